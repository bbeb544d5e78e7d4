"""What a tape speaks of: the contents of storages, references to them, and what autograd keeps of a saved tensor."""

from __future__ import annotations

import weakref

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..tensors.storage import View, bytes_of, memory_of
from ..tensors.storage import is_plain as is_plain
from ..tensors.storage import version_of as version_of

RESIDENT = -1  # `Content.op` of what no operation of the tape made
CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation, between the"
    " forward and the backward: a tensor of shape {} that the forward has read; change it after the backward, or clone"
    " it"
)
LOST = (
    "the backward needs what a forward read from memory that was overwritten unseen since (by NumPy, a foreign kernel"
    " or tensor.data); clone the tensor before it is overwritten"
)
SMALL = 1 << 16  # bytes of a resident up to which it is copied also if nothing has read it before it is overwritten
CHUNK = 1 << 16  # words that a checksum takes at a time on an accelerator


class Content:
    """One content of one storage: what an operation wrote there, until another one writes.

    op, out: the operation that makes it again, by its number on the tape, and which of its results it is; `RESIDENT`
    for what the tape did not see made. maker: that operation; for what an operation wrote over a resident, that one, if
    there is a copy of what it overwrote. stage: in which it was made. held: the storage, while the tape keeps it. read:
    whether an operation of the tape reads it. next: the content that took its place, if a write did. once: whether it
    must not be made again. lent: how many copies to the host read it. on_demand: whether it comes to the device when
    something asks for its storage.
    """

    on_demand = False
    __slots__ = (
        *("__weakref__", "_made_in", "_new", "_sum", "_version", "_weak", "_witness"),
        *("held", "lent", "maker", "nbytes", "next", "once", "op", "out", "read", "stage"),
    )

    def __init__(self, op: int, out: int, stage: int, storage: torch.UntypedStorage) -> None:
        self.op, self.out, self.stage, self.nbytes = op, out, stage, storage.nbytes()
        self.maker, self.lent, self._new = op, 0, False
        self.held: torch.UntypedStorage | None = None
        self.next: Content | None = None
        self.read = self.once = False
        self._made_in = StorageWeakRef(storage)  # so that no other storage gets its address, by which a tape knows it
        self._weak: StorageWeakRef | None = self._made_in
        self._witness: torch.Tensor | None = None  # shares the version counter of a tensor that shows this content
        self._version = 0
        self._sum: int | None = None  # of what others hold, too, when the forward ended

    def watch(self, witness: torch.Tensor) -> None:
        """Trust the storage as long as the version of `witness` stays as it is."""
        self._witness, self._version = witness, version_of(witness)

    def overwrites(self, maker: int) -> None:
        """An operation has just written this content of a resident, and can write it again."""
        self.maker, self._new = maker, True

    def settle(self) -> None:
        """Autograd counts a write after the operation has run, and before another one begins."""
        if self._new and self._witness is not None and version_of(self._witness) == self._version + 1:
            self._version += 1
        self._new = False

    def hold(self, storage: torch.UntypedStorage) -> None:
        """Keep this content, which is now in `storage`."""
        if self._weak is None or self._weak.cdata != storage._cdata:
            self._weak, self._witness, self._sum = StorageWeakRef(storage), None, None
        self.held = storage

    def keep_copy(self, copy: torch.UntypedStorage) -> None:
        """Keep a copy of what others may change unseen."""
        self.held, self._witness = copy, None

    def is_in(self, storage: torch.UntypedStorage) -> None:
        """Find this content in `storage` from now on, as long as something has it."""
        if self._weak is None or self._weak.cdata != storage._cdata:
            self._weak = StorageWeakRef(storage)

    def lose(self, copy: torch.UntypedStorage | None) -> None:
        """The storage gets another content. copy: of this one, if it is kept."""
        self.held, self._weak, self._witness = copy, None, None

    def storage(self, seen: bool) -> torch.UntypedStorage | None:
        """Return a storage with this content, or None. seen: whether the tape has seen all writes so far, as it does
        while the forward runs; later a content is trusted if it is held, or if its version tells that it is unchanged.

        Raises:
            RuntimeError: if it was changed and cannot be made again.
        """
        found = self.held
        if found is None and self._weak is not None and (seen or self._witness is not None):
            found = torch.UntypedStorage._new_with_weak_ptr(self._weak.cdata)
        if found is not None and found.nbytes() != self.nbytes:
            found = None  # its owner has emptied it, as FSDP does
        if found is not None and self.changed():
            if self.maker == RESIDENT:
                assert self._witness is not None
                raise RuntimeError(CHANGED.format(tuple(self._witness.shape)))
            return None
        if found is not None and self._sum is not None and not seen and checksum(found) != self._sum:
            return None
        return found

    def changed(self) -> bool:
        """Whether its storage was written since, outside of the tape."""
        return self._witness is not None and version_of(self._witness) != self._version

    def hold_for_good(self) -> None:
        """Keep this content, if it is there, because it must not be made again."""
        if (storage := self.storage(seen=True)) is not None:
            self.hold(storage)
            self.once = True

    def seal(self, of_residents: bool) -> None:
        """The forward has ended: take the checksum of what is held here and elsewhere, if an operation reads it and no
        version tells whether the caller changes it. The host waits for that; so what is made of residents alone, as
        autocast's copies of parameters, is rather made again."""
        self.settle()
        unwatched = self.op != RESIDENT and self.read and self._witness is None
        if unwatched and self.held is not None and torch._C._storage_Use_Count(self.held._cdata) > 1 + self.lent:
            if of_residents and not self.once:
                self.held = None
            else:
                self._sum = checksum(self.held)

    def alive(self) -> bool:
        """Whether something still has the storage."""
        return self.held is not None or (self._weak is not None and not self._weak.expired())


class Reference:
    """A tensor without its bytes: a content and a geometry. into: the content that the operation writes there."""

    __slots__ = ("content", "into", "view")

    def __init__(self, content: Content, t: torch.Tensor) -> None:
        self.content, self.view = content, View.of(t)
        self.into: Content | None = None


class Slot:
    """What autograd keeps of a saved tensor; it keeps the tape alive.

    tensor: the tensor itself, if it is a resident. reference: to the content otherwise. own: the storage, while a plan
    or a backward keeps it for this slot. at: its position.
    """

    __slots__ = ("__weakref__", "_version", "_witness", "at", "own", "reference", "stage", "tape", "tensor")

    def __init__(self, tape: object, stage: int, at: int, witness: torch.Tensor) -> None:
        self.tape, self.stage, self.at = tape, stage, at
        self.tensor: torch.Tensor | None = None
        self.reference: Reference | None = None
        self.own: torch.UntypedStorage | None = None
        self._witness, self._version = witness, version_of(witness)

    def check(self) -> None:
        """Raise what autograd raises if the saved tensor was changed in place: its own check is off under hooks."""
        if version_of(self._witness) != self._version:
            shape = self.reference.view.size if self.tensor is None else self.tensor.shape  # type: ignore[union-attr]
            raise RuntimeError(CHANGED.format(tuple(shape)))


SlotReference = weakref.ref[Slot]


_SHARES_VERSIONS = torch._C.DispatchKey.ADInplaceOrView


def detached(t: torch.Tensor) -> torch.Tensor:
    """Return `t` without its graph. Unlike ``t.detach()`` it shares the version counter below autograd, too."""
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(_SHARES_VERSIONS)
    torch._C._dispatch_tls_set_dispatch_key_excluded(_SHARES_VERSIONS, False)
    try:
        return t.detach()
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(_SHARES_VERSIONS, excluded)


_EMPTY: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def witness_of(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor that shares the version counter of `t`, and not its bytes."""
    witness = t.detach()
    key = t.dtype, t.device
    empty = _EMPTY.get(key)
    if empty is None:
        empty = _EMPTY[key] = torch.empty(0, dtype=t.dtype, device=t.device)
    witness.data = empty
    return witness


def same_bytes(one: torch.UntypedStorage, other: torch.UntypedStorage, end: int | None = None) -> bool:
    """Whether two storages have the same bytes, up to `end` if it is given."""
    many = (one.nbytes() if end is None else end) // 8 * 8
    parts = [(a[:many].view(torch.int64), a[many:end]) for a in map(bytes_of, (one, other))]
    return one.nbytes() == other.nbytes() and all(map(torch.equal, *parts))  # words are compared faster than bytes


def copy_of(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return a copy of a storage, on its device."""
    return bytes_of(storage).clone().untyped_storage()


_WEIGHTS: dict[torch.device, torch.Tensor] = {}


def checksum(storage: torch.UntypedStorage) -> int:
    """Return a number that another content, or the same words in another order, has with a chance of about 2^-64. On a
    CPU it takes no bytes."""
    if storage.device.type == "cpu":
        return hash(memory_of(storage).toreadonly())
    data = bytes_of(storage)
    weights = _WEIGHTS.get(data.device)
    if weights is None:
        generator = torch.Generator().manual_seed(1)
        drawn = torch.randint(-(2**63), 2**63 - 1, (CHUNK,), generator=generator, dtype=torch.int64)
        weights = _WEIGHTS[data.device] = (drawn | 1).to(data.device)
    whole = data.numel() // 8 * 8
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for words in data[:whole].view(torch.int64).split(CHUNK):
        total = total * 0x5851F42D4C957F2D + (words >> 29).bitwise_xor_(words).mul_(weights[: words.numel()]).sum()
    rest = data[whole:].to(torch.int64)
    return int(total * 31 + (rest * weights[: rest.numel()]).sum())


def checksum_room(nbytes: int, device: torch.device) -> int:
    """Return the bytes that a checksum of so many takes on the device."""
    return 0 if device.type == "cpu" else min(nbytes, 8 * CHUNK)
