"""What is trained: a model that ends in its loss, and its batch.

The loss is the model's last stage, since what it allocates is a part of the step: every method is charged for it, and a
limit covers it. Sizes for the CPU let the whole grid end within 40 minutes on two cores, with steps of a third to half
a second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from . import models


@dataclass(frozen=True)
class Workload:
    """One network at one size.

    build: the model, on the CPU in float32. batch: (input, target) from a seeded generator, likewise. blocks: the
    modules that block-wise peers checkpoint. dtype: of parameters and activations on the device.
    """

    name: str
    about: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]
    dtype: torch.dtype = torch.float32

    def make(self, device: torch.device, seed: int = 0) -> tuple[nn.Module, torch.Tensor]:
        """The model, which returns its loss, and its input, on `device`; the same for the same seed."""
        torch.manual_seed(seed)
        # billions of parameters are drawn where they live
        with torch.device(device if device.type == "cuda" else "cpu"):
            model = self.build().to(device, self.dtype).train()
        x, target = (t.to(device) for t in self.batch(torch.Generator().manual_seed(seed)))
        return models.trained(model, models.Loss(target)), x.to(self.dtype) if x.is_floating_point() else x


def blocks(model: nn.Module) -> list[nn.Module]:
    """What a person would checkpoint: the stages of a Sequential but head and loss, or the convolution blocks of the
    U-Net."""
    if isinstance(model, models.Trained):
        assert isinstance(model.net, models.UNet)
        return [*model.net.down, *model.net.join]
    assert isinstance(model, nn.Sequential)
    return list(model)[:-2]


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
    return Workload(
        name, f"{about}, {batch} images of {size}², {kind}", build, _images(batch, size, classes, pixels), dtype
    )


_F32, _BF16 = torch.float32, torch.bfloat16

CPU = (
    _gpt("gpt", 12, 256, 4, 256, 4, 512, _F32),
    _net("vit", "ViT of 12 blocks of width 192", lambda: models.vit(192, 8, 12, 192, 3, 100), 2, 192, 100),
    _net("resnet", "ResNet-50", lambda: models.resnet((3, 4, 6, 3), 100), 4, 128, 100),
    _net("unet", "U-Net of 5 resolutions", lambda: models.UNet(16, 4, 8), 6, 128, 8, pixels=True),
)

CUDA = (
    _gpt("gpt-1.3b", 24, 2048, 16, 2048, 8, 50304, _BF16),
    _gpt("gpt-7b", 32, 4096, 32, 4096, 2, 32000, _BF16),
    _net("vit-l", "ViT-L/16", lambda: models.vit(224, 16, 24, 1024, 16, 1000), 256, 224, 1000, _BF16),
    _net("resnet101", "ResNet-101", lambda: models.resnet((3, 4, 23, 3), 1000), 256, 224, 1000),
    _net("unet", "U-Net of 5 resolutions", lambda: models.UNet(64, 4, 8), 16, 512, 8, pixels=True),
)

SUITES = {"cpu": CPU, "cuda": CUDA}


def find(suite: str, name: str) -> Workload:
    """The workload called `name` of a suite."""
    return next(workload for workload in SUITES[suite] if workload.name == name)
