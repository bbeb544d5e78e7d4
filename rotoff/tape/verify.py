"""Verified before it is trusted: what a stage of a new course makes is made again once and compared.

Where it differs (a kernel that writes unseen, one that is not deterministic, chance that is not PyTorch's), the content
is held from then on: it costs bytes and is never wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..tensors.storage import View, bytes_of
from ..tensors.undo import others_undone
from .contents import RESIDENT, Content, Slot, checksum, same_bytes
from .operators import below_autograd, results_of
from .tape import Key, Known, Operation, Tape

logger = logging.getLogger("rotoff")
_aten = torch.ops.aten
UNINITIALIZED = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.empty_permuted, _aten.new_empty}
FILL = 0xA5  # no content that a kernel is likely to write


class Verified(Tape):
    """A tape that verifies each stage that it does not know, when the stage has ended.

    overwrites: whether something that PyTorch does not see has written into what an earlier stage has made.
    """

    known: Known
    overwrites = False

    def __init__(self, known: Known) -> None:
        super().__init__(known)
        self._keys: dict[Content, tuple[Key, int]] = {}
        self._ends: dict[Content, int] = {}  # bytes that its tensor shows: a loss has a storage of its input's size
        self._new: list[Key] = []  # of this stage, those not yet sure
        self._kept: list[torch.UntypedStorage] = []  # what autograd saves in this stage, until it is verified
        self._right: list[Content] = []  # what was made again as it is
        self._earlier: dict[Content, int] = {}  # checksums of what earlier stages have made, while it lives

    def enter(self, stage: int) -> None:
        with torch._C._DisableTorchDispatch():
            if self.key in self.known.overwritten:
                self._replace(self.known.overwritten[self.key])
            if self._new:
                with others_undone(), below_autograd():  # an operator of the caller's may draw from them, too
                    self._verify()
            self.leave()
            super().enter(stage)
            self._new, self._kept = [], []
            self._earlier = {content: total for content, total in self._earlier.items() if content.alive()}
            with below_autograd():
                for content in self._right:
                    if (storage := content.storage(seen=True)) is not None:
                        self._earlier[content] = checksum(storage)
            self._right = []

    def leave(self) -> None:
        """Called when the open stage has ended and is verified."""

    def trust(self, op: Operation, new: Iterable[Content]) -> None:
        if self.key not in self.known.sure:
            self._new.append(self.key)
            _fill(op, {content: content.storage(seen=True) for content in op.made})
        for content in new:
            self._keys[content] = self.key, content.out
            if (self.key, content.out) in self.known.held:
                content.hold_for_good()

    def _new_contents(self, *of: Any) -> list[Content]:
        new = super()._new_contents(*of)
        for t in results_of(of[-1]):
            if isinstance(t, torch.Tensor) and self.plain(t):
                content = self._contents.get(t.untyped_storage()._cdata)
                if content in new and content.op != RESIDENT and content.out >= 0:
                    self._ends[content] = max(self._ends.get(content, 0), View.of(t).end)
        return new

    def _run(self, number: int, have: dict[Content, torch.UntypedStorage], needed: set[Content]) -> None:
        super()._run(number, have, needed)
        _fill(self.operations[number], have)

    def was_held(self, content: Content) -> bool:
        """Whether a content of this tape is held because it cannot be made again."""
        return self._keys.get(content) in self.known.held

    def saved(self, slot: Slot, storage: torch.UntypedStorage) -> None:
        if self._new:
            self._kept.append(storage)

    def _verify(self) -> None:
        """Make all contents of the open stage that are saved or alive again; hold those that differ."""
        changed = {
            self._keys[content]
            for content, was in self._earlier.items()
            if content.held is None and (now := content.storage(seen=True)) is not None and checksum(now) != was
        }
        first = self.begins[self.stage]
        made = [content for op in self.operations[first:] for content in (*op.made, *op.written())]
        there = {
            content: storage
            for content in made
            if content.held is None and (storage := content.storage(seen=True)) is not None
        }
        if changed:  # what read it before the write and after it cannot be told apart: hold all that the stage made
            self.known.overwritten[self.key] = changed
            self.known.held |= {self._keys[content] for content in there}
            self._replace(changed)
            for content in there:
                content.hold_for_good()
            self._tell(self.operations[first:][-1], "a kernel that PyTorch does not see wrote into a tensor near it")
            there = {}
        while there and (wrong := self._first_wrong(there, {content for content in made if content.held is None})):
            wrong.hold_for_good()
            self.known.held.add(self._keys[wrong])
            self._tell(self.operations[wrong.op], "its result is another when it is made again")
            del there[wrong]
        self._right = list(there)
        self.known.sure.update(self._new)

    def _first_wrong(self, there: dict[Content, torch.UntypedStorage], anew: set[Content]) -> Content | None:
        """Make the contents of `there` again; return the first that differs, or that cannot be made."""
        have, numbers = self._there(set(there), anew)
        for op in self._run_all(sorted(numbers), have, set()):
            for content in (*op.made, *op.written()):
                if content in there and not same_bytes(have[content], there[content], self._ends.get(content)):
                    return content
        return None

    def _replace(self, keys: set[tuple[Key, int]]) -> None:
        """Note that storages of earlier contents now have others, which no operation made."""
        self.overwrites = True
        for content in [content for content in self._contents.values() if self._keys.get(content) in keys]:
            storage = content.storage(seen=True)
            if storage is None:
                continue
            later = self._contents[storage._cdata] = content.next = Content(RESIDENT, 0, 0, storage)
            later.held = storage
            content.lose(None)
            self._earlier.pop(content, None)

    def _tell(self, op: Operation, why: str) -> None:
        name = str(op.operator)
        if name not in self.known.told:
            self.known.told.add(name)
            logger.warning("rotoff: what %s makes stays in memory or is moved, and is not recomputed: %s", name, why)


def _fill(op: Operation, storages: Mapping[Content, torch.UntypedStorage | None]) -> None:
    """What an operation leaves uninitialized is alike each time: a model writes there before it reads."""
    if op.operator.overloadpacket in UNINITIALIZED:
        for content in op.made:
            if (storage := storages[content]) is not None:
                bytes_of(storage).fill_(FILL)
