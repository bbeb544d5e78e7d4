"""A ResNet on real images, scikit-learn's handwritten digits upscaled, in a fraction of the memory and to the same
losses.

    python examples/digits_resnet.py --limit 0.4
    python examples/digits_resnet.py --limit "150 MiB" --size 96 --steps 60

The same steps are trained twice from the same seed, first by plain PyTorch, then inside the limit. Needs scikit-learn
for its images and nothing else; on a machine with a GPU it runs there.
"""

import argparse
import copy

import torch
from sklearn.datasets import load_digits
from torch import nn

import rotoff


class Block(nn.Module):
    """A basic residual block."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        same = before == width and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(before, width, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def build(depth: int) -> nn.Sequential:
    """A stem, three groups of `depth` blocks, a head: every element of the Sequential is a stage that can be
    planned."""
    torch.manual_seed(0)
    stages: list[nn.Module] = [nn.Sequential(nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())]
    before = 16
    for group, width in enumerate((16, 32, 64)):
        for n in range(depth):
            stages.append(Block(before, width, stride=2 if group and n == 0 else 1))
            before = width
    stages.append(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10)))
    return nn.Sequential(*stages)


def train(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, options: argparse.Namespace) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    order = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(options.steps):
        rows = torch.randint(0, len(images), (options.batch,), generator=order)
        loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", default="0.5", help="bytes of a step, or a share of what keeping everything takes")
    parser.add_argument("--size", type=int, default=48, help="pixels of a side, from the 8 of the data set")
    parser.add_argument("--depth", type=int, default=3, help="blocks in each of three groups")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    images = nn.functional.interpolate(images, size=options.size, mode="bilinear").to(device)
    labels = torch.tensor(digits.target).to(device)
    train_images, train_labels, test_images, test_labels = images[300:], labels[300:], images[:300], labels[:300]

    plain = build(options.depth).to(device)
    limited = rotoff.Checkpointable(copy.deepcopy(plain)).measure(train_images[: options.batch])
    everything = limited.keep_all_memory
    is_share = options.limit.replace(".", "", 1).isdigit() and float(options.limit) <= 1
    limited.compute_sequence(int(float(options.limit) * everything) if is_share else options.limit)
    limited.display()
    print(f"\na step keeps {rotoff.format_bytes(everything)} where nothing is planned", end=", ")
    print(f"{rotoff.format_bytes(limited.get_expected_memory())} inside the limit\n")

    expected = train(plain, train_images, train_labels, options)
    losses = train(limited, train_images, train_labels, options)
    for name, model, found in (("plain", plain, expected), ("limited", limited, losses)):
        model.eval()
        with torch.no_grad():
            accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
        print(f"{name:<8} loss {found[0]:.6f} -> {found[-1]:.6f}, accuracy {accuracy:.3f}")
    print("largest difference of any loss:", max(abs(a - b) for a, b in zip(expected, losses, strict=True)))
    limited.close()


if __name__ == "__main__":
    main()
