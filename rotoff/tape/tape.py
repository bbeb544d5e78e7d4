"""The tape in plain Python: the reference that a person reads, the oracle of the tests, and what runs where the
compiled one is not there.

Note [The rules of the tape]
----------------------------

**What is noted.** While the forward runs, each operation that PyTorch dispatches below autograd is noted: the operator,
its arguments (a `Reference` for each tensor that is a geometry of a storage, all else as it is), the generator's state
if it draws, the settings that choose kernels. Views are not noted, since a reference has its geometry.

**Contents.** What an operation makes is a `Content` of a storage. One that writes makes a new content of the same
storage. What the tape did not see made (parameters, buffers, the batch, what lies in NumPy's memory, what a foreign
kernel made) is *resident*: it is never made again, and it is copied once if an operation overwrites it after another
one has read it. So is a content that is held when it is overwritten.

**Saved tensors.** Autograd's hooks put a `Slot` in the place of each saved tensor: a reference, and its bytes only if
`keep` asks for them. Whatever is read and is not there is made again. So what is kept decides bytes and time, and never
a result.

**Making again** runs the operations that lead from what is there to what is wanted, in the noted order, below autograd,
and releases each content after its last use. No Python of the model runs, and nothing is computed that is not needed.

**When the forward has ended**, the tape no longer sees writes. A content is then trusted if it is held, or if the
version counter of a saved tensor says that it is unchanged; otherwise it is made again. A resident that was written
since raises what PyTorch raises. What others than the tape hold, too, is trusted only if its checksum is the same.

**What a tape cannot see**, such as a write through NumPy, ctypes or a raw kernel, and kernels that are not
deterministic, is found by comparing once (`verified`): what is made again otherwise is held from then on.

**What is no plain tensor** (sparse, nested, quantized, mapped) stays as it is. A wrapper subclass such as DTensor takes
itself apart first, and the tape sees what it does inside. Results of collectives are held.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

from ..tensors.eager_mode import EagerMode
from ..tensors.storage import is_wrapper as is_wrapper
from . import regions
from .contents import (
    LOST,
    RESIDENT,
    SMALL,
    Content,
    Reference,
    Slot,
    SlotReference,
    copy_of,
    detached,
    is_plain,
    same_bytes,
    witness_of,
)
from .dispatch import Below, compiled
from .operators import (
    Kind,
    Settings,
    below_autograd,
    generator_of,
    kind_of,
    put_settings,
    replaced,
    results_of,
    settings,
    tensors_of,
)

FACTOR, MASK = 0x5851F42D4C957F2D, 2**64 - 1
Key = int  # of an operation: it, all those before it in its stage, and the sizes of what they read


class Known:
    """What the steps so far have shown of a model's operations.

    sure: keys of operations whose results are the same when they are made again. held: (key, result) of those that
    are not. overwritten: for the key at the end of a stage, (key, result) of the contents of earlier ones that the
    stage overwrites unseen. told: the names of operators that were told of.
    """

    def __init__(self) -> None:
        self.sure: set[Key] = set()
        self.held: set[tuple[Key, int]] = set()
        self.overwritten: dict[Key, set[tuple[Key, int]]] = {}
        self.told: set[str] = set()


def taken_apart(t: torch.Tensor, pack: Callable[[torch.Tensor], Any]) -> Any:
    """Return what autograd keeps of a tensor that is not plain: itself, or its parts, packed each."""
    if not is_wrapper(t):
        return t
    names, context = t.__tensor_flatten__()  # type: ignore[attr-defined]
    parts: dict[str, Any] = {name: getattr(t, name) for name in names}
    for name, part in parts.items():
        # the sizes of a nested tensor are symbols, known by the very tensor of its offsets
        if isinstance(part, torch.Tensor) and (name == "_values" or not t.is_nested):
            parts[name] = pack(part)
    return type(t), parts, context, t.size(), t.stride()


def put_together(packed: tuple[Any, ...], unpack: Callable[[Any], Any]) -> torch.Tensor:
    """Return the tensor that was taken apart."""
    cls, parts, *geometry = packed
    return cls.__tensor_unflatten__({name: unpack(part) for name, part in parts.items()}, *geometry)


class Operation:
    """One operation on the tape. references: to all its tensors, in order. made: the contents of new storages."""

    __slots__ = ("args", "generator", "kwargs", "made", "operator", "references", "settings", "stage", "state")

    operator: Any
    args: list[Any]
    kwargs: dict[str, Any]
    references: list[Reference]
    settings: Settings
    made: list[Content]
    stage: int
    generator: torch.Generator | None
    state: torch.Tensor | None

    def contents(self) -> set[Content]:
        """What it reads, or overwrites."""
        return {reference.content for reference in self.references}

    def continued(self, key: Key) -> Key:
        """Return the key of this operation after one of the key `key`."""
        key = key * FACTOR + kind_of(self.operator).name_sum
        for reference in self.references:
            for n in reference.view.size:
                key = key * 31 + n + 1
        return key & MASK

    def written(self) -> set[Content]:
        """The contents of storages from before that it makes."""
        return {r.into for r in self.references if r.into is not None and r.into.op != RESIDENT}


class Tape(EagerMode):
    """Records a forward as a context, and gives autograd back what it drops.

    Use it as ``with taking_saved(tape): model(x)``, in one thread.
    A backward may run in any.

    Attributes:
        position: how many operations and saved tensors there were. ahead: the position at which `on_ahead` is called,
            -1 for none.
        stage: the open stage of the forward; `enter` begins another. key: tells its operations so far, and the sizes of
            what they read, from others.
        keep: what `pack` keeps of what autograd saves: all, or the contents whose (operation, result), counted from the
            open stage's first operation, are in the set.
        paused: whether nothing is noted.
        operations: of the forward, so far. begins: the number of the first one of each stage.
        replayed: how many were run again.
    """

    supports_higher_order_operators = True
    # called with this tape and a stage when a backward reaches what the stage has saved
    on_backward: Callable[[Tape, int], None] | None = None
    on_ahead: Callable[[Tape], None] | None = None
    plain: Callable[[torch.Tensor], bool] = staticmethod(is_plain)  # whether it notes a tensor
    is_mode = compiled is None

    def __init__(self, known: Known | None = None) -> None:
        super().__init__()
        self.known = known
        self.regions: set[regions.Region] = set()
        self.key: Key = 0
        self.position, self.ahead = 0, -1
        self.paused = False
        self.reached = 0  # the stage whose saved tensors the backward reads
        self.operations: list[Operation] = []
        self.slots: dict[int, list[SlotReference]] = {}
        self.stage = 0
        self.begins: dict[int, int] = {0: 0}
        self.keep: bool | frozenset[tuple[int, int]] = False
        self.replayed = 0
        self._contents: dict[int, Content] = {}  # by storage, the present one
        self._recording = False
        self._unsure = False  # whether there was an operation that is not known
        self._settings: Settings = []
        self._lock = threading.RLock()

    @property
    def noted(self) -> int:
        """How many operations are on the tape."""
        return len(self.operations)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What a compiled part makes is resident, so the part may run as it is."""
        return True

    def __enter__(self) -> Tape:
        self._recording = True
        self._seen = regions.seen(self.regions)
        self._seen.__enter__()
        if self.is_mode:
            super().__enter__()
        else:
            self._below = Below(self)
            self._below.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self.is_mode:
            super().__exit__(*error)
        else:
            self._below.__exit__(*error)
            del self._below  # it has this tape
        self._seen.__exit__(None, None, None)
        self.enter(0)
        for content in self._contents.values():
            read = self.operations[content.op].contents() if content.op != RESIDENT else ()
            content.seal(all(one.op == RESIDENT for one in read))
        self._contents, self._recording = {}, False

    def enter(self, stage: int) -> None:
        """Begin a stage of the forward. Stage 0 is what comes before the first."""
        for op in self.operations[self.begins[self.stage] :] if self._unsure else ():
            for content in (*op.made, *op.written()):
                content.hold_for_good()
        self.stage, self.key = stage, stage
        self.begins[stage] = len(self.operations)

    def let_go(self, stage: int) -> None:
        """Hold nothing that the stage before the open one has made."""
        for op in self.operations[self.begins[stage] : self.begins[self.stage]]:
            for content in (*op.made, *op.written()):
                content.held = None

    # -- the forward

    def content_of(self, t: torch.Tensor) -> Content:
        """Return the content that a tensor shows; a resident if the tape does not know it."""
        storage = t.untyped_storage()
        key = storage._cdata
        content = self._contents.get(key)
        if content is not None:
            content.settle()
        if content is None or (content.op == RESIDENT and content.held is not None and content.changed()):
            content = self._contents[key] = self._resident(storage, t)
        if content.op == RESIDENT and not storage.resizable():  # NumPy's memory: it may change unseen
            last = content.held
            assert last is not None
            if last is storage or not same_bytes(last, storage):
                content = self._contents[key] = self._resident(storage, t)
                content.keep_copy(self._copy(storage))
        return content

    def _resident(self, storage: torch.UntypedStorage, t: torch.Tensor) -> Content:
        content = Content(RESIDENT, 0, 0, storage)
        content.held = storage
        content.watch(t if t.is_leaf else detached(t))
        return content

    def _copy(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        return copy_of(storage)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(is_traceable_wrapper_subclass_type(t) for t in types):
            return NotImplemented
        if func is regions.HIGHER_ORDER and not self.paused:
            return regions.called(*args, call=self.__torch_dispatch__, **kwargs)
        # the results of any other higher-order operator are residents
        if self.paused or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        kind = kind_of(func)
        if kind.view and all(map(self.plain, tensors_of(args, kwargs))):
            return func(*args, **kwargs)
        if self.position == self.ahead:
            self._come_to()
        op = self._operation(func, kind, args, kwargs)
        written = self._written(kind, op, args, kwargs)
        before = [t.untyped_storage() for _, t in written]
        for (reference, _), storage in zip(written, before, strict=True):
            content = reference.content
            kept = content.held is not None and content.held._cdata == storage._cdata
            if kept and (content.op != RESIDENT or content.read or kind.makes or content.nbytes <= SMALL):
                content.lose(self._copy(storage))
        out = self.call(func, args, kwargs)
        new = self._new_contents(kind, op, written, before, out)
        if kind.kept:
            for content in new:
                content.hold_for_good()
        if any(content.maker != RESIDENT for content in new):
            self._note(op, new)
        return out

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that the tape may note."""
        return func(*args, **kwargs)

    def _operation(self, func: Any, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Operation:
        """Return the operation, as it is before it runs."""
        references: list[Reference] = []

        def reference(t: torch.Tensor) -> torch.Tensor | Reference:
            if not self.plain(t):
                return t
            references.append(Reference(self.content_of(t), t))
            return references[-1]

        op = Operation()
        op.operator, op.references, op.made, op.stage = func, references, [], self.stage
        op.args = [replaced(x, torch.Tensor, reference) for x in args]
        op.kwargs = {name: replaced(x, torch.Tensor, reference) for name, x in kwargs.items()} if kwargs else kwargs
        op.generator = generator_of(args, kwargs) if kind.random else None
        op.state = None if op.generator is None else op.generator.get_state()
        return op

    @staticmethod
    def _written(
        kind: Kind, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[Reference, torch.Tensor]]:
        """Return the tensors that the operation changes."""
        found = []
        for n, name in kind.writes:
            reference, t = (op.args[n], args[n]) if n < len(args) else (op.kwargs.get(name), kwargs.get(name))
            pairs = (
                zip(reference, t, strict=True) if isinstance(reference, list) and t is not None else [(reference, t)]
            )
            found += [(r, x) for r, x in pairs if isinstance(r, Reference) and x is not None]
        return found

    def _new_contents(
        self,
        kind: Kind,
        op: Operation,
        written: list[tuple[Reference, torch.Tensor]],
        before: list[torch.UntypedStorage],
        out: Any,
    ) -> list[Content]:
        """Return the contents that an operation has just made."""
        number, new = len(self.operations), dict[int, Content]()
        for (reference, t), storage in zip(written, before, strict=True):
            key, old = storage._cdata, reference.content
            if t.untyped_storage()._cdata != key:
                continue  # set_: what the tensor shows now is not of this tape
            if key not in new:
                if old.op == RESIDENT:
                    content = self._resident(storage, t)
                    if old.held is not None and old.held._cdata != key:
                        content.overwrites(number)
                else:
                    content = Content(number, -1 - len(new), self.stage, storage)
                if old.held is None or old.held._cdata == key:
                    old.lose(None)
                old.next = content
                new[key] = self._contents[key] = content
            reference.into = new[key]
        if kind.view:
            return list(new.values())
        known = {reference.content for reference in op.references}
        for n, t in enumerate(results_of(out)):
            if not isinstance(t, torch.Tensor) or not self.plain(t):
                continue
            storage = t.untyped_storage()
            key = storage._cdata
            if key in new or self._contents.get(key) in known:
                continue
            new[key] = self._contents[key] = content = Content(number, n, self.stage, storage)
            op.made.append(content)
        return list(new.values())

    def _note(self, op: Operation, new: Iterable[Content]) -> None:
        for reference in op.references:
            reference.content.read = True
        if (now := settings()) != self._settings:
            self._settings = now
        op.settings = self._settings
        self.operations.append(op)
        self.key = op.continued(self.key)
        if self.known is not None:
            self.trust(op, [content for content in new if content.op != RESIDENT])
        self.position += 1

    def _come_to(self) -> None:
        self.ahead = -1
        assert self.on_ahead is not None
        with torch._C._DisableTorchDispatch():
            self.on_ahead(self)

    def trust(self, op: Operation, new: Iterable[Content]) -> None:
        """Hold what is known to be another when it is made again. From an operation that is not known on, the tape
        keeps what autograd saves, and what is left when a stage ends: stages cannot tell what an earlier one has
        made, which nobody may make again."""
        assert self.known is not None
        self._unsure |= self.key not in self.known.sure
        for content in new:
            if (self.key, content.out) in self.known.held:
                content.hold_for_good()

    # -- saved tensors

    def pack(self, t: torch.Tensor) -> Any:
        """Autograd's hook: return what it keeps in place of `t`."""
        if not self.plain(t):
            return taken_apart(t, self.pack)
        if self.position == self.ahead:
            self._come_to()
        at = self.position
        self.position += 1
        with torch._C._DisableTorchDispatch():
            storage = t.untyped_storage()
            content = self._contents.get(storage._cdata)
            if content is None or content.op == RESIDENT:
                slot = Slot(self, self.stage, at, t)
                slot.tensor = t
                return slot
            witness = witness_of(t)
            slot = Slot(self, self.stage, at, witness)
            slot.reference = Reference(content, t)
            content.watch(witness)
            self.slots.setdefault(self.stage, []).append(SlotReference(slot))
            n = content.op - self.begins[self.stage]
            if self._unsure or (self.keep and (self.keep is True or (n, content.out) in self.keep)):
                slot.own = storage
            self.saved(slot, storage)
        return slot

    def saved(self, slot: Slot, storage: torch.UntypedStorage) -> None:
        """Called with each slot of a content that the tape can make again, and its storage."""

    def unpack(self, packed: Any) -> torch.Tensor:
        """Autograd's hook: return the tensor that it saved."""
        if isinstance(packed, tuple):
            return put_together(packed, self.unpack)
        if not isinstance(packed, Slot):
            return packed
        packed.check()
        if packed.stage != self.reached:
            self.reached = packed.stage
            if self.on_backward is not None:
                with self._lock, torch._C._DisableTorchDispatch():
                    self.on_backward(self, packed.stage)
        if packed.reference is None:
            assert packed.tensor is not None
            return packed.tensor
        with self._lock, torch._C._DisableTorchDispatch():
            if packed.own is None:
                self.fetch(packed.stage)
            assert packed.own is not None
            return packed.reference.view.on(packed.own)

    def fetch(self, stage: int) -> None:
        """Give its content to each slot of a stage that autograd still has."""
        slots = [slot for slot in self.live(stage) if slot.own is None]
        self.fill(stage, self.make([slot.reference.content for slot in slots if slot.reference is not None]))

    def fill(self, stage: int, storages: Mapping[Content, torch.UntypedStorage]) -> None:
        """Keep these contents for the slots of a stage that refer to them."""
        for slot in self.live(stage):
            assert slot.reference is not None
            content = slot.reference.content
            if (storage := storages.get(content)) is not None:
                slot.own = storage
                content.is_in(storage)

    def owned(self, stage: int) -> dict[Content, torch.UntypedStorage]:
        """Return what is kept for the slots of a stage."""
        return {s.reference.content: s.own for s in self.live(stage) if s.own is not None and s.reference is not None}

    def empty(self, stage: int) -> None:
        """Keep nothing for the slots of a stage."""
        for slot in self.live(stage):
            slot.own = None

    def saved_contents(self, stage: int) -> list[Content]:
        """Return the contents to which the slots of a stage refer that autograd still has, each once."""
        return list({slot.reference.content: None for slot in self.live(stage) if slot.reference is not None})

    def content(self, stage: int, n: int, out: int) -> Content | None:
        """Return what the `n`-th operation of a stage made, its result `out`; None if there is no such."""
        number = self.begins.get(stage, 0) + n
        if stage not in self.begins or number >= len(self.operations):
            return None
        op = self.operations[number]
        return next((c for c in (*op.made, *op.written()) if c.out == out), None)

    def live(self, stage: int) -> list[Slot]:
        """Return the slots of a stage that autograd still has."""
        slots = [slot for one in self.slots.get(stage, ()) if (slot := one()) is not None]
        for slot in slots:
            assert slot.reference is not None
            # PyTorch saves memory and not contents: a write that changes no version counts
            while (later := slot.reference.content.next) is not None:
                slot.reference.content = later
        return slots

    # -- making again

    def make(self, contents: Iterable[Content]) -> dict[Content, torch.UntypedStorage]:
        """Return the storages of `contents`; those that are gone are made again."""
        wanted = set(contents)
        have, numbers = self._there(wanted)
        if numbers:
            with below_autograd():
                for _ in self._run_all(sorted(numbers), have, wanted):
                    pass
        return have

    def _run_all(
        self, order: list[int], have: dict[Content, torch.UntypedStorage], wanted: set[Content]
    ) -> Iterator[Operation]:
        """Run operations again from what `have` has; yields each, before what it has used up is released."""
        there, last = set(have), {}
        for number in order:
            for reference in self.operations[number].references:
                last[reference.content] = number
        for number in order:
            op = self.operations[number]
            others = {c for c in op.contents() if c in there or c not in have}
            self._run(number, have, others | {c for c in op.contents() if c in wanted or last[c] > number})
            yield op
            overwritten = (r.into for r in op.references if r.into is not None)
            for content in (*op.contents(), *op.made, *overwritten):
                if last.get(content, number) <= number and content not in wanted:
                    have.pop(content, None)
        self.replayed += len(order)

    def _there(
        self, wanted: set[Content], anew: Container[Content] = ()
    ) -> tuple[dict[Content, torch.UntypedStorage], set[int]]:
        """Return what is there of what `wanted` needs, and the numbers of the operations that make the rest. anew: what
        does not count as there."""
        have: dict[Content, torch.UntypedStorage] = {}
        numbers: set[int] = set()
        todo, seen = list(wanted), set(wanted)
        while todo:
            content = todo.pop()
            if content.on_demand and content not in wanted:
                continue  # the operation that reads it asks for it
            storage = None if content in anew else self.storage_of(content)
            if storage is not None:
                have[content] = storage
            elif content.maker == RESIDENT:
                raise RuntimeError(LOST)
            elif content.maker not in numbers:
                numbers.add(content.maker)
                new = {reference.content for reference in self.operations[content.maker].references} - seen
                seen |= new
                todo += new
        return have, numbers

    def storage_of(self, content: Content) -> torch.UntypedStorage | None:
        """Return the storage of a content that need not be made again; None if there is none."""
        return content.storage(self._recording)

    def _run(self, number: int, have: dict[Content, torch.UntypedStorage], needed: set[Content]) -> None:
        """Run an operation again on what `have` has, and put there what it makes. needed: of what it reads, what must
        not be overwritten."""
        op = self.operations[number]
        overwritten = {reference.content for reference in op.references if reference.into is not None}
        read = {}
        for content in op.contents():
            storage = have[content] if content in have else self.storage_of(content)
            assert storage is not None
            read[content] = copy_of(storage) if content in overwritten & needed else storage

        def tensor(reference: Reference) -> torch.Tensor:
            return reference.view.on(read[reference.content])

        args = [replaced(x, Reference, tensor) for x in op.args]
        kwargs = {name: replaced(x, Reference, tensor) for name, x in op.kwargs.items()} if op.kwargs else op.kwargs
        put_settings(op.settings)
        if op.generator is None:
            out = op.operator(*args, **kwargs)
        else:
            assert op.state is not None
            now = op.generator.get_state()
            op.generator.set_state(op.state)
            try:
                out = op.operator(*args, **kwargs)
            finally:
                op.generator.set_state(now)
        results = list(results_of(out)) if op.made else []
        for content in op.made:
            have.setdefault(content, results[content.out].untyped_storage())
        for reference in op.references:
            if reference.into is not None and reference.into.maker != RESIDENT:
                have.setdefault(reference.into, read[reference.content])
