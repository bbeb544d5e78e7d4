"""The trace of a step from fake tensors: no kernel runs, and the device need not be there.

A fake copy of the model runs on the tape that records a first step (`recorded_step`). Its log has the births and deaths
of storages that a dispatch mode sees, in place of those of an allocator; its times come from a data sheet.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from fractions import Fraction
from functools import partial
from numbers import Number
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ...accelerator import named
from ...errors import MeasureError
from ...runtime.links.spill import Back, Spill
from ...runtime.sharded import sharded
from ...tape.contents import Content, Slot
from ...tape.tape import Known
from ...tensors.storage import is_plain, local
from ..recorded_step import Reads, RecordedStep
from ..sample_step import run_sample
from ..tape_chain import CALL
from ..trace import number_bytes
from .cuda_kernels import ADDS_MASK, device_variants
from .devices import Device
from .fake import FakeLog, fake_copy
from .fake_kernels import CPU, QUERIES, FakeKernels

_FACTORS = {torch.ops.aten.mul.Tensor, torch.ops.aten.div.Tensor}  # for `x`, the backward needs the second argument


@contextmanager
def _unlogged() -> Iterator[None]:
    """Within, PyTorch logs no traceback of an error on fake tensors, of which rotoff says more, or nothing."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def fake_step(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: Device,
    names: tuple[str | int, ...] = (),
    shard: Callable[[nn.Module], object] | None = None,
) -> FakeStep:
    """Run a step of `model` on `device`, without the device and without memory, and return it for `trace_of`.

    Bytes are those of a recorded step, except for what kernels take for themselves, of which `cpu_temporaries` knows a
    part. Seconds are those of the data sheet.

    Args:
        model, args, kwargs: of real, meta or fake tensors, on any device; they stay as they are.
        names: of the outputs from which the backward starts. shard: shards a fake copy of the model, in place.

    Raises:
        MeasureError: if the forward depends on the contents of its tensors, or cannot run on fake ones; and as for
            `run_sample`.
    """
    cuda = device.capability is not None
    mode = FakeKernels(cuda)
    log = FakeLog(device)
    # a mode is slow, and only needed where the caller has another default
    default = nullcontext() if torch.get_default_device() == CPU else CPU
    with default, device_variants(device), _unlogged():
        copied = fake_copy(model, mode)
        args, kwargs = fake_copy((args, kwargs), mode)
        if shard is not None:
            with mode:
                shard(copied)
        step = FakeStep(copied, mode, log)
        if cuda:
            step.device = named(0)
        try:
            with mode, log, nullcontext() if shard is None else log.seeing_resizes():
                roots = run_sample(step, partial(step.run, copied, *args, **kwargs), names)
                step.unnamed = 0 if names else len(roots)
        except MeasureError:
            raise
        except Exception as error:  # a model may do anything
            raise MeasureError(
                f"the model cannot run on fake tensors: {type(error).__name__}: {error}; check that model(*sample) runs"
                " by itself, and that its forward does not depend on what its tensors hold"
            ) from error
        finally:
            step.stop()
    for op in step.operations:
        for content in (*op.made, *op.written()):
            content.nbytes = log.rounded(content.nbytes)
    step.hold_shards()
    return step


class _Nowhere(Spill):
    """Keeps how large storages were."""

    def put(self, storage: torch.UntypedStorage) -> Back:
        nbytes = storage.nbytes()
        return lambda: torch.empty(nbytes, dtype=torch.uint8, device="meta").untyped_storage()


class FakeStep(RecordedStep):
    """A recorded step of fake tensors: nothing is copied, verified or timed."""

    is_mode = True  # what fake tensors run is below
    unnamed = 0  # outputs from which the backward starts because none was named

    def __init__(self, model: nn.Module, mode: FakeTensorMode, log: FakeLog) -> None:
        super().__init__(Known(), model, _Nowhere(CPU))
        self.model = model
        self._mode, self._births = mode, log
        self.log, self.collectives, self.kernels = log.told, log.collectives, log.kernels

    @staticmethod
    def plain(t: torch.Tensor) -> bool:
        return is_plain(t) or (type(t) is FakeTensor and t.layout is torch.strided)

    def start(self) -> bool:
        return True

    def region(self, name: str) -> AbstractContextManager[object]:
        return self._births.region(name)

    def moment(self) -> Fraction:
        return self._births.seconds

    def address(self, storage: torch.UntypedStorage) -> int:
        return self._births.number(storage)

    def saved(self, slot: Slot, storage: torch.UntypedStorage) -> None:
        super().saved(slot, storage)
        assert slot.reference is not None
        self._away.setdefault(slot.reference.content, self._spill.put(storage))
        self._kept.clear()  # nothing is verified, so contents live as long as the model's code has them

    def enter(self, stage: int) -> None:
        super().enter(stage)
        self._borders = []

    def _verify(self) -> None:
        self.known.sure.update(self._new)

    def _operation(self, *given: Any) -> Any:
        op = super()._operation(*given)
        if op.state is not None and self.device.type == "cpu":
            self._births.note(op.state.untyped_storage())
        return op

    def _copy(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        copy = super()._copy(storage)
        self._births.note(copy)
        return copy

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in QUERIES:  # no operation
            return func(*args)
        if func is torch.ops.aten.add.Tensor and ADDS_MASK.get():
            return super().__torch_dispatch__(torch.ops.aten.add_.Tensor, types, args, kwargs).detach()
        return super().__torch_dispatch__(func, types, args, kwargs)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        grows = torch.is_grad_enabled() and self.device.type == "cpu"
        if grows and func in _FACTORS and isinstance(args[1], Number) and args[0].requires_grad:
            self._births.hidden(number_bytes(args[1]))  # autograd saves it as a tensor, which it shows to no hook
        out = super().call(func, args, kwargs)
        began, ended = self._last
        self._last = max(0.0, float(ended - began) - CALL)  # which a chain adds for each operation
        return out

    def fill(self, stage: int, storages: Mapping[Content, torch.UntypedStorage]) -> None:
        for storage in storages.values():
            self._births.note(storage)
        super().fill(stage, storages)

    def unpack(self, packed: Any) -> torch.Tensor:
        tensor = super().unpack(packed)
        if isinstance(packed, Slot) and tensor.is_meta:
            tensor = FakeTensor(self._mode, tensor, CPU)
        return tensor

    def hold_shards(self) -> None:
        """Put what a rank holds in place of the model's sharded parameters, once the step has ended.

        FSDP2 reads those of a module that it sharded wherever that runs. The root gathers once, before the first
        operation, and reduces its gradients after all backwards.
        """
        starts, at = [segment.first for segment in self.segments], dict(super().reading.at)
        modules = [f"{self.segments[bisect_right(starts, n) - 1].module}." for n in range(len(self.positions))]
        for name, unit in sharded(self.model).items():  # the innermost comes last
            within = (p for p, module in zip(self.positions, modules, strict=True) if module.startswith(f"{name}."))
            at |= dict.fromkeys(map(id, unit.parameters()), frozenset(within if name else self.positions[:1]))
        held: dict[int, nn.Parameter] = {}
        for module in self.model.modules():
            for name, p in module._parameters.items():
                if p is not None and (shard := local(p)) is not p:
                    one = held.setdefault(id(p), nn.Parameter(shard.detach(), requires_grad=p.requires_grad))
                    module._parameters[name] = one
        self._read_at = {id(held[key]) if key in held else key: some for key, some in at.items()}

    @property
    def reading(self) -> Reads:
        return replace(super().reading, at=self._read_at)
