"""Verified before it is trusted: what a stage of a new course makes is made again once and compared.

Where it differs (a kernel that writes unseen, one that is not deterministic, chance that is not PyTorch's), the content
is held from then on: it costs bytes and is never wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from .contents import RESIDENT, Content, Slot, checksum
from .operators import below_autograd, kind_of
from .tape import Operation, Tape

logger = logging.getLogger("rotoff")
FACTOR, MASK = 0x5851F42D4C957F2D, 2**64 - 1

Key = int  # of an operation: it, all those before it in its stage, and the sizes of what they read


class Known:
    """What the steps so far have shown of a model's operations.

    sure: keys of operations whose results are the same when they are made again. held: (key, result) of those that
    are not. overwritten: for the key at the end of a stage, (key, result) of the contents of earlier ones that the
    stage overwrites unseen.
    """

    def __init__(self) -> None:
        self.sure: set[Key] = set()
        self.held: set[tuple[Key, int]] = set()
        self.overwritten: dict[Key, set[tuple[Key, int]]] = {}
        self.told: set[str] = set()  # names of operators that were told of


class Verified(Tape):
    """A tape that verifies each stage that it does not know, when the stage has ended."""

    def __init__(self, known: Known) -> None:
        super().__init__()
        self.known = known
        self._key: Key = 0
        self._keys: dict[Content, tuple[Key, int]] = {}
        self._new: list[Key] = []  # of this stage, those not yet sure
        self._kept: list[torch.UntypedStorage] = []  # what autograd saves in this stage, until it is verified
        self._earlier: dict[Content, int] = {}  # checksums of what earlier stages have made, while it lives

    def enter(self, stage: int) -> None:
        with torch._C._DisableTorchDispatch():
            if self._key in self.known.overwritten:
                self._replace(self.known.overwritten[self._key])
            if self._new:
                self._verify()
        super().enter(stage)
        self._key, self._new, self._kept = stage, [], []

    def noted(self, op: Operation, new: Iterable[Content]) -> None:
        key = self._key * FACTOR + kind_of(op.operator).name_sum
        for reference in op.references:
            for n in reference.size:
                key = key * 31 + n + 1
        self._key = key = key & MASK
        sure = key in self.known.sure
        if not sure:
            self._new.append(key)
        for n, content in enumerate(content for content in new if content.op != RESIDENT):
            self._keys[content] = key, n
            storage = content.storage(seen=True)
            if storage is None:
                continue
            if (key, n) in self.known.held:
                content.hold(storage)

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
            self.known.overwritten[self._key] = changed
            self.known.held |= {self._keys[content] for content in there}
            self._replace(changed)
            for content, storage in there.items():
                content.hold(storage)
            self._tell(self.operations[first:][-1], "a kernel that PyTorch does not see wrote into a tensor near it")
            there = {}
        sums = {content: checksum(storage) for content, storage in there.items()}
        while sums and (wrong := self._first_wrong(sums, {content for content in made if content.held is None})):
            wrong.hold(there[wrong])
            self.known.held.add(self._keys[wrong])
            self._tell(self.operations[wrong.op], "its result is another when it is made again")
            del sums[wrong]
        self._earlier.update(sums)
        self._earlier = {content: total for content, total in self._earlier.items() if content.alive()}
        self.known.sure.update(self._new)

    def _first_wrong(self, sums: dict[Content, int], anew: set[Content]) -> Content | None:
        """Make the contents of `sums` again; return the first that differs, or that cannot be made."""
        have, numbers = self._there(set(sums), anew)
        with below_autograd():
            for op in self._run_all(sorted(numbers), have, set()):
                for content in (*op.made, *op.written()):
                    if content in sums and checksum(have[content]) != sums[content]:
                        return content
        return None

    def _replace(self, keys: set[tuple[Key, int]]) -> None:
        """Note that storages of earlier contents now have others, which no operation made."""
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
