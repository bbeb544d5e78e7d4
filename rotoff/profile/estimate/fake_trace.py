"""The trace of a step from fake tensors: no kernel runs, and the device need not be there.

A fake copy of the model runs on the tape that records a first step (`recorded_step`). Its log has the births and deaths
of storages that a dispatch mode sees, in place of those of an allocator; its times come from a data sheet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from numbers import Number
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ...accelerator import BLOCK, named
from ...core.backward_from import LossAlone, output_named
from ...errors import MeasureError
from ...runtime.links.spill import Away, Spill
from ...runtime.sharded import gathering_apart, sharded
from ...tape.contents import Content, Slot
from ...tape.tape import Known
from ...tensors.storage import is_plain
from ...tensors.tree import look_into, tensor_leaves
from ..allocations import Event
from ..reads import Reads, RecordedReads
from ..recorded_step import GATHERED
from ..tape_chain import CALL
from ..trace import number_bytes
from . import cpu_temporaries
from .collectives import Collective, collective
from .cuda_kernels import ADDS_MASK, device_variants
from .devices import Device
from .fake import FakeAllocator, fake_copy
from .fake_kernels import FakeKernels
from .roofline import Roofline
from .shards import with_shards

_CPU = torch.device("cpu")  # of all fake tensors
_FACTORS = {torch.ops.aten.mul.Tensor, torch.ops.aten.div.Tensor}  # for `x`, the backward needs the second argument


class _Loss(torch.autograd.Function):
    """A loss of no bytes. Its backward makes a gradient for each of its inputs, which nothing else holds."""

    @staticmethod
    def forward(ctx: Any, *parts: torch.Tensor) -> torch.Tensor:
        ctx.made = [partial(torch.empty_strided, t.size(), t.stride(), dtype=t.dtype, device=t.device) for t in parts]
        return parts[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return tuple(make().fill_(1) for make in ctx.made)


def starts(result: Any, names: Sequence[str | int] = ()) -> list[torch.Tensor]:
    """Return the tensors of what a model returns from which its backward starts: the outputs with these `names`, or
    all.

    Raises:
        MeasureError: if one of them is missing, or needs no gradient.
    """
    look_into(result)
    parts = [] if names else [t for t in tensor_leaves(result) if t.requires_grad]
    for name in names:
        named = [t for t in tensor_leaves(output_named(result, name)) if t.requires_grad]
        if not named:
            raise MeasureError(
                f"backward_from names {name!r}, which needs no gradient on this input; call the model as in training"
                " (for example with labels), or name the output that the backward starts from"
            )
        parts += named
    return parts


def run_backward(parts: Iterable[torch.Tensor]) -> None:
    """Run the backward from all of `parts`."""
    loss = _Loss.apply(*parts)
    torch.autograd.backward(loss, torch.empty_like(loss))


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
            `starts`.
    """
    cuda = device.capability is not None
    mode = FakeKernels(cuda)
    log = _Log(device)
    # a mode is slow, and only needed where the caller has another default
    default = nullcontext() if torch.get_default_device() == _CPU else _CPU
    with default, device_variants(device):
        copied = fake_copy(model, mode)
        args, kwargs = fake_copy((args, kwargs), mode)
        if shard is not None:
            with mode:
                shard(copied)
        step = FakeStep(copied, mode, log)
        apart = gathering_apart(sharded(copied).values(), step, partial(step.region, GATHERED))
        if cuda:
            step.device = named(0)
        try:
            with mode, log, nullcontext() if shard is None else log.seeing_resizes():
                with apart, step, torch.autograd.graph.saved_tensors_hooks(step.pack, step.unpack):
                    result = copied(*args, **kwargs)
                step.check([t for t in tensor_leaves(result) if t.requires_grad])
                parts = starts(result, names)
                if any(isinstance(name, LossAlone) for name in names):
                    del result
                run_backward(parts)
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


class _Log(FakeAllocator):
    """Logs births and deaths of storages and the regions of a recorded step, and adds up the seconds of operations."""

    def __init__(self, device: Device) -> None:
        if device.capability is None:
            super().__init__(temporaries=cpu_temporaries.steps)
        else:
            super().__init__(BLOCK)
        self.told: list[Event] = []
        self.collectives: list[Collective] = []
        self._device = device
        self._roofline = Roofline(device)
        self._seconds = 0.0

    @contextmanager
    def region(self, name: str) -> Iterator[None]:
        self.told.append(Event(0, begins=name))
        yield
        self.told.append(Event(0, ends=name))

    def event(self, number: int, size: int) -> None:
        self.told.append(Event(size, number))

    def ran(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        call = collective(func, args, kwargs, result, self._device, len(self.told))
        if call is None:
            self._seconds += self._roofline.time(func, args, kwargs, result)
        else:
            self.collectives.append(call)
            self._seconds += 0.0 if call.beside else call.seconds

    def take_seconds(self) -> float:
        """Return the seconds of the operations since this was called last."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class _Nowhere(Spill):
    """Keeps how large storages were."""

    def put(self, storage: torch.UntypedStorage) -> Away:
        return Away(storage.device, storage.nbytes(), None, 0)

    def get(self, away: Away) -> torch.UntypedStorage:
        return torch.empty(away.nbytes, dtype=torch.uint8, device="meta").untyped_storage()


class FakeStep(RecordedReads):
    """A recorded step of fake tensors: nothing is copied, verified or timed."""

    is_mode = True  # what fake tensors run is below
    lingers = False

    def __init__(self, model: nn.Module, mode: FakeTensorMode, log: _Log) -> None:
        super().__init__(Known(), model)
        self.model = model
        self._mode, self._births = mode, log
        self._spill = _Nowhere(self.device)

    @staticmethod
    def plain(t: torch.Tensor) -> bool:
        return is_plain(t) or (type(t) is FakeTensor and t.layout is torch.strided)

    def _start(self) -> None:
        pass

    def region(self, name: str) -> AbstractContextManager[object]:
        return self._births.region(name)

    def moment(self) -> float:
        return 0.0

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
        if func is torch.ops.aten.add.Tensor and ADDS_MASK.get():
            return super().__torch_dispatch__(torch.ops.aten.add_.Tensor, types, args, kwargs).detach()
        return super().__torch_dispatch__(func, types, args, kwargs)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._births.take_seconds()
        if func in _FACTORS and isinstance(args[1], Number) and args[0].requires_grad and torch.is_grad_enabled():
            self._factor(args[1])
        out = super().call(func, args, kwargs)
        self._last = max(0.0, self._births.take_seconds() - CALL)  # which a chain adds for each operation
        return out

    def _factor(self, number: Number) -> None:
        """Note a number that autograd saves as a tensor of the CPU, and shows to no hook."""
        if self.device.type == "cpu":
            self._births.hidden(number_bytes(number))

    def fill(self, stage: int, storages: Mapping[Content, torch.UntypedStorage]) -> None:
        for storage in storages.values():
            self._births.note(storage)
        super().fill(stage, storages)

    def unpack(self, packed: Any) -> torch.Tensor:
        many = len(self.waits)
        tensor = super().unpack(packed)
        self._since(many)
        if isinstance(packed, Slot) and tensor.is_meta:
            tensor = FakeTensor(self._mode, tensor, _CPU)
        return tensor

    def _ended(self) -> None:
        many = len(self.waits)
        super()._ended()
        self._since(many)

    def _since(self, many: int) -> None:
        """Correct the wait that was noted last."""
        if len(self.waits) > many:
            seconds = self._births.take_seconds()
            self.waits[-1] = seconds if many else 0.0

    def stop(self) -> None:
        super().stop()
        self.log, self.collectives = self._births.told, self._births.collectives

    def hold_shards(self) -> None:
        """Put what a rank holds in place of the model's sharded parameters, once the step has ended."""
        self._read_at = with_shards(self, self.model, super().reading.at)

    @property
    def reading(self) -> Reads:
        return replace(super().reading, at=self._read_at)
