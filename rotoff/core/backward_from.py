"""From which of its outputs a model's backward starts: the option `backward_from`, and the outputs that it names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..errors import MeasureError, OptionError
from .modes import as_tuple


class LossAlone(str):
    """The key of the loss in a loop that holds none of the model's other outputs when the backward begins. Of a tuple
    the loss is the first, as trainers have it."""


BackwardFrom = str | int | Iterable[str | int] | None


def read_backward_from(given: Any) -> tuple[str | int, ...]:
    """Return the keys or positions that the option names; none if it is None.

    Raises:
        OptionError: if it is anything else.
    """
    if given is None:
        return ()
    names = as_tuple(given)
    once = isinstance(given, (bytes, bytearray, Iterator))  # which a second look finds empty, or takes for numbers
    if once or not names or not all(isinstance(name, (str, int)) and not isinstance(name, bool) for name in names):
        raise OptionError(
            f'backward_from is {given!r}; give the key of an output ("loss"), its position in a tuple (0), or a list'
            " of those"
        )
    return names


def output_named(output: Any, name: str | int) -> Any:
    """Return the part of a model's output with this key or position.

    Raises:
        MeasureError: if there is none.
    """
    if isinstance(name, LossAlone) and isinstance(output, (tuple, list)):
        name = 0
    try:
        if isinstance(name, int):
            return (list(output.values()) if isinstance(output, Mapping) else _places(output))[name]
        return output[name] if isinstance(output, Mapping) else _fields(output)[name]
    except (KeyError, IndexError):
        raise MeasureError(
            f"backward_from names {name!r}, but the model returns {_described(output)}; name one of those"
        ) from None


def _places(output: Any) -> tuple[Any, ...]:
    return tuple(output) if isinstance(output, (tuple, list)) else tuple(_fields(output).values()) or (output,)


def _fields(output: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(output):
        return {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    return {name: getattr(output, name) for name in getattr(output, "_fields", ())}  # a named tuple


def _described(output: Any) -> str:
    names = list(output) if isinstance(output, Mapping) else list(_fields(output))
    if names:
        return ", ".join(map(repr, names))
    if isinstance(output, (tuple, list)):
        return f"a {type(output).__name__} of {len(output)}"
    return "a tensor alone" if hasattr(output, "requires_grad") else f"a {type(output).__name__}"
