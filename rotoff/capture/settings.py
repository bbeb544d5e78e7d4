"""Python values that a forward may go by, as they were: numbers, containers of any nesting, arrays, objects such as configurations.

Taken once and compared before every step, so what is compared is little: a value that is the very same object is equal at once,
a container of nothing but plain values is compared by one ``==``, one that many modules share is looked through once, and what is
too deep, or too much to be a setting (a trainer, a data set), is let be.
"""

from __future__ import annotations

import sys
import types
import weakref
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Container, Iterator
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn

GONE = object()  # in place of a value: there is none
DEPTH = 6  # of containers and objects within one another
ENTRIES = 2000  # that one attribute may hold, containers of plain values counting as one
ARRAY_BYTES = 2**16  # of a NumPy array that is compared by its content, not by which one it is

_SCALARS = (
    *(bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, type),
)
_UNKNOWN = object()  # in place of what was taken: anything will do
_Read = Callable[[Any], dict[Any, Any]]


class _TooMuch(Exception):
    """What an attribute holds is no setting."""


class Taken(ABC):
    """A value that could change, as it was."""

    __slots__ = ()

    @abstractmethod
    def matches(self, now: Any, done: dict[int, Taken]) -> bool:
        """Whether `now` is as it was. done: by id, what has been compared already; all of it is alive meanwhile."""

    @abstractmethod
    def settle(self, now: Any, used: Container[int], done: dict[int, bool]) -> bool:
        """Let be what is other in `now`, and tensors of which the id is not `used`; whether anything is left to compare."""


class Taker:
    """Takes values down; objects that are met again, in circles or in many modules, are the same `Taken`."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}
        self._left = 0

    def take(self, value: Any) -> Any:
        """What `value` is now: itself, where it is plain; a `Taken`; None, where it cannot be told or is too much."""
        self._left = ENTRIES
        try:
            taken = self._take(value, DEPTH)
        except _TooMuch:
            taken = self._seen[id(value)] = _UNKNOWN
        return None if taken is _UNKNOWN else taken

    def _take(self, value: Any, depth: int) -> Any:
        if plain(value) or isinstance(value, nn.Module):
            return value
        if isinstance(value, torch.Tensor):
            return _Tensor(value)
        if id(value) not in self._seen:
            self._seen[id(value)] = _UNKNOWN
            self._seen[id(value)] = self._look_into(value, depth)
        return self._seen[id(value)]

    def _look_into(self, value: Any, depth: int) -> Any:
        if isinstance(value, (list, dict, set, frozenset)) and all(map(plain, _elements(value))):
            return _Content(value)
        if _is_array(value):
            return _Array(value)
        read = _reader(value)
        if read is None or not depth:
            return _UNKNOWN
        taken = self._seen[id(value)] = _Parts(read)
        held = read(value)
        self._left -= len(held)
        if self._left < 0:
            raise _TooMuch
        parts = [(key, self._take(part, depth - 1)) for key, part in held.items()]
        taken.fill(type(value), len(held), [(key, part) for key, part in parts if part is not _UNKNOWN])
        return taken


class _Content(Taken):
    """A list, dict or set of plain values. A list that was empty may grow: a history, most often."""

    __slots__ = ("_content", "_history", "_kind")

    def __init__(self, value: Any) -> None:
        self._kind = type(value)
        plain_kind = next(kind for kind in (list, dict, set, frozenset) if isinstance(value, kind))
        self._content = plain_kind(value)
        self._history = value if plain_kind is list and not value else None

    def matches(self, now: Any, done: dict[int, Taken]) -> bool:
        if type(now) is not self._kind:
            return False
        try:
            return bool(now == self._content) or now is self._history
        except (RuntimeError, ValueError):  # there is a tensor or an array in it now, which does not say
            return False

    def settle(self, now: Any, used: Container[int], done: dict[int, bool]) -> bool:
        return self.matches(now, {})


class _Array(Taken):
    """A NumPy array: its content where that is little, else which one it is."""

    __slots__ = ("_array", "_content")

    def __init__(self, array: Any) -> None:
        self._array = weakref.ref(array)
        self._content = _bytes_of(array)

    def matches(self, now: Any, done: dict[int, Taken]) -> bool:
        if self._content is None:
            return now is self._array()
        return _is_array(now) and _bytes_of(now) == self._content

    def settle(self, now: Any, used: Container[int], done: dict[int, bool]) -> bool:
        return self.matches(now, {})


class _Tensor(Taken):
    """A tensor within a container or an object: which one it is matters where the forward uses it, or it is a parameter."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = weakref.ref(tensor)  # those that are used are kept alive by the recording

    def matches(self, now: Any, done: dict[int, Taken]) -> bool:
        return now is self._tensor()

    def settle(self, now: Any, used: Container[int], done: dict[int, bool]) -> bool:
        return now is self._tensor() and (id(now) in used or isinstance(now, nn.Parameter))


class _Parts(Taken):
    """A container or an object, by what it holds."""

    __slots__ = ("_kind", "_parts", "_read", "_size")

    def __init__(self, read: _Read) -> None:
        self._kind: type | None = None  # anything will do
        self._read = read
        self._size = 0
        self._parts: list[tuple[Any, Any]] = []

    def fill(self, kind: type, size: int, parts: list[tuple[Any, Any]]) -> None:
        self._kind, self._size, self._parts = kind, size, parts

    def matches(self, now: Any, done: dict[int, Taken]) -> bool:
        if done.get(id(now)) is self:
            return True
        if type(now) is not self._kind:
            return self._kind is None
        done[id(now)] = self
        held = self._read(now)
        if len(held) != self._size:
            return False
        for key, then in self._parts:
            part = held.get(key, GONE)
            if part is not then and not alike(then, part, done):
                return False
        return True

    def settle(self, now: Any, used: Container[int], done: dict[int, bool]) -> bool:
        if id(self) not in done:
            done[id(self)] = True
            done[id(self)] = self._settle(now, used, done)
        return done[id(self)]

    def _settle(self, now: Any, used: Container[int], done: dict[int, bool]) -> bool:
        held = self._read(now) if type(now) is self._kind else {}
        before, self._parts = (
            self._parts,
            [(key, then) for key, then in self._parts if _settled(then, held.get(key, GONE), used, done)],
        )
        # a list of tensors that the forward does not use is a history too
        history = isinstance(now, list) and any(isinstance(then, _Tensor) for _, then in before) and not self._parts
        if len(held) != self._size or history:
            self._kind, self._parts = None, []
        return self._kind is not None


def plain(value: Any) -> bool:
    """Whether `value` cannot change, and is told from others by ``==``."""
    return isinstance(value, _SCALARS) or (isinstance(value, tuple) and all(map(plain, value))) or _is_number_of_numpy(value)


def alike(then: Any, now: Any, done: dict[int, Taken]) -> bool:
    """Whether `now` is as it was when `then` was taken."""
    if isinstance(then, Taken):
        return then.matches(now, done)
    return now is then or (type(now) is type(then) and bool(now == then or (now != now and then != then)))


def class_settings(kind: type) -> Iterator[tuple[list[type], str, Any]]:
    """What objects of class `kind` find in it, or in its bases, where they have no attribute of that name: the classes that are looked
    through for it, the last of which has it, its name and its value."""
    users = [base for base in kind.__mro__ if holds_settings(base)]
    found: set[str] = set()
    for number, base in enumerate(users):
        own = {name: value for name, value in vars(base).items() if name not in found}
        found.update(own)
        for name, value in own.items():
            if not name.startswith("__") and not hasattr(type(value), "__get__"):  # no methods, no properties
                yield users[: number + 1], name, value


def _settled(then: Any, now: Any, used: Container[int], done: dict[int, bool]) -> bool:
    if isinstance(then, Taken):
        return then.settle(now, used, done)
    return alike(then, now, {})


def holds_settings(kind: type) -> bool:
    """Whether a class is such that its attributes may be a user's settings: none of Python's, NumPy's, torch's or rotoff's own (`rotoff.attach`
    leaves one with the model)."""
    module = str(getattr(kind, "__module__", ""))
    package = module.partition(".")[0]
    if issubclass(kind, (types.SimpleNamespace, Namespace)) or module.startswith("torch.distributions."):
        return True
    return package not in ("torch", "numpy", "rotoff") and package not in sys.stdlib_module_names


def _reader(value: Any) -> _Read | None:
    """What gives the parts of values like `value`, by name, key or place; None: they are not to be looked into."""
    if isinstance(value, (list, tuple)):
        return _by_place
    if isinstance(value, dict):
        return dict if type(value) is not dict else _as_it_is
    if isinstance(value, partial):
        return _of_partial
    if not holds_settings(type(value)):
        return None
    if isinstance(getattr(value, "__dict__", None), dict):
        return vars
    return _of_slots if hasattr(type(value), "__slots__") else None


def _as_it_is(value: Any) -> dict[Any, Any]:
    found: dict[Any, Any] = value
    return found


def _by_place(value: Any) -> dict[Any, Any]:
    return dict(enumerate(value))


def _of_partial(value: Any) -> dict[Any, Any]:
    return {"func": value.func, "args": value.args, "keywords": value.keywords}


def _of_slots(value: Any) -> dict[Any, Any]:
    slots = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    names = [name for own in slots for name in ([own] if isinstance(own, str) else own)]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _elements(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_number_of_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def _bytes_of(array: Any) -> tuple[Any, ...] | None:
    return (array.dtype, array.shape, array.tobytes()) if array.nbytes <= ARRAY_BYTES and not array.dtype.hasobject else None
