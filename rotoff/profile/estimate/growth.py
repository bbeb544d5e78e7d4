"""How an estimate grows with the batch: everything is on the line through its values at two batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from ..trace import Trace
from .estimate import Estimate

_NUMBERS = {"nbytes", "peak", "copies", "gathered", "size", "seconds"}


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
        profile: of a batch of `batch`, where a dimension of 1 may save copies."""
        larger, base = estimated(count), profile
        if shape_of(base.trace) != shape_of(larger.trace) and (filled := _filled(profile, larger, batch / count)):
            base = filled
        elif shape_of(base.trace) != shape_of(larger.trace):
            batch *= 2
            base = estimated(batch) if batch < count else larger
        alike = _stages(base) == _stages(profile) and shape_of(base.trace) == shape_of(larger.trace)
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
            one, other = ((of.trace, of.batch_bytes) for of in (self.profile, self.larger))
            trace, batch_bytes = _between(one, other, (count - self.batch) / (self.count - self.batch))
            self._known[count] = replace(self.larger, trace=trace, batch_bytes=batch_bytes)
        return self._known[count]


def _stages(profile: Estimate) -> list[tuple[str, int]]:
    return [(stage.name, len(stage.forms)) for stage in profile.chain.stages]


def shape_of(trace: Trace) -> object:
    """What is the same at all batches."""
    made = [(one.op, one.out, one.dies, one.later) for one in trace.made]
    ran = [(op.reads, op.writes, op.makes, op.at) for op in trace.ran]
    return made, ran, trace.saved, [(event.size > 0, event.freed, event.reads) for event in trace.backward]


def _filled(profile: Estimate, larger: Estimate, share: float) -> Estimate | None:
    """`profile` with the operations of `larger` that it lacks, in one place, such as copies that a dimension of 1
    saves. They take `share` of their bytes and seconds there. None if the two differ in more."""
    few, many = profile.trace, larger.trace
    pairs = enumerate(zip(few.ran, many.ran, strict=False))
    first = next((n for n, (a, b) in pairs if a.operator != b.operator), len(few.ran))
    last = first + len(many.ran) - len(few.ran)
    ran = [*few.ran[:first], *(_scaled(op, share) for op in many.ran[first:last]), *few.ran[first:]]
    new = [_scaled(one, share) for one in many.made if first <= one.op < last]
    before = [one for one in few.made if one.op < first]
    made = [*before, *new, *few.made[len(before) :]]
    alike = [[(op.operator, len(op.makes)) for op in ops] for ops in (ran, many.ran)]
    events = [[(one.size > 0, one.size < 0, one.kept, one.reads is None) for one in of.backward] for of in (few, many)]
    if alike[0] != alike[1] or len(made) != len(many.made) or events[0] != events[1]:
        return None
    numbers = {"made": made, "ran": ran, "backward": few.backward}
    told = {
        name: tuple(replace(one, **_numbers(other)) for one, other in zip(getattr(many, name), found, strict=True))
        for name, found in numbers.items()
    }
    trace = replace(many, **told, beside=few.beside, states=few.states)  # type: ignore[arg-type]
    return replace(larger, trace=trace, batch_bytes=profile.batch_bytes)


def _numbers(one: Any) -> dict[str, Any]:
    """Bytes and seconds of a part of a trace."""
    return {field.name: getattr(one, field.name) for field in fields(one) if field.name in _NUMBERS}


def _scaled(one: Any, share: float) -> Any:
    return replace(one, **{name: type(value)(share * value) for name, value in _numbers(one).items()})


def _between(a: Any, b: Any, share: float) -> Any:
    """Return what is on the line through two values, which differ in numbers alone. A number keeps its sign."""
    if a == b:
        return a
    if isinstance(a, tuple):
        return tuple(_between(*pair, share) for pair in zip(a, b, strict=True))
    if is_dataclass(a):
        names = [field.name for field in fields(a)]
        return replace(a, **{name: _between(getattr(a, name), getattr(b, name), share) for name in names})  # type: ignore[type-var]
    found = max(0.0, abs(a) + share * (abs(b) - abs(a)))
    found = round(found) if isinstance(a, int) else found
    return -found if a < 0 else found
