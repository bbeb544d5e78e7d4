"""Checks for the fields of a chain; each error is one sentence that names the field and the value."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from ..errors import ChainError
from ..io.files import is_text

T = TypeVar("T")


def read(
    cls: Callable[..., T], data: Any, where: str, required: Iterable[str], names: Iterable[str], **others: Any
) -> T:
    """A part of a chain from its object in a file; unknown fields are kept in `extra`. others: fields that the object
    need not have."""
    if not isinstance(data, Mapping):
        raise ChainError(f"{where} is {data!r}, not an object")
    for name in required:
        if name not in data:
            raise ChainError(f"{where} misses the field {name!r}")
    known = set(names)
    fields = {name: data[name] for name in data if name in known}
    try:
        return cls(**{**others, **fields}, extra={name: data[name] for name in data if name not in {*known, *others}})
    except ChainError as error:
        raise ChainError(f"{where}: {error}") from error


def check_name(name: Any, where: str) -> None:
    if not is_text(name):
        raise ChainError(f"name of {where} is {name!r}; give text, without lone halves of surrogate pairs")


def several(values: Any, name: str, where: str, kind: str) -> Iterable[Any]:
    if not isinstance(values, Iterable):
        raise ChainError(f"{name} of {where} is {values!r}; give a sequence of {kind}")
    return values


def number(value: Any, name: str, where: str) -> float:
    if isinstance(value, bool) or not hasattr(value, "__float__") or getattr(value, "shape", ()) != ():
        raise ChainError(f"{name} of {where} is {value!r}; give a number")
    try:
        real = float(value)
    except OverflowError:  # an integer of more than 308 digits
        raise ChainError(f"{name} of {where} is above 1e308; give a finite number at or above 0") from None
    if not math.isfinite(real) or real < 0:
        raise ChainError(f"{name} of {where} is {value!r}; give a finite number at or above 0")
    return real


def bytes_of(value: Any, name: str, where: str) -> int:
    real = number(value, name, where)
    whole = int(value)
    if whole != real and not isinstance(value, int):
        raise ChainError(f"{name} of {where} is {value!r}; give a whole number of bytes")
    return whole


def clean(one: Any, where: str, times: Iterable[str] = (), sizes: Iterable[str] = ()) -> None:
    """Make the fields `times` of a frozen object floats, and `sizes` whole numbers."""
    for names, read_as in ((times, number), (sizes, bytes_of)):
        for name in names:
            object.__setattr__(one, name, read_as(getattr(one, name), name, where))


def at_most(value: Any, alone: float, name: str) -> float:
    """Check the bidirectional bandwidth of a direction that reaches `alone` while nothing runs in the other one."""
    real = number(value, name, "the chain")
    if not 0 < real <= alone:
        raise ChainError(
            f"{name} of the chain is {value}; give bytes per second above 0, and no more than the {alone} of that"
            " direction alone"
        )
    return real
