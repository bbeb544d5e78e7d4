"""Bytes of values while a step runs: the tensors that stand for each, and how they leave the device and come back.

Bytes are storages: a value's tensors are views into storages, each storage moved once however many views it has.
Nothing here decides when; the interpreter does.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch

from ..core.sequence import Op, Value, a, abar
from ..tensors.storage import View, bytes_of, storage_key
from .links.base import Link, Ticket


class Slot:
    """A place for one tensor; whoever holds the slot holds the tensor.

    Autograd owns the slots of what it saves, so that memory goes as its graph goes; the interpreter owns those of
    outputs.
    """

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: torch.Tensor | None) -> None:
        self.tensor = tensor
        self.version = 0 if tensor is None else tensor._version

    def put(self, tensor: torch.Tensor | None) -> None:
        self.tensor = tensor
        self.version = 0 if tensor is None else tensor._version

    def modified(self) -> bool:
        """Whether someone changed the tensor in place after it was put here."""
        return self.tensor is not None and self.tensor._version != self.version


class Held:
    """One value of the machine (a_i or ā_i) on the device, on the host, or both.

    Args:
        name: which value, and the name of the stage that made it.
        outputs: the stage's outputs, detached; kept alive by this value. own: of each, whether its bytes are this
            value's;
        others were there before, are not counted and stay.
        saved: what autograd saved, for ā_i; kept alive by the graph.
    """

    def __init__(
        self,
        name: tuple[object, str],
        outputs: Sequence[torch.Tensor],
        own: Sequence[bool] = (),
        saved: Sequence[weakref.ref[Slot]] = (),
    ) -> None:
        self._name = name
        self.outputs = [Slot(t) for t in outputs]
        self._own = [slot for slot, mine in zip(self.outputs, own, strict=True) if mine] if own else self.outputs
        self.saved = list(saved)
        self.on_device = True
        self.usable = True  # on the device, and arrived
        self.tickets: list[tuple[Link, Ticket]] = []  # copies that may still run
        self.offloaded: Ticket = None
        self.offset = 0  # of the host copy in the slab
        self._sources: list[torch.Tensor] = []
        self._layout: list[tuple[weakref.ref[Slot], int, View]] = []  # slot, index of its storage, view
        self._sizes: list[int] = []
        self._kinds: list[torch.dtype | None] = []  # of each storage, where the link wants to know

    @property
    def name(self) -> str:
        """For messages; put together only there."""
        return f"{self._name[0]} ({self._name[1]})"

    def slots(self) -> list[Slot]:
        """The slots still alive of what this value holds itself, outputs first."""
        return self._own + [slot for ref in self.saved if (slot := ref()) is not None]

    def tensors(self) -> list[torch.Tensor]:
        """The outputs, as they lie on the device."""
        return [slot.tensor for slot in self.outputs if slot.tensor is not None]

    def refill(self, outputs: Sequence[torch.Tensor]) -> None:
        """Take the outputs of a stage that ran again, while the host copy stays valid."""
        for slot, tensor in zip(self.outputs, outputs, strict=True):
            slot.put(tensor)
        self.on_device = self.usable = True

    def offload(self, link: Link, offset: int, room: int) -> bool:
        """Start the copy of every storage to the host slab, from `offset` on; returns whether they fit into its `room`
        bytes there.

        Raises:
            RuntimeError: where one was changed in place.
        """
        self.check_unmodified()
        keys: dict[int, int] = {}
        storages: list[torch.UntypedStorage] = []
        kinds: list[torch.dtype | None] = []  # of each storage, None where it is seen as several
        layout: list[tuple[weakref.ref[Slot], int, View]] = []
        for slot in self.slots():
            if (tensor := slot.tensor) is None:
                continue
            storage = tensor.untyped_storage()
            index = keys.setdefault(storage._cdata, len(storages))
            if index == len(storages):
                storages.append(storage)
                kinds.append(tensor.dtype)
            elif kinds[index] is not tensor.dtype:
                kinds[index] = None
            layout.append((weakref.ref(slot), index, View.of(tensor)))
        # By the powers of two that their bytes are multiples of, so that on the host each begins at one of its own.
        order = sorted(range(len(storages)), key=lambda n: -(storages[n].nbytes() & -storages[n].nbytes()))
        if order != list(range(len(storages))):
            places = {n: place for place, n in enumerate(order)}
            storages, kinds = [storages[n] for n in order], [kinds[n] for n in order]
            layout = [(slot, places[n], view) for slot, n, view in layout]
        self._layout = layout
        sources = [bytes_of(storage) for storage in storages]
        self._sizes = [source.numel() for source in sources]
        if sum(self._sizes) > room:
            return False
        self._kinds = kinds if link.typed else []
        sources = self._as_kinds(sources)
        self._sources, self.offset = sources, offset
        self.offloaded = link.copy_out(sources, offset)
        self.tickets.append((link, self.offloaded))
        return True

    def release(self) -> None:
        """Give the device bytes back once no copy touches them; slots forget their tensors, also where a copy
        failed."""
        try:
            self.settle()
        finally:
            self.forget()

    def forget(self) -> None:
        """Let the device bytes go; copies that still run keep theirs until they have ended."""
        for slot in self.slots():
            slot.put(None)
        self._sources = []
        self.on_device = self.usable = False

    def storages(self) -> list[torch.UntypedStorage]:
        """Every storage on the device, once."""
        found = {storage_key(s.tensor): s.tensor.untyped_storage() for s in self.slots() if s.tensor is not None}
        return list(found.values())

    def prefetch(self, link: Link) -> None:
        """Take device bytes and start the copy back; slots get their tensors now, their contents by `settle`."""
        targets = [link.allocate(size) for size in self._sizes]
        for ref, index, view in self._layout:
            if (slot := ref()) is not None:
                slot.put(view.on(targets[index].untyped_storage()))
        self._sources, self.on_device, self.usable = targets, True, False
        self.tickets.append((link, link.copy_in(self._as_kinds(targets), self.offset, self.offloaded)))

    def _as_kinds(self, storages: list[torch.Tensor]) -> list[torch.Tensor]:
        """Storages as bytes, or as float32 where that is all they hold and the link wants to know."""
        if not self._kinds:
            return storages
        pairs = zip(storages, self._kinds, strict=True)
        return [data.view(kind) if kind is torch.float32 and data.numel() % 4 == 0 else data for data, kind in pairs]

    def settle(self) -> None:
        """Hold compute until no copy reads or writes this value."""
        while self.tickets:
            link, ticket = self.tickets.pop()
            link.wait(ticket)
        self._sources = []
        self.usable = self.on_device

    def check_unmodified(self) -> None:
        """Raise as autograd would where a tensor was changed in place, since its host copy would not show it."""
        if any(slot.modified() for slot in self.slots()):
            raise RuntimeError(
                f"one of the tensors of {self.name} has been modified by an inplace operation after it was saved for"
                " backward; clone it before changing it"
            )


class HeldValues(dict[Value, Held]):
    """Every value that a step holds. A link that records is told which bytes are read, written and given back.

    Args:
        link: to the host, None where nothing moves.
    """

    def __init__(self, link: Link | None) -> None:
        super().__init__()
        self._recorder = link if link is not None and link.recording else None
        self._consumed: list[torch.UntypedStorage] = []  # what autograd lets go of one by one, where that is recorded

    def input_of(self, i: int) -> Value:
        """The value that stage i takes: a_{i-1} where it can be used, else ā_{i-1}."""
        plain = self.get(a(i - 1))
        return a(i - 1) if plain is not None and plain.usable else abar(i - 1)

    def drop(self, v: Value) -> None:
        """Give v's device bytes back; it is gone where the host has no copy."""
        self.release(self[v])
        if self[v].offloaded is None:
            del self[v]

    def release(self, held: Held) -> None:
        """Give the device bytes of a value back that stands, or stood, in here."""
        if self._recorder is None:
            held.release()
            return
        leaving = held.storages()
        held.settle()
        others = [s for other in self.values() if other is not held for s in other.storages()]
        staying = {s._cdata for s in (*self._consumed, *others)}  # a skip connection's bytes stand in several values
        self._recorder.release(held.name, [s for s in leaving if s._cdata not in staying])
        held.release()

    def give_back(self) -> None:
        """Empty this; copies that failed are no errors any more."""
        self.pop(a(0), None)  # the caller's
        try:
            while self:
                with suppress(Exception):
                    self.release(self.popitem()[1])
        finally:
            for held in self.values():  # an interrupt came: what is let go unawaited is safe, only later
                held.forget()
            self.clear()

    def touch(self, op: Op, reads: Sequence[Value], writes: Sequence[Value]) -> None:
        """`op` reads and writes the bytes of these values."""
        if self._recorder is not None:
            storages = [[s for v in values for s in self[v].storages()] for values in (reads, writes)]
            self._recorder.access(str(op), *storages)

    def device_bytes(self) -> int:
        """What the values take on the device."""
        storages = {s._cdata: s.nbytes() for held in self.values() if held.on_device for s in held.storages()}
        return sum(storages.values())

    def consume(self, v: Value) -> None:
        """A backward begins that reads v and lets go of it piece by piece."""
        if self._recorder is not None:
            self._consumed = self[v].storages()

    def consumed(self, i: int) -> None:
        """The backward of stage i is over."""
        if self._recorder is not None and self._consumed:
            staying = {s._cdata for held in self.values() for s in held.storages()}
            self._recorder.release(f"B {i}", [s for s in self._consumed if s._cdata not in staying])
            self._consumed = []


def compact(gradient: torch.Tensor) -> torch.Tensor | None:
    """A hook: a copy of a gradient that is a part of a larger storage, so that the rest of that can go."""
    return (
        gradient.clone() if gradient.untyped_storage().nbytes() > gradient.numel() * gradient.element_size() else None
    )
