"""Chains for the solver's benchmarks: ResNet, GPT, DenseNet-like and random ones, from shapes alone, in bytes and
seconds."""

from __future__ import annotations

import json
import os
import platform
import random
from dataclasses import replace
from pathlib import Path

import numpy

from rotoff import Chain, Form, Stage

FLOPS = 60e12  # sustained by the device that these chains imagine
MEMORY_RATE = 1e12  # bytes per second, for the layers that only stream


def save(path: Path | None, rows: list[dict[str, object]], **about: object) -> None:
    """Write the rows as JSON, with the machine and the versions."""
    if path is not None:
        machine = {"cpu": platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
        versions = {"python": platform.python_version(), "numpy": numpy.__version__}
        found = {"machine": machine, "versions": versions, **about, "rows": rows}
        path.write_text(json.dumps(found, indent=1) + "\n")


def gpt(blocks: int, width: int = 1024, tokens: int = 8192, bandwidth: float = 25e9) -> Chain:
    """A GPT with `blocks` transformer blocks in half precision; attention that saves no matrix."""
    hidden = tokens * width * 2
    stages = [Stage("embed", 2 * hidden / MEMORY_RATE, 4 * hidden / MEMORY_RATE, hidden, hidden)]
    time = 24 * tokens * width**2 / FLOPS
    extra = {"forward_transient_bytes": 2 * hidden, "backward_transient_bytes": 4 * hidden}
    stages += [Stage(f"block{i}", time, 2 * time, hidden, 17 * hidden, **extra) for i in range(blocks)]
    logits = tokens * 50257 * 2
    head = 2 * tokens * width * 50257 / FLOPS
    stages.append(Stage("head", head, 2 * head, 4, logits, backward_transient_bytes=logits))
    return Chain(tuple(stages), bandwidth, bandwidth, input_bytes=tokens * 8, name=f"gpt-{blocks}")


def resnet(blocks: tuple[int, int, int, int], batch: int = 32, image: int = 224, bandwidth: float = 12e9) -> Chain:
    """A bottleneck ResNet in single precision: early blocks hold most bytes, late ones most of the stages."""
    side, width = image // 4, 64
    stem = batch * 64 * (image // 2) ** 2 * 4
    out = batch * width * side**2 * 4
    stages = [Stage("stem", 4 * stem / MEMORY_RATE, 8 * stem / MEMORY_RATE, out, 3 * stem)]
    for group, count in enumerate(blocks):
        for b in range(count):
            if b == 0 and group > 0:
                side, width = side // 2, 2 * width
            narrow = batch * width * side**2 * 4
            wide = 4 * narrow
            saved = 4 * narrow + 2 * wide + (2 * wide if b == 0 else 0)
            flops = 2 * batch * side**2 * width**2 * (17 + (8 if b == 0 else 0))
            time = flops / FLOPS * 4 + 3 * saved / MEMORY_RATE
            name = f"group{group}.{b}"
            stages.append(Stage(name, time, 2 * time, wide, saved, None, narrow, None, wide))
    stages.append(Stage("classify", 1e-4, 2e-4, 4, batch * 4000))
    return Chain(
        tuple(stages), bandwidth, bandwidth, input_bytes=batch * 3 * image**2 * 4, name=f"resnet-{2 + 3 * sum(blocks)}"
    )


def densenet(
    layers: tuple[int, ...] = (6, 12, 24, 16), batch: int = 32, growth: int = 32, bandwidth: float = 12e9
) -> Chain:
    """DenseNet-like: each stage's output is all features so far, so outputs grow within a group."""
    side, channels, stages = 56, 64, []
    for group, count in enumerate(layers):
        for b in range(count):
            channels += growth
            out = batch * channels * side**2 * 4
            saved = 2 * out + 5 * batch * growth * side**2 * 4
            time = (
                2 * batch * side**2 * (channels * 4 * growth + 9 * 4 * growth**2)
            ) / FLOPS * 4 + 3 * saved / MEMORY_RATE
            stages.append(Stage(f"group{group}.{b}", time, 2 * time, out, saved, None, out // 4, None, out))
        if group + 1 < len(layers):
            channels, side = channels // 2, side // 2
            out = batch * channels * side**2 * 4
            stages.append(Stage(f"join{group}", 8 * out / MEMORY_RATE, 16 * out / MEMORY_RATE, out, 9 * out))
    stages.append(Stage("classify", 1e-4, 2e-4, 4, batch * 4000))
    return Chain(
        tuple(stages), bandwidth, bandwidth, input_bytes=batch * 3 * 224**2 * 4, name=f"densenet-{len(stages)}"
    )


def heterogeneous(seed: int, stages: int) -> Chain:
    """Sizes and times over two orders of magnitude, links of any speed, one or two lanes."""
    rng = random.Random(seed)
    bandwidth, made = 10 ** rng.uniform(9.5, 10.7), []
    for i in range(stages):
        output, time = int(10 ** rng.uniform(6.5, 8.3)), 10 ** rng.uniform(-3.3, -1.7)
        saved, back = int(output * rng.uniform(1, 8)), time * rng.uniform(1.2, 2.8)
        forward, backward = int(output * rng.random()), int(2 * output * rng.random())
        made.append(Stage(f"{i}", time, back, output, saved, None, forward, None, backward))
    inward = bandwidth * rng.choice([1.0, 1.0, 1.5])
    duplex = rng.random() < 0.7
    return Chain(tuple(made), bandwidth, inward, input_bytes=10_000_000, duplex=duplex, name=f"random-{seed}-{stages}")


def grid() -> list[Chain]:
    """The chains of the quality benchmark."""
    return [
        gpt(24),
        gpt(48, bandwidth=12e9),
        gpt(96, width=2048, bandwidth=16e9),
        resnet((3, 4, 6, 3)),
        resnet((3, 4, 23, 3)),
        resnet((3, 8, 36, 3), bandwidth=25e9),
        densenet(),
        densenet((6, 12, 32, 32), bandwidth=25e9),
        *(
            heterogeneous(seed, stages)
            for seed, stages in ((1, 20), (2, 30), (3, 40), (4, 50), (5, 60), (6, 80), (7, 100))
        ),
    ]


def with_forms(chain: Chain) -> Chain:
    """`chain` with four forms for each stage, from the cheap and elementwise to the one that keeps its output alone."""

    def form(stage: Stage, part: float, share: float) -> Form:
        kept = int(stage.output_bytes + part * (stage.saved_bytes - stage.output_bytes))
        gone = stage.saved_bytes - kept
        seconds = stage.backward_time + share * stage.forward_time
        return Form(kept, seconds, stage.forward_transient_bytes + gone, stage.backward_transient_bytes + gone)

    made = ((0.7, 0.05), (0.45, 0.2), (0.2, 0.5), (0.0, 0.75))
    return replace(chain, stages=tuple(replace(s, forms=tuple(form(s, *m) for m in made)) for s in chain.stages))
