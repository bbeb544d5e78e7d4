"""What a policy says where it fits nothing: the smallest limit at which it is known to work."""

from __future__ import annotations

from collections.abc import Callable

from ...core.sizes import format_bytes
from ...errors import InfeasibleError

STEPS = 10


def refusal(policy: str, mem_limit: int, least: int, slots: int | None = None) -> InfeasibleError:
    """The error that names `least`, in bytes. slots: of a program that knows it to within one of them."""
    known, at = ("at least", "") if slots is None else ("about", f" at {slots} slots")
    return InfeasibleError(
        f"needs {known} {format_bytes(least)} ({least} bytes) with policy {policy}{at}; the limit is"
        f" {format_bytes(mem_limit)} ({mem_limit} bytes)",
        least,
    )


def limit_that_works(fits: Callable[[int], bool], low: int, high: int, steps: int = STEPS) -> int:
    """A limit in (low, high] that fits, `high` being one: the smallest but for (high - low) / 2^steps where limits
    behave."""
    for _ in range(steps):
        middle = (low + high) // 2
        if middle == low:
            break
        if fits(middle):
            high = middle
        else:
            low = middle
    return high
