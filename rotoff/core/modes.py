"""Checks of options that many functions have: modes, and whole numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import OptionError
from .sequence import MODES


def check_mode(mode: str) -> None:
    """Raise OptionError if `mode` is none of the three."""
    if mode not in MODES:
        raise OptionError(f"mode is {mode!r}; modes are {', '.join(map(repr, MODES))}")


def parse_modes(modes: Any) -> tuple[str, ...]:
    """Read an option that names one or several modes; OptionError if there is none or an unknown one."""
    wanted = as_tuple(modes)
    if not wanted:
        raise OptionError(f"modes is empty; give at least one of {', '.join(map(repr, MODES))}")
    for mode in wanted:
        check_mode(mode)
    return wanted


def as_tuple(given: Any) -> tuple[Any, ...]:
    """The values of an option; a text, number or dict alone is one value."""
    lone = isinstance(given, (str, Mapping)) or not isinstance(given, Iterable) or getattr(given, "shape", None) == ()
    return (given,) if lone else tuple(given)


def whole_number(given: Any, name: str, least: int = 1, most: int | None = None) -> int:
    """Read an option that is a whole number of at least `least`, and at most `most`; OptionError for anything else."""
    fits = not isinstance(given, bool) and hasattr(given, "__index__") and least <= given
    if not fits or (most is not None and given > most):
        allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise OptionError(f"{name} is {given!r}; give a whole number {allowed}")
    return int(given)
