"""How an estimate grows with the batch: everything is on the line through its values at two batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ..tape_profile import TapeProfile
from ..trace import Event, Made, Ran, Trace
from .estimate import Estimate


@dataclass(frozen=True)
class Growth:
    """A profile at a batch of `batch`, and `larger`, one of the same operations at a batch of `count`."""

    profile: TapeProfile
    batch: int
    larger: TapeProfile
    count: int
    _known: dict[int, TapeProfile] = field(default_factory=dict, compare=False)

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
        assert isinstance(self.profile, Estimate) and isinstance(self.larger, Estimate)
        return Growth(self.profile.moving, self.batch, self.larger.moving, self.count)

    def at(self, count: int) -> TapeProfile:
        """The profile at a batch of `count`."""
        if count not in self._known:
            self._known[count] = self._at(count)
        return self._known[count]

    def _at(self, count: int) -> TapeProfile:
        share = (count - self.batch) / (self.count - self.batch)
        one, other = self.profile, self.larger
        trace, batch = _between(one.trace, other.trace, share), _on(one.batch_bytes, other.batch_bytes, share)
        return replace(other, trace=trace, batch_bytes=batch)


def _stages(profile: Estimate) -> list[tuple[str, int]]:
    return [(stage.name, len(stage.forms)) for stage in profile.chain.stages]


def _shape(trace: Trace) -> object:
    """What is the same at all batches."""
    made = [(one.op, one.out, one.dies, one.later) for one in trace.made]
    ran = [(op.reads, op.writes, op.makes, op.at) for op in trace.ran]
    return made, ran, trace.saved, [(event.size > 0, event.freed, event.reads) for event in trace.backward]


def _between(one: Trace, other: Trace, share: float) -> Trace:
    def made(a: Made, b: Made) -> Made:
        return replace(a, nbytes=_on(a.nbytes, b.nbytes, share))

    def ran(a: Ran, b: Ran) -> Ran:
        peak, copies = _on(a.peak, b.peak, share), _on(a.copies, b.copies, share)
        return replace(a, peak=peak, copies=copies, seconds=_seconds(a.seconds, b.seconds, share))

    def event(a: Event, b: Event) -> Event:
        size = _on(abs(a.size), abs(b.size), share)
        return replace(a, size=size if a.size > 0 else -size, seconds=_seconds(a.seconds, b.seconds, share))

    return replace(
        one,
        made=tuple(map(made, one.made, other.made)),
        ran=tuple(map(ran, one.ran, other.ran)),
        backward=tuple(map(event, one.backward, other.backward)),
        beside=_on(one.beside, other.beside, share),
        states=_on(one.states, other.states, share),
    )


def _on(a: int, b: int, share: float) -> int:
    return max(0, round(a + share * (b - a)))


def _seconds(a: float, b: float, share: float) -> float:
    return max(0.0, a + share * (b - a))
