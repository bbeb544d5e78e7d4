"""What is trained: a model, its batch, its loss. Sizes for the CPU let the whole grid end within an hour on two cores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from . import models


@dataclass(frozen=True)
class Workload:
    """One network at one size.

    build: the model, on the CPU in float32. batch: (input, target) from a seeded generator, likewise. blocks: the modules
    that block-wise peers checkpoint. dtype: of parameters and activations on the device.
    """

    name: str
    about: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]
    dtype: torch.dtype = torch.float32

    def make(self, device: torch.device, seed: int = 0) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
        """Model, input and target on `device`, the same for the same seed."""
        torch.manual_seed(seed)
        with torch.device(device if device.type == "cuda" else "cpu"):  # billions of parameters are drawn where they live
            model = self.build().to(device, self.dtype).train()
        x, target = (t.to(device) for t in self.batch(torch.Generator().manual_seed(seed)))
        return model, x.to(self.dtype) if x.is_floating_point() else x, target

    @staticmethod
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy over whatever is classified: images, tokens or pixels."""
        if target.dim() == 2:  # (n, tokens)
            return F.cross_entropy(output.flatten(0, 1), target.flatten())
        return F.cross_entropy(output, target)


def blocks(model: nn.Module) -> list[nn.Module]:
    """What a person would checkpoint: the stages of a Sequential but its head, or the convolution blocks of the U-Net."""
    if isinstance(model, models.UNet):
        return [*model.down, *model.join]
    assert isinstance(model, nn.Sequential)
    return list(model)[:-1]


def _tokens(n: int, length: int, vocabulary: int) -> Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]:
    def batch(random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.randint(vocabulary, (n, length + 1), generator=random, device="cpu")
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    return batch


def _images(
    n: int, size: int, classes: int, pixels: bool = False
) -> Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]:
    def batch(random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        images = torch.randn(n, 3, size, size, generator=random, device="cpu")
        shape = (n, size, size) if pixels else (n,)
        return images, torch.randint(classes, shape, generator=random, device="cpu")

    return batch


def _gpt(
    name: str, layers: int, width: int, heads: int, context: int, batch: int, vocabulary: int, dtype: torch.dtype
) -> Workload:
    about = f"GPT, {layers} blocks of width {width}, {batch} x {context} tokens, {str(dtype).removeprefix('torch.')}"
    build = lambda: models.gpt(layers, width, heads, context, vocabulary)  # noqa: E731
    return Workload(name, about, build, _tokens(batch, context, vocabulary), dtype)


def _net(
    name: str,
    about: str,
    build: Callable[[], nn.Module],
    batch: int,
    size: int,
    classes: int,
    dtype: torch.dtype = torch.float32,
    pixels: bool = False,
) -> Workload:
    kind = str(dtype).removeprefix("torch.")
    return Workload(name, f"{about}, {batch} images of {size}², {kind}", build, _images(batch, size, classes, pixels), dtype)


_F32, _BF16 = torch.float32, torch.bfloat16

CPU = (
    _gpt("gpt", 12, 256, 4, 256, 4, 512, _F32),
    _net("vit", "ViT of 12 blocks", lambda: models.vit(96, 8, 12, 192, 4, 100), 6, 96, 100),
    _net("resnet", "ResNet-50", lambda: models.resnet((3, 4, 6, 3), 100), 4, 96, 100),
    _net("unet", "U-Net of 5 resolutions", lambda: models.UNet(16, 4, 8), 4, 96, 8, pixels=True),
)

CUDA = (
    _gpt("gpt-1.3b", 24, 2048, 16, 2048, 8, 50304, _BF16),
    _gpt("gpt-7b", 32, 4096, 32, 4096, 2, 32000, _BF16),
    _gpt("gpt-1.3b-8k", 24, 2048, 16, 8192, 2, 50304, _BF16),
    _net("vit-l", "ViT-L/16", lambda: models.vit(224, 16, 24, 1024, 16, 1000), 256, 224, 1000, _BF16),
    _net("resnet101", "ResNet-101", lambda: models.resnet((3, 4, 23, 3), 1000), 256, 224, 1000),
    _net("resnet1001", "ResNet-1001", lambda: models.resnet((3, 4, 323, 3), 1000), 16, 224, 1000),
    _net("densenet201", "DenseNet-201", lambda: models.densenet((6, 12, 48, 32), 1000), 128, 224, 1000),
    _net("unet", "U-Net of 5 resolutions", lambda: models.UNet(64, 4, 8), 16, 512, 8, pixels=True),
)

TINY = (
    _gpt("gpt", 3, 32, 2, 16, 2, 32, _F32),
    _net("unet", "U-Net of 3 resolutions", lambda: models.UNet(4, 2, 3), 2, 16, 3, pixels=True),
)

SUITES = {"cpu": CPU, "cuda": CUDA, "tiny": TINY}


def find(suite: str, name: str) -> Workload:
    """The workload called `name` of a suite."""
    return next(workload for workload in SUITES[suite] if workload.name == name)
