"""The networks of the grid, built from torch's own parts: `nn.Sequential` of stages, or a plain module for the U-Net.

Every method gets the very same module. The tensor that a stage passes on is the only one, so that
`torch.utils.checkpoint.checkpoint_sequential` can run them too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn


class Loss(nn.Module):
    """Mean cross entropy over whatever is classified: images, tokens (n, length) or pixels (n, h, w)."""

    target: torch.Tensor

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("target", target, persistent=False)

    def forward(self, output: torch.Tensor) -> torch.Tensor:
        if self.target.dim() == 2:
            return F.cross_entropy(output.flatten(0, 1), self.target.flatten())
        return F.cross_entropy(output, self.target)


class Trained(nn.Module):
    """A network that is no `nn.Sequential`, and its loss."""

    def __init__(self, net: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(self.net(x))


def trained(net: nn.Module, loss: Loss) -> nn.Module:
    """`net` and then `loss`; of stages, one stage more."""
    return nn.Sequential(*net, loss) if isinstance(net, nn.Sequential) else Trained(net, loss)


class Embedding(nn.Module):
    def __init__(self, vocabulary: int, width: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(context, width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.tokens(tokens) + self.positions


class Block(nn.Module):
    """A pre-norm transformer block, of a GPT (`causal`) or a ViT."""

    def __init__(self, width: int, heads: int, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.dropout(self.merge(mixed.transpose(1, 2).reshape(n, length, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


def gpt(layers: int, width: int, heads: int, context: int, vocabulary: int, dropout: float = 0.0) -> nn.Sequential:
    """Tokens (n, context) -> logits (n, context, vocabulary)."""
    blocks = [Block(width, heads, True, dropout) for _ in range(layers)]
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False))
    return nn.Sequential(Embedding(vocabulary, width, context), *blocks, Whole(head))


class Whole(nn.Module):
    """One stage of what is inside; a nested `nn.Sequential` would be flattened into several."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Patches(nn.Module):
    def __init__(self, size: int, patch: int, width: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn((size // patch) ** 2, width))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.project(image).flatten(2).transpose(1, 2) + self.positions


class Pooled(nn.Module):
    """Mean over the tokens, then classes."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.norm, self.project = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(self.norm(x).mean(1))


def vit(size: int, patch: int, layers: int, width: int, heads: int, classes: int) -> nn.Sequential:
    """Images (n, 3, size, size) -> logits (n, classes)."""
    blocks = [Block(width, heads, False) for _ in range(layers)]
    return nn.Sequential(Patches(size, patch, width), *blocks, Pooled(width, classes))


class Bottleneck(nn.Module):
    """ResNet's, the stride in the 3x3 convolution."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.norm1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.skip = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = F.relu(self.norm2(self.conv2(y)), inplace=True)
        return F.relu(self.norm3(self.conv3(y)) + self.skip(x), inplace=True)


class Classifier(nn.Module):
    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.project = nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(x.mean((2, 3)))


def resnet(depths: Sequence[int], classes: int, width: int = 64) -> nn.Sequential:
    """Bottleneck ResNet: images (n, 3, h, w) -> logits; `depths` (3, 4, 23, 3) is ResNet-101."""
    stem = nn.Sequential(
        nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)
    )
    stages: list[nn.Module] = [Whole(stem)]
    channels = width
    for part, depth in enumerate(depths):
        for block in range(depth):
            stages.append(Bottleneck(channels, width << part, 2 if part and not block else 1))
            channels = 4 * (width << part)
    return nn.Sequential(*stages, Classifier(channels, classes))


class Double(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(x)), inplace=True)


class UNet(nn.Module):
    """Images (n, 3, h, w) -> (n, classes, h, w), with a long skip at each of `depth` resolutions."""

    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        channels = [width << k for k in range(depth + 1)]
        self.down = nn.ModuleList([Double(i, o) for i, o in zip([3, *channels], channels, strict=False)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(c, c // 2, 2, 2) for c in reversed(channels[1:])])
        self.join = nn.ModuleList([Double(c, c // 2) for c in reversed(channels[1:])])
        self.classify = nn.Conv2d(width, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for k, block in enumerate(self.down):
            x = block(x if k == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([skips.pop(), up(x)], 1))
        return self.classify(x)
