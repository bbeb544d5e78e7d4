"""Courses measured at some input sizes, and courses interpolated from them for other sizes."""

from __future__ import annotations

import bisect
import time
from collections.abc import Collection, Iterable
from typing import Any

from ..core.sequence import OpKind
from ..errors import InfeasibleError
from ..profile.profile import Profile
from ..profile.timing.timing_cache import KnownTimes, known_times
from .course_meter import OtherSizes
from .memory_account import reported_bytes
from .planner import GOOD, KnownPlan, least_limit, make_plan, plan_everything
from .request import Request
from .sizes import MeasuredSizes, Sizes, rounded, saved_bytes, volume
from .specialization import Specialization

_FAMILIES = 8  # families whose sizes are kept
_NEAREST = 4  # plans of other sizes that are tried for a new one
SEVERAL = 2  # measured sizes, from which on a warning is logged and times of unused forms are dropped
WORTH = 4  # seconds lost by steps / seconds of a search from which on the search is made
LOOSE = 1.2  # bytes charged / bytes needed from which on an interpolated size counts as too loose
Measured = MeasuredSizes[Specialization]


class KnownSizes:
    """Courses by input size. A `family` is all that inputs of different sizes have in common (`family_of`).

    Args:
        varies: whether to interpolate between sizes; if not, nothing is remembered here.
    """

    def __init__(self, varies: bool) -> None:
        self._varies = varies
        self._measured: dict[Any, Measured] = {}  # by family
        self._rounded: dict[Any, Specialization] = {}  # by family and sizes that were rounded up
        self._searching = 0.0  # seconds that the last search for a better plan took

    def learn(self, course: Specialization, family: Any, sizes: Sizes, seconds: float) -> None:
        """Remember that `course` was measured at `sizes`, which took `seconds`."""
        if not self._varies or any(0 in shape for shape in sizes):  # an empty input tells nothing of others
            return
        several = self._measured.setdefault(family, MeasuredSizes())
        times_too = course.profile.timed and not self.are_timed(family)  # the next sizes only need bytes
        several.add(sizes, course, course.captured.tape.tensor_bytes, course.captured.tape.picks)
        several.owed = 0.0
        if not (times_too and several.price):
            several.price = seconds / volume(sizes)
        while len(self._measured) > _FAMILIES:
            self._measured.pop(next(iter(self._measured)))
        self._rounded = {of: one for of, one in self._rounded.items() if of[0] != family}  # now better known

    def doubt(self, family: Any) -> None:
        """A step at an interpolated size held more bytes than charged: interpolate more carefully from now on."""
        if family in self._measured:
            self._measured[family].doubt()
        self._rounded = {of: one for of, one in self._rounded.items() if of[0] != family}

    def forget(self, courses: Collection[Specialization]) -> None:
        """Forget those of `courses` that were interpolated."""
        gone = {id(one) for one in courses}
        self._rounded = {of: one for of, one in self._rounded.items() if id(one) not in gone}

    def sizes(self, family: Any) -> list[Sizes]:
        """The measured sizes of the family."""
        return self._measured[family].sizes if family in self._measured else []

    def are_timed(self, family: Any) -> bool:
        """Whether a measured size of the family has times."""
        return any(one.profile.timed for one in self._measured.get(family, ()))

    def exceeds(self, family: Any, sizes: Sizes, request: Request) -> bool:
        """Whether keeping everything at `sizes` surely exceeds the limit, as the largest measured size tells."""
        rows = zip(self.sizes(family), self._measured.get(family, ()), strict=True)
        at, largest = max(rows, key=lambda row: volume(row[0]), default=(sizes, None))
        return largest is not None and saved_bytes(largest.profile) * volume(sizes) / volume(at) > request.mem_limit

    def between(self, family: Any, sizes: Sizes, request: Request) -> Specialization | None:
        """A planned course for an input of new `sizes`, interpolated from measured ones; None if that is impossible."""
        measured = self._measured.get(family)
        if measured is None:
            return None
        for wanted in dict.fromkeys((rounded(sizes), sizes)):  # the exact size may fit when the rounded one does not
            course = self._rounded.get((family, wanted))
            if course is None or lacks_times(course, request):
                course = self._made(measured, wanted, request)
            if course is not None:
                self._rounded[family, wanted] = course
                return course
        return None

    def _made(self, measured: Measured, wanted: Sizes, request: Request) -> Specialization | None:
        """A course with a plan for all sizes up to `wanted`."""
        near = measured.near(wanted)
        if near is None:
            return None
        vague = not near.profile.timed or (len(measured) == 1 and near.loose >= LOOSE)
        if vague and not fits(near.profile, request):
            return None  # a second measured size makes the interpolation much tighter
        like = near.like
        course = Specialization(near.profile, like.captured, hint=like.hint, loose=near.loose, interpolated=True)
        try:
            self._plan(course, request, self._plans(measured, course.profile), thorough=False)
        except InfeasibleError:
            return None  # it may fit all the same, since it may need less than it is charged
        course.like(like)
        return course

    def plan(self, course: Specialization, family: Any, request: Request, group: Any) -> None:
        """Plan a measured course, by a plan of another size if one fits."""
        near = self._plans(self._measured.get(family, ()), course.profile)
        if group is None:
            self._plan(course, request, near)
        else:
            course.plan = make_plan(course.profile, request, group, near)

    def _plan(self, course: Specialization, request: Request, near: list[KnownPlan], thorough: bool = True) -> None:
        course.plan = plan = make_plan(
            course.profile, request, near=near, thorough=thorough or not near, better=course.borrowed
        )
        slow = plan.trace.makespan > GOOD * course.profile.chain.compute_time
        again = any(plan.sequence.ops == other.sequence.ops for _, other in near)
        # with a `device_limit` another plan would move parameters between the steps of different sizes
        course.borrowed = slow and again and not course.borrowed and request.planner is None
        course.lost = 0.0

    def improve(self, course: Specialization, family: Any, request: Request) -> None:
        """Search for a better plan than the one of another size, once steps have lost several times what that takes."""
        if not course.borrowed or course.plan is None or not course.profile.timed:
            return
        course.lost += course.plan.trace.makespan - course.profile.chain.compute_time
        if course.lost < WORTH * self._searching:
            return
        began = time.perf_counter()
        self.plan(course, family, request, None)
        self._searching = time.perf_counter() - began

    def too_loose(self, course: Specialization, family: Any, sizes: Sizes) -> bool:
        """Whether to measure the `sizes` of this step now: by planning for more bytes than they need, steps have lost
        as much time as measuring takes."""
        measured = self._measured.get(family)
        if course.loose < LOOSE or course.plan is None or course.plan.keeps_all or measured is None:
            return False
        more = course.plan.trace.makespan - course.profile.chain.compute_time
        measured.owed += max(0.0, more)
        return more > 0 and measured.owed > measured.price * volume(sizes)

    def _plans(self, measured: Iterable[Specialization], profile: Profile) -> list[KnownPlan]:
        every = {id(one): one for one in (*measured, *self._rounded.values()) if one.plan is not None}
        nearest = sorted(every.values(), key=lambda one: abs(saved_bytes(one.profile) - saved_bytes(profile)))
        return [(one.profile, one.plan) for one in nearest[:_NEAREST] if one.plan is not None]

    def told(self, family: Any, sizes: Sizes) -> OtherSizes | None:
        """The last measured size of the family, and the times interpolated for `sizes`."""
        measured = self._measured.get(family)
        if measured is None:
            return None
        last = measured.last
        names = [stage.name for stage in (*last.profile.prefix, *last.profile.stages)]
        return OtherSizes(last.captured.tape, names, self._times(measured, sizes))

    def _times(self, measured: Measured, sizes: Sizes) -> KnownTimes | None:
        """The times for `sizes`. From the third size on, only forms that plans have used are included, unless every
        plan keeps everything. No forms are included if they are yet to be found."""
        timed = [(at, one) for at, one in zip(measured.sizes, measured, strict=True) if one.profile.timed]
        if not timed:
            return None
        near = measured.near(sizes)
        if near is not None and near.profile.timed:
            times = known_times(near.profile)
        else:
            times = known_times(timed[-1][1].profile, volume(sizes) / volume(timed[-1][0]))
        planned = [(one, one.plan) for one in measured if one.plan is not None and not one.plan.keeps_all]
        if not planned and timed[-1][1].profile.formed_for:  # no limit has needed a form yet
            return times._replace(stages=tuple(row._replace(forms=None) for row in times.stages))
        if not planned or len(measured) < SEVERAL:
            return times
        used = {
            (op.stage, one.profile.behaviours[op.stage - 1].forms[op.form - 1].identity)
            for one, plan in planned
            for op in plan.sequence.ops
            if op.kind is OpKind.F_SEL
        }
        rows = enumerate(times.stages, start=1)
        return times._replace(
            stages=tuple(
                row._replace(forms=tuple(form for form in row.forms or () if (i, form.identity) in used))
                for i, row in rows
            )
        )

    def largest_that_fits(self, low: Sizes, high: Sizes, family: Any, request: Request) -> Sizes | None:
        """The largest of the sizes from `low` to `high` with a plan within the limit; None if `low` has none."""

        def at(step: int) -> Sizes:
            return tuple(
                tuple(a + (b - a) * step // most for a, b in zip(one, other, strict=True))
                for one, other in zip(low, high, strict=True)
            )

        def within(step: int) -> bool:
            near = self._measured[family].near(at(step))
            return near is not None and least_limit(near.profile, request) <= request.mem_limit

        most = max(b - a for one, other in zip(low, high, strict=True) for a, b in zip(one, other, strict=True))
        if not within(0):
            return None
        return at(bisect.bisect_left(range(1, most + 1), True, key=lambda step: not within(step)))


def fits(profile: Profile, request: Request) -> bool:
    """Whether keeping everything satisfies `request`; then no times are needed."""
    if request.policy is not None or request.planner is not None:
        return False
    everything = plan_everything(profile, request.plain, request.lets_go, request.in_flight)
    return reported_bytes(profile, everything) <= request.mem_limit


def lacks_times(course: Specialization, request: Request) -> bool:
    """Whether `course` must be timed before it can be planned for `request`."""
    return course.plan is None and not course.profile.timed and not fits(course.profile, request)
