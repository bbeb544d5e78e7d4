"""The networks of the papers as chains of one block a stage: bytes and times of any of them on a device that nobody has
here.

    python -m benchmarks.paper_models resnet50 --image 224 --batch 32 --device V100 --output resnet50.json

Models are made on ``meta`` and estimated on fake tensors, so that nothing is allocated. ``model(name)`` is an
``nn.Sequential`` of blocks from torchvision and timm (GPT: written here); ``chain(name, ...)`` is its `rotoff.Chain`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn import functional as F

import rotoff
from rotoff.profile.estimate.devices import Device

try:
    import torchvision
except (ImportError, RuntimeError):  # a build of torch that lacks torchvision's operators needs them declared
    _library = torch.library.Library("torchvision", "DEF")
    _library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision

RESNETS = {  # blocks of each group; the depth is 3 x their sum + 2
    "resnet50": (3, 4, 6, 3),
    "resnet101": (3, 4, 23, 3),
    "resnet152": (3, 8, 36, 3),
    "resnet200": (3, 24, 36, 3),
    "resnet1001": (3, 94, 233, 3),  # 333 blocks; groups in the manner of ResNet-200
}
GPTS = {"gpt2": (12, 768, 12), "gpt2-medium": (24, 1024, 16), "gpt2-large": (36, 1280, 20), "gpt2-xl": (48, 1600, 25)}
NAMES = (
    *RESNETS, "densenet121", "densenet161", "densenet169", "densenet201", "inception_v3", "inception_v4", "vgg16", "vgg19",
    "alexnet", *GPTS,
)  # fmt: skip


class DenseStep(nn.Module):
    """A layer of a dense block: its new features behind those before, in one tensor, as the next layer reads them."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer = self.layer
        new = layer.conv2(layer.relu2(layer.norm2(layer.conv1(layer.relu1(layer.norm1(x))))))
        return torch.cat([x, new], 1)


class Block(nn.Module):
    """GPT-2's: attention, then two linear layers, each behind a norm and beside a skip connection."""

    def __init__(self, width: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop1, self.drop2 = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, w = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).split(w, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        x = x + self.drop1(self.out(y.transpose(1, 2).reshape(b, t, w)))
        return x + self.drop2(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")))


class Embed(nn.Module):
    def __init__(self, words: int, tokens: int, width: int) -> None:
        super().__init__()
        self.words, self.places, self.drop = nn.Embedding(words, width), nn.Embedding(tokens, width), nn.Dropout(0.1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.drop(self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device)))


def model(name: str, tokens: int = 1024) -> nn.Sequential:
    """The network `name`, on ``meta``, one block a stage; in torchvision's and timm's order of operations."""
    with torch.device("meta"):
        if name in RESNETS:
            return nn.Sequential(
                *_resnet(torchvision.models.ResNet(torchvision.models.resnet.Bottleneck, list(RESNETS[name])))
            )
        if name in GPTS:
            blocks, width, heads = GPTS[name]
            head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 50257, bias=False))
            return nn.Sequential(
                Embed(50257, tokens, width), *[Block(width, heads) for _ in range(blocks)], _Whole(head)
            )
        found = re.fullmatch(r"(vgg|alexnet|densenet|inception)\w*", name)
        if found is None or name not in NAMES:
            raise SystemExit(f"unknown network {name!r}; known ones are {', '.join(NAMES)}")
        if name == "inception_v4":
            import timm

            net = timm.create_model(name)
            return nn.Sequential(*net.features, net.global_pool, _Whole(nn.Sequential(net.head_drop, net.last_linear)))
        if name == "inception_v3":
            return nn.Sequential(*_inception_v3(torchvision.models.inception_v3(aux_logits=False, init_weights=False)))
        net = getattr(torchvision.models, name)()
        return nn.Sequential(*(_densenet(net) if name.startswith("densenet") else _plain(net)))


class _Whole(nn.Module):
    """Several modules as one stage; a plain Sequential would be taken apart."""

    def __init__(self, inner: nn.Sequential) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def _resnet(net: nn.Module) -> Iterator[nn.Module]:
    yield _Whole(nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool))
    for group in (net.layer1, net.layer2, net.layer3, net.layer4):
        yield from group
    yield _Whole(nn.Sequential(net.avgpool, nn.Flatten(), net.fc))


def _densenet(net: nn.Module) -> Iterator[nn.Module]:
    stem = []
    for name, part in net.features.named_children():
        if name.startswith("denseblock"):
            if stem:
                yield _Whole(nn.Sequential(*stem))
                stem = []
            yield from map(DenseStep, part.children())
        elif name.startswith("transition"):
            yield _Whole(part)
        else:
            stem.append(part)
    yield _Whole(nn.Sequential(*stem, nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), net.classifier))


def _inception_v3(net: nn.Module) -> Iterator[nn.Module]:
    yield from (part for name, part in net.named_children() if name not in ("avgpool", "dropout", "fc"))
    yield _Whole(nn.Sequential(net.avgpool, net.dropout, nn.Flatten(), net.fc))


def _plain(net: nn.Module) -> Iterator[nn.Module]:
    """VGG and AlexNet: a convolution or a linear layer a stage, with what follows it."""
    yield from _grouped([*net.features, net.avgpool, nn.Flatten(), *net.classifier])


def _grouped(parts: list[nn.Module]) -> Iterator[nn.Module]:
    group: list[nn.Module] = []
    for part in parts:
        if group and isinstance(part, (nn.Conv2d, nn.Linear)):
            yield _Whole(nn.Sequential(*group))
            group = []
        group.append(part)
    yield _Whole(nn.Sequential(*group))


def chain(
    name: str, image: int = 224, batch: int = 32, device: Device | str = "V100", dtype: str = "float32"
) -> rotoff.Chain:
    """The chain of network `name` on `device`. image: its side in pixels; of a GPT, the tokens of a sequence."""
    kind: torch.dtype = getattr(torch, dtype)
    make: Callable[..., torch.Tensor] = torch.empty
    net = model(name, tokens=image).to(kind)
    with torch.device("meta"):
        sample = (
            torch.zeros(batch, image, dtype=torch.long) if name in GPTS else make(batch, 3, image, image, dtype=kind)
        )
    return rotoff.estimate(net, sample, device=device)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--image", type=int, default=224, help="side in pixels; of a GPT, tokens")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--device", default="V100")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output", help="chain file to write")
    options = parser.parse_args()
    found = chain(options.name, options.image, options.batch, options.device, options.dtype)
    peak = rotoff.simulate(found, rotoff.keep_all(found)).peak_bytes
    least = rotoff.min_mem_limit(found, "joint")
    print(
        f"{options.name}: {len(found)} stages, keeping everything {rotoff.format_bytes(peak)}, smallest limit"
        f" {rotoff.format_bytes(least)}, step {found.compute_time:.3g} s (an estimate)"
    )
    if options.output:
        found.save(options.output)


if __name__ == "__main__":
    main()
