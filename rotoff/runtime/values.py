"""Values of a running step: the tensors that make up each, and how their bytes leave the device and come back.

A value's tensors are views into storages; each storage is moved once, however many views it has. The interpreter
decides when.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import torch

from ..core.sequence import Op, Value, a, abar
from ..errors import ExecutionError
from ..tensors.storage import View, bytes_of, storage_key
from .links.base import Link, Ticket


class Slot:
    """A mutable reference to one tensor.

    Autograd owns the slots of saved tensors, so that their memory is freed with the graph; the interpreter owns the
    slots of outputs. stale: whether the forward has changed the tensor in place since; the slot keeps its old content.
    """

    __slots__ = ("__weakref__", "stale", "tensor", "version")

    def __init__(self, tensor: torch.Tensor | None) -> None:
        self.stale = False
        self.tensor = tensor
        self.version = 0 if tensor is None else tensor._version

    def put(self, tensor: torch.Tensor | None) -> None:
        self.tensor = tensor
        self.version = 0 if tensor is None else tensor._version

    def modified(self) -> bool:
        """Whether the tensor was changed in place after it was put here."""
        return self.tensor is not None and self.tensor._version != self.version


def as_made(slots: Iterable[Slot], stage: str) -> list[torch.Tensor]:
    """Return the tensors in `slots`, which a replay of `stage` reads or returns.

    Raises:
        ExecutionError: if one was changed in place since.
    """
    found = []
    for slot in slots:
        if slot.tensor is None:
            continue
        found.append(slot.tensor)
        if slot.modified():
            raise ExecutionError(
                f"a tensor of shape {tuple(slot.tensor.shape)} that the forward left somewhere was changed in place"
                f" between the forward and the backward, and stage {stage!r} recomputes from it; change it after the"
                " last backward, or change a clone"
            )
    return found


class Held:
    """One value of the machine (a_i or ā_i) on the device, on the host, or both.

    Args:
        name: the value, and the name of the stage that made it.
        outputs: the stage's outputs, detached; this value keeps them alive.
        own: for each output, whether this value owns its bytes; others existed before, are not counted and stay.
        saved: slots of what autograd saved, for ā_i; the graph keeps them alive.
    """

    offloaded: Ticket = None
    offset = 0  # of the copy in the host slab
    _layout: Sequence[tuple[weakref.ref[Slot], int, View]] = ()  # slot, index of its storage, view
    _sizes: Sequence[int] = ()
    _kinds: Sequence[torch.dtype | None] = ()  # of each storage, if the link is typed

    def __init__(
        self,
        name: tuple[object, str],
        outputs: Sequence[torch.Tensor],
        own: Sequence[bool] = (),
        saved: Sequence[weakref.ref[Slot]] = (),
    ) -> None:
        self._name = name
        self.outputs = [Slot(t) for t in outputs]
        self._own = self.outputs if all(own) else [self.outputs[n] for n, mine in enumerate(own) if mine]
        self.saved = list(saved)
        self.on_device = True
        self.usable = True  # on the device, and no copy to it is running
        self.tickets: list[tuple[Link, Ticket]] = []  # copies that may still run

    @property
    def name(self) -> str:
        """For messages; built on demand."""
        return f"{self._name[0]} ({self._name[1]})"

    def slots(self) -> list[Slot]:
        """Return the slots of this value's own tensors that are still alive, outputs first."""
        return self._own + [slot for ref in self.saved if (slot := ref()) is not None]

    def tensors(self) -> list[torch.Tensor]:
        """Return the outputs on the device."""
        return [slot.tensor for slot in self.outputs if slot.tensor is not None]

    def refill(self, outputs: Sequence[torch.Tensor]) -> None:
        """Store the outputs of a stage that ran again; the host copy stays valid."""
        for slot, tensor in zip(self.outputs, outputs, strict=True):
            slot.put(tensor)
        self.on_device = self.usable = True

    def offload(self, link: Link, where: Callable[[int], int | None]) -> bool:
        """Start to copy every storage to the host slab; returns False, and copies nothing, if there is no place.

        Args:
            where: returns the first byte of the place for so many bytes, or None.

        Raises:
            RuntimeError: if a tensor was changed in place.
        """
        self.check_unmodified()
        keys: dict[int, int] = {}
        storages: list[torch.UntypedStorage] = []
        kinds: list[torch.dtype | None] = []  # of each storage; None if its views have several
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
        # sorted by the largest power of two that divides their size, so that on the host each is aligned to its own
        order = sorted(range(len(storages)), key=lambda n: -(storages[n].nbytes() & -storages[n].nbytes()))
        if order != list(range(len(storages))):
            places = {n: place for place, n in enumerate(order)}
            storages, kinds = [storages[n] for n in order], [kinds[n] for n in order]
            layout = [(slot, places[n], view) for slot, n, view in layout]
        self._layout = layout
        sources = [bytes_of(storage) for storage in storages]
        self._sizes = [source.numel() for source in sources]
        if (offset := where(sum(self._sizes))) is None:
            return False
        self._kinds = kinds if link.typed else []
        self.offset = offset
        self.offloaded = link.copy_out(self._as_kinds(sources), offset)
        self.tickets.append((link, self.offloaded))
        return True

    def release(self) -> None:
        """Free the device bytes once no copy uses them; slots release their tensors even if a copy failed."""
        try:
            self.settle()
        finally:
            self.forget()

    def forget(self) -> None:
        """Free the device bytes; copies that still run keep theirs until they end."""
        for slot in self.slots():
            slot.put(None)
        self.on_device = self.usable = False

    def storages(self) -> list[torch.UntypedStorage]:
        """Return every storage on the device, once."""
        found = {storage_key(s.tensor): s.tensor.untyped_storage() for s in self.slots() if s.tensor is not None}
        return list(found.values())

    def prefetch(self, link: Link) -> None:
        """Allocate device bytes and start the copy back; slots get their tensors now, with the content after
        `settle`."""
        targets = [link.allocate(size) for size in self._sizes]
        for ref, index, view in self._layout:
            if (slot := ref()) is not None:
                slot.put(view.on(targets[index].untyped_storage()))
        self.on_device, self.usable = True, False
        self.tickets.append((link, link.copy_in(self._as_kinds(targets), self.offset, self.offloaded)))

    def _as_kinds(self, storages: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return storages as bytes; if the link is typed, as float32 those that hold nothing else."""
        if not self._kinds:
            return storages
        pairs = zip(storages, self._kinds, strict=True)
        return [data.view(kind) if kind is torch.float32 and data.numel() % 4 == 0 else data for data, kind in pairs]

    def settle(self) -> None:
        """Make compute wait until no copy reads or writes this value."""
        while self.tickets:
            link, ticket = self.tickets.pop()
            link.wait(ticket)
        self.usable = self.on_device

    def check_unmodified(self) -> None:
        """Raise autograd's error if a tensor was changed in place; its host copy would not show the change."""
        if any(slot.modified() for slot in self.slots()):
            raise RuntimeError(
                f"one of the tensors of {self.name} has been modified by an inplace operation after it was saved for"
                " backward; clone it before changing it"
            )


class HeldValues(dict[Value, Held]):
    """Every value that a step holds. Reports to a recording link which bytes are read, written and released.

    Args:
        link: to the host; None if the plan moves nothing.
    """

    def __init__(self, link: Link | None) -> None:
        super().__init__()
        self._recorder = link if link is not None and link.recording else None
        self._consumed: list[torch.UntypedStorage] = []  # if recorded: storages that the running backward releases

    def input_of(self, i: int) -> Value:
        """Return the value that is stage i's input: a_{i-1} if it is usable, else ā_{i-1}."""
        plain = self.get(a(i - 1))
        return a(i - 1) if plain is not None and plain.usable else abar(i - 1)

    def drop(self, v: Value) -> None:
        """Free v's device bytes, and forget v if the host has no copy."""
        self.release(self[v])
        if self[v].offloaded is None:
            del self[v]

    def release(self, held: Held) -> None:
        """Free the device bytes of a value that is, or was, in this dict."""
        if self._recorder is None:
            held.release()
            return
        leaving = held.storages()
        held.settle()
        others = [s for other in self.values() if other is not held for s in other.storages()]
        staying = {s._cdata for s in (*self._consumed, *others)}  # a skip connection's bytes are in several values
        self._recorder.release(held.name, [s for s in leaving if s._cdata not in staying])
        held.release()

    def give_back(self) -> None:
        """Release all values; failed copies raise no errors here."""
        self.pop(a(0), None)  # belongs to the caller
        try:
            while self:
                with suppress(Exception):
                    self.release(self.popitem()[1])
        finally:
            for held in self.values():  # after an interrupt: running copies still free their bytes, only later
                held.forget()
            self.clear()

    def touch(self, op: Op, reads: Sequence[Value], writes: Sequence[Value]) -> None:
        """Report that `op` reads and writes the bytes of these values."""
        if self._recorder is not None:
            storages = [[s for v in values for s in self[v].storages()] for values in (reads, writes)]
            self._recorder.access(str(op), *storages)

    def device_bytes(self, others: Iterable[torch.Tensor]) -> int:
        """Return the bytes that the values take on the device, without those of `others`."""
        storages = {s._cdata: s for held in self.values() if held.on_device for s in held.storages()}
        for tensor in others:
            storages.pop(storage_key(tensor), None)
        return sum(storage.nbytes() for storage in storages.values())

    def consume(self, v: Value) -> None:
        """Note that a backward begins, which reads v and releases it tensor by tensor."""
        if self._recorder is not None:
            self._consumed = self[v].storages()

    def consumed(self, i: int) -> None:
        """Report what the backward of stage i, now over, has released."""
        if self._recorder is not None and self._consumed:
            staying = {s._cdata for held in self.values() for s in held.storages()}
            self._recorder.release(f"B {i}", [s for s in self._consumed if s._cdata not in staying])
            self._consumed = []


def compact(gradient: torch.Tensor) -> torch.Tensor | None:
    """Tensor hook: copy a gradient that is a part of a larger storage, so that the rest can be freed."""
    return gradient.clone() if gradient.untyped_storage().nbytes() > gradient.nbytes else None
