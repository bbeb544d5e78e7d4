"""Layers of AlexNet and ResNet as SuperNeurons (PPoPP 2018) counts them: bytes of each layer's output, cheap ones in
time."""

from __future__ import annotations

from rotoff import Chain, Stage

HEAVY = ("conv", "fc")


def chain_of(layers: list[tuple[str, int]], batch: int) -> Chain:
    """One stage for each (name, floats of an image's output); a layer saves its output, as cuDNN's layers do.

    a_0 is not counted (the paper does not), nor is the loss: a_L is small.
    """
    stages = []
    for name, floats in layers:
        size = 4 * batch * floats
        time = 20.0 if name.startswith(HEAVY) else 1.0
        stages.append(Stage(name, time, 2 * time, size, size))
    return Chain(tuple(stages), 8e9, 8e9)


def checkpoints(layers: list[tuple[str, int]]) -> list[int]:
    return [i for i, (name, _) in enumerate(layers, start=1) if name.startswith((*HEAVY, "kept"))]


def alexnet() -> list[tuple[str, int]]:
    """The 23 layers of the paper's footnote 3."""
    a, b, c, d = 96 * 55 * 55, 256 * 27 * 27, 384 * 13 * 13, 256 * 13 * 13
    sizes = [
        *[("conv1", a), ("relu1", a), ("lrn1", a), ("pool1", 96 * 27 * 27)],
        *[("conv2", b), ("relu2", b), ("lrn2", b), ("pool2", 256 * 13 * 13)],
        *[("conv3", c), ("relu3", c), ("conv4", c), ("relu4", c), ("conv5", d), ("relu5", d), ("pool5", 256 * 6 * 6)],
        *[("fc1", 4096), ("relu6", 4096), ("dropout1", 4096), ("fc2", 4096), ("relu7", 4096), ("dropout2", 4096)],
    ]
    return [*sizes, ("fc3", 1000), ("softmax", 1000)]


def resnet(blocks: tuple[int, int, int, int]) -> list[tuple[str, int]]:
    """Bottlenecks as segments (BN, ReLU), (BN, ReLU), (BN) and a join, which two branches read, so that it is kept.

    The same holds for the pooled stem. Nothing branches off after the last join: its ReLU and the pooling are a
    segment. This is the reading under which the counts of table 1 come out; projections run beside and are not in the
    chain.
    """
    layers = [
        ("conv1", 64 * 112 * 112),
        ("bn1", 64 * 112 * 112),
        ("relu1", 64 * 112 * 112),
        ("kept pool1", 64 * 56 * 56),
    ]
    for group, count in enumerate(blocks):
        side, width = 56 >> group, 64 << group
        narrow, wide = width * side * side, 4 * width * side * side
        for _ in range(count):
            for _ in range(2):
                layers += [("conv", narrow), ("bn", narrow), ("relu", narrow)]
            layers += [("conv", wide), ("bn", wide), ("kept join", wide)]
    return [*layers, ("relu", 2048 * 7 * 7), ("pool", 2048), ("fc", 1000), ("softmax", 1000)]
