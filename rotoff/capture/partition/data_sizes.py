"""Finds tensors of a recorded forward whose sizes depend on data, such as the rows that a mask selects.

The number of tokens for an expert, or of anchors that match a box, is known only after all before it was computed. If
Python reads such a size, a recording would fix the number for good.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from ..tape import Owned, argument_leaves

_PICK = frozenset(["nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "_return_output", "nms"])
_INDEXED = frozenset(["__setitem__", "index_put", "index_put_", "masked_scatter", "masked_scatter_"])
_TELL = frozenset(["size", "numel", "nelement", "__len__"])
_COUNT = frozenset(["unbind", "split", "chunk", "tensor_split"])
_MASKS = (torch.bool, torch.uint8)
_COUNTS_VALUES = frozenset(["where", "one_hot", "bincount"])  # if a tensor is their only argument


class DataSizes:
    """Follows sizes while a forward is recorded.

    Attributes:
        computed: variables that depend on parameters or random numbers, instead of the batch alone.
    """

    def __init__(self) -> None:
        self.computed: set[int] = set()
        self._varying: set[int] = set()  # variables whose size may depend on data

    def note(
        self,
        function: Callable[..., Any],
        name: str,
        references: Any,
        tensors: Sequence[torch.Tensor],
        reads: Collection[int],
        outputs: Sequence[int | None],
        random: bool,
    ) -> None:
        """Note a call with the arguments `references`, among which are `tensors`."""
        made = {n for n in outputs if n is not None}
        learnt = any(isinstance(leaf, Owned) and leaf.table == "_parameters" for leaf in argument_leaves(references))
        if learnt or random or isinstance(function, torch.nn.Module) or not self.computed.isdisjoint(reads):
            self.computed |= made
            if name == "__setitem__" or name.endswith("_"):
                self.computed.update(list(reads)[:1])
        if _picks(name, references, tensors) or not self._varying.isdisjoint(reads):
            self._varying |= made

    def taken_whole(self, given: Collection[int], outputs: Sequence[int | None]) -> None:
        """Note the `outputs` of a module whose work depends on data; their sizes are constant if those of its inputs
        are."""
        made = {n for n in outputs if n is not None}
        self.computed |= made
        if self._varying.isdisjoint(given):
            self._varying -= made

    def picks(self, name: str, references: Any, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the sizes of a call's results, or of its arguments, depend on the contents of its arguments."""
        return (
            _picks(name, references, tensors)
            or name == "_pack_padded_sequence"
            or (name in _INDEXED and any(t.dtype in _MASKS for t in tensors[1:]))
        )

    def asked(self, function: Any, name: str, reads: Collection[int]) -> bool:
        """Whether this call reads a size that depends on data."""
        tells = name in _TELL or (name == "__get__" and getattr(function.__self__, "__name__", "") == "shape")
        return tells and not self._varying.isdisjoint(reads)

    def counted(self, name: str, reads: Collection[int]) -> bool:
        """Whether the number of results of this call depends on data."""
        return name in _COUNT and not self._varying.isdisjoint(reads)


def _picks(name: str, references: Any, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the number of rows of a call's result depends on the contents of its arguments."""
    args, kwargs = references
    if name == "__getitem__":
        return any(t.dtype in _MASKS for t in tensors[1:])
    if name in _COUNTS_VALUES:
        return len(args) + len(kwargs) == 1
    if name == "repeat_interleave":
        return not any(isinstance(value, int) for value in (*args[1:2], kwargs.get("repeats")))
    return name in _PICK
