"""The discretization: how bytes become slots for the dynamic programs.

The room of M = mem_limit − |a_0| bytes is cut into N slots of M / N bytes.

- *Sizes held* (|a_i|, |ā_i^k|) become slots by one of two rules. ``"up"`` rounds each size up, which is sound: a plan
  that fits in slots fits in bytes. ``"sums"`` rounds running sums over the stages to the nearest slot and takes
  differences, so that the total of consecutive stages is off by at most one slot (Euro-Par 2020, 5.3.2). This is not
  sound for scattered stages, so its proposals are checked on exact bytes.
- *Needs* of an operation are summed in exact bytes and rounded up once. Only inside an idle time that spans several
  operations they stay real numbers.
- *Backlogs* (A_F, A_B, Δ) are whole slots, drained by clocks: a stage drains the difference of running sums of β times
  time, rounded to the nearest slot, so that rounding errors of many short stages do not add up. An idle time drains the
  slots that it waits for. A recomputed segment i..j drains by the clock of its u_F + u_B, plus β times its time beyond
  that, rounded to the nearest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import OptionError
from .arrays import Arrays

ROUNDINGS = ("up", "sums")


@dataclass(frozen=True)
class Slots:
    """Sizes held in slots: out[i] of a_i, saved[i, k] of ā_i^k. room: bytes of all N slots."""

    N: int
    room: int
    out: np.ndarray
    saved: np.ndarray


def discretize(c: Arrays, mem_limit: int, N: int, rounding: str) -> Slots:
    """The sizes of a chain in slots at a limit of `mem_limit` bytes, by the rule `rounding`.

    N: requested slots; at petabytes there may be fewer, since the kernels multiply bytes by slots in 64 bits.
    """
    room = mem_limit - int(c.out[0])
    N = min(N, (2**63 - 1) // max(room, 1))
    rule = _up if rounding == "up" else _sums
    saved = np.stack([rule(column, N, room) for column in c.saved.T], axis=1)
    return Slots(N, room, rule(c.out, N, room), saved)


def _up(sizes: np.ndarray, N: int, room: int) -> np.ndarray:
    exact = [min(N + 1, -(-int(size) * N // max(room, 1))) for size in sizes]
    return np.array(exact, dtype=np.int32)


def _sums(sizes: np.ndarray, N: int, room: int) -> np.ndarray:
    total, before, made = 0, 0, [0]  # a_0 is charged separately
    for size in sizes[1:]:
        total += int(size)
        after = (2 * total * N + room) // (2 * max(room, 1))
        made.append(min(N + 1, after - before))
        before = after
    return np.array(made, dtype=np.int32)


def needed(sizes: np.ndarray, slots: Slots) -> np.ndarray:
    """Needs in slots, rounded up; those above the room become N + 1, which never fits."""
    up = -(-np.minimum(sizes, slots.room + 1) * slots.N // slots.room)
    return np.where(sizes > slots.room, slots.N + 1, up)


def clock(times: np.ndarray, beta: float) -> np.ndarray:
    """Slots drained up to the end of each stage: β times the running sum of `times`, rounded to the nearest."""
    return np.floor(np.minimum(beta * np.cumsum(times), 1e9) + 0.5).astype(np.int32)


def parse_slots(given: Any, option: str = "mem_slots") -> int:
    """Read an option that is a number of slots.

    Raises:
        OptionError: if it is not a whole number of at least 1.
    """
    if isinstance(given, bool) or not isinstance(given, (int, np.integer)) or given < 1:
        raise OptionError(f"{option} is {given!r}; give a whole number of at least 1")
    return int(given)
