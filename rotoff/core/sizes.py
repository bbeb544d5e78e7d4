"""Sizes in bytes as text, and back: ``"6 GiB"`` is 6442450944; and seconds as text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import LimitError

_UNITS = {"B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter}IB"] = 1024**_power
_TEXT = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+]?[0-9]+)?)\s*([A-Za-z]*)\s*")
BYTES = (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0))  # units, largest first
SECONDS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
NO_LIMIT = 2**62  # more than any device has
MOST = 10**308  # larger sizes are cut to this, since reports need a float
_HOW = 'give a whole number of bytes or a size such as "6 GiB"'
_SETTINGS = "; settings as a whole go to rotoff.attach(model, config), with config = rotoff.RotoffConfig.load(path)"


def is_auto(value: Any) -> bool:
    """Whether a limit is ``"auto"``: what the device has free."""
    return isinstance(value, str) and value.strip().lower() == "auto"


def parse_share(value: Any) -> float | None:
    """The part of a whole that text such as ``"50%"`` means, for limits that a trainer takes; None for anything else.

    Raises:
        LimitError: if it is not above 0 and at most 100 %.
    """
    if not isinstance(value, str) or not value.strip().endswith("%"):
        return None
    try:
        share = float(value.strip()[:-1]) / 100
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise LimitError(f'mem_limit is {value!r}; give a share of keeping everything such as "50%", or {_HOW[7:]}')
    return share


def parse_bytes(value: Any, what: str = "mem_limit") -> int:
    """The bytes that `value` means: an int, a float above 1 (rounded down), or text.

    Text is a number and a unit: B, decimal kB to PB, binary KiB to PiB (any case). A whole number without a unit is
    bytes. what: the name of the value in errors.

    Raises:
        LimitError: for everything else (bool, NaN, 0, negative, a fraction, an unknown unit).
    """
    number = _in_text(value, what) if isinstance(value, str) else value
    if isinstance(number, bool) or not hasattr(number, "__float__") or getattr(number, "shape", ()) != ():
        if isinstance(value, Mapping) or hasattr(value, "mem_limit"):
            raise LimitError(f"{what} is a {type(value).__name__}: {_HOW}{_SETTINGS}")
        raise LimitError(f"{what} is {value!r} ({type(value).__name__}): {_HOW}")
    if not -math.inf < number < math.inf:
        raise LimitError(f"{what} is {value!r}: {_HOW}")
    if 0 < number <= 1 and not hasattr(number, "__index__"):
        raise LimitError(f"{what} is {value!r}, which looks like a fraction; limits are absolute: {_HOW}")
    if number <= 0:
        said = repr(value) if number > -MOST else "under -1e308"
        raise LimitError(f"{what} is {said}, but must be above 0: {_HOW}")
    return min(int(number), MOST)


def _in_text(text: str, what: str) -> int | float:
    match = _TEXT.fullmatch(text)
    if text.strip().endswith("%"):
        raise LimitError(
            f"{what} is {text!r}, a share; limits are absolute: {_HOW}, or int(0.5 * model.keep_all_memory) for half of"
            " what keeping everything takes"
        )
    if match is None:
        settings = _SETTINGS if text.endswith((".yaml", ".yml", ".json")) else ""
        raise LimitError(f"{what} is {text!r}: {_HOW}{settings}")
    digits, unit = match.groups()
    number = int(digits) if digits.isdigit() and len(digits) < 300 else float(digits)
    if not unit and not (float(number).is_integer() and (number > 1 or digits.isdigit())):
        raise LimitError(f"{what} is {text!r}, a number without a unit: {_HOW}")
    if (scale := _UNITS.get(unit.upper() or "B")) is None:
        raise LimitError(
            f"{what} is {text!r} with the unknown unit {unit!r}; units are B, kB to PB and KiB to PiB: {_HOW}"
        )
    return number * scale


def unit_of(number: float, units: Sequence[tuple[str, float]]) -> tuple[str, float]:
    """The largest of `units` in which `number` is at least 1, else the smallest."""
    return next((unit for unit in units if abs(number) >= unit[1]), units[-1])


def format_bytes(number: float) -> str:
    """`number` bytes in the largest binary unit in which it is at least 1, such as ``"1.31 GiB"``."""
    name, size = unit_of(number, BYTES)
    many = number / size
    return f"{many:.{'0f' if name == 'B' else '2f' if abs(many) < 1e6 else '3g'}} {name}"


def format_seconds(seconds: float) -> str:
    """`seconds` in s, ms or µs, such as ``"97.14 ms"``."""
    name, length = unit_of(seconds, SECONDS)
    return f"{seconds / length:.4g} {name}"


def as_size(number: int) -> str:
    """At most `number` bytes as text that `parse_bytes` reads, such as ``"1.31 GiB"``."""
    name, size = unit_of(number, BYTES[1:])
    return f"{math.floor(100 * number / size) / 100} {name}" if size > 1 else f"{number} B"
