"""What is known of a model: for each course that its forward takes, what was measured and the plan made of it.

A course is an input signature (shapes, strides, dtypes, what needs gradients, autocast), the answers to what the
forward asks of its batch, and the model's own state. A new one is measured and planned on sight; those seen last are
kept.
"""

from __future__ import annotations

import bisect
import logging
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..capture import strategy
from ..capture.backward_roots import read_backward_from
from ..capture.course import Course, expected
from ..capture.outside import own_function, without_checkpoints
from ..capture.recording import same_calls
from ..capture.sharding import refuse_tensor_parallel
from ..capture.tape import Tape
from ..capture.undo import undone
from ..core.chain import LinkRates, Stage
from ..core.sequence import OpKind
from ..core.sizes import format_bytes
from ..errors import InfeasibleError, MeasureError
from ..io.cache import Cache
from ..io.progress import Bar
from ..profile.kept_profile import find_profile, keep_profile, tells_bytes
from ..profile.measure import Progress, measure
from ..profile.profile import Profile
from ..profile.provenance import provenance
from ..profile.selective.variants import read_forms
from ..profile.stage_meter import Meter
from ..profile.timing.context import MeasurementContext
from ..profile.timing.timing_cache import KnownTimes, TimesChanged, known_times, profile_key
from ..runtime.execution_plan import ExecutionPlan
from ..runtime.interpreter import Step
from ..runtime.links.pool import LinkPool
from ..runtime.placed.lending import Lender, settle_buffers
from ..runtime.taped_forward import TapedForward, UntapedError
from ..tensors.buffers import contents_preserved
from ..tensors.convolutions import flags, other_algorithms, read_conv_algorithms
from ..tensors.tree import flatten
from .distributed import agree_on_profile, refuse_root_shards
from .memory_account import expected_bytes, reported_bytes
from .options import Options
from .planner import least_limit, make_plan, plan_everything
from .request import Request
from .sizes import MeasuredSizes, Sizes, covers, halves, rounded, split, volume

logger = logging.getLogger("rotoff")
# Measuring watches calls and allocations of the whole process; so one thread does it at a time.
_MEASURING = threading.RLock()
_OF_ONE_SIGNATURE = 8  # courses that are kept
_FAMILIES = 8  # kinds of input, and states of the model, of which sizes are kept
_NEAREST = 4  # plans of other sizes that are tried for a new one
_SEVERAL = 2  # sizes measured before a word is said of it, and forms that no plan uses are left out
# Devices of which a whole profile is taken from the cache. Others' libraries must run before the first planned step, to
# have their workspaces, so that stages are run all the same.
KNOWN_WHOLE = frozenset({"cpu"})
LOOSE = 1.2  # times its own bytes: what a size is charged with before it counts as too much
_STAGES = 20_000  # of all courses that are kept, a few kilobytes each


@dataclass(eq=False)
class Specialization:
    """One course of the forward. plan: None until there is a request for one. hint: what was beside the tensors of its
    input. measure_again: whether steps have become others than this one; left: whether the last step that was to take
    it did not; missed: how many did not, and patience: after how many all courses known are made one. loose: how many
    times what its steps may take the profile charges, where it follows from other sizes. seen: what steps did that
    chance has taken elsewhere, to be planned for as well."""

    profile: Profile
    captured: strategy.Captured
    plan: ExecutionPlan | None = None
    _planned: tuple[tuple[tuple[int, ...], bool], Profile] | None = None
    hint: str = ""
    measure_again: bool = False
    left: bool = False
    _expected: Course | None = None
    _astray: dict[int, int] = field(default_factory=dict)
    missed: int = 0
    patience: int = 4
    loose: float = 1.0
    seen: list[Tape] = field(default_factory=list)

    @property
    def planned(self) -> Profile:
        """The profile as the plan sees it: with the skip connections in place that it keeps there, and the gradients
        copied that it copies."""
        seen = (self.plan.kept, self.plan.compact) if self.plan is not None else ((), False)
        if self._planned is None or self._planned[0] != seen:
            self._planned = seen, self.profile.keeping(*seen)
        return self._planned[1]

    @property
    def wants_more(self) -> bool:
        """Whether to note what steps do, since chance takes them elsewhere."""
        return self.captured.random and self.missed > 0 and len(self.seen) < _SEEN

    def miss(self, astray: int) -> None:
        """A step did not take this course, as it was to; `astray` tells the one that it took."""
        self.left = True
        self.missed += 1
        self._astray[astray] = times = self._astray.get(astray, 0) + 1
        self.measure_again |= times == _TWICE
        if len(self._astray) > _OTHERS:  # by chance a model may take another one in each step
            del self._astray[next(iter(self._astray))]

    @property
    def expected(self) -> Course:
        """The calls that the model's forward is expected to make."""
        if self._expected is None:
            self._expected = expected(self.captured.tape, self.profile.stages, self.profile.prefix)
        return self._expected


_OTHERS = 64  # other courses that are remembered
_SEEN = 8  # of those, whose calls are noted
_TWICE = 2  # times that a step takes the same other course before that is measured, too


class PlannedSize(NamedTuple):
    """The plan for one size of input.

    shapes: of the input's tensors. measured: whether its bytes were; else they follow from other sizes. memory: bytes
    that the step is expected to hold at most, in the terms of `mem_limit`. makespan: seconds that it is expected to
    take. overhead: of these, over keeping everything, as a share.
    """

    shapes: tuple[tuple[int, ...], ...]
    measured: bool
    memory: int
    makespan: float
    overhead: float


class Specializations:
    """The courses of `model`, measured and planned alike by all processes of `group`, if any.

    request: what is asked of every plan; None: nothing yet. latest: the course measured, planned or taken last. plain:
    what runs the model as it is, where that is not a call of it (`rotoff.attach`).

    Args:
        root: the module that is called; `model` where nothing is around it. options: of `Checkpointable`. links: to the
            host, of which the bandwidth is measured.
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
        self.lets_go = False  # as of `Request`, as the last backward showed
        self.plain: Callable[..., Any] | None = None
        self.update_times: dict[Any, tuple[float, float, float]] = {}  # measured by `PlacedPlanner`
        self.device = options.device  # on which steps run, where that is not the parameters' own
        self._root = weakref.ref(root)  # which owns this
        self._model = model
        self._options = options
        self._links = links
        self._group = group
        self._cache = cache
        self._varies = options.interpolate and group is None  # whether what was measured at some sizes tells of others
        self._sizes: dict[Any, MeasuredSizes[Specialization]] = {}  # by what inputs of all sizes have in common
        self._rounded: dict[Any, Specialization] = {}  # by that and sizes that were rounded up
        self._known: OrderedDict[Any, deque[Specialization]] = OrderedDict()
        self._warned = False
        self._told_sizes = self._told_whole = False
        self._ceiling: tuple[Any, Sizes] | None = None  # the largest input that was announced

    def __iter__(self) -> Iterator[Specialization]:
        """Every course that is kept."""
        return (course for courses in self._known.values() for course in courses)

    def measure(
        self,
        value: Any,
        progress: Progress | bool | None,
        repeats: int | None,
        timed: bool = True,
        also: Sequence[Specialization] = (),
        taped: TapedForward | None = None,
    ) -> Specialization:
        """Measure on the chain's input `value`; times may be interpolated where not `timed`. What it finds takes the
        place of the courses `also`, and is of what those do, too. The model's own forward is that of the step which
        `taped` is for, if any. progress: as of `Checkpointable.measure`."""
        found: list[strategy.Captured] = []

        def measure_here() -> Profile:
            undo = nullcontext() if taped else undone(self._model)
            with undo, without_checkpoints(), self._lender() as lender, Bar("measuring") as bar:
                told = (
                    (lambda done, of, name: bar(done / max(1, of), name))
                    if progress is None or progress is True
                    else progress
                )
                captured, profile = self._measure_here(value, told or None, repeats, timed, also, lender, taped)
            found.append(captured)
            return profile

        began = time.perf_counter()
        if self.device is not None:
            settle_buffers(self._model, self.device)
        with _MEASURING:
            profile = measure_here() if self._group is None else agree_on_profile(measure_here, self._group)
        seconds = time.perf_counter() - began
        logger.info("rotoff: measured %d stages in %.1f s", len(profile.chain), seconds)
        course = self.latest = Specialization(profile, found[0])
        course.hint = _constants(value)
        key = signature(value, self._model)
        known = self._known.setdefault(key, deque(maxlen=_OF_ONE_SIGNATURE))
        for one in also:
            known.remove(one)
        known.appendleft(course)
        if self._varies:
            family, sizes = _family(key)
            several = self._sizes.setdefault(family, MeasuredSizes())
            several.add(sizes, course)
            several.owed, several.price = 0.0, seconds / volume(sizes)
            while len(self._sizes) > _FAMILIES:
                self._sizes.pop(next(iter(self._sizes)))
            self._rounded = {
                of: one for of, one in self._rounded.items() if of[0] != family
            }  # which are better known now
        self._drop()
        return course

    def _drop(self) -> None:
        """Of all that is known keep what was used last."""
        while len(self._known) > 1 and sum({id(one): len(one.profile.chain) for one in self}.values()) > _STAGES:
            gone = {id(one) for one in self._known.popitem(last=False)[1]}
            self._rounded = {of: one for of, one in self._rounded.items() if id(one) not in gone}

    def _between_sizes(self, value: Any, key: Any) -> Specialization | None:
        """The course for an input of new sizes, by what was measured at others; None where that does not tell."""
        assert self.request is not None
        family, sizes = _family(key)
        measured = self._sizes.get(family)
        if not self._varies or measured is None or self.request.planner is not None:
            return None
        for wanted in dict.fromkeys((rounded(sizes), sizes)):  # which may fit where a rounded one does not
            course = self._rounded.get((family, wanted)) or self._made_between(measured, wanted)
            if course is not None:
                self._rounded[family, wanted] = course
                self._known[key] = deque([course], maxlen=_OF_ONE_SIGNATURE)
                self._drop()
                return course
        return None

    def _made_between(self, measured: MeasuredSizes[Specialization], wanted: Sizes) -> Specialization | None:
        """A course with a plan for all sizes up to `wanted`."""
        assert self.request is not None
        near = measured.near(wanted)
        if near is None:
            return None
        everything = plan_everything(near.profile, self.request.plain, in_flight=self.request.in_flight)
        kept = reported_bytes(near.profile, everything)
        if len(measured) == 1 and near.loose >= LOOSE and kept > self.request.mem_limit:
            return None  # two that were measured tell much more than one
        course = Specialization(near.profile, near.like.captured, hint=near.like.hint, loose=near.loose)
        try:
            known = self._plans(measured, course.profile)
            course.plan = make_plan(course.profile, self.request, near=known, thorough=not known)
        except InfeasibleError:
            return None  # what it takes may be less than what it is charged with
        return course

    def _too_loose(self, course: Specialization, key: Any) -> bool:
        """Whether it is time to measure the size of this step: steps have taken longer by as much as that costs, since
        they were planned for more bytes than they take."""
        if course.loose < LOOSE or course.plan is None:
            return False
        family, sizes = _family(key)
        measured = self._sizes.get(family)
        if measured is None:
            return False
        more = course.plan.trace.makespan - course.profile.chain.compute_time
        measured.owed += max(0.0, more)
        return more > 0 and measured.owed > measured.price * volume(sizes)

    def _plans(self, measured: MeasuredSizes[Specialization], profile: Profile) -> list[tuple[Profile, ExecutionPlan]]:
        """Those made for the sizes nearest to that of `profile`."""
        every = {id(one): one for one in (*measured, *self._rounded.values()) if one.plan is not None}
        nearest = sorted(every.values(), key=lambda one: abs(_saved(one.profile) - _saved(profile)))
        return [(one.profile, one.plan) for one in nearest[:_NEAREST] if one.plan is not None]

    def _lender(self) -> AbstractContextManager[Lender | None]:
        """Brings the parameters that lie elsewhere than steps run while the model is measured."""
        if self.device is None:
            return nullcontext()
        lender = Lender(self._model.parameters(), self.device, 0)
        return lender if lender else nullcontext()

    def _measure_here(
        self,
        value: Any,
        progress: Progress | None,
        repeats: int | None,
        timed: bool,
        also: Sequence[Specialization],
        lender: Lender | None,
        taped: TapedForward | None,
    ) -> tuple[strategy.Captured, Profile]:
        device, root = self.device or device_of(self._model, value), self._root()
        refuse_tensor_parallel(self._model if root is None else root, self._model)

        def bandwidth(nbytes: int, step_bytes: int) -> LinkRates:
            return self._links.bandwidth(device, nbytes, step_bytes)

        was_training = self._model.training
        if not was_training:
            self._model.train()
        try:
            known = [tape for one in also for tape in (one.captured.tape, *one.seen)]
            like, times = self._other_sizes(value) if self._varies and not timed and not also else (None, None)
            tape = None if like is None else like.captured.tape
            captured = self._captured(value, device, known, tape, taped)
            self._say_called_again(captured.tape)
            captured = captured.starting(read_backward_from(self._options.backward_from))
            refuse_root_shards(self._model if root is None else root, captured.stages)
            # processes that measure together must all do the same
            chosen = self._links.staging_bytes, self._options.forms, self._options.conv_algorithms
            key = profile_key(captured.stages, value, device, repeats, *chosen) if self._group is None else None
            kept = find_profile(self._cache, key, captured.stages)
            known_whole = kept is not None and device.type in KNOWN_WHOLE and tells_bytes(captured.stages)
            if kept is not None:
                what = "profile" if known_whole else "times"
                logger.info(
                    "rotoff: %s of %d stages from the cache in %s", what, len(kept.chain), self._cache.directory
                )
            if like is not None and not same_calls(like.captured.tape, captured.tape):
                like = times = None
            between = times if kept is None else None
            merged = [stage.name for stage in (*like.profile.prefix, *like.profile.stages)] if like is not None else ()
            others = other_algorithms(device) if read_conv_algorithms(self._options.conv_algorithms) else ()
            named = bool(strategy.named(self._model, self._options.stages))

            def measured(times: KnownTimes | None) -> Profile:
                meter = Meter(MeasurementContext.on(device, repeats, lender), read_forms(self._options.forms), others)
                return measure(captured.stages, value, meter, bandwidth, progress, times, named, merged)

            try:
                if kept is not None and known_whole:
                    profile = kept
                else:
                    times = between or (None if kept is None else known_times(kept, checked=True))
                    with _unchanged(self._model, captured):
                        profile = measured(times)
            except TimesChanged as changed:
                logger.info("rotoff: times from the cache are not used, since %s", changed)
                kept = None
                with _unchanged(self._model, captured):
                    profile = measured(None)
            if kept is None and between is None:
                keep_profile(self._cache, key, captured.stages, profile)
            meta = provenance(self._model, value, device)
            if between is not None:
                meta["times"] = "interpolated between those measured at other sizes"
            profile = _with_outside(profile, expected(captured.tape, profile.stages, profile.prefix))
            stuck = profile.unmanaged_bytes + self._links.staging_bytes + captured.tape.changed_bytes
            return captured, replace(profile, unmanaged_bytes=stuck).described(type(self._model).__name__, meta)
        finally:
            if not was_training:
                self._model.eval()

    def _captured(
        self,
        value: Any,
        device: torch.device,
        known: Sequence[Tape],
        like: Tape | None,
        taped: TapedForward | None,
    ) -> strategy.Captured:
        forward: Callable[..., Any] = self.plain or self._model
        if taped is None:
            return strategy.capture(self._model, value, device, self._options.stages, forward, known, like)

        def run(*args: Any, **kwargs: Any) -> Any:
            taped.result = forward(*args, **kwargs)
            return taped.result

        captured = strategy.capture(self._model, value, device, self._options.stages, run, known, like, taped)
        try:
            taped.let_go(captured.tape)
        except UntapedError as error:
            logger.warning(
                "rotoff: the forward runs once more to measure this step, since %s; what it changes outside of the model (globals,"
                " iterators, files) it changes twice in this step",
                error,
            )
            taped.put_back()
            with undone(self._model):
                return self._captured(value, device, known, like, None)
        return captured

    def _record(self, course: Specialization, value: Any, taped: TapedForward) -> None:
        """Note what the forward of a step does that may take another way than `course`, by chance; its plan is made when
        there are more."""
        device = self.device or device_of(self._model, value)
        with _MEASURING, without_checkpoints(), self._lender():
            course.seen.append(self._captured(value, device, (), None, taped).tape)

    def _other_sizes(self, value: Any) -> tuple[Specialization | None, KnownTimes | None]:
        """What was measured last at other sizes, and the times that it and others tell of; from the third size on only of
        forms that plans use, where these need more than the plain model."""
        family, sizes = _family(signature(value, self._model))
        measured = self._sizes.get(family)
        if measured is None:
            return None, None
        near = measured.near(sizes)
        if near is not None:
            times = known_times(near.profile)
        else:
            times = known_times(measured.last.profile, volume(sizes) / volume(measured.sizes[-1]))
        used: set[Any] = set()
        planned = [one for one in measured if one.plan is not None and not one.plan.keeps_all]
        for one in planned:
            assert one.plan is not None
            used.update(
                (op.stage, one.profile.behaviours[op.stage - 1].forms[op.form - 1].identity)
                for op in one.plan.sequence.ops
                if op.kind is OpKind.F_SEL
            )
        if planned and len(measured) >= _SEVERAL:
            times = times._replace(
                stages=tuple(
                    row._replace(forms=tuple(form for form in row.forms if (i, form.identity) in used))
                    for i, row in enumerate(times.stages, start=1)
                )
            )
        return measured.last, times

    def measure_up_to(self, value: Any, request: Request) -> None:
        """Measure on the largest input `value`, and on halves of it, so that smaller ones are known as well.

        Raises:
            InfeasibleError: where it does not fit; says which smaller inputs do.
        """
        largest = self.measure(value, None, None)
        family, sizes = _family(signature(value, self._model))
        smaller = [half for half in halves(value) if self._measured_smaller(half, largest)]
        self.latest = largest
        vague = [stage.name for stage in largest.profile.stages if stage.varying]
        if vague:
            logger.warning(
                "rotoff: bytes of %s depend on data; what is promised for smaller inputs leaves them out",
                ", ".join(vague),
            )
        if (least := least_limit(largest.profile, request)) > request.mem_limit:
            fitting = [
                self._largest_that_fits(_family(signature(half, self._model))[1], sizes, family, request)
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

    def _measured_smaller(self, value: Any, largest: Specialization) -> bool:
        """Whether a smaller input could be measured, and takes no more than the `largest`."""
        try:
            found = self.measure(value, None, None, timed=False)
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

    def _largest_that_fits(self, low: Sizes, high: Sizes, family: Any, request: Request) -> Sizes | None:
        """Of the sizes from `low` to `high` the largest with a plan within the limit; None where `low` has none."""

        def at(step: int) -> Sizes:
            return tuple(
                tuple(a + (b - a) * step // most for a, b in zip(one, other, strict=True))
                for one, other in zip(low, high, strict=True)
            )

        def fits(step: int) -> bool:
            near = self._sizes[family].near(at(step))
            return near is not None and least_limit(near.profile, request) <= request.mem_limit

        most = max(b - a for one, other in zip(low, high, strict=True) for a, b in zip(one, other, strict=True))
        if not fits(0):
            return None
        return at(bisect.bisect_left(range(1, most + 1), True, key=lambda step: not fits(step)))

    def ask(self, request: Request) -> None:
        """Plan the latest course for `request`, and the others when they are taken; nothing changes where that
        fails."""
        if self.latest is not None:
            self.latest.plan = make_plan(self.latest.profile, request, self._group)
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
            taped = TapedForward(self._model, value, self.device or device_of(self._model, value))
            return self._made_one(value, also, taped) if also else self.measure(value, None, None, False, (), taped)

        try:
            course = self._taken(value, measured_here)
            if taped is None and course is not None and self._group is None and course.wants_more:
                taped = TapedForward(self._model, value, self.device or device_of(self._model, value))
                self._record(course, value, taped)
            return course, taped if taped is not None and taped.usable else None
        except BaseException:
            if taped is not None:
                taped.put_back()
            raise

    def _taken(self, value: Any, measured_here: Callable[..., Specialization]) -> Specialization | None:
        assert self.request is not None
        key, hint = signature(value, self._model), _constants(value)
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
        if course is None:
            self._say_larger(key)
            course = self._between_sizes(value, key)
        if course is not None and can_measure and self._too_loose(course, key):
            course = None
            del self._known[key]
        if course is None:
            if not any(t.requires_grad for t in (*self._model.parameters(), *flatten(value)[0])):
                return None
            if not can_measure:
                logger.warning(
                    "rotoff: a step with a new input shape runs as the plain model, without a limit, since it cannot be measured while a"
                    " profiler is active; measure before, by model.measure(*sample)"
                )
                return None
            self._say_new(key)
            course = measured_here()
        self._known.move_to_end(key)
        self._look_at_loop(course)
        if course.plan is None:
            measured = self._sizes.get(_family(key)[0], MeasuredSizes())
            near = () if self.request.planner is not None else self._plans(measured, course.profile)
            course.plan = make_plan(course.profile, self.request, self._group, near)
        self.latest = course
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
        everything = plan_everything(course.profile, self.request.plain, self.lets_go, self.request.in_flight)
        if (reported_bytes(course.profile, everything) <= self.request.mem_limit) != course.plan.keeps_all:
            if not self.lets_go:
                logger.warning(
                    "rotoff: this loop holds outputs beside the one that backward_from names, which the steps before it did not; the last"
                    " step may have exceeded the limit by them, and the next ones are planned anew"
                )
            course.plan = None
        else:
            course.plan = replace(course.plan, lets_go=self.lets_go)

    def _say_larger(self, key: Any) -> None:
        """In the log: that an input is larger than announced."""
        family, sizes = _family(key)
        if self._ceiling is not None and self._ceiling[0] == family and not covers(self._ceiling[1], sizes):
            logger.warning(
                "rotoff: the input %s is larger than up_to, so it is planned now, and measured if need be",
                [list(one) for one in sizes],
            )

    def _say_new(self, key: Any) -> None:
        """In the log: that an input of a new kind or size is measured; once, how to measure less often."""
        told = ", ".join(f"{dtype.removeprefix('torch.')} {list(shape)}" for shape, dtype, *_ in key[0])
        logger.info("rotoff: measuring, since the model gets an input of a new kind or size: %s", told)
        family, sizes = _family(key)
        known = self._sizes.get(family)
        if known is None or len(known) < _SEVERAL or self._told_sizes:
            return
        self._told_sizes = True
        every = [*known.sizes, sizes]
        varying = [
            (n, d) for n, shape in enumerate(sizes) for d in range(len(shape)) if len({one[n][d] for one in every}) > 1
        ]
        told = "; ".join(
            f"dimension {d} of tensor {n}: {', '.join(str(one[n][d]) for one in every)}" for n, d in varying[:4]
        )
        logger.warning(
            "rotoff: the input's sizes vary (%s). Most are planned from those that were measured; larger ones may have to be"
            " measured, too, so announce the largest, by compute_sequence(limit, up_to=largest)",
            told,
        )

    def _say_called_again(self, tape: Tape) -> None:
        """In the log, once: which modules and Functions are run by their own code more often than in the plain model."""
        names = {module: repr(name) for name, module in self._model.named_modules()}
        functions = {one.function for op in tape.operations for one in tape.inner.get(id(op), (op,))}
        told = sorted({names.get(one, "") if isinstance(one, nn.Module) else own_function(one) for one in functions})
        told = [name for name in told if name]
        if not told or self._told_whole:
            return
        self._told_whole = True
        logger.warning(
            "rotoff: the code of %s%s (compiled, sharded, mapped by torch.func, or a torch.autograd.Function) runs again when it is measured and"
            " in replays; what it changes outside of the model (globals, iterators, files) changes more often than in the plain model",
            ", ".join(told[:4]),
            ", ..." if len(told) > 4 else "",
        )

    def plans(self) -> list[PlannedSize]:
        """One row for each signature that has a plan."""
        measured = {id(one) for several in self._sizes.values() for one in several}
        found = []
        for key, known in self._known.items():
            sizes = _family(key)[1]
            for one in known:
                if one.plan is not None:
                    makespan, own = one.plan.trace.makespan, not self._varies or id(one) in measured
                    told = expected_bytes(one.profile, one.plan)
                    found.append(PlannedSize(sizes, own, told, makespan, makespan / one.profile.chain.compute_time - 1))
        return found

    def followed(self, course: Specialization, step: Step) -> None:
        """`step` has run its forward, and was expected to take `course`."""
        if step.astray is None or (course.captured.random and not step.unknown):
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
            "rotoff: the model's forward took another course than the planned one. Its result is that of the plain model; its bytes may"
            " exceed the limit%s until that course is planned, which is done when it comes again",
            told,
        )

    def _made_one(self, value: Any, known: deque[Specialization], taped: TapedForward | None) -> Specialization:
        """A course of all that those `known` do, and the forward for `value`, since steps go between them as they like;
        the first of them, where the limit is too small for that."""
        assert self.request is not None
        logger.info("rotoff: measuring for all that the model's forward does, since it goes another way in each step")
        before = list(known)
        course = self.measure(value, None, None, timed=False, also=before, taped=taped)
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


@contextmanager
def _unchanged(model: nn.Module, captured: strategy.Captured) -> Iterator[None]:
    """After the block the model, and the generators and tensors that its forward uses, are as before it."""
    generators = [generator for generator, _ in captured.tape.generators]
    states = [generator.get_state() for generator in generators]
    try:
        with undone(model), contents_preserved([*captured.tape.changed.values()]):
            yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _with_outside(profile: Profile, course: Course) -> Profile:
    """`profile`, where the forwards are also charged for what the model's own code runs there and no stage does: parts
    of the prefix, and what is computed for nothing."""
    beside = max(0, profile.prefix_peak_bytes - profile.made_input_bytes) if profile.prefix else 0
    outside = tuple(
        nbytes + (beside if i in course.beside else 0) for i, nbytes in enumerate(course.dead_bytes, start=1)
    )

    def more(one: Any, nbytes: int) -> Any:
        return replace(one, forward_transient_bytes=one.forward_transient_bytes + nbytes)

    def charged(stage: Stage, nbytes: int) -> Stage:
        assert stage.checkpoint_transient_bytes is not None
        forms = tuple(more(form, nbytes) for form in stage.forms)
        checkpoint = stage.checkpoint_transient_bytes + nbytes
        return replace(more(stage, nbytes), checkpoint_transient_bytes=checkpoint, forms=forms)

    def all_of(costs: tuple[Stage, ...]) -> tuple[Stage, ...]:
        return tuple(map(charged, costs, outside))

    compact = profile.compact and profile.compact._replace(stages=all_of(profile.compact.stages))
    chain = replace(profile.chain, stages=all_of(profile.chain.stages))
    return replace(profile, chain=chain, compact=compact, outside_bytes=outside)


def signature(value: Any, model: nn.Module) -> Any:
    """What the bytes of a step depend on: the tensors of its input, autocast, and the model's parameters and modes."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    shapes = tuple(map(_shape, tensors))
    types = {"cpu", *(t.device.type for t in tensors)}
    autocast = tuple((t, torch.is_autocast_enabled(t), str(torch.get_autocast_dtype(t))) for t in sorted(types))
    modules = {
        id(model): model
    }  # found by a loop of our own: ``model.modules()`` goes through a generator for each level
    todo = [model]
    for module in todo:
        for child in module._modules.values():
            if child is not None and id(child) not in modules:
                modules[id(child)] = child
                todo.append(child)
    found = [p for module in todo for p in module._parameters.values() if p is not None]
    parameters = tuple([(p.shape, p.dtype, p.requires_grad) for p in found])
    modes = tuple([module.training for module in todo])
    return shapes, autocast, parameters, modes, torch.get_default_dtype()


def _saved(profile: Profile) -> int:
    return sum(stage.saved_bytes for stage in profile.chain.stages)


def _family(key: Any) -> tuple[Any, Sizes]:
    """Of a `signature`: all but the sizes, with what else times depend on; and the sizes."""
    shapes, *rest = key
    kinds, sizes = split(shapes)
    return (kinds, *rest, torch.get_num_threads(), torch.get_float32_matmul_precision(), flags()), sizes


def _constants(value: Any) -> str:
    """What is beside the tensors of an input, which may or may not decide about the course of the forward."""
    return repr([leaf for leaf in tree_leaves(value) if not isinstance(leaf, torch.Tensor)])


def _shape(tensor: torch.Tensor) -> tuple[Any, ...]:
    told = tuple(tensor.shape), str(tensor.dtype), str(tensor.device), tensor.requires_grad
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return told
    return *told, tuple(stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def device_of(model: nn.Module, value: Any) -> torch.device:
    found = {p.device for p in model.parameters()} or {t.device for t in flatten(value)[0]}
    if len(found) > 1:
        raise MeasureError(
            f"the model's parameters are on {', '.join(sorted(map(str, found)))}; rotoff runs on one device"
        )
    return found.pop() if found else torch.device("cpu")
