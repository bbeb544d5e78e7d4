"""Every error that rotoff raises on purpose; each message names the value, the limit and the cure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence that asks whether a name in `known` was meant; empty if none is like `name`."""
    import difflib

    found = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {found[0]}?" if found else ""


class RotoffError(Exception):
    """Base of all errors of this package."""


class ChainError(RotoffError, ValueError):
    """A chain, or a chain file, that does not describe a training step."""


class LimitError(RotoffError, ValueError):
    """A memory limit that is not a number of bytes."""


class OptionError(RotoffError, ValueError):
    """An option outside its range, such as an unknown mode."""


class SequenceFormatError(RotoffError, ValueError):
    """Text or a file that is not a sequence of operations."""


class InvalidSequenceError(RotoffError, ValueError):
    """A sequence that the machine refuses.

    Attributes:
        op: the operation that is refused, or None if the sequence ends too early.
        index: its 0-based position in the sequence.
    """

    def __init__(self, reason: str, op: Any = None, index: int | None = None) -> None:
        self.op = op
        self.index = index
        self.reason = reason
        super().__init__(reason if op is None else f"op {index} ({op}): {reason}")


class InfeasibleError(RotoffError):
    """No sequence of the requested mode fits the limit.

    Attributes:
        min_mem_limit: the smallest limit in bytes that works in that mode.
    """

    def __init__(self, message: str, min_mem_limit: int) -> None:
        self.min_mem_limit = min_mem_limit
        super().__init__(message)


class MeasureError(RotoffError):
    """A model that cannot be measured as a chain of stages, or a call that needs a plan before there is one."""


class ExecutionError(RotoffError, RuntimeError):
    """A training step that cannot be run as planned; the original exception is its cause."""
