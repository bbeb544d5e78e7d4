"""Where in the model's own code a call of torch is made: what tells whether calls of two forwards are the same one.

A forward that skips a layer, or takes another branch, makes other calls from there on; those of the layers after it are
the same again. So a call is known by the call of the module that makes it, and within that by its function and by how
many calls of this function came before it: since the last module that was called from there, or else at all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import nn

from .tape import name_of

Entry = tuple[nn.Module | None, int]  # a call of a module, and how many calls of that module came before


class _Frame:
    __slots__ = ("calls", "entry", "first", "last")

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.last: Entry = entry  # the module that was called last from here
        self.calls: list[Any] = []  # functions, in order
        self.first = 0  # of `calls`, after `last`


class Places:
    """Follows the calls of one forward."""

    def __init__(self) -> None:
        self._frames = [_Frame((None, 0))]
        self.calls = self._frames[0].calls  # functions that have been called in the module that now is, in order
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
        """What the next call is known by, if it is of `function`: the first is exact, the second tells as long as both
        read the same."""
        frame, name = self._frames[-1], name_of(function)
        names = [name_of(one) for one in frame.calls]
        return (frame.entry, frame.last, name, names[frame.first :].count(name)), (frame.entry, name, names.count(name))


def alone(entry: Entry, module: nn.Module) -> tuple[Hashable, Hashable]:
    """What `module` is known by as the one call that its call `entry` makes."""
    return (entry, entry, name_of(module), 0), (entry, name_of(module), 0)


def is_exact(key: Any) -> bool:
    """Whether a key tells by itself which call it is."""
    return len(key) == 4
