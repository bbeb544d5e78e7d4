"""The first step of a model on a tape: it runs as any other, and its log is the profile.

What autograd saves leaves the device whenever the call of a module begins or ends, and comes back when the backward
needs it. So the step keeps its limit if anything does, and shows how long each tensor lives in the model's own code.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.variable import Variable
from torch.multiprocessing.reductions import StorageWeakRef

from ..accelerator import block_bytes, finish, take_workspaces
from ..errors import MeasureError
from ..runtime.links.spill import Back, Spill
from ..runtime.sharded import Gathered, gathering_apart, sharded
from ..tape.contents import Content, Slot, SlotReference
from ..tape.hooks import taking_saved
from ..tape.operators import tensors_of
from ..tape.regions import OPERATORS
from ..tape.tape import Key, Known, Operation, Tape, is_wrapper
from ..tape.verify import Verified
from ..tensors.clock import mark, seconds_between
from ..tensors.modules import compiled, eagerly, parts_of
from ..tensors.storage import local, rounded, stored
from ..tensors.tree import tensor_leaves
from .allocations import Event, Log, check_allocator, region

END = "end"
GRADIENT = "gradient"
ARRIVED = "arrived"  # a gradient that has come is had by something else, too; until the end it may be the caller
LOSS = "loss"  # what follows the forward
STAGE = "stage "  # what a segment has saved is there again
READ = "read "  # the backward reads the saved tensor of that position
GATHERED = "gathered"  # FSDP gathers parameters, or releases them
RESHARDED = "resharded"  # at the end of the backward FSDP releases those of the root, then it reduces their gradients
ASIDE, BACK = "aside", "back"  # the backward of another step begins, and ends
OWN = "own"  # what the recording itself does: neither the model nor a plan


class Segment(NamedTuple):
    """What happens from one call of a module to the next.

    module: its name. first: the number of its first operation.
    """

    module: str
    first: int


# tags of operators after which Python, or the shape of a tensor, depends on data
VARYING = frozenset([torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape])
BUSY = threading.Lock()  # there is one profiler
PATIENCE = 20.0  # seconds in which another thread is to end its recorded step
META = torch.device("meta")  # of fake tensors
NONE = Gathered()
OPEN: weakref.WeakSet[RecordedStep] = weakref.WeakSet()  # those whose log has not ended


def in_log(name: str) -> AbstractContextManager[object]:
    """Within, the log of the step that is recorded, if there is one, is of the region `name`."""
    return region(name) if BUSY.locked() else nullcontext()


def stop_complete() -> None:
    """End the logs of steps of this thread whose backward has ended, or will never come."""
    for step in [one for one in OPEN if one.ended and one.thread == threading.get_ident()]:
        step.stop()


class _AtEnd:
    """Called when a backward ends, and released when the engine has put the thread-local state back: before that the
    profiler must not be ended, and after that it must not be on."""

    def __init__(self, step: RecordedStep) -> None:
        self._step = step

    def __call__(self) -> None:
        self._step._ended()

    def __del__(self) -> None:
        if self._step.complete and self._step.thread == threading.get_ident() and not within_backward():
            self._step.stop()


def within_backward() -> bool:
    """Whether this is called within a backward, where no profiler may begin or end."""
    return torch._C._current_graph_task_id() != -1


@dataclass(frozen=True)
class Reads:
    """Which operations of a step read parameters, which are given by id.

    at: their positions, and that at which the backward gives them gradients, if it is lower. staying: those that
    have to stay on the device: that its operations overwrite, that compiled graphs read, or that autocast casts
    once for several operations. It keeps casts of leaf tensors alone, and what stands for a parameter is none.
    larger: of parameters whose gradient is a part of a larger tensor, which it keeps alive, what tells that tensor
    from others, and its bytes. given: parameters that have got a gradient.
    """

    at: dict[int, frozenset[int]]
    staying: frozenset[int]
    larger: dict[int, tuple[int, int]]
    given: set[int]


class RecordedStep(Verified):
    """Records a step, from the model's forward to the end of its backward; `stop` ends it before the next one.

    Args:
        spill: where what is saved goes. patient: whether it waits for the end of one in another thread. before: what
            FSDP2 has gathered by now, with which the log begins.

    Attributes:
        segments: in the order of the forward. death: of each content that the model's code has let go of, the number of
            the first operation that began after. positions, seconds: of each operation. packed: by position, what
            autograd has saved and still has at the end of the forward. waits: seconds of the backward before each read.
            varies: whether the sizes of its tensors may depend on data.
        before_write: called with each storage that the forward is about to overwrite, if given.
        calls: of each module, those that have returned: the number of operations and the position at begin and end.
        arrived: called with each parameter whose gradient has come, if given.
        handed_out: what the caller gets. returned: what he has when the backward begins. log: what the allocator
            did. copies: bytes of each copy of what was overwritten.
    """

    varies = False
    complete = False  # whether the backward has ended
    thread = 0
    _queued = _announced = False
    _lowest = sys.maxsize  # of the positions that the backward has read

    def __init__(
        self, known: Known, model: nn.Module, spill: Spill | None = None, patient: bool = False, before: Gathered = NONE
    ) -> None:
        super().__init__(known)
        self._patient, self.gathered = patient, before
        self.before_write: Callable[[torch.UntypedStorage], None] | None = None
        self.arrived: Callable[[torch.Tensor], None] | None = None
        self.segments = [Segment("", 0)]
        self.calls: dict[str, list[tuple[int, int, int, int]]] = {}
        self._begun: dict[str, list[tuple[int, int]]] = {}
        self.death: dict[Content, int] = {}
        self.seconds: list[Any] = []  # until it is stopped, marks of the begin and the end of each
        self.positions: list[int] = []
        self.packed: dict[int, Content | None] = {}
        self.waits: list[Any] = []
        self.handed_out: set[Content] = set()
        self.returned: set[Content] = set()
        self.handed_at: dict[int, Content] = {}  # what the caller gets, by address
        self.log: list[Event] = []
        self.copies: list[int] = []
        self.elsewhere: set[Content] = set()  # what is made on another device than that of the step
        self.parameters = list(stored(model.parameters()))
        device = next((p.device for p in self.parameters if not p.is_meta), torch.device("cpu"))
        self._spill = Spill(device) if spill is None else spill
        self.device = self._spill.device
        # scripted modules take no hooks of a whole call, and a compiler would look into what it compiles
        within = {inner for module in model.modules() if compiled(module) for inner in parts_of(module)}
        self._names = {module: name for name, module in model.named_modules() if module not in within}
        self._compiled: list[tuple[nn.Module, Any]] = []
        self._units = list(sharded(model).values())
        self._shards = {id(p): p for unit in self._units for p in unit.parameters()}
        self._gradients: list[StorageWeakRef] = []  # of parameters, that the backward still has
        self._told: set[StorageWeakRef] = set()  # of those, the ones of which the log says so
        self._aliased: set[str] = set()  # addresses of those that the caller has, too
        self._larger: dict[int, tuple[int, int]] = {}
        self._given: dict[int, int] = {}  # by id of a parameter, the lowest position read before its gradient came
        self._hooks: list[Any] = []
        self._gradient_hooks: list[Any] = []
        self._slots: list[SlotReference] = []
        self.gone_at: dict[Content, int] = {}  # in the forward, by graphs that have gone: the operation that began then
        self._watches: list[Any] = []
        self._alive: list[Content] = []
        self._copied: list[tuple[StorageWeakRef, int]] = []
        self._borders: list[torch.UntypedStorage] = []  # what is alive when a segment begins, until it is verified
        self._holds: set[int] = set()  # storages that the recording holds
        # by segment and address, what the backward has read, and the position of its first saved tensor
        self.fetched: dict[int, dict[int, tuple[Content, int]]] = {}
        self._away: dict[Content, Back] = {}
        self._own = {local(p).untyped_storage()._cdata: id(p) for p in self.parameters}
        # numbers of operations, and ids of parameters that they, or views right before them, read
        self._reads: set[tuple[int, int]] = set()
        # positions at which autograd has saved parameters that nothing has read since the operation before
        self._kept_at: set[tuple[int, int]] = set()
        self._staying: set[int] = set()
        self._casts: dict[Content, int] = {}
        self._uses: Counter[Content] = Counter()  # of casts
        self._profile: Log | None = None
        self._clock: Any = None
        self._last: Any = 0.0
        self.on_backward = RecordedStep._reached

    # -- the forward

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the forward, and record it."""
        apart = gathering_apart(self._units, self, lambda: self.region(GATHERED))
        with apart, taking_saved(self):
            result = forward(*args, **kwargs)
        for t in tensor_leaves(result) if self.gathered.at_end else ():
            if t.requires_grad:
                t.register_hook(self._backward_begins)  # before FSDP's
        return result

    def __enter__(self) -> RecordedStep:
        if self._profile is None and not self.start():
            raise MeasureError("a step is recorded in another thread already; run its backward, and measure then")
        for module in self._names:
            if (call := module._compiled_call_impl) is None:
                self._hooks.append(module.register_forward_pre_hook(eagerly(self._called), prepend=True))
                self._hooks.append(module.register_forward_hook(eagerly(self._returned)))
            else:
                self._compiled.append((module, call))
                module._compiled_call_impl = partial(self._call, module, call)  # its hooks are compiled, too
        # while its parameters are there
        self._hooks += [module.register_forward_hook(eagerly(self._left), prepend=True) for module in self._units]
        others = self.gathered.parameters  # whose whole gradients are the step's, until FSDP2 reduces them
        trained = [p for p in self.parameters if p.requires_grad and p.is_leaf and id(p) not in others]
        this = weakref.ref(self)  # or the parameters would keep a step whose graph is dropped

        def accumulated(parameter: torch.Tensor) -> None:
            if (step := this()) is not None:
                step._accumulated(parameter)

        self._gradient_hooks += [p.register_post_accumulate_grad_hook(accumulated) for p in trained]
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()
        for module, call in self._compiled:
            module._compiled_call_impl = call
        self._hooks, self._compiled = [], []
        super().__exit__(*error)
        self._borders = []
        self._watch_graph()
        self.packed |= {s.at: s.reference.content for k in self.slots for s in self.live(k) if s.reference is not None}
        self.handed_out = {content for content in self._alive if content.alive()}
        for content in self.handed_out:
            if (storage := content.storage(seen=True)) is not None:
                self.handed_at[self.address(storage)] = content
        self.copies = [nbytes for copy, nbytes in self._copied if not copy.expired()]
        with self.region(LOSS):
            pass

    def _call(self, module: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._called(module, args)
        result = call(*args, **kwargs)
        self._returned(module, args, result)
        return result

    def _called(self, module: nn.Module, args: Any) -> None:
        self.enter(len(self.segments))
        self.segments.append(Segment(self._names[module], len(self.operations)))
        self._begun.setdefault(self._names[module], []).append((len(self.operations), self.position))

    def _returned(self, module: nn.Module, args: Any, result: Any) -> None:
        name = self._names[module]
        self.calls.setdefault(name, []).append((*self._begun[name].pop(), len(self.operations), self.position))

    def _left(self, module: nn.Module, args: Any, result: Any) -> None:
        self.enter(len(self.segments))
        self.segments.append(Segment(self._names[module].rpartition(".")[0], len(self.operations)))

    def leave(self) -> None:
        """Take what the segment that ends has saved off the device."""
        for content in self.saved_contents(self.stage):
            if (storage := content.storage(seen=True)) is not None and content not in self._away:
                self._away[content] = self._spill.put(storage)

    def enter(self, stage: int) -> None:
        with self.region(OWN), torch._C._DisableTorchDispatch():
            ended = self.operations[self.begins[self.stage] :]
            super().enter(stage)
            found = (content for op in ended for content in (*op.made, *op.written()) if content.held is not None)
            self._alive += [content for content in found if self.death.pop(content, None) is not None]
            self._borders = []  # or what has died would be alive still
            self._borders = [s for content in self._alive if (s := content.storage(seen=True)) is not None]
            self._holds = {storage._cdata for storage in self._borders}

    def _copy(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        copy = super()._copy(storage)
        self._copied.append((StorageWeakRef(copy), copy.nbytes()))
        return copy

    def content_of(self, t: torch.Tensor) -> Content:
        storage = t.untyped_storage()
        if storage._cdata in self._own and not storage.resizable():  # it lies on the host; nobody changes it unseen
            return self._contents.setdefault(storage._cdata, self._resident(storage, t))
        return super().content_of(t)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for t in tensors_of(args, kwargs or {}):  # views, too: they ask for the bytes
            if self.plain(t) and (key := self._own.get(t.untyped_storage()._cdata)) is not None:
                self._reads.add((len(self.operations), key))
                if func in OPERATORS:
                    self._staying.add(key)  # as the parameters of compiled modules
        return super().__torch_dispatch__(func, types, args, kwargs)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number, still = len(self.operations), []
        for content in self._alive:
            if self._in_use(content):
                still.append(content)
            else:
                self.death[content] = number
        self._alive = still
        self.varies |= not VARYING.isdisjoint(func.tags)
        with self.region(str(number)):
            began = self.moment()
            out = func(*args, **kwargs)
            self._last = began, self.moment()
        return out

    def _in_use(self, content: Content) -> bool:
        """Whether anything but the recording has the storage."""
        if content.held is not None or (storage := content.storage(seen=True)) is None:
            return content.alive()
        return storage._cdata not in self._holds or torch._C._storage_Use_Count(storage._cdata) > 1

    def _written(self, *of: Any) -> Any:  # type: ignore[override]
        written = super()._written(*of)
        found = (self._own.get(t.untyped_storage()._cdata) for _, t in written)
        self._staying |= {key for key in found if key is not None}
        if self.before_write is not None:
            with self.region(OWN), torch._C._DisableTorchDispatch():
                for _, t in written:
                    self.before_write(t.untyped_storage())
        return written

    def trust(self, op: Operation, new: Iterable[Content]) -> None:
        new = list(new)
        super().trust(op, new)
        for content in new:
            if (storage := content.storage(seen=True)) is not None and storage.device not in (self.device, META):
                self.elsewhere.add(content)
        for content in op.contents():
            if content in self._casts:
                self._uses[content] += 1
            key = None if content.held is None else self._own.get(content.held._cdata)
            if key is not None and op.operator is torch.ops.aten._to_copy.default:
                self._casts |= dict.fromkeys(new, key)
        self._alive += new
        self.seconds.append(self._last)
        self.positions.append(self.position)

    def pack(self, t: torch.Tensor) -> Any:
        position, packed = self.position, super().pack(t)
        if isinstance(packed, Slot):
            self._slots.append(weakref.ref(packed))
            if packed.reference is None:
                self.packed[position] = None
                key = self._own.get(t.untyped_storage()._cdata)
                if key is not None and (len(self.operations), key) not in self._reads:
                    self._kept_at.add((packed.at, key))
        return packed

    def saved(self, slot: Slot, storage: torch.UntypedStorage) -> None:
        super().saved(slot, storage)
        if self._new:
            self._holds.add(storage._cdata)
        assert slot.reference is not None
        self._watches.append(weakref.ref(slot, partial(self._dropped, slot.reference.content)))

    def _watch_graph(self) -> None:
        """End the log as soon as the graph is dropped without a backward: a profiler of the caller's may begin next."""
        this, slots = weakref.ref(self), [slot for one in self._slots if (slot := one()) is not None]
        left = len(slots)

        def dropped(_: object) -> None:
            nonlocal left
            left -= 1
            step = None if left else this()
            if step is not None and not within_backward() and step.thread == threading.get_ident():
                step.stop()

        self._watches = [weakref.ref(slot, dropped) for slot in slots]

    def _dropped(self, content: Content, _: object) -> None:
        """Autograd has let go of what it saved."""
        if self._recording:
            self.gone_at[content] = len(self.operations)

    # -- the backward

    def _backward_begins(self, gradient: torch.Tensor) -> None:
        """FSDP2's root, whose hook is called next, will have its callback called right after this one."""
        if not self._announced:
            self._announced = True
            Variable._execution_engine.queue_callback(self._resharded)

    def _resharded(self) -> None:
        with self.region(RESHARDED):
            pass

    def _reached(self: Tape, stage: int) -> None:
        """The backward has come to what a segment has saved: bring it back."""
        assert isinstance(self, RecordedStep)
        if self._recording:  # a backward within the forward is a part of this
            return
        if not self._queued:
            self._queued = True
            Variable._execution_engine.queue_callback(_AtEnd(self))
            self.returned = {content for content in self.handed_out if content.alive()}
        with torch._C.DisableTorchFunction():  # a mode of the caller's would be asked for each
            reduced = [key for key, p in self._shards.items() if p.grad is not None]
        self._accumulated(*map(self._shards.pop, reduced))  # FSDP calls no hook of theirs
        with self.region(OWN):
            self.fetch(stage)
            fetched = self.fetched.setdefault(stage, {})
            for slot in self.live(stage):
                if slot.own is not None and slot.reference is not None:
                    fetched.setdefault(self.address(slot.own), (slot.reference.content, slot.at))
        with self.region(f"{STAGE}{stage}"):
            pass

    def unpack(self, packed: Any) -> torch.Tensor:
        began = self.moment()
        tensor = super().unpack(packed)
        if isinstance(packed, Slot) and not self._recording:
            with self.region(f"{READ}{packed.at}"):
                self.waits.append((self._clock, began) if self.waits else 0.0)
            self._lowest = min(self._lowest, packed.at)
            self._clock = self.moment()
        return tensor

    def storage_of(self, content: Content) -> torch.UntypedStorage | None:
        back = self._away.get(content)
        return super().storage_of(content) if back is None else back()

    def _ended(self) -> None:
        self._hand_over()
        left = map(torch.UntypedStorage._new_with_weak_ptr, (one.cdata for one in self._gradients))
        self._aliased = {str(self.address(storage)) for storage in left if storage is not None}
        with self.region(END):
            self.waits.append((self._clock, self.moment()))
        self._away.clear()
        self.complete = True

    def trust_as(self, keys: Sequence[Key]) -> None:
        """Operations are known by these keys, too, from now on: those that they have in the stages of a plan."""
        self.known.sure.update(keys)
        for key, op in zip(keys, self.operations, strict=True):
            self.known.held |= {(key, c.out) for c in (*op.made, *op.written()) if self.was_held(c)}

    def stop(self) -> None:
        """End the log; not within a backward, whose thread-local state the profiler must not change."""
        for hook in self._gradient_hooks:
            hook.remove()
        self._gradient_hooks.clear()
        if self._profile is not None:
            log, self._profile = self._profile, None
            OPEN.discard(self)
            self._unstopped.detach()
            try:
                log.__exit__(None, None, None)
                self.log = self._gathered_before(log.events(self.device))
            finally:
                BUSY.release()
            finish(self.device)
        self.seconds, self.waits = list(map(_seconds, self.seconds)), list(map(_seconds, self.waits))

    # -- the log

    def start(self) -> bool:
        """Begin the log, unless a step of another thread has it; returns whether it has begun."""
        if self._patient:
            for step in [one for one in OPEN if one.thread == threading.get_ident()]:
                step.stop()  # its backward may never come
        take_workspaces(self.device)  # which are no step's
        if not BUSY.acquire(timeout=PATIENCE if self._patient else 0.001):
            return False
        try:
            check_allocator(self.device)
            log = self._profile = Log().__enter__()
        except BaseException:
            BUSY.release()
            raise
        self.thread = threading.get_ident()
        OPEN.add(self)
        self._unstopped = weakref.finalize(self, _discarded, log, self._gradient_hooks)
        return True

    def _gathered_before(self, log: list[Event]) -> list[Event]:
        """Return `log` as if it had begun before FSDP2 gathered. When a block from before is freed, none tells."""
        told, block = self.gathered, block_bytes(self.device)
        ends = ((LOSS,), told.resharded), ((GATHERED, LOSS), told.passing), ((RESHARDED,), told.at_end)
        for moments, blocks in ends:
            after = next((n for n, event in enumerate(log, 1) if event.ends in moments), len(log))
            log[after:after] = [Event(-rounded(nbytes, block), address) for address, nbytes in blocks]
        held = told.stays.union(*(blocks for _, blocks in ends))
        found = [Event(rounded(nbytes, block), address) for address, nbytes in held]
        return [Event(0, begins=GATHERED), *found, Event(0, ends=GATHERED), *log]

    def region(self, name: str) -> AbstractContextManager[object]:
        """A region of the log."""
        return region(name)

    def moment(self) -> Any:
        """Return a mark of the present moment."""
        return mark(self.device)

    def address(self, storage: torch.UntypedStorage) -> int:
        """Return what tells a storage from others in the log."""
        return storage.data_ptr()

    def _accumulated(self, *parameters: torch.Tensor) -> None:
        """Note that gradients are no longer the step's: a later one is added to each, and released."""
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None or gradient.layout is not torch.strided:  # another hook may have taken it
                continue
            self._given[id(parameter)] = self._lowest
            names = gradient.__tensor_flatten__()[0] if is_wrapper(gradient) else ()  # type: ignore[attr-defined]
            for part in [getattr(gradient, name) for name in names] or [gradient]:
                if isinstance(part, torch.Tensor) and not is_wrapper(part):
                    storage = part.untyped_storage()
                    self._gradients.append(StorageWeakRef(storage))
                    if storage.nbytes() > part.nbytes:
                        self._larger[id(parameter)] = self.address(storage), storage.nbytes()
        self._hand_over()
        if self.arrived is not None:
            with self.region(OWN), torch._C._DisableTorchDispatch(), torch.no_grad():
                for parameter in parameters:
                    self.arrived(parameter)

    def _hand_over(self) -> None:
        """Note which gradients only parameters have by now: what the backward still reads may be a view of one."""
        for reference in set(self._gradients):
            storage, many = torch.UntypedStorage._new_with_weak_ptr(reference.cdata), self._gradients.count(reference)
            # `many` views of one storage, as those of FSDP2, and what is had here
            alone = storage is not None and torch._C._storage_Use_Count(storage._cdata) <= many + 1
            if alone:
                self._gradients = [one for one in self._gradients if one != reference]
            if alone or (storage is not None and reference not in self._told):
                self._told.add(reference)
                with self.region(f"{GRADIENT if alone else ARRIVED} {self.address(storage)}"):
                    pass

    def given(self, event: Event) -> tuple[int, bool] | None:
        """The address of the gradient that an event of the log says to be its parameter's, and whether nothing else of
        the step has it; None if the event says nothing of the kind."""
        kind, _, address = event.begins.partition(" ")
        return (int(address), kind == GRADIENT or address in self._aliased) if kind in (GRADIENT, ARRIVED) else None

    @property
    def shown(self) -> bool:
        """Whether the step has run to its end, and its log is whole: another profiler may have ended it."""
        marks = {event.begins for event in self.log}
        return self.complete and bool(self.operations) and {LOSS, END} <= marks

    @property
    def most_bytes(self) -> int:
        """The most bytes that the step has held, but for gradients that parameters have by then."""
        live: dict[int, int] = {}
        level = most = 0
        for event in self.log:
            if event.size > 0:
                live[event.ptr] = event.size
                level += event.size
            elif event.size < 0:
                level -= live.pop(event.ptr, 0)
            elif (given := self.given(event)) is not None and given[1]:
                level -= live.pop(given[0], 0)
            most = max(most, level)
        return most

    @property
    def ended(self) -> bool:
        """Whether its backward has ended, or will never come: its graph is gone without one, or after one that
        failed."""
        within = self._recording or within_backward()
        return self.complete or (not within and all(slot() is None for slot in self._slots))

    @property
    def reading(self) -> Reads:
        """What the step has read, once it has ended."""
        at: dict[int, set[int]] = {}
        last = len(self.positions) - 1
        for position, key in (*((self.positions[min(n, last)], key) for n, key in self._reads), *self._kept_at):
            at.setdefault(key, set()).add(position)
        for key, lowest in self._given.items():  # a checkpoint reads parameters again where its backward begins
            if lowest < min(at.get(key, ()), default=0):
                at[key].add(lowest)
        staying = self._staying | {self._casts[content] for content, uses in self._uses.items() if uses > 1}
        whole = {key: frozenset(some) for key, some in at.items()}
        return Reads(whole, frozenset(staying), self._larger, set(self._given))

    def check(self, roots: Sequence[torch.Tensor]) -> None:
        """Raise MeasureError if there is nothing to plan. roots: from which a backward starts."""
        if not self.operations:
            raise MeasureError(
                "the forward computes nothing: no call of torch makes what it returns, so there is nothing to recompute"
                " or to move; train it without rotoff"
            )
        if not roots:
            raise MeasureError(
                "nothing in the model needs a gradient, so there is no backward to plan for; let some parameters be"
                " trained (model.requires_grad_()), or run the model without rotoff"
            )


def _discarded(log: Log, hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
    try:
        with suppress(RuntimeError):
            log.__exit__(None, None, None)
    finally:
        BUSY.release()


def _seconds(of: Any) -> float:
    return of if isinstance(of, float) else seconds_between(*of)
