"""Which operations of a recorded step read parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..tape.contents import Content, Slot
from ..tape.operators import tensors_of
from ..tape.tape import Known, Operation
from ..tensors.storage import local
from .recorded_step import RecordedStep

CAST = "aten::_to_copy"


@dataclass(frozen=True)
class Reads:
    """Which operations of a step on `device` read parameters, which are given by id.

    at: their positions. staying: those that have to stay on the device: that its operations overwrite, or that autocast
    casts once for several operations. It keeps casts of leaf tensors alone, and what stands for a parameter is none.
    """

    device: torch.device
    at: dict[int, frozenset[int]]
    staying: frozenset[int]


class RecordedReads(RecordedStep):
    """A recorded step that also notes which operations read parameters, where they lie."""

    def __init__(self, known: Known, model: nn.Module, *how: Any) -> None:
        super().__init__(known, model, *how)
        # numbers of operations, and ids of parameters that they, or views right before them, read
        self._reads: set[tuple[int, int]] = set()
        # positions at which autograd has saved parameters that nothing has read since the operation before
        self._kept_at: set[tuple[int, int]] = set()
        self._overwritten: set[int] = set()
        self._own = {local(p).untyped_storage()._cdata: id(p) for p in self.parameters}
        self._casts: dict[Content, int] = {}
        self._uses: Counter[Content] = Counter()  # of casts

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
        return super().__torch_dispatch__(func, types, args, kwargs)

    def trust(self, op: Operation, new: Iterable[Content]) -> None:
        new = list(new)
        super().trust(op, new)
        for content in op.contents():
            if content in self._casts:
                self._uses[content] += 1
            key = None if content.held is None else self._own.get(content.held._cdata)
            if key is not None and op.operator._schema.name == CAST:
                self._casts |= dict.fromkeys(new, key)

    def _written(self, *of: Any) -> Any:  # type: ignore[override]
        written = super()._written(*of)
        found = (self._own.get(t.untyped_storage()._cdata) for _, t in written)
        self._overwritten |= {key for key in found if key is not None}
        return written

    def pack(self, t: torch.Tensor) -> Any:
        packed = super().pack(t)
        if isinstance(packed, Slot) and packed.reference is None:
            key = self._own.get(t.untyped_storage()._cdata)
            if key is not None and (len(self.operations), key) not in self._reads:
                self._kept_at.add((packed.at, key))
        return packed

    @property
    def reading(self) -> Reads:
        """What the step has read, once it has ended."""
        at: dict[int, set[int]] = {}
        last = len(self.positions) - 1
        for position, key in (*((self.positions[min(n, last)], key) for n, key in self._reads), *self._kept_at):
            at.setdefault(key, set()).add(position)
        staying = self._overwritten | {self._casts[content] for content, uses in self._uses.items() if uses > 1}
        return Reads(self.device, {key: frozenset(some) for key, some in at.items()}, frozenset(staying))
