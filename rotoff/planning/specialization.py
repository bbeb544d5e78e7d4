"""Which course a step takes: what is known of a model, for each course that its forward has taken, and its plan.

A new course is measured and planned on sight; those seen last are kept.
"""

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

from ..core.sizes import format_bytes
from ..errors import InfeasibleError, MeasureError
from ..io.cache import Cache
from ..profile.measure import Progress
from ..runtime.interpreter import Step
from ..runtime.links.pool import LinkPool
from ..runtime.replay import ReplayState
from ..runtime.taped_forward import TapedForward
from ..tensors.autocast import Autocast, autocast_as, autocast_now
from ..tensors.rng import Generators
from ..tensors.tree import flatten
from .course import Specialization, constants, family_of, signature
from .course_meter import CourseMeter, Wanted
from .known_sizes import SEVERAL, KnownSizes, fits, lacks_times
from .memory_account import expected_bytes
from .options import Options
from .planner import least_limit, make_plan
from .request import Request
from .sizes import Sizes, covers, halves

logger = logging.getLogger("rotoff")
_OF_ONE_SIGNATURE = 8  # courses that are kept
_STAGES = 20_000  # of all courses that are kept, a few kilobytes each


class Sample(NamedTuple):
    """An input of a step, on which times can be measured later.

    Attributes:
        value: the chain's input, out of its graph.
        key: its signature.
        autocast: what was set around the step.
        cached: whether autocast kept its casts.
    """

    value: Any
    key: Any
    autocast: Autocast
    cached: bool

    @classmethod
    def of(cls, value: Any, key: Any) -> Sample:
        """`value`, out of its graph, with what is set now."""
        tensors, rebuild = flatten(value)
        alone = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        return cls(rebuild(alone), key, autocast_now(), torch.is_autocast_cache_enabled())


class PlannedSize(NamedTuple):
    """The plan for one size of input.

    Attributes:
        shapes: of the input's tensors.
        measured: whether its bytes were measured; otherwise they follow from other sizes.
        memory: bytes that the step is expected to hold at most, in the terms of `mem_limit`.
        makespan: seconds that the step is expected to take. None where everything is kept and nobody asked for times.
        overhead: of these seconds, those over keeping everything, as a share. None in the same case.
    """

    shapes: tuple[tuple[int, ...], ...]
    measured: bool
    memory: int
    makespan: float | None
    overhead: float | None


class Specializations:
    """The courses of `model`, measured and planned alike by all processes of `group`, if any.

    Where keeping everything fits the request, a course has no times: `timed` measures them when they are asked for.

    Attributes:
        request: what is asked of every plan; None: nothing yet.
        latest: the course measured, planned or taken last.
        lets_go: as of `Request`, as the last backward showed.
        update_times: of optimizers, measured by `PlacedPlanner`.
        meter: what measures courses.

    Args:
        root, model, options, links, group, cache: as of `CourseMeter`.
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
        self.update_times: dict[Any, tuple[float, float, float]] = {}
        self.meter = CourseMeter(root, model, options, links, group, cache)
        self._model = model
        self._group = group
        self._sizes = KnownSizes(options.interpolate and group is None)
        self._known: OrderedDict[Any, deque[Specialization]] = OrderedDict()
        self._sample: Sample | None = None  # of the latest course, while that has no times
        self._warned = self._told_sizes = False
        self._ceiling: tuple[Any, Sizes] | None = None  # the largest input that was announced

    def __iter__(self) -> Iterator[Specialization]:
        """Every course that is kept."""
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
    ) -> Specialization:
        """Measure the course for the chain's input `value`.

        Args:
            progress, repeats: as of `Checkpointable.measure`.
            timed: whether times are measured; otherwise they may follow from other sizes.
            also: courses of which this one is, too, and whose place it takes.
            taped: of the step whose own forward is recorded, if any.
            request: where keeping everything fits it, no times are needed.
        """
        began = time.perf_counter()
        tapes = [tape for one in also for tape in (one.captured.tape, *one.seen)]
        like = None if timed or also else self._sizes.told(*family_of(signature(value, self._model)))
        wanted = Wanted(value, progress, repeats, tapes, like, taped)
        enough = None
        if request is not None and request.policy is None and request.planner is None:
            enough = partial(fits, request=request)
        captured, profile = self.meter.measure(wanted, enough)
        course = Specialization(profile, captured, hint=constants(value))
        key = signature(value, self._model)
        known = self._known.setdefault(key, deque(maxlen=_OF_ONE_SIGNATURE))
        for one in also:
            known.remove(one)
        known.appendleft(course)
        self._learn(course, key, time.perf_counter() - began)
        self._now(course, value, key)
        return course

    def _learn(self, course: Specialization, key: Any, seconds: float) -> None:
        """Remember that `course` was measured, in so many `seconds`, on an input of the signature `key`."""
        self._sizes.learn(course, *family_of(key), seconds)
        self._drop()

    def _now(self, course: Specialization, value: Any, key: Any) -> None:
        """`course` is the latest, and `value` an input for it, of the signature `key`."""
        self.latest = course
        self._sample = None if course.profile.timed else Sample.of(value, key)

    def timed(self, latest: Specialization, together: bool = False) -> Specialization:
        """The `latest` course, with times.

        Where keeping everything fits and nobody asked for times before, they are measured now, on the input of the last
        step.

        Args:
            together: whether all processes of a group come here.

        Raises:
            MeasureError: in a group whose processes may not all come here.
        """
        if latest.profile.timed:
            return latest
        if self._group is not None and not together:
            raise MeasureError(
                "no times have been measured, since keeping everything fits the limit; call model.measure(*sample) in"
                " all processes of the group"
            )
        assert self._sample is not None
        return self._time_again(latest, self._sample)

    def _time_again(self, course: Specialization, sample: Sample) -> Specialization:
        """`time` outside of a step."""
        modes = [mode for behaviour in course.profile.behaviours for mode in behaviour.modes]
        generators = Generators(self.meter.device_for(sample.value))
        with autocast_as(sample.autocast, sample.cached), ReplayState(generators, (), (), modes).again():
            return self.time(course, sample.value, sample.key)

    def time(self, course: Specialization, value: Any, key: Any) -> Specialization:
        """Measure the times and the smaller forms of `course`, which has none; in a group, all processes together.

        Args:
            value: the chain's input, of the signature `key`.

        Returns:
            The course for that input now.
        """
        planned = course.plan is not None
        if self._sizes.is_measured(course):
            began = time.perf_counter()
            course.become(self.meter.measure(Wanted(value, captured=course.captured))[1])
            self._learn(course, key, time.perf_counter() - began)
            self._now(course, value, key)
            found = course
        else:  # it follows from other sizes
            self._known.pop(key, None)
            found = self.measure(value)
        if planned and self.request is not None:
            found.plan = make_plan(found.profile, self.request, self._group)
        return found

    def _drop(self) -> None:
        """Of all that is known keep what was used last."""
        while len(self._known) > 1 and sum({id(one): len(one.profile.chain) for one in self}.values()) > _STAGES:
            self._sizes.forget(self._known.popitem(last=False)[1])

    def _between_sizes(self, key: Any) -> Specialization | None:
        """The course for an input of new sizes, by what was measured at others; None where that does not tell."""
        assert self.request is not None
        course = self._sizes.between(*family_of(key), self.request)
        if course is not None:
            self._known[key] = deque([course], maxlen=_OF_ONE_SIGNATURE)
            self._drop()
        return course

    def measure_up_to(self, value: Any, request: Request) -> None:
        """Measure on the largest input `value`, and on halves of it, so that smaller ones are known as well.

        Raises:
            InfeasibleError: where it does not fit; says which smaller inputs do.
        """
        largest = self.measure(value, request=request)
        key = signature(value, self._model)
        family, sizes = family_of(key)
        smaller = [half for half in halves(value) if self._measured_smaller(half, largest, request)]
        self._now(largest, value, key)
        vague = [stage.name for stage in largest.profile.stages if stage.varying]
        if vague:
            logger.warning(
                "rotoff: bytes of %s depend on data; what is promised for smaller inputs leaves them out",
                ", ".join(vague),
            )
        if largest.profile.timed and (least := least_limit(largest.profile, request)) > request.mem_limit:
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
        """Whether a smaller input could be measured, and takes no more than the `largest`."""
        try:
            found = self.measure(value, timed=False, request=None if largest.profile.timed else request)
        except MeasureError as error:  # it need not be one that the model takes
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
        """Plan the latest course for `request`, and the others when they are taken; nothing changes where that
        fails."""
        course = self.latest
        if course is not None:
            if self._sample is not None and not fits(course.profile, request):
                course = self._time_again(course, self._sample)
            course.plan = make_plan(course.profile, request, self._group)
        self.request = request
        for course in self:
            if course is not self.latest:
                course.plan = None

    def take(self, value: Any) -> tuple[Specialization | None, TapedForward | None]:
        """The planned course for the chain's input `value`, None where nothing needs a gradient; and, where it is new,
        the forward of this step by which it was measured."""
        taped: TapedForward | None = None

        def measured_here(also: deque[Specialization] | None = None) -> Specialization:
            nonlocal taped
            taped = TapedForward(self._model, value, self.meter.device_for(value))
            if also:
                return self._made_one(value, also, taped)
            return self.measure(value, timed=False, taped=taped, request=self.request)

        try:
            course = self._taken(value, measured_here)
            if taped is None and course is not None and self._group is None and course.wants_more:
                taped = TapedForward(self._model, value, self.meter.device_for(value))
                course.seen.append(self.meter.record(value, taped))  # a plan for these is made when there are more
            return course, taped if taped is not None and taped.usable else None
        except BaseException:
            if taped is not None:
                taped.put_back()
            raise

    def _taken(self, value: Any, measured_here: Callable[..., Specialization]) -> Specialization | None:
        assert self.request is not None
        key, hint = signature(value, self._model), constants(value)
        known = self._known.get(key, deque[Specialization]())
        if len(known) > 1 and known[0].left:  # what was left last is not expected next
            known[0].left = False
            known.rotate(-1)
        course = next((one for one in known if one.hint == hint), known[0] if known else None)
        # processes of a group must all measure or none, and what one of them does is not known to the others
        can_measure = self._group is not None or not torch.autograd._profiler_enabled()  # of which there can be one
        if course is not None and self._group is None and can_measure:
            if sum(one.missed for one in known) >= course.patience:
                course = measured_here(known)
            elif course.measure_again and len(known) < _OF_ONE_SIGNATURE:
                logger.info("rotoff: measuring anew, since the model's forward has become another")
                course.measure_again = False
                course = measured_here()
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
        if lacks_times(course, self.request):
            course = self.time(course, value, key)
        if course.plan is None:
            near = [] if self.request.planner is not None else self._sizes.plans_near(course.profile, family_of(key)[0])
            course.plan = make_plan(course.profile, self.request, self._group, near)
        self._now(course, value, key)
        return course

    def _look_at_loop(self, course: Specialization) -> None:
        """Plan the course anew where its last backward showed another loop, and keeping everything fits in only one."""
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
                    "rotoff: this loop holds outputs beside the one that backward_from names, which the steps before it"
                    " did not; the last step may have exceeded the limit by them, and the next ones are planned anew"
                )
            course.plan = None
        else:
            course.plan = replace(course.plan, lets_go=self.lets_go)

    def _say_larger(self, key: Any) -> None:
        """In the log: that an input is larger than announced."""
        family, sizes = family_of(key)
        if self._ceiling is not None and self._ceiling[0] == family and not covers(self._ceiling[1], sizes):
            logger.warning(
                "rotoff: the input %s is larger than up_to, so it is planned now, and measured if need be",
                [list(one) for one in sizes],
            )

    def _say_new(self, key: Any) -> None:
        """In the log: that an input of a new kind or size is measured; once, how to measure less often."""
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
            " to be measured, too, so announce the largest, by compute_sequence(limit, up_to=largest)",
            told,
        )

    def plans(self) -> list[PlannedSize]:
        """One row for each signature that has a plan."""
        found = []
        for key, known in self._known.items():
            sizes = family_of(key)[1]
            for one in known:
                if one.plan is not None:
                    own = self._sizes.is_measured(one)
                    told, makespan, overhead = expected_bytes(one.profile, one.plan), None, None
                    if one.profile.timed:
                        makespan = one.plan.trace.makespan
                        overhead = makespan / one.profile.chain.compute_time - 1
                    found.append(PlannedSize(sizes, own, told, makespan, overhead))
        return found

    def followed(self, course: Specialization, step: Step) -> None:
        """`step` has run its forward, and was expected to take `course`."""
        if step.astray is None or (course.captured.tape.random and not step.unknown):
            return  # where calls are left out by chance, the plan has held
        course.miss(step.astray)
        if not step.unknown or self._warned:
            return
        self._warned = True
        assert self.request is not None
        told, limit = "", self.request.mem_limit
        if step.unknown_bytes > limit:
            told = f" (its activations took {format_bytes(step.unknown_bytes)}, and the limit is {format_bytes(limit)})"
        logger.warning(
            "rotoff: the model's forward took another course than the planned one. Its result is that of the plain"
            " model; its bytes may exceed the limit%s until that course is planned, which is done when it comes again",
            told,
        )

    def _made_one(self, value: Any, known: deque[Specialization], taped: TapedForward | None) -> Specialization:
        """A course of all that those `known` do, and the forward for `value`, since steps go between them as they like;
        the first of them, where the limit is too small for that."""
        assert self.request is not None
        logger.info("rotoff: measuring for all that the model's forward does, since it goes another way in each step")
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
