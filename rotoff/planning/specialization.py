"""Selects the course and the plan for each step. A new course is measured and planned on first use; the courses used
last are kept."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ..capture.recording import same_calls
from ..core.sizes import format_bytes
from ..errors import InfeasibleError, MeasureError
from ..io.cache import Cache
from ..profile.measure import Progress
from ..profile.optimizer_probe import UpdateCosts
from ..profile.profile import Profile
from ..runtime.links.pool import LinkPool
from ..runtime.replay import ReplayState
from ..runtime.step import Step
from ..runtime.taped_forward import TapedForward
from ..tensors.autocast import Autocast, autocast_as, autocast_now, in_region
from ..tensors.rng import Generators
from ..tensors.tree import flatten
from .course import LOOKS, Specialization, constants, family_of, signature
from .course_meter import CourseMeter, FormUse, Wanted
from .known_sizes import SEVERAL, KnownSizes, fits, lacks_times
from .options import Options
from .planner import least_limit, make_plan, useful_forms
from .request import Request
from .sizes import Sizes, covers, halves

logger = logging.getLogger("rotoff")
_OF_ONE_SIGNATURE = 8  # courses kept for each signature
SOON = 3  # limit / bytes that keeping everything takes, up to which a second size is timed
_STAGES = 20_000  # most stages of all kept courses, a few kilobytes each
STRAY_BYTES = 1 << 20  # by which forwards of the plain model may allocate more or less than the first
STRAY_SHARE = 16  # bytes held / such bytes, if these are more


class Sample(NamedTuple):
    """An input of a step, on which times can be measured later.

    Attributes:
        value: the chain's input, detached.
        key: its signature.
        autocast: the autocast state around the step.
        cached: whether autocast's cache was enabled.
        region: whether an autocast region was open.
    """

    value: Any
    key: Any
    autocast: Autocast
    cached: bool
    region: bool

    @classmethod
    def of(cls, value: Any, key: Any) -> Sample:
        """A sample of `value`, detached, with the current autocast state."""
        tensors, rebuild = flatten(value)
        alone = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        return cls(rebuild(alone), key, autocast_now(), torch.is_autocast_cache_enabled(), in_region())


class PlannedSize(NamedTuple):
    """The plan for one size of input.

    Attributes:
        shapes: shapes of the input's tensors.
        measured: whether its bytes were measured; if not, they were interpolated from other sizes.
        memory: expected peak of the step in bytes, in the terms of `mem_limit`.
        makespan: expected seconds of the step. None if everything is kept and times were never requested.
        overhead: expected seconds beyond those of keeping everything, as a share of the latter. None in the same case.
    """

    shapes: tuple[tuple[int, ...], ...]
    measured: bool
    memory: int
    makespan: float | None
    overhead: float | None


class Specializations:
    """The courses of `model`, measured and planned alike by all processes of `group`, if any.

    If keeping everything fits the request, a course has no times; `timed` measures them when they are needed.

    Attributes:
        request: the request for every plan; None: none yet.
        latest: the course measured, planned or taken last.
        lets_go: as for `Request`, as the last backward showed.
        update_times: optimizers' update times, measured by `PlacedPlanner`.
        meter: measures courses.

    Args:
        root, model, options, links, group, cache: as for `CourseMeter`.
    """

    def __init__(
        self,
        root: nn.Module,
        model: nn.Module,
        options: Options,
        links: LinkPool,
        group: Any,
        cache: Cache,
    ) -> None:
        self.request: Request | None = None
        self.latest: Specialization | None = None
        self.lets_go = False
        self.update_times: dict[Any, UpdateCosts] = {}
        self.meter = CourseMeter(root, model, options, links, group, cache)
        self._model = model
        self._group = group
        self._sizes = KnownSizes(options.interpolate and group is None)
        self._known: OrderedDict[Any, deque[Specialization]] = OrderedDict()
        self._sample: Sample | None = None  # of the latest course, while that has no times
        self._warned = self._warned_of_sizes = self._told_sizes = False
        self._ceiling: tuple[Any, Sizes] | None = None  # family and sizes of ``up_to``

    def __iter__(self) -> Iterator[Specialization]:
        """All kept courses."""
        return (course for courses in self._known.values() for course in courses)

    def measure(
        self,
        value: Any,
        progress: Progress | bool | None = None,
        repeats: int | None = None,
        timed: bool = True,
        also: Sequence[Specialization] = (),
        taped: TapedForward | None = None,
        request: Request | None = None,
        room: Request | None = None,
    ) -> Specialization:
        """Measure the course for the chain's input `value`.

        Args:
            progress, repeats: as for `Checkpointable.measure`.
            timed: whether times must be measured; if not, they may be interpolated from other sizes.
            also: courses that the new one must cover and replaces.
            taped: the current step's forward; it is recorded in place of a separate one.
            request: for the plan. If keeping everything fits it, no times are measured.
            room: what keeping everything has to fit instead of `request`.
        """
        began = time.perf_counter()
        tapes = [tape for one in also for tape in (one.captured.tape, *one.seen)]
        like = None if timed or also else self._sizes.told(*family_of(signature(value, self._model)))
        wanted = Wanted(value, progress, repeats, tapes, like, taped, use=self._form_use(request))
        room = room or request
        surely = room is not None and self._sizes.exceeds(*family_of(signature(value, self._model)), room)
        captured, profile = self.meter.measure(wanted, None if surely else _untimed_if(room))
        course = Specialization(profile, captured, hint=constants(value))
        key = signature(value, self._model)
        known = self._known.setdefault(key, deque(maxlen=_OF_ONE_SIGNATURE))
        for one in also:
            known.remove(one)
        known.appendleft(course)
        self._learn(course, key, time.perf_counter() - began)
        self._now(course, value, key)
        return course

    def _form_use(self, request: Request | None) -> FormUse | None:
        """What smaller forms are for, in one process that plans for `request` by the solver."""
        if request is None or request.policy is not None or request.planner is not None or self._group is not None:
            return None
        return FormUse(request.limit, partial(useful_forms, request=request))

    def _learn(self, course: Specialization, key: Any, seconds: float) -> None:
        """Remember that `course` was measured on an input of the signature `key`, which took `seconds`."""
        self._sizes.learn(course, *family_of(key), seconds)
        self._drop()

    def _now(self, course: Specialization, value: Any, key: Any) -> None:
        """Make `course` the latest; `value`, of the signature `key`, is an input for it."""
        self.latest = course
        self._sample = None if course.profile.complete else Sample.of(value, key)

    def timed(self, latest: Specialization, together: bool = False, forms: bool = False) -> Specialization:
        """The `latest` course with times, which are measured now on the input of the last step if it has none.

        Args:
            together: whether all processes of the group make this call.
            forms: whether it must have all smaller forms.

        Raises:
            MeasureError: in a group, unless `together` or the course has times.
        """
        if latest.profile.complete if forms else latest.profile.timed:
            return latest
        if self._group is not None and not together:
            raise MeasureError(
                "no times have been measured, since keeping everything fits the limit; call model.measure(*sample) in"
                " all processes of the group"
            )
        assert self._sample is not None
        return self._time_again(latest, self._sample)

    def _time_again(self, course: Specialization, sample: Sample, request: Request | None = None) -> Specialization:
        """`time` outside of a step, with the sample's autocast state, and generators restored."""
        modes = [mode for behaviour in course.profile.behaviours for mode in behaviour.modes]
        generators = Generators(self.meter.device_for(sample.value))
        with autocast_as(sample.autocast, sample.cached, sample.region), ReplayState(generators, (), (), modes).again():
            return self.time(course, sample.value, sample.key, request)

    def time(self, course: Specialization, value: Any, key: Any, request: Request | None = None) -> Specialization:
        """Measure the times and the smaller forms of `course`; in a group, all processes together.

        Args:
            value: the chain's input, of the signature `key`.
            request: what forms are for; None: all are measured.

        Returns:
            The new course for that input.
        """
        planned = course.plan is not None
        if self._sizes.is_measured(course):
            began = time.perf_counter()
            wanted = Wanted(value, captured=course.captured, use=self._form_use(request))
            course.become(self.meter.measure(wanted)[1])
            self._learn(course, key, time.perf_counter() - began)
            self._now(course, value, key)
            found = course
        else:  # it was interpolated
            self._known.pop(key, None)
            found = self.measure(value)
        if planned and self.request is not None:
            found.plan = make_plan(found.profile, self.request, self._group)
        return found

    def _drop(self) -> None:
        """Drop the signatures used least recently beyond `_STAGES` stages."""
        while len(self._known) > 1 and sum({id(one): len(one.profile.chain) for one in self}.values()) > _STAGES:
            self._sizes.forget(self._known.popitem(last=False)[1])

    def _between_sizes(self, key: Any) -> Specialization | None:
        """The course for an input of new sizes, interpolated from others; None if that is impossible."""
        assert self.request is not None
        course = self._sizes.between(*family_of(key), self.request)
        if course is not None:
            self._known[key] = deque([course], maxlen=_OF_ONE_SIGNATURE)
            self._drop()
        return course

    def measure_up_to(self, value: Any, request: Request) -> None:
        """Measure the largest input `value` and halves of it, so that sizes in between can be interpolated.

        Raises:
            InfeasibleError: if it does not fit; the message names smaller inputs that do.
        """
        largest = self.measure(value, request=request)
        key = signature(value, self._model)
        family, sizes = family_of(key)
        smaller = [half for half in halves(value) if self._measured_smaller(half, largest, request)]
        self._now(largest, value, key)
        vague = [stage.name for stage in largest.profile.stages if stage.varying]
        if vague:
            logger.warning(
                "rotoff: bytes of %s depend on the data; plans for smaller inputs do not include them",
                ", ".join(vague),
            )
        if not largest.profile.timed or request.planner is not None:  # it fits, or a planner says whether it does
            least = 0
        else:
            least = least_limit(largest.profile, request)
        if least > request.mem_limit:
            fitting = [
                self._sizes.largest_that_fits(family_of(signature(half, self._model))[1], sizes, family, request)
                for half in smaller
            ]
            told = " and ".join(str([list(shape) for shape in one]) for one in fitting if one is not None)
            raise InfeasibleError(
                f"the training step {request} on the input of up_to, {[list(shape) for shape in sizes]}, needs at least"
                f" {format_bytes(least)} ({least} bytes), and the limit is {format_bytes(request.mem_limit)}"
                f" ({request.mem_limit} bytes)"
                + (f"; inputs of {told} fit" if told else "; half of it does not fit either"),
                least,
            )
        self._ceiling = family, sizes

    def _measured_smaller(self, value: Any, largest: Specialization, request: Request) -> bool:
        """Measure a smaller input. Whether that worked and no stage takes more bytes than with the `largest`."""
        try:
            found = self.measure(value, timed=False, request=None if largest.profile.timed else request)
        except MeasureError as error:  # the model need not accept this size
            logger.info("rotoff: an input of half the size is not measured, since %s", error)
            return False
        pairs = zip(found.profile.chain.stages, largest.profile.chain.stages, strict=False)
        more = [a.name for a, b in pairs if a.saved_bytes > b.saved_bytes or a.output_bytes > b.output_bytes]
        if more:
            logger.warning(
                "rotoff: %s take more bytes on an input of half the size, so smaller inputs may not fit",
                ", ".join(more),
            )
        return not more

    def ask(self, request: Request) -> None:
        """Plan the latest course for `request`, and the others when a step takes them. If that fails, the old request
        stays."""
        course = self.latest
        if course is not None:
            formed = course.profile.formed_for == request.limit
            if self._sample is not None and not (formed or fits(course.profile, request)):
                course = self._time_again(course, self._sample, request)
            course.plan = make_plan(course.profile, request, self._group)
        self.request = request
        for course in self:
            course.stray, course.grown, course.looks = None, None, LOOKS
            if course is not self.latest:
                course.plan = None

    def take(self, value: Any) -> tuple[Specialization | None, TapedForward | None]:
        """The planned course for the chain's input `value`, None for the plain model; and this step's recorded forward,
        if it was recorded to measure or extend the course."""
        taped: TapedForward | None = None

        def measured_here(also: deque[Specialization] | None = None) -> Specialization:
            nonlocal taped
            taped = TapedForward(self._model, value, self.meter.device_for(value))
            if also:
                return self._made_one(value, also, taped)
            return self.measure(value, timed=False, taped=taped, request=self.request, room=self._enough(value))

        def looked_at(course: Specialization, key: Any) -> Specialization:
            nonlocal taped
            taped = TapedForward(self._model, value, self.meter.device_for(value))
            return self._larger(course, value, key, taped)

        try:
            course = self._taken(value, measured_here, looked_at)
            if taped is None and course is not None and self._group is None and course.wants_more:
                taped = TapedForward(self._model, value, self.meter.device_for(value))
                course.seen.append(self.meter.record(value, taped).tape)  # for the next plan
            return course, taped if taped is not None and taped.usable else None
        except BaseException:
            if taped is not None:
                taped.put_back()
            raise

    def _enough(self, value: Any) -> Request:
        """The request that a course must fit to be left without times. If sizes vary and none has times, it has the
        share `1 / SOON` of the limit: larger inputs will soon need them, and at smaller ones they take less."""
        assert self.request is not None
        family, sizes = family_of(signature(value, self._model))
        known = self._sizes.sizes(family)
        if self._ceiling is not None or not known or sizes in known or self._sizes.are_timed(family):
            return self.request
        return replace(self.request, mem_limit=self.request.mem_limit // SOON)

    def _known_course(
        self,
        key: Any,
        hint: str,
        measured_here: Callable[..., Specialization],
        looked_at: Callable[[Specialization, Any], Specialization],
        can_measure: bool,
    ) -> Specialization | None:
        """The course expected for an input of the signature `key`, measured again if steps have left it; None if there
        is none yet."""
        known = self._known.get(key)
        if not known:
            return None
        self._known.move_to_end(key)
        if len(known) > 1 and known[0].left:  # try another course than the one that the last step left
            known[0].left = False
            known.rotate(-1)
        course = next((one for one in known if one.hint == hint), known[0])
        if self._group is not None or not can_measure:
            return course
        if sum(one.missed for one in known) >= course.patience:
            return measured_here(known)
        if course.measure_again and len(known) < _OF_ONE_SIGNATURE:
            logger.info("rotoff: measuring again, since the model's forward makes other calls than before")
            course.measure_again = False
            return measured_here()
        if course.grown == hint and course.looks:
            return looked_at(course, key)
        return course

    def _taken(
        self,
        value: Any,
        measured_here: Callable[..., Specialization],
        looked_at: Callable[[Specialization, Any], Specialization],
    ) -> Specialization | None:
        assert self.request is not None
        key = signature(value, self._model)
        # measuring needs the profiler, of which there is one; a group's processes must all measure or none
        can_measure = self._group is not None or not torch.autograd._profiler_enabled()
        course = self._known_course(key, constants(value), measured_here, looked_at, can_measure)
        if (
            course is not None
            and lacks_times(course, self.request)
            and not (can_measure and self._sizes.is_measured(course))
        ):
            course = None
            del self._known[key]
        if course is None:
            self._say_larger(key)
            course = self._between_sizes(key)
        if course is not None and can_measure and self._sizes.too_loose(course, *family_of(key)):
            course = None
            del self._known[key]
        if course is None:
            if not any(t.requires_grad for t in (*self._model.parameters(), *flatten(value)[0])):
                return None
            if not can_measure:
                logger.warning(
                    "rotoff: a step with a new input shape runs as the plain model, without a limit, since it cannot be"
                    " measured while a profiler is active; measure before, by model.measure(*sample)"
                )
                return None
            self._say_new(key)
            course = measured_here()
        self._known.move_to_end(key)
        self._look_at_loop(course)
        measured = can_measure and self._sizes.is_measured(course)
        others = measured and course.profile.formed_for not in ("", self.request.limit)
        if lacks_times(course, self.request) or (others and course.plan is None):
            course = self.time(course, value, key, self.request)
        if course.plan is None:
            self._sizes.plan(course, family_of(key)[0], self.request, self._group)
        elif self._group is None:
            self._sizes.improve(course, family_of(key)[0], self.request)
        self._now(course, value, key)
        return course

    def _look_at_loop(self, course: Specialization) -> None:
        """Update `lets_go` from the last backward, and drop the course's plan if that changes whether keeping
        everything fits."""
        starts = course.captured.starts
        assert self.request is not None
        if starts is None or starts.lets_go is None or self._group is not None or self.request.planner is not None:
            return
        if starts.lets_go != self.request.lets_go:
            self.lets_go = starts.lets_go
            self.request = replace(self.request, lets_go=self.lets_go)
        if course.plan is None or course.plan.lets_go == self.lets_go or self.request.policy is not None:
            return
        if fits(course.profile, self.request) != course.plan.keeps_all:
            if not self.lets_go:
                logger.warning(
                    "rotoff: this loop holds outputs beside the one that backward_from names, and the steps before it"
                    " did not; the last step may have exceeded the limit by them, and the next steps are planned again"
                )
            course.plan = None
        else:
            course.plan = replace(course.plan, lets_go=self.lets_go)

    def _say_larger(self, key: Any) -> None:
        """Log a warning if an input is larger than ``up_to``."""
        family, sizes = family_of(key)
        if self._ceiling is not None and self._ceiling[0] == family and not covers(self._ceiling[1], sizes):
            logger.warning(
                "rotoff: the input %s is larger than up_to, so it is planned now, and measured if necessary",
                [list(one) for one in sizes],
            )

    def _say_new(self, key: Any) -> None:
        """Log that an input of a new kind or size is measured and, once, how to measure less often."""
        told = ", ".join(f"{dtype.removeprefix('torch.')} {list(shape)}" for shape, dtype, *_ in key[0])
        logger.info("rotoff: measuring, since the model gets an input of a new kind or size: %s", told)
        family, sizes = family_of(key)
        known = self._sizes.sizes(family)
        if len(known) < SEVERAL or self._told_sizes:
            return
        self._told_sizes = True
        every = [*known, sizes]
        varying = [
            (n, d) for n, shape in enumerate(sizes) for d in range(len(shape)) if len({one[n][d] for one in every}) > 1
        ]
        told = "; ".join(
            f"dimension {d} of tensor {n}: {', '.join(str(one[n][d]) for one in every)}" for n, d in varying[:4]
        )
        logger.warning(
            "rotoff: the input's sizes vary (%s). Most are planned from those that were measured; larger ones may have"
            " to be measured, too, so pass the largest once, to compute_sequence(limit, up_to=largest)",
            told,
        )

    def plans(self) -> list[PlannedSize]:
        """One row for each course that has a plan."""
        found = []
        for key, known in self._known.items():
            sizes = family_of(key)[1]
            for one in known:
                if one.plan is not None and self.request is not None:
                    own = self._sizes.is_measured(one)
                    told, makespan, overhead = self.request.expected_bytes(one.profile, one.plan), None, None
                    if one.profile.timed:
                        makespan = one.plan.trace.makespan
                        overhead = makespan / one.profile.chain.compute_time - 1
                    found.append(PlannedSize(sizes, own, told, makespan, overhead))
        return found

    def ran_plain(self, course: Specialization, value: Any, grown: int) -> None:
        """Record that the forward for `value` ran as the plain model, whose allocated bytes have `grown`."""
        assert course.plan is not None
        more, allowed = grown - course.plan.held_bytes, max(STRAY_BYTES, course.plan.held_bytes // STRAY_SHARE)
        if course.stray is None:
            course.stray = min(max(0, more), allowed)
        if more - course.stray > allowed:
            self._took_more(course, value, more - course.stray)

    def _told(self, course: Specialization, more: int) -> tuple[bool, str]:
        """Return whether a step that holds `more` bytes than `course` is charged exceeds the limit, and the figures."""
        assert self.request is not None
        assert course.plan is not None
        limit = self.request.mem_limit
        nbytes = min(course.plan.trace.peak_bytes, limit) + more
        return nbytes > limit, f"it takes about {format_bytes(nbytes)}, and the limit is {format_bytes(limit)}"

    def _took_more(self, course: Specialization, value: Any, more: int) -> None:
        """A step on `value` made the calls of `course` and held `more` bytes than it is charged. If that exceeds the
        limit, look at the next steps; warn once."""
        exceeds, told = self._told(course, more)
        if not exceeds:
            return
        if course.interpolated:
            self._doubt(family_of(signature(value, self._model))[0])
        course.grown = constants(value) if self._group is None else None
        if self._warned_of_sizes:
            return
        self._warned_of_sizes = True
        logger.warning(
            "rotoff: a step made tensors larger than %s: %s; %s",
            "those at other sizes of the input had shown"
            if course.interpolated
            else "in the batch that was measured (by its data, a number among the arguments, or the model's state)",
            told,
            "measure with a batch that needs the most, or plan with a lower limit"
            if self._group is not None
            else "when such a step comes again, it is measured and planned",
        )

    def _doubt(self, family: Any) -> None:
        """Drop what was interpolated for inputs of the family: a size took more bytes than charged."""
        self._sizes.doubt(family)
        for key in [key for key in self._known if family_of(key)[0] == family]:
            if any(one.interpolated for one in self._known[key]):
                del self._known[key]

    def _larger(self, course: Specialization, value: Any, key: Any, taped: TapedForward) -> Specialization:
        """The course for this step, which is recorded, and is measured and planned if its tensors are larger than those
        of `course`; otherwise `course`."""
        assert self.request is not None
        began, tape = time.perf_counter(), course.captured.tape
        captured = self.meter.record(value, taped, (tape, *course.seen) if tape.random else ())
        larger = sum(captured.tape.tensor_bytes) > sum(tape.tensor_bytes)
        if not larger or not (tape.random or same_calls(captured.tape, tape)):
            course.looks -= 1
            return course
        logger.info("rotoff: measuring again, since the tensors of this step are larger than before")
        like = self._sizes.told(*family_of(key))
        wanted = Wanted(value, known=like, taped=taped, captured=captured, use=self._form_use(self.request))
        _, profile = self.meter.measure(wanted, _untimed_if(self.request))
        found = Specialization(profile, captured, hint=constants(value), patience=course.patience, looks=course.looks)
        try:
            self._sizes.plan(found, family_of(key)[0], self.request, None)
        except InfeasibleError as error:
            logger.info("rotoff: steps with larger tensors are not planned, since %s", error)
            course.looks = 0  # nor are others looked for
            return course
        known = self._known[key]
        if course.hint == found.hint:
            known.remove(course)
        known.appendleft(found)
        self._learn(found, key, time.perf_counter() - began)
        return found

    def followed(self, course: Specialization, value: Any, step: Step) -> None:
        """Record whether `step`, which has run its forward on `value`, took `course`. Warn once if it took another, and
        once if its tensors were larger than the limit allows."""
        if step.more_bytes > 0 and step.astray is None:
            self._took_more(course, value, step.more_bytes)
        if step.astray is None or (course.captured.tape.random and not step.unknown):
            return  # a random forward that only left out calls has kept the plan
        course.miss(step.astray)
        if not step.unknown or self._warned:
            return
        self._warned = True
        exceeds, told = self._told(course, step.more_bytes)
        logger.warning(
            "rotoff: the model's forward took another course than the planned one. Its result is that of the plain"
            " model; its bytes may exceed the limit%s until that course is planned, which happens when it recurs",
            f" ({told})" if exceeds else "",
        )

    def _made_one(self, value: Any, known: deque[Specialization], taped: TapedForward | None) -> Specialization:
        """One course that covers all `known` ones and the forward for `value`, since steps keep switching between them;
        the first of `known`, if the limit is too small for it."""
        assert self.request is not None
        logger.info("rotoff: measuring all courses of the model's forward as one, since steps switch between them")
        before = list(known)
        course = self.measure(value, timed=False, also=before, taped=taped, request=self.request)
        course.patience = 2 * before[0].patience
        try:
            course.plan = make_plan(course.profile, self.request, self._group)
        except InfeasibleError:
            known.clear()
            known.extend(before)
            for one in before:
                one.missed, one.patience = 0, course.patience
            return before[0]
        return course


def _untimed_if(request: Request | None) -> Callable[[Profile], bool] | None:
    """Return what says of a profile that it needs no times, since keeping everything fits `request`; None if times are
    needed in any case."""
    if request is None or request.policy is not None or request.planner is not None:
        return None
    return partial(fits, request=request)
