"""Estimates a chain without a device or memory: stages run on fake tensors, and times come from operation counts.

Bytes follow the same rules as measured ones, by the same code (`stage_meter`); only the allocator is another
(`fake.FakeAllocator`). Equal stages on equal inputs are run once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ...accelerator import BLOCK
from ...capture import strategy
from ...capture.backward_roots import BackwardFrom, read_backward_from
from ...capture.mutations import ChangedBuffers
from ...capture.partition.weight_casts import cast_again
from ...core.chain import LinkRates
from ...runtime.overhead import NO_OVERHEAD, OverheadTimes
from ...tensors.convolutions import Algorithms
from ...tensors.rng import RNG_BYTES
from ...tensors.stage import Behaviour
from ..measure import measure
from ..measured import Measured
from ..memory.allocator import AllocationLog
from ..profile import Profile
from ..provenance import provenance
from ..selective.variant_meter import FormMeter
from ..selective.variants import FormPolicy, Forms, read_forms
from ..stage_meter import Meter
from ..timing.context import MeasurementContext
from ..timing.convergence import Repeats
from ..timing.harness import Run
from ..timing.stage_timing import EarlyStop, Timings
from . import cpu_temporaries
from .cuda_kernels import cuda_variants
from .devices import Device
from .fake import FakeAllocator, InMode, fake_copy
from .fake_forms import FakeFormMeter
from .fake_kernels import FakeKernels
from .roofline import Roofline

T = TypeVar("T")
_CPU = torch.device("cpu")  # of all fake tensors


def estimate_profile(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: Device,
    wanted: strategy.StagesOption = None,
    forms: Forms = True,
    backward_from: BackwardFrom = None,
) -> Profile:
    """Return what `measure` would return on `device`, from a fake copy of the model.

    Args:
        wanted, forms, backward_from: the options `stages`, `forms` and `backward_from` of `Checkpointable`.
    """
    wanted = strategy.named(model, wanted) or wanted  # names also find the modules of the copy
    strategy.refuse_lazy(model)
    mode = FakeKernels(device.capability is not None)
    with _CPU, cuda_variants(device):  # whatever the caller's default device is, all fake tensors are there
        copied = fake_copy(model, mode).train()
        value = fake_copy(strategy.chain_input(model, args, kwargs), mode)
        captured = strategy.capture(copied, value, _CPU, wanted).starting(read_backward_from(backward_from))

        def within(module: nn.Module) -> nn.Module:
            return module if module is captured.starts else InMode(module, mode)

        stages = [replace(s, modules=tuple(map(within, s.modules))) for s in captured.stages]
        meter = FakeMeter(device, mode, read_forms(forms))
        named = bool(strategy.named(copied, wanted))
        _, profile = measure(stages, value, meter, lambda *_: link(device), named=named)
    meta = provenance(model, value, device)
    chain = replace(profile.chain, name=type(model).__name__, meta=meta)
    return replace(profile, chain=chain, cast_again=cast_again(captured.tape))


def link(device: Device) -> LinkRates:
    """Return the assumed rates of copies."""
    share = device.link_efficiency
    return LinkRates(device.d2h_bandwidth * share, device.h2d_bandwidth * share, device.duplex)


class TimedAllocator(FakeAllocator):
    """Also adds up the seconds of the logged operations on `device`.

    Attributes:
        seconds: for each log, the seconds after the mark "backward", and under "" those before it.
    """

    def __init__(self, device: Device, mode: FakeTensorMode, roofline: Roofline) -> None:
        if device.capability is None:
            super().__init__(1, cpu_temporaries.steps)
        else:
            super().__init__(BLOCK)
        self._mode = mode
        self._roofline = roofline
        self.seconds: list[dict[str, float]] = []
        self._phase = ""

    def log(self, run: Callable[[], T]) -> tuple[T, AllocationLog]:
        self.seconds.append({})
        self._phase = ""
        with self._mode:  # so that the interpreter's own tensors in a backward are fake
            return super().log(run)

    def mark(self, name: str) -> None:
        super().mark(name)
        if name == "backward":
            self._phase = name
            self.seconds[-1][name] = 0.0

    def ran(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        spans = self.seconds[-1]
        spans[self._phase] = spans.get(self._phase, 0.0) + self._roofline.time(func, args, kwargs, result)


class FakeMeter(Meter):
    """Measures stages on fake tensors, as they would be on `device`."""

    def __init__(self, device: Device, mode: FakeTensorMode, forms: bool | FormPolicy) -> None:
        roofline = Roofline(device)
        self._timed = TimedAllocator(device, mode, roofline)
        super().__init__(MeasurementContext(_CPU, self._timed, Repeats(1, 1), roofline.time), forms)
        self._copy_bandwidth = device.memory_bandwidth * device.memory_efficiency / 2  # each byte is read and written
        self.rng_bytes = RNG_BYTES if device.capability is None else 0

    def form_meter(self, policy: FormPolicy | None, partial: bool, algorithms: Sequence[Algorithms]) -> FormMeter:
        return FakeFormMeter(self.context, lambda: self._timed.seconds[-1]["backward"], policy)

    def _costs(self, run: Run, changes: ChangedBuffers, alike: bool = False) -> tuple[Measured, list[torch.Tensor]]:
        self._timed.seconds = []
        return super()._costs(run, changes, alike)

    def plain(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, FakeTensor)

    def _times(self, run: Run, end: EarlyStop) -> Timings:
        """Return the times of earlier runs: the first is a forward, and one ends with the backward."""
        forward = self._timed.seconds[0].get("", 0.0)
        backward = next(spans["backward"] for spans in self._timed.seconds if "backward" in spans)
        return Timings([forward], [backward], [] if run.last else [end.share])

    def copy_bandwidth(self, nbytes: float) -> float:
        return self._copy_bandwidth

    def sample_overhead(self, run: Run, behaviour: Behaviour) -> None: ...

    def overhead_times(self) -> OverheadTimes:
        return NO_OVERHEAD
