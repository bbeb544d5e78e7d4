"""The error of a policy if nothing fits: it names the smallest limit at which the policy is known to work."""

from __future__ import annotations

from collections.abc import Callable

from ...core.sizes import format_bytes
from ...errors import InfeasibleError

STEPS = 10


def refusal(policy: str, mem_limit: int, least: int, slots: int | None = None) -> InfeasibleError:
    """The error that names `least`, in bytes. slots: if given, `least` is known to within one of so many slots."""
    known, at = ("at least", "") if slots is None else ("about", f" at {slots} slots")
    return InfeasibleError(
        f"needs {known} {format_bytes(least)} ({least} bytes) with policy {policy}{at}; the limit is"
        f" {format_bytes(mem_limit)} ({mem_limit} bytes)",
        least,
    )


def limit_that_works(fits: Callable[[int], bool], low: int, high: int, steps: int = STEPS) -> int:
    """A limit in (low, high] that fits, found by bisection; `high` must fit. If fitting is monotone, it is the smallest
    up to (high - low) / 2^steps."""
    for _ in range(steps):
        middle = (low + high) // 2
        if middle == low:
            break
        if fits(middle):
            high = middle
        else:
            low = middle
    return high
