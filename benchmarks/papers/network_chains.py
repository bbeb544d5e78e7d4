"""Chains of real networks with no device: bytes from the modules run on fake tensors, times from a device's data sheet.

Bytes of values are exact: a_i is the output's storage; ā_i is every storage that autograd saves while the stage runs, the
output's included, parameters and the stage's input left out. Transients are a model: a stage of several layers holds the
gradients of two neighbouring layers inside it during its backward (twice its largest inner storage). An operation lasts the
longer of its floating-point operations and its bytes, each at the data sheet's rate times a share that is reached.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from rotoff import Chain, Stage


@dataclass(frozen=True)
class Device:
    """Rates of a device: floating-point operations and bytes per second, link bytes per second out and in."""

    name: str
    flops: float
    memory_bandwidth: float
    d2h_bandwidth: float
    h2d_bandwidth: float
    memory_bytes: int
    flops_share: float = 0.5
    memory_share: float = 0.8
    winograd: float = 1.0  # how many times fewer operations a dense 3 × 3 convolution of stride 1 takes


# Peaks as the vendor prints them (float32); links as 001's table 1 measures them (Titan X) and 004's section 3.3.2 says (8 GB/s).
# 001 runs "the winograd convolution algorithm", which needs 2.25 times fewer multiplications on 2 × 2 tiles.
TITAN_X = Device("Titan X", 6.144e12, 336.5e9, 6.5e9, 6.1e9, 12 << 30, winograd=2.25)
K40 = Device("K40", 4.29e12, 288e9, 8e9, 8e9, 12 << 30)
V100 = Device("V100, PCIe 3", 15.7e12, 900e9, 12e9, 12e9, 16 << 30)


class _Time(TorchDispatchMode):
    """Adds up what the operations under it would take on a device, and remembers the largest storage that one of them made."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device, self.seconds, self.largest = device, 0.0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if torch.Tag.inplace_view in func.tags or func.is_view:
            return made
        tensors = [t for t in tree_leaves((args, kwargs, made)) if isinstance(t, torch.Tensor)]
        moved = sum(t.numel() * t.element_size() for t in tensors)
        count = flop_registry.get(func.overloadpacket)
        flops = count(*args, **(kwargs or {}), out_val=made) if count is not None else 0
        d = self.device
        if d.winograd > 1 and _is_dense_3x3(func, args):
            flops /= d.winograd
        self.seconds += max(flops / (d.flops * d.flops_share), moved / (d.memory_bandwidth * d.memory_share))
        self.largest = max([self.largest] + [t.untyped_storage().nbytes() for t in tree_leaves(made) if torch.is_tensor(t)])
        return made


def _is_dense_3x3(func, args) -> bool:
    forward = func is torch.ops.aten.convolution.default
    if not forward and func is not torch.ops.aten.convolution_backward.default:
        return False
    weight, stride, groups = (args[1], args[3], args[8]) if forward else (args[2], args[4], args[9])
    return tuple(weight.shape[2:]) == (3, 3) and tuple(stride) == (1, 1) and groups == 1


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def measure_stage(name: str, module: nn.Module, x: torch.Tensor, device: Device) -> tuple[Stage, torch.Tensor]:
    """(costs, output) of one stage on a fake input; the output is detached and asks for its gradient."""
    resident = {_storage(t) for t in (*module.parameters(), *module.buffers(), x)}
    saved: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if _storage(tensor) not in resident:
            saved[_storage(tensor)] = (tensor.untyped_storage().nbytes(), tensor)
        return tensor

    forward, backward = _Time(device), _Time(device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), forward:
        y = module(x)
    saved[_storage(y)] = (y.untyped_storage().nbytes(), y)
    wanted = [x, *(p for p in module.parameters() if p.requires_grad)] if x.requires_grad else list(module.parameters())
    if wanted:
        with backward:
            torch.autograd.grad(y, wanted, torch.empty_like(y), allow_unused=True)
    output = y.untyped_storage().nbytes()
    inner = max([size for size, _ in saved.values() if size] + [0])
    deep = (
        sum(1 for m in module.modules() if not list(m.children())) > 2
    )  # a layer and its activation need no inner gradients
    stage = Stage(
        name=name,
        forward_time=forward.seconds,
        backward_time=backward.seconds,
        output_bytes=output,
        saved_bytes=sum(size for size, _ in saved.values()),
        forward_transient_bytes=inner if deep else 0,
        backward_transient_bytes=2 * inner if deep else 0,
    )
    return stage, y.detach().requires_grad_()


def chain_of(name: str, stages: Iterable[tuple[str, nn.Module]], shape: tuple[int, ...], device: Device) -> Chain:
    """The chain of modules that follow one another, made and run under the fake mode that is active."""
    x = torch.empty(shape)
    made, weights = [], 0
    size = x.untyped_storage().nbytes()
    for label, module in stages:
        module.train()
        weights += sum(p.numel() * p.element_size() for p in module.parameters())
        stage, x = measure_stage(label, module, x, device)
        made.append(stage)
    meta = {"device": device.name, "shape": list(shape), "parameter_bytes": weights}
    return Chain(tuple(made), device.d2h_bandwidth, device.h2d_bandwidth, input_bytes=size, name=name, meta=meta)


def network(name: str, batch: int, image: int, device: Device, invertible: bool = False, **options) -> Chain:
    """A chain of `name` for a batch of square images; `invertible` has 001's BatchNorm in place of BatchNorm and ReLU."""
    torchvision = _torchvision()
    with FakeTensorMode():
        if name.startswith("resnet"):
            depths = {"18": (2, 2, 2, 2), "34": (3, 4, 6, 3), "50": (3, 4, 6, 3), "101": (3, 4, 23, 3), "152": (3, 8, 36, 3)}
            block = (
                torchvision.models.resnet.BasicBlock if name[6:] in ("18", "34") else torchvision.models.resnet.Bottleneck
            )
            model = torchvision.models.ResNet(block, options.get("blocks") or depths[name[6:]])
            model = _invertible(model) if invertible else model
            stages = _resnet_stages(model)
        elif name.startswith("vgg"):
            model = getattr(torchvision.models, name)()
            stages = _layers(model.features) + [("avgpool..flatten", nn.Sequential(model.avgpool, nn.Flatten()))]
            stages += [(f"classifier.{label}", module) for label, module in _layers(model.classifier)]
        elif name == "alexnet":
            model = torchvision.models.alexnet()
            stages = _layers(model.features) + [("avgpool..flatten", nn.Sequential(model.avgpool, nn.Flatten()))]
            stages += [(f"classifier.{label}", module) for label, module in _layers(model.classifier)]
        elif name == "mobilenet":
            stages = _mobilenet(invertible)
        elif name == "inception_v4":
            import timm

            model = timm.create_model("inception_v4")
            stages = [(f"features.{n}", module) for n, module in enumerate(model.features)]
            stages.append(("head", nn.Sequential(model.global_pool, nn.Flatten(), model.last_linear)))
        else:
            raise ValueError(f"no network {name!r} here")
        return chain_of(f"{name}, {image}, batch {batch}", stages, (batch, 3, image, image), device)


def scaled(chain: Chain, factor: int) -> Chain:
    """The chain at `factor` times the batch: bytes and times grow alike (small kernels are no faster for it)."""

    def more(stage: Stage) -> Stage:
        sizes = ("output_bytes", "saved_bytes", "grad_bytes", "forward_transient_bytes", "checkpoint_transient_bytes")
        names = (*sizes, "backward_transient_bytes", "forward_time", "backward_time")
        return replace(stage, **{name: getattr(stage, name) * factor for name in names})

    return replace(chain, stages=tuple(map(more, chain.stages)), input_bytes=chain.input_bytes * factor)


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
    stages: list[tuple[str, nn.Module]] = [("conv stem", stem)]
    for group in ("layer1", "layer2", "layer3", "layer4"):
        stages += [(f"{group}.{n}", block) for n, block in enumerate(getattr(model, group))]
    return [*stages, ("head", nn.Sequential(model.avgpool, nn.Flatten(), model.fc))]


def _invertible(model: nn.Module) -> nn.Module:
    """Each BatchNorm that a ReLU follows becomes an invertible one, and that ReLU nothing."""
    from torchvision.models.resnet import BasicBlock, Bottleneck

    from rotoff.nn import InvertibleBatchNormLeakyReLU

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
    from rotoff.nn import InvertibleBatchNormLeakyReLU

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


_kept = []


def _torchvision():
    """torchvision, also where its compiled operators are missing (none of these networks uses one)."""
    try:
        import torchvision
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(library)
        import torchvision
    return torchvision
