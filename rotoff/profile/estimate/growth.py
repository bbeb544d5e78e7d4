"""How an estimate grows with the batch: everything is on the line through its values at two batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ..trace import Trace
from .estimate import Estimate


@dataclass(frozen=True)
class Growth:
    """A profile at a batch of `batch`, and `larger`, one of the same operations at a batch of `count`."""

    profile: Estimate
    batch: int
    larger: Estimate
    count: int
    _known: dict[int, Estimate] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, estimated: Callable[[int], Estimate], profile: Estimate, batch: int, count: int) -> Growth | None:
        """The growth; None if a larger batch takes other operations or stages. estimated: makes the profile of a batch.
        profile: of a batch of `batch`, where a dimension of 1 may save some operations."""
        larger, base = estimated(count), profile
        if _shape(base.trace) != _shape(larger.trace):
            batch *= 2
            base = estimated(batch) if batch < count else larger
        alike = _stages(base) == _stages(profile) and _shape(base.trace) == _shape(larger.trace)
        if not alike or base is larger:
            return None
        return cls(base, batch, replace(larger, like=tuple(base.chains)), count)

    @property
    def moving(self) -> Growth:
        """This for steps whose gradients are those of groups of parameters."""
        return Growth(self.profile.moving, self.batch, self.larger.moving, self.count)

    def at(self, count: int) -> Estimate:
        """The profile at a batch of `count`."""
        if count not in self._known:
            one, other = self.profile, self.larger
            line = partial(_on, share=(count - self.batch) / (self.count - self.batch))
            batch_bytes = line(one.batch_bytes, other.batch_bytes)
            self._known[count] = replace(other, trace=_between(one.trace, other.trace, line), batch_bytes=batch_bytes)
        return self._known[count]


def _stages(profile: Estimate) -> list[tuple[str, int]]:
    return [(stage.name, len(stage.forms)) for stage in profile.chain.stages]


def _shape(trace: Trace) -> object:
    """What is the same at all batches."""
    made = [(one.op, one.out, one.dies, one.later) for one in trace.made]
    ran = [(op.reads, op.writes, op.makes, op.at) for op in trace.ran]
    return made, ran, trace.saved, [(event.size > 0, event.freed, event.reads) for event in trace.backward]


def _between(one: Trace, other: Trace, line: Callable[[Any, Any], Any]) -> Trace:
    def part(a: Any, b: Any, *names: str) -> Any:
        return replace(a, **{name: line(getattr(a, name), getattr(b, name)) for name in names})

    def parts(a: Iterable[Any], b: Iterable[Any], *names: str) -> tuple[Any, ...]:
        return tuple(part(*pair, *names) for pair in zip(a, b, strict=True))

    trace: Trace = replace(
        part(one, other, "beside", "states"),
        made=parts(one.made, other.made, "nbytes"),
        ran=parts(one.ran, other.ran, "peak", "copies", "seconds"),
        backward=parts(one.backward, other.backward, "size", "seconds"),
    )
    return trace


def _on(a: Any, b: Any, share: float) -> Any:
    """Return what is on the line through two numbers, whose sign they have."""
    found = max(0.0, abs(a) + share * (abs(b) - abs(a)))
    found = round(found) if isinstance(a, int) else found
    return -found if a < 0 else found
