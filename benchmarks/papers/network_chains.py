"""Chains of real networks with no device: `rotoff.estimate` over the stages that the papers speak of.

Bytes are those of the real modules, run on fake tensors; times are from a device's data sheet.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))
import torchvision_operators
from invertible_norm import InvertibleBatchNormLeakyReLU

import rotoff
from rotoff import Chain
from rotoff.profile.estimate.devices import Device, find

torchvision = torchvision_operators.load()

# Links as 001's table 1 measures them (Titan X) and as 004's section 3.3.2 says ("a practical speed of 8 GB/s").
TITAN_X = replace(find("Titan X"), d2h_bandwidth=6.5e9, h2d_bandwidth=6.1e9, link_efficiency=1.0)
# 001 runs "the winograd convolution algorithm": 2.25 times fewer multiplications in 3 × 3 convolutions, which is all of
# VGG's.
TITAN_X_WINOGRAD = replace(TITAN_X, flops={"float32": 2.25 * TITAN_X.flops["float32"]})
K40 = replace(find("K40"), d2h_bandwidth=8e9, h2d_bandwidth=8e9, link_efficiency=1.0)
V100 = find("V100")


class Whole(nn.Module):
    """A stage that capture leaves in one piece."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.run = nn.Sequential(*modules)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)


def network(name: str, batch: int, image: int, device: Device, invertible: bool = False, **options) -> Chain:
    """A chain of `name` for a batch of square images; `invertible` has 001's BatchNorm in place of BatchNorm and ReLU.

    ``meta["parameter_bytes"]`` is what its parameters take.
    """
    with torch.device("meta"):
        if name.startswith("resnet"):
            depths = {"18": (2, 2, 2, 2), "34": (3, 4, 6, 3), "50": (3, 4, 6, 3)}
            depths |= {"101": (3, 4, 23, 3), "152": (3, 8, 36, 3)}
            block = (
                torchvision.models.resnet.BasicBlock
                if name[6:] in ("18", "34")
                else torchvision.models.resnet.Bottleneck
            )
            model = torchvision.models.ResNet(block, options.get("blocks") or depths[name[6:]])
            stages = _resnet_stages(_invertible(model) if invertible else model)
        elif name.startswith("vgg") or name == "alexnet":
            model = getattr(torchvision.models, name)()
            stages = [*_layers(model.features), ("pool", nn.Sequential(model.avgpool, nn.Flatten()))]
            stages += [(f"classifier {label}", module) for label, module in _layers(model.classifier)]
        elif name == "mobilenet":
            stages = _mobilenet(invertible)
        elif name == "inception_v4":
            import timm

            model = timm.create_model("inception_v4")
            stages = [(f"features {n}", module) for n, module in enumerate(model.features)]
            stages.append(("head", nn.Sequential(model.global_pool, nn.Flatten(), model.last_linear)))
        else:
            raise ValueError(f"no network {name!r} here")
        model = nn.Sequential(OrderedDict((label.replace(".", " "), Whole(module)) for label, module in stages))
        x = torch.empty(batch, 3, image, image)
    chain = rotoff.estimate(model, x, device=device)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    meta = {**chain.meta, "parameter_bytes": weights}
    return replace(chain, name=f"{name}, {image}, batch {batch}", meta=meta)


def _layers(features: nn.Sequential) -> list[tuple[str, nn.Module]]:
    """One stage for each layer, an in-place activation with the layer before it."""
    made: list[tuple[str, nn.Module]] = []
    for n, module in enumerate(features):
        if getattr(module, "inplace", False) and made:
            label, before = made[-1]
            made[-1] = (label, nn.Sequential(before, module))
        else:
            made.append((f"{n} {type(module).__name__.lower()}", module))
    return made


def _resnet_stages(model: nn.Module) -> list[tuple[str, nn.Module]]:
    stem = nn.Sequential(*([model.conv1, model.bn1, model.relu, model.maxpool]))
    stages: list[tuple[str, nn.Module]] = [("stem", stem)]
    for group in ("layer1", "layer2", "layer3", "layer4"):
        stages += [(f"{group}.{n}", block) for n, block in enumerate(getattr(model, group))]
    return [*stages, ("head", nn.Sequential(model.avgpool, nn.Flatten(), model.fc))]


def _invertible(model: nn.Module) -> nn.Module:
    """Each BatchNorm that a ReLU follows becomes an invertible one, and that ReLU nothing."""
    BasicBlock, Bottleneck = torchvision.models.resnet.BasicBlock, torchvision.models.resnet.Bottleneck

    def swap(owner: nn.Module, name: str) -> None:
        setattr(owner, name, InvertibleBatchNormLeakyReLU(getattr(owner, name).num_features))

    class Joined(nn.Module):
        """A residual block whose inner activations are inside its norms; the join's own ReLU stays."""

        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            last = "3" if isinstance(block, Bottleneck) else "2"
            names = [n for n in ("conv1", "bn1", "conv2", "bn2", "conv3", "bn3") if hasattr(block, n)]
            for name in names:
                if name.startswith("bn") and name[2:] != last:
                    swap(block, name)
            self.path = nn.Sequential(*(getattr(block, n) for n in names))
            self.downsample = block.downsample
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.relu(self.path(x).add_(x if self.downsample is None else self.downsample(x)))

    swap(model, "bn1")
    model.relu = nn.Identity()
    for group in ("layer1", "layer2", "layer3", "layer4"):
        blocks = getattr(model, group)
        for n, block in enumerate(blocks):
            if isinstance(block, (BasicBlock, Bottleneck)):
                blocks[n] = Joined(block)
    return model


def _mobilenet(invertible: bool) -> list[tuple[str, nn.Module]]:
    """MobileNet of Howard et al. (2017), table 1: a convolution, then depthwise and pointwise ones."""

    def unit(c_in: int, c_out: int, stride: int, kernel: int = 3, groups: int = 1) -> nn.Module:
        conv = nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, groups=groups, bias=False)
        if invertible:
            return nn.Sequential(conv, InvertibleBatchNormLeakyReLU(c_out))
        return nn.Sequential(conv, nn.BatchNorm2d(c_out), nn.ReLU(inplace=True))

    stages, width = [("conv0", unit(3, 32, 2))], 32
    plan = [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1)]
    for n, (out, stride) in enumerate(plan, start=1):
        stages += [
            (f"conv{n}.depthwise", unit(width, width, stride, groups=width)),
            (f"conv{n}.pointwise", unit(width, out, 1, 1)),
        ]
        width = out
    return [*stages, ("head", nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 1000)))]


def vision_chain(
    name: str, image: int, batch: int, device: str = "V100", bandwidth: float = 12.2e9, duplex: bool = True
) -> Chain:
    """torchvision's own `name` on a batch of square images; `bandwidth` in bytes per second, each way."""
    options = {"aux_logits": False, "init_weights": False} if name == "inception_v3" else {}
    with torch.device("meta"):
        model, sample = getattr(torchvision.models, name)(**options), torch.empty(batch, 3, image, image)
    chain = rotoff.estimate(model, sample, device=device)
    label = f"{name}, {image}, batch {batch}"
    return replace(chain, name=label, d2h_bandwidth=bandwidth, h2d_bandwidth=bandwidth, duplex=duplex)
