"""A chain with no device and no bytes: the stages of a model run on fake tensors, times from operation counts.

Bytes follow the same rules as measured ones, by the same code (`meter`): only where they are seen is another
(`fake.FakeAllocator`). Equal stages on equal inputs are run once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ..capture import strategy
from ..capture.operations import OperationLog, record_operations
from ..capture.stage import StageModule, flatten, storage_key
from ..chain import Chain
from ..runtime.replay import RNG_BYTES
from . import cpu_temporaries
from .allocations import AllocationLog
from .cuda_kernels import cuda_variants
from .devices import Device, find
from .fake import FakeAllocator, InMode, fake_copy, fake_mode
from .fake_forms import FakeFormMeter
from .form_meter import FormMeter
from .forms import Policy
from .measure import Profile, measure
from .meter import CUDA_BLOCK, End, Measured, Meter, Run
from .provenance import TAIL_TIMES, provenance
from .roofline import Roofline
from .structure import describe, structure

T = TypeVar("T")
_CPU = torch.device("cpu")  # of all fake tensors


def estimate(model: nn.Module, *sample: Any, device: Device | str = "H200", **kwargs: Any) -> Chain:
    """The chain of `model` as it would be measured on `device`, with no device and no memory taken.

    Bytes are exact but for temporaries inside kernels (docs/profiles.md lists them); times are estimates from operation
    counts and the device's data sheet. The chain's ``meta`` says so.

    Args:
        model, sample, kwargs: what is trained and what it is called with; tensors may be real, on ``meta``, or fake, and stay
            untouched. Autocast, where it is on for the CPU or CUDA, counts.
        device: a name (``rotoff.devices()`` lists them) or a `Device`.

    Raises:
        OptionError: for an unknown device, naming those that are known.
        MeasureError: where the model's stages cannot be found, or what it does depends on its tensors' contents.
    """
    return estimate_profile(model, sample, kwargs, find(device)).chain


def estimate_profile(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: Device) -> Profile:
    """What `measure` would return on `device`, over a fake copy of the model."""
    mode = fake_mode(device.capability is not None)
    copied = fake_copy(model, mode).train()
    value = fake_copy(strategy.chain_input(model, args, kwargs), mode)
    with cuda_variants(device):
        stages = strategy.stages(copied, value, _CPU)
        stages = [StageModule(s.name, tuple(InMode(m, mode) for m in s.modules)) for s in stages]
        profile = measure(stages, value, _CPU, lambda _: link(device), meter=FakeMeter(device, mode))
    meta = {**provenance(model, value, device), TAIL_TIMES: list(profile.tail_times)}
    chain = replace(profile.chain, name=type(model).__name__, meta=meta)
    return replace(profile, chain=chain)


def link(device: Device) -> tuple[float, float, bool]:
    """(d2h B/s, h2d B/s, duplex) that copies are taken to reach."""
    share = device.link_efficiency
    return device.d2h_bandwidth * share, device.h2d_bandwidth * share, device.duplex


class FakeMeter(Meter):
    """Costs of stages over fake tensors, as they would be on `device`."""

    def __init__(self, device: Device, mode: FakeTensorMode, forms: bool | Policy = True) -> None:
        self._mode = mode
        self._roofline = Roofline(device)
        self._copy_bandwidth = device.memory_bandwidth * device.memory_efficiency / 2  # read and written
        super().__init__(_CPU, 1, forms)
        self._allocator = FakeAllocator(1, cpu_temporaries.steps) if device.capability is None else FakeAllocator(CUDA_BLOCK)
        self._allocator.on_operation = self._operation
        self.rng_bytes = RNG_BYTES if device.capability is None else 0
        self._spans: list[dict[str, float]] = []  # of each record: seconds after each mark, those before any under ""
        self._phase = ""
        self._known: dict[tuple[str, str, bool], tuple[Measured | None, list[bool]]] = {}

    def form_meter(self, policy: Policy | None, partial: bool) -> FormMeter:
        return FakeFormMeter(self, self._mode, self._roofline, lambda: self._spans[-1]["backward"], policy)

    def stage(self, stage: StageModule, value: Any, last: bool) -> tuple[Measured | None, Any]:
        key = structure(stage.modules), describe(value, self._lasting), last
        if key in self._known:
            return self._again(stage, value, *self._known[key])
        self._spans = []
        measured, output = super().stage(stage, value, last)
        self._known[key] = measured, [t.requires_grad for t in flatten(output)[0]]
        return measured, output

    def _again(
        self, stage: StageModule, value: Any, measured: Measured | None, needs: list[bool]
    ) -> tuple[Measured | None, Any]:
        with torch.no_grad():
            outputs, rebuild = flatten(stage.run(value))
        inputs = {storage_key(t) for t in flatten(value)[0]}
        if measured is not None:
            measured = replace(measured, costs=replace(measured.costs, name=stage.name))
            own = measured.behaviour.own_outputs
            self._lasting |= {storage_key(t) for t, made in zip(outputs, own, strict=True) if not made} - inputs
        return measured, rebuild([t.detach().requires_grad_(need) for t, need in zip(outputs, needs, strict=True)])

    def record(self, run: Callable[[], T]) -> tuple[T, AllocationLog]:
        self._spans.append({})
        self._phase = ""
        return self._allocator.log(run)

    def mark(self, name: str) -> None:
        self._allocator.mark(name)
        if name == "backward":
            self._phase = name
            self._spans[-1][name] = 0.0

    def plain(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, FakeTensor)

    def _operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        spans = self._spans[-1]
        spans[self._phase] = spans.get(self._phase, 0.0) + self._roofline.time(func, args, kwargs, result)

    def _times(self, run: Run, end: End) -> tuple[float, float, float]:
        """Of the runs recorded before: the first is a forward, one ends with the backward."""
        forward = self._spans[0].get("", 0.0)
        backward = next(spans["backward"] for spans in self._spans if "backward" in spans)
        return forward, backward, 0.0 if run.last else end.share * forward

    def copy_bandwidth(self, nbytes: float) -> float:
        return self._copy_bandwidth

    def recorded(self, run: Run) -> OperationLog:
        leaves = run.leaves()
        return record_operations(lambda: flatten(run.forward(leaves))[0], self.device, self._roofline.time)

    def address(self, tensor: torch.Tensor) -> int:
        return self._allocator.address(tensor)

    def _rounded(self, nbytes: int) -> int:
        return self._allocator.rounded(nbytes)
