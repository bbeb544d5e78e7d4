"""Identifies calls of torch by their position in the model's code, so that calls of two forwards can be matched.

A forward that skips a layer or takes another branch makes other calls there; the calls of later layers are the same
again. So a call is identified by the call of the module that makes it, its function, and the number of calls of this
function before it there: since the last call of a submodule, or in all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import nn

from .tape import name_of

Entry = tuple[nn.Module | None, int]  # a call of a module, and the number of calls of that module before it


class _Frame:
    __slots__ = ("calls", "entry", "first", "last")

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.last: Entry = entry  # the last submodule call
        self.calls: list[Any] = []  # functions, in order
        self.first = 0  # index of the first of `calls` after `last`


class Places:
    """Follows the calls of one forward."""

    def __init__(self) -> None:
        self._frames = [_Frame((None, 0))]
        self.calls = self._frames[0].calls  # functions called in the current module, in order
        self._times: dict[nn.Module, int] = {}

    def enter(self, module: nn.Module) -> Entry:
        n = self._times.get(module, 0)
        self._times[module] = n + 1
        entry = module, n
        self._frames.append(_Frame(entry))
        self.calls = self._frames[-1].calls
        return entry

    def leave(self) -> None:
        entry = self._frames.pop().entry
        frame = self._frames[-1]
        self.calls = frame.calls
        frame.last, frame.first = entry, len(frame.calls)

    def keys(self, function: Callable[..., Any]) -> tuple[Hashable, Hashable]:
        """Return the keys of the next call, if it is of `function`. The first is exact; the second identifies the call
        if both calls read the same."""
        frame, name = self._frames[-1], name_of(function)
        names = [name_of(one) for one in frame.calls]
        return (frame.entry, frame.last, name, names[frame.first :].count(name)), (frame.entry, name, names.count(name))


def alone(entry: Entry, module: nn.Module) -> tuple[Hashable, Hashable]:
    """Return the keys of `module` as the one call that its call `entry` makes."""
    return (entry, entry, name_of(module), 0), (entry, name_of(module), 0)


def is_exact(key: Any) -> bool:
    """Whether a key identifies a call by itself."""
    return len(key) == 4
