"""Parameters that a plan moves, in a step on a tape: they are contents like any other.

Note [What stands for a parameter]
----------------------------------

For a forward, the places where modules keep such a parameter (entries, lists, attributes) have another tensor in them:
one on the device whose storage has bytes only while the device has the parameter's. Its one autograd node takes the
gradient to the parameter. So no operation of the model tells the difference, and the caller's parameter, its gradient
and its hooks are as ever.

**Within the forward** the storage is filled and emptied as the plan says. An operation, or a view, that meets an empty
one fills it first; it is emptied again when the next one is filled so. A write goes to the parameter.

**For the backward**, the tape keeps a reference to the parameter in place of each saved tensor. What reads it, a replay
or an unpack, gets the copy that the device has then, and fills it if there is none. A copy is never emptied there:
whoever still reads it keeps it.

**What the model's code has kept** of such a tensor when the forward ends (an attribute of an autograd function, a
result) has the parameter's bytes for as long as it lives. An attribute of a module gets the parameter back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.autograd.variable import Variable
from torch.multiprocessing.reductions import StorageWeakRef

from ..core.sequence import UPDATES, Op, OpKind
from ..tape.contents import CHANGED, RESIDENT, Content, Reference, Slot, is_plain, version_of, witness_of
from ..tape.hooks import taking_saved
from ..tape.operators import kind_of, tensors_of
from ..tape.tape import Known, Tape
from ..tensors.storage import in_shared_memory, is_wrapper, uses_of
from .placed.groups import ParameterPlaces
from .placed.placement import Placement
from .placed.tensor import PlacedTensor, offload, prefetch
from .tape_step import TapeStep

weak_tensor: Callable[[torch.Tensor], Any] = torch._C._WeakTensorRef  # type: ignore[attr-defined]
with_geometry: Callable[..., torch.Tensor] = torch._C._dynamo.guards._reinterpret_tensor  # type: ignore[attr-defined]
FIRST = 2**64 - 1  # autograd runs the node of a gradient before all others that can run, as it does for parameters


class _Brought(torch.autograd.Function):
    """From a parameter to what stands for it."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, lent: Lent, lending: Lending) -> torch.Tensor:
        ctx.places, ctx.lending = lent.places, lending
        return lent.new_tensor()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        parameter, place, gradient = ctx.places.parameter, ctx.places.gradient, gradients[0]
        if gradient is not None and gradient.device != parameter.device:
            gradient = gradient.to(parameter.device) if ctx.lending.home else place.take(gradient)
        elif gradient is not None and ctx.lending.home and (gradient := place.take(gradient)) is None:
            place.release()
            place.join()
        return gradient, None, None


class Lent:
    """One parameter in one forward, and until its backward ends.

    tensor: what stands for it. storage: that of `tensor`. These are there within the forward alone.
    """

    def __init__(self, places: ParameterPlaces, lending: Lending) -> None:
        self.places, self.place, self.parameter = places, places.weight, places.parameter
        self.version = version_of(self.parameter)
        self._home = self.place.on_host
        self.storage: torch.UntypedStorage | None = None
        needs = self.parameter.requires_grad and torch.is_grad_enabled()
        self.tensor: torch.Tensor | None = _Brought.apply(self.parameter, self, lending) if needs else self.new_tensor()
        if needs:
            self.tensor.grad_fn._set_sequence_nr(FIRST)  # type: ignore[union-attr]
        self.tensor.__class__ = type(self.parameter)
        self.tensor.__dict__.update(self.parameter.__dict__)
        self.storage = self.place.shown = self.tensor.untyped_storage()

    def new_tensor(self) -> torch.Tensor:
        """Return a tensor like the parameter: over the bytes that the device has of it, or with none."""
        if self.place.device is not None:
            return self.place.device.detach()
        size, stride, dtype = self.parameter.size(), self.parameter.stride(), self.parameter.dtype
        with torch.inference_mode(False):
            return with_geometry(torch.empty(0, dtype=dtype, device=self.place.link.device), size, stride)

    def settle(self) -> None:
        """Within the forward: the storage is as full as the device's copy."""
        if self.place.device is None and self.storage is not None and self.storage.nbytes():
            self.storage.resize_(0)

    def part(self, aborted: bool) -> bool:
        """The forward has ended, and no module has `tensor` any more. What others have of it keeps its bytes; returns
        whether there is something."""
        assert self.tensor is not None and self.storage is not None
        if self.tensor.untyped_storage()._cdata != self.storage._cdata:  # the model has set its ``.data``
            self.parameter.data = self.tensor.data.to(self.parameter.device)
        whole, bare = weak_tensor(self.tensor), StorageWeakRef(self.storage)
        self.tensor = self.storage = self.place.shown = None
        if self._home and not self.place.on_host:  # the model has changed it; its gradient goes to where it has been
            offload([self.place])
            self.place.show_host()
            self.place.arrive()
        if (device := self.place.device) is not None:
            own = 2 if self.place.on_host else 3  # it, that call's, the caller's
            return not whole.expired() or (not self.place.moving and uses_of(device) > own)
        kept = torch.UntypedStorage._new_with_weak_ptr(bare.cdata)
        if aborted or kept is None:
            return False
        self.place.shown = kept
        self.bring()
        self.place.shown = None
        return True

    def bring(self) -> torch.UntypedStorage:
        """Return the device's copy, and fetch it if there is none."""
        if version_of(self.parameter) != self.version:
            raise RuntimeError(CHANGED.format(tuple(self.parameter.shape)))
        if self.place.device is None:
            prefetch([self.place])
        self.place.settle()
        assert self.place.device is not None
        return self.place.device.untyped_storage()


class Weight(Content):
    """A parameter as a content: there whenever something reads it."""

    on_demand = True
    __slots__ = ("bring",)

    def __init__(self, bring: Callable[[], torch.UntypedStorage], storage: torch.UntypedStorage, nbytes: int) -> None:
        super().__init__(RESIDENT, 0, 0, storage)
        self.bring, self.held, self.nbytes = bring, storage, nbytes

    def storage(self, seen: bool) -> torch.UntypedStorage | None:
        return self.bring() if self.next is None else self.held

    def alive(self) -> bool:
        return True


class Away(Reference):
    """What autograd keeps of a saved parameter."""

    __slots__ = ()

    @property
    def shape(self) -> torch.Size:
        return self.view.size


class Lending:
    """The parameters of `model` that are lent for one step, and back at its end.

    reached: by id, parameters that the model's code has reached past its modules, or kept beyond its forward.

    Args:
        places: of those that the plan moves. room: bytes that the device may have of what was filled on demand. home:
            whether gradients go to where the parameters lie at once, since no plan takes them there.
    """

    def __init__(self, model: nn.Module, places: Iterable[ParameterPlaces], room: int = 0, home: bool = False) -> None:
        self._model, self._room, self.home = model, room, home
        self._places = [one for one in places if _is_alone(one)]
        self.reached: set[int] = set()
        self.around: Callable[[], AbstractContextManager[object]] = nullcontext  # what fills storages
        self._lent: dict[int, Lent] = {}  # by id of the parameter
        self._shown: dict[int, Lent] = {}  # by storage
        self._own: dict[int, int] = {}  # by storage of a parameter that lies elsewhere, its id
        self._weights: list[Weight] = []
        self._demanded: list[Lent] = []  # filled because something read them

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The model's forward runs within."""
        aborted = True
        try:
            for places in self._places:
                lent = self._lent[id(places.parameter)] = Lent(places, self)
                assert lent.storage is not None
                self._shown[lent.storage._cdata] = lent
                if (own := lent.parameter.untyped_storage()._cdata) != lent.storage._cdata:
                    self._own[own] = id(lent.parameter)
            self._exchange({key: lent.tensor for key, lent in self._lent.items()})
            yield
            aborted = False
        finally:
            self._exchange({id(lent.tensor): lent.parameter for lent in self._lent.values()})
            self._shown.clear()
            for weight in self._weights:
                if weight.next is None:
                    weight.held = None
            self._weights = []  # they refer to this
            for key, lent in self._lent.items():
                if lent.part(aborted):
                    self.reached.add(key)

    def _exchange(self, others: Mapping[int, Any]) -> None:
        """Put other tensors, given by id, in their places in the modules."""
        for module in self._model.modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            for holder in (vars(module), *vars(module).values()):
                if not isinstance(holder, (dict, list)) or not holder:
                    continue
                for key, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
                    if not isinstance(value, torch.Tensor):
                        continue
                    if (other := others.get(id(value))) is not None:
                        holder[key] = other
                    elif is_wrapper(value):
                        _exchange_parts(value, others)

    def keys(self) -> dict[int, int]:
        """Return, by storage of what takes its place, the id of each parameter."""
        return {key: id(lent.parameter) for key, lent in self._shown.items()}

    def shown(self, storage: torch.UntypedStorage) -> Lent | None:
        """The parameter whose place the storage takes."""
        return self._shown.get(storage._cdata)

    def is_own(self, storage: torch.UntypedStorage) -> bool:
        """Whether a parameter that is lent lies there. Its reader has reached it past the modules."""
        if (key := self._own.get(storage._cdata)) is not None:
            self.reached.add(key)
        return key is not None

    def weight(self, lent: Lent, storage: torch.UntypedStorage) -> Weight:
        """Return the content that `storage` shows."""

        def bring() -> torch.UntypedStorage:
            self.fill([lent], alone=not self._shown)
            return lent.bring()

        self._weights.append(Weight(bring, storage, lent.parameter.nbytes))
        return self._weights[-1]

    def read_by(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Lent]:
        """What an operation reads of parameters."""
        plain = (t.untyped_storage()._cdata for t in tensors_of(args, kwargs) if is_plain(t))
        return [lent for key in plain if (lent := self._shown.get(key)) is not None]

    def fill(self, wanted: list[Lent], alone: bool = False) -> None:
        """Have the device hold `wanted`. alone: and no more that was filled so than there is room for."""
        missing = [lent for lent in dict.fromkeys(wanted) if lent.place.device is None]
        if alone:
            more = sum(lent.parameter.nbytes for lent in (*self._demanded, *missing)) - self._room
            others = [lent for lent in self._demanded if lent not in wanted]
            taken = accumulate((lent.parameter.nbytes for lent in others), initial=0)
            self.empty([lent for lent, before in zip(others, taken, strict=False) if before < more])
        self._demanded += missing
        with self.around():
            prefetch(lent.place for lent in missing)
            for lent in wanted:
                lent.bring()

    def empty(self, gone: Iterable[Lent] | None = None) -> None:
        """Let go of what was filled on demand; None: all of it."""
        for lent in list(self._demanded if gone is None else gone):
            self._demanded.remove(lent)
            lent.place.release()
            lent.settle()

    def moved(self, tensors: Iterable[PlacedTensor], keeps: bool) -> None:
        """The plan has moved these. keeps: it has them on the device from now on."""
        places = {id(tensor) for tensor in tensors}
        for lent in self._lent.values():
            if id(lent.place) in places:
                lent.settle()
                if lent in self._demanded and (keeps or lent.place.device is None):
                    self._demanded.remove(lent)

    def on_demand(self) -> None:
        """There is no plan any more: whatever the device has may go, and gradients go to where the parameters lie."""
        self.home = True
        here = [lent for lent in self._lent.values() if lent.place.device is not None]
        self._demanded = [lent for lent in here if lent.place.on_host]


def _is_alone(places: ParameterPlaces) -> bool:
    """Whether the parameter is there, and no other tensor shares the device's copy of it, which a plan could not
    empty."""
    place = places.weight
    if not place.look():
        return False
    if place.on_host:
        return True
    if in_shared_memory(places.parameter) or not places.parameter.untyped_storage().resizable():
        return False
    return uses_of(places.parameter) <= 3  # it, `device`, and that call's


def _exchange_parts(wrapper: Any, others: Mapping[int, Any]) -> None:
    """Put other tensors, given by id, in their places in a tensor that wraps some."""
    for name in wrapper.__tensor_flatten__()[0]:
        part = getattr(wrapper, name)
        if (other := others.get(id(part))) is not None:
            setattr(wrapper, name, other)
        elif is_wrapper(part):
            _exchange_parts(part, others)


class PlacedTape(Tape):
    """A tape of a forward whose parameters are lent. last_key: the key with which the open stage ends. on_error: is
    called with what a read of the backward raises."""

    on_error: Callable[[Tape, BaseException], None] | None = None

    def __init__(self, known: Known | None, lending: Lending, *more: Any) -> None:
        super().__init__(known, *more)
        self.lending = lending
        self.last_key = -1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        read = self.lending.read_by(args, kwargs or {})
        if read and self.ahead >= 0 and self.key == self.last_key:  # only saved tensors were to come before the stage
            self._come_to()
        kind = kind_of(func) if read and isinstance(func, torch._ops.OpOverload) else None
        if kind is not None and kind.view:
            try:
                return super().__torch_dispatch__(func, types, args, kwargs)
            except RuntimeError:
                pass  # it asks for the bytes
        if read:
            writes = () if kind is None else kind.writes
            written = tuple(args[n] if n < len(args) else (kwargs or {}).get(name) for n, name in writes)
            with torch._C._DisableTorchDispatch():
                self.lending.fill(read, alone=True)
                for lent in self.lending.read_by(written, {}):
                    lent.place.hand_over(changes=True)  # it is the parameter that changes
        return super().__torch_dispatch__(func, types, args, kwargs)

    def content_of(self, t: torch.Tensor) -> Content:
        storage = t.untyped_storage()
        if self.lending.is_own(storage):  # on the host, where it does not change
            return self._contents.setdefault(storage._cdata, self._resident(storage, t))
        return super().content_of(t)

    def _resident(self, storage: torch.UntypedStorage, t: torch.Tensor) -> Content:
        lent = self.lending.shown(storage)
        if lent is None:
            return super()._resident(storage, t)
        lent.version = version_of(lent.parameter)  # it may have written
        return self.lending.weight(lent, storage)

    def pack(self, t: torch.Tensor) -> Any:
        packed = super().pack(t)
        if not isinstance(packed, Slot) or packed.reference is not None:
            return packed
        with torch._C._DisableTorchDispatch():
            if self.lending.shown(t.untyped_storage()) is not None:
                slot = Slot(self, packed.stage, packed.at, witness_of(t))
                slot.tensor = Away(self.content_of(t), t)  # type: ignore[assignment]
                return slot
        return packed

    def unpack(self, packed: Any) -> torch.Tensor:
        try:
            found: Any = super().unpack(packed)
            if not isinstance(found, Away):
                return found
            with self._lock, torch._C._DisableTorchDispatch():
                storage = found.content.storage(self._recording)
                assert storage is not None
                return found.view.on(storage)
        except BaseException as error:
            if self.on_error is not None:
                self.on_error(self, error)
            raise


@contextmanager
def filled(lending: Lending) -> Iterator[None]:
    """A forward without a plan runs within: its operations, and a backward, find the parameters that are lent."""
    tape = PlacedTape(None, lending)
    tape.paused, tape.reached = True, -1  # no stage

    def ended() -> None:
        tape.reached = -1
        lending.empty()

    tape.on_backward = lambda *_: Variable._execution_engine.queue_callback(ended)
    with lending.forward(), taking_saved(tape):
        yield
    lending.empty()


class PlacedStep(TapeStep):
    """One training step whose plan moves parameters, gradients and optimizer states, too.

    Args:
        placement: runs those operations. lending: the parameters. how: as for `TapeStep`.
    """

    def __init__(self, placement: Placement, lending: Lending, *how: Any) -> None:
        super().__init__(*how)
        self._placement, self.lending = placement, lending
        self._tape: weakref.ref[Tape] | None = None
        self._late: list[Op] = []  # updates whose gradients had not come
        self._ended = False

    @contextmanager
    def forward(self, tape: Tape) -> Iterator[None]:
        assert isinstance(tape, PlacedTape)
        self._tape, tape.on_error = weakref.ref(tape), self._failed
        with self.lending.forward(), super().forward(tape):
            yield

    def _look_ahead(self, tape: Tape) -> None:
        super()._look_ahead(tape)
        assert isinstance(tape, PlacedTape)
        keys = self._layout.keys[:-1]
        tape.last_key = keys[tape.stage - 1] if tape.stage <= len(keys) and not self.left_course else -1

    def _leave_course(self) -> None:
        super()._leave_course()
        self.lending.on_demand()

    def _run(self, tape: Tape, op: Op) -> None:
        if not op.of and op.kind not in UPDATES:
            super()._run(tape, op)
            return
        self._next += 1
        if op.kind in UPDATES and not self._placement.is_whole(op.stage):
            self._late.append(op)
            return
        moved = self._placement.operate(op)
        if op.of == "w":
            self.lending.moved(moved, op.kind in (OpKind.PREFETCH, OpKind.WAIT))

    # -- the backward

    def advance(self, tape: Tape, stage: int) -> None:
        if self._stage > len(self._layout.begins) or self.left_course:  # not within the forward
            if not self._queued:
                self._placement.check_process()
                self._placement.gradients.backward_begins()
            self.lending.empty()
            if self._ended:  # another backward through the graph
                Variable._execution_engine.queue_callback(self.lending.empty)
        super().advance(tape, stage)

    def _failed(self, tape: Tape, error: BaseException) -> None:
        if not self._queued:
            return  # the model's own backward, within its forward
        self.abandon()  # no update follows
        self._placement.updates.give_up(error)

    def _end(self, tape: Tape) -> None:
        super()._end(tape)
        if self._ended:
            return
        self._ended = True
        self.lending.empty()
        if self._queued:  # and not a forward that has failed
            ops = self._ops[self._next :]
            self._next = len(self._ops)
            self._placement.backward_done([*self._late, *(op for op in ops if op.of or op.kind in UPDATES)])

    def abandon(self) -> None:
        """Another step, or an update by the caller, begins: from now on all is on demand."""
        self._leave_course()
        if self._tape is not None and (tape := self._tape()) is not None and not self._ended:
            self._ended = True
            super()._end(tape)
            self.lending.empty()
