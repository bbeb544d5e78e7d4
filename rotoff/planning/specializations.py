"""Selects the course and the plan for each step. A new course is measured and planned on first use."""

from __future__ import annotations

import inspect
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ..capture import strategy
from ..capture.recording import same_calls
from ..capture.unrepeatable import UnrepeatableError
from ..core.sizes import format_bytes
from ..errors import InfeasibleError, MeasureError
from ..runtime.step import Step
from ..runtime.taped_forward import TapedForward
from ..tensors.tree import flatten, leaves
from .course_meter import MeasureRequest
from .known_sizes import SEVERAL, fits, lacks_times
from .measured_courses import OF_ONE_SIGNATURE, MeasuredCourses, untimed_if
from .planner import make_plan
from .request import Request
from .sizes import covers
from .specialization import Specialization, constants, family_of, signature

logger = logging.getLogger("rotoff")
SOON = 3  # limit / bytes that keeping everything takes, up to which a second size is timed
STRAY_BYTES = 1 << 20  # by which forwards of the plain model may allocate more or less than the first
STRAY_SHARE = 16  # bytes held / such bytes, if these are more


class Specializations(MeasuredCourses):
    """Selects the course and the plan for each step, and learns from what the step did."""

    _warned = False  # that a step took another course
    _warned_of_sizes = False  # that a step's tensors were larger than measured
    _told_sizes = False  # how fewer sizes are measured

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.plain: list[str] = []  # why steps have had no plan

    def _between_sizes(self, key: Any) -> Specialization | None:
        """The course for an input of new sizes, interpolated from others; None if that is impossible."""
        assert self.request is not None
        course = self._sizes.between(*family_of(key), self.request)
        if course is not None:
            self._known[key] = deque([course], maxlen=OF_ONE_SIGNATURE)
            self._evict()
        return course

    def take(self, value: Any) -> tuple[Specialization | None, TapedForward | None]:
        """The planned course for the chain's input `value`, None for the plain model; and this step's recorded forward,
        if it was recorded to measure or extend the course."""
        if not self._known and (name := strategy.lazy(self._model)) is not None:
            self._say_plain(f"{name!r} gets its shape in it (a lazy module)")
            return None, None
        taped: TapedForward | None = None
        given = value

        @contextmanager
        def recording() -> Iterator[TapedForward]:
            nonlocal taped, value
            taped = TapedForward(self._model, given, self.meter.device_for(given))
            value = tree_map(lambda leaf: leaf, given)  # the forward may change the caller's lists and dictionaries
            try:
                yield taped
            except MeasureError as error:
                if isinstance(error, UnrepeatableError) or not taped.is_kept():
                    taped.put_back()
                    taped = None
                raise

        def measured_here(also: deque[Specialization] | None = None) -> Specialization:
            with recording() as forward:
                if also:
                    return self._merged(value, also, forward)
                return self.measure(value, timed=False, taped=forward, request=self.request, room=self._enough(value))

        def looked_at(course: Specialization, key: Any) -> Specialization:
            with recording() as forward:
                return self._larger(course, value, key, forward)

        try:
            course = self._select(value, measured_here, looked_at)
            if taped is None and course is not None and self._group is None and course.wants_more:
                try:
                    with recording() as forward:
                        course.seen.append(self.meter.record(value, forward).tape)  # for the next plan
                except MeasureError as error:
                    _go_on(course, error)
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
        if self._group is not None or not can_measure or course.no_more_courses:
            return course
        try:
            if sum(one.missed for one in known) >= course.patience:
                return measured_here(known)
            if course.measure_again and len(known) < OF_ONE_SIGNATURE:
                logger.info("rotoff: measuring again, since the model's forward makes other calls than before")
                course.measure_again = False
                return measured_here()
            if course.grown == hint and course.looks:
                return looked_at(course, key)
        except MeasureError as error:
            _go_on(course, error)
        return course

    def _select(
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
        if course is not None and lacks_times(course, self.request) and not (can_measure and not course.interpolated):
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
                self._say_plain(
                    "it cannot be measured while a profiler is active; measure before, by model.measure(*sample)"
                )
                return None
            self._say_new(key, value)
            course = measured_here()
        self._known.move_to_end(key)
        self._look_at_loop(course)
        measured = can_measure and not course.interpolated
        others = measured and course.profile.formed_for not in ("", self.request.limit)
        if lacks_times(course, self.request) or (others and course.plan is None):
            course = self.time(course, value, key, self.request)
        if course.plan is None:
            self._sizes.plan(course, family_of(key)[0], self.request, self._group)
        elif self._group is None:
            self._sizes.improve(course, family_of(key)[0], self.request)
        self._set_latest(course, value, key)
        return course

    def _look_at_loop(self, course: Specialization) -> None:
        """Update `lets_go` from the last backward, and drop the course's plan if that changes its bytes, or whether
        keeping everything fits."""
        starts = course.captured.starts
        assert self.request is not None
        if starts is None or starts.lets_go is None or self._group is not None or self.request.planner is not None:
            return
        if starts.lets_go != self.request.lets_go:
            self.lets_go = starts.lets_go
            self.request = replace(self.request, lets_go=self.lets_go)
        if course.plan is None or course.plan.lets_go == self.lets_go or self.request.policy is not None:
            return
        if not course.plan.keeps_all or not fits(course.profile, self.request):
            if not self.lets_go:
                logger.warning(
                    "rotoff: this loop holds outputs beside the one that backward_from names, and the steps before it"
                    " did not; the last step may have exceeded the limit by them, and the next steps are planned again"
                )
            course.plan = None
        else:
            course.plan = replace(course.plan, lets_go=self.lets_go)

    def _say_plain(self, why: str) -> None:
        """Log a warning, once for each reason, that a step has no plan."""
        if why not in self.plain:
            self.plain.append(why)
            logger.warning(
                "rotoff: a step with a new input shape runs as the plain model, without a limit, since %s", why
            )

    def _say_larger(self, key: Any) -> None:
        """Log a warning if an input is larger than ``up_to``."""
        family, sizes = family_of(key)
        if self._ceiling is not None and self._ceiling[0] == family and not covers(self._ceiling[1], sizes):
            logger.warning(
                "rotoff: the input %s is larger than up_to, so it is planned now, and measured if necessary",
                [list(one) for one in sizes],
            )

    def _say_new(self, key: Any, value: Any) -> None:
        """Log that an input of a new kind or size is measured and, once, how to measure less often."""
        names = self._names(value)
        rows = zip(names, key[0], strict=True)
        told = ", ".join(f"{name} {dtype.removeprefix('torch.')} {list(shape)}" for name, (shape, dtype, *_) in rows)
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
            f"dimension {d} of {names[n]}: {', '.join(str(one[n][d]) for one in every)}" for n, d in varying[:4]
        )
        logger.warning(
            "rotoff: the input's sizes vary (%s). Most are planned from those that were measured; larger ones may have"
            " to be measured, too, so pass the largest once, to compute_sequence(limit, up_to=largest)",
            told,
        )

    def _names(self, value: Any) -> list[str]:
        """For each tensor of the chain's input, the argument of the model's forward that has it."""
        args, kwargs = value
        parameters = [*inspect.signature(self._model.forward).parameters]
        parameters += [f"argument {n}" for n in range(len(parameters), len(args))]
        named = [*zip(parameters, args, strict=False), *kwargs.items()]
        return [name for name, given in named for leaf in leaves(given) if isinstance(leaf, torch.Tensor)]

    def ran_plain(self, course: Specialization, value: Any, grown: int) -> None:
        """Record that the forward for `value` ran as the plain model, whose allocated bytes have `grown`."""
        assert course.plan is not None
        more, allowed = grown - course.plan.held_bytes, max(STRAY_BYTES, course.plan.held_bytes // STRAY_SHARE)
        if course.stray is None:
            course.stray = min(max(0, more), allowed)
        if more - course.stray > allowed:
            self._took_more(course, value, more - course.stray)

    def _exceeds_limit(self, course: Specialization, more: int) -> tuple[bool, str]:
        """Return whether a step that holds `more` bytes than `course` is charged exceeds the limit, and the figures."""
        assert self.request is not None
        assert course.plan is not None
        limit = self.request.mem_limit
        nbytes = min(course.plan.trace.peak_bytes, limit) + more
        return nbytes > limit, f"it takes about {format_bytes(nbytes)}, and the limit is {format_bytes(limit)}"

    def _took_more(self, course: Specialization, value: Any, more: int) -> None:
        """A step on `value` made the calls of `course` and held `more` bytes than it is charged. If that exceeds the
        limit, look at the next steps; warn once."""
        exceeds, told = self._exceeds_limit(course, more)
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
        wanted = MeasureRequest(value, known=like, taped=taped, captured=captured, use=self._form_use(self.request))
        _, profile = self.meter.measure(wanted, untimed_if(self.request))
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
        exceeds, told = self._exceeds_limit(course, step.more_bytes)
        logger.warning(
            "rotoff: the model's forward took another course than the planned one. Its result is that of the plain"
            " model; its bytes may exceed the limit%s until that course is planned, which happens when it recurs",
            f" ({told})" if exceeds else "",
        )

    def _merged(self, value: Any, known: deque[Specialization], taped: TapedForward | None) -> Specialization:
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


def _go_on(course: Specialization, error: MeasureError) -> None:
    """Go on with the plan of `course`, since another one cannot be planned."""
    if isinstance(error, UnrepeatableError):  # nor may a replay repeat it
        raise error
    course.no_more_courses = True
    logger.warning(
        "rotoff: steps take a course that cannot be planned, and may exceed the limit; their results are those of the"
        " plain model (%s)",
        error,
    )
