"""Measures the courses of a model's forward and keeps those used last. `specializations` selects one for each step."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ..core.backward_from import LossAlone
from ..core.sizes import format_bytes
from ..errors import InfeasibleError, MeasureError
from ..io.cache import Cache
from ..profile.measure import Progress
from ..profile.optimizer_probe import UpdateCosts
from ..profile.profile import Profile
from ..runtime.links.pool import LinkPool
from ..runtime.replay import ReplayState
from ..runtime.taped_forward import TapedForward
from ..tensors.autocast import Autocast, autocast_as, autocast_now, in_region
from ..tensors.rng import Generators
from ..tensors.tree import flatten
from .course_meter import CourseMeter, FormUse, MeasureRequest
from .known_sizes import KnownSizes, fits
from .options import Options
from .planner import least_limit, make_plan, useful_forms
from .request import Request
from .sizes import Sizes, halves
from .specialization import LOOKS, Specialization, constants, family_of, signature

logger = logging.getLogger("rotoff")
OF_ONE_SIGNATURE = 8  # courses kept for each signature
_STAGES = 20_000  # most stages of all kept courses, a few kilobytes each


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


class MeasuredCourses:
    """Measures, plans and keeps the courses of `model`, alike by all processes of `group`, if any.

    If keeping everything fits the request, a course has no times; `timed` measures them when they are needed.

    Attributes:
        request: the request for every plan; None: none yet.
        latest: the course measured, planned or taken last.
        lets_go: as for `Request`, as the last backward showed, or as a trainer's callback knows.
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
        self.lets_go = isinstance(options.backward_from, LossAlone)
        self.update_times: dict[Any, UpdateCosts] = {}
        self.meter = CourseMeter(root, model, options, links, group, cache)
        self._model = model
        self._group = group
        self._sizes = KnownSizes(options.interpolate and group is None)
        self._known: OrderedDict[Any, deque[Specialization]] = OrderedDict()
        self._sample: Sample | None = None  # of the latest course, while that has no times
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
        began, key = time.perf_counter(), None
        if taped is not None:  # its forward may put modules in another mode
            key = signature(value, self._model)
        tapes = [tape for one in also for tape in (one.captured.tape, *one.seen)]
        like = None if timed or also else self._sizes.told(*family_of(key or signature(value, self._model)))
        wanted = MeasureRequest(value, progress, repeats, tapes, like, taped, use=self._form_use(request))
        room = room or request
        surely = room is not None and self._sizes.exceeds(*family_of(key or signature(value, self._model)), room)
        captured, profile = self.meter.measure(wanted, None if surely else untimed_if(room))
        course = Specialization(profile, captured, hint=constants(value))
        key = key or signature(value, self._model)
        known = self._known.setdefault(key, deque(maxlen=OF_ONE_SIGNATURE))
        for one in also:
            known.remove(one)
        known.appendleft(course)
        self._learn(course, key, time.perf_counter() - began)
        self._set_latest(course, value, key)
        return course

    def _form_use(self, request: Request | None) -> FormUse | None:
        """What smaller forms are for, in one process that plans for `request` by the solver."""
        if request is None or request.policy is not None or request.planner is not None or self._group is not None:
            return None
        return FormUse(request.limit, partial(useful_forms, request=request))

    def _learn(self, course: Specialization, key: Any, seconds: float) -> None:
        """Remember that `course` was measured on an input of the signature `key`, which took `seconds`."""
        self._sizes.learn(course, *family_of(key), seconds)
        self._evict()

    def _set_latest(self, course: Specialization, value: Any, key: Any) -> None:
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
        with autocast_as(sample.autocast, sample.cached, sample.region), ReplayState(generators, (), modes).again(True):
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
        if not course.interpolated:
            began = time.perf_counter()
            wanted = MeasureRequest(value, captured=course.captured, use=self._form_use(request))
            course.become(self.meter.measure(wanted)[1])
            self._learn(course, key, time.perf_counter() - began)
            self._set_latest(course, value, key)
            found = course
        else:
            self._known.pop(key, None)
            found = self.measure(value)
        if planned and self.request is not None:
            found.plan = make_plan(found.profile, self.request, self._group)
        return found

    def _evict(self) -> None:
        """Drop the signatures used least recently beyond `_STAGES` stages."""
        while len(self._known) > 1 and sum({id(one): len(one.profile.chain) for one in self}.values()) > _STAGES:
            self._sizes.forget(self._known.popitem(last=False)[1])

    def measure_up_to(self, value: Any, request: Request) -> None:
        """Measure the largest input `value` and halves of it, so that sizes in between can be interpolated.

        Raises:
            InfeasibleError: if it does not fit; the message names smaller inputs that do.
        """
        largest = self.measure(value, request=request)
        key = signature(value, self._model)
        family, sizes = family_of(key)
        smaller = [half for half in halves(value) if self._measured_smaller(half, largest, request)]
        self._set_latest(largest, value, key)
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
                + (f"; inputs of {told} fit" if told else "; half of it does not fit either" if smaller else ""),
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

    def plans(self) -> list[PlannedSize]:
        """One row for each course that has a plan."""
        found = []
        for key, known in self._known.items():
            sizes = family_of(key)[1]
            for one in known:
                if one.plan is not None and self.request is not None:
                    own = not one.interpolated
                    told, makespan, overhead = self.request.expected_bytes(one.profile, one.plan), None, None
                    if one.profile.timed:
                        makespan = one.plan.trace.makespan
                        overhead = makespan / one.profile.chain.compute_time - 1
                    found.append(PlannedSize(sizes, own, told, makespan, overhead))
        return found


def untimed_if(request: Request | None) -> Callable[[Profile], bool] | None:
    """Return what says of a profile that it needs no times, since keeping everything fits `request`; None if times are
    needed in any case."""
    if request is None or request.policy is not None or request.planner is not None:
        return None
    return partial(fits, request=request)
