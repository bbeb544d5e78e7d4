"""Runs the training steps of a model: the first of each kind is recorded, later ones follow the plan that it allows."""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..accelerator import is_capturing, retries
from ..core.backward_from import read_backward_from
from ..core.chain import LinkRates
from ..core.figures import Figures
from ..core.sizes import format_bytes
from ..errors import InfeasibleError, MeasureError
from ..profile.other_size import at_size
from ..profile.recorded_step import (
    ASIDE,
    BACK,
    BUSY,
    OWN,
    Reads,
    RecordedStep,
    in_log,
    stop_complete,
    within_backward,
)
from ..profile.sample_step import run_sample
from ..profile.tape_groups import RecordedLent
from ..profile.tape_profile import TapeProfile
from ..profile.trace import trace_of
from ..runtime.execution_plan import ExecutionPlan
from ..runtime.held_check import HeldCheck
from ..runtime.links.base import Link
from ..runtime.links.pool import LinkPool
from ..runtime.links.spill import Spill
from ..runtime.sharded import device_of, gathered, gathering_apart, sharded
from ..runtime.step_times import Recording
from ..runtime.tape_placed import Lending, PlacedTape
from ..runtime.tape_step import TapeStep
from ..tape import kernel
from ..tape.contents import is_plain
from ..tape.tape import Known, Tape
from ..tensors.storage import storage_key
from ..tensors.tree import tensor_leaves
from .agreement import APART, agree_on_plan, agree_on_rates, common_profile, everywhere, room_of, together
from .inputs import constants, family_of, refuse_meta, signature, size_of
from .options import Options
from .request import Request
from .stages import stages_of
from .step_planner import StepPlan, Way, make_plan

logger = logging.getLogger("rotoff")
Call = partial[Any]  # of the model
PATIENCE = 2  # steps in a row off their course before another one is recorded
MOST = 64  # courses that are kept
OF_ONE_KIND = 8  # of them for inputs of one signature
MEASURE = "measure the model"
LINK_BYTES = 16 << 20  # of a copy whose time says how fast the link is


@dataclass(eq=False)
class Course:
    """What is known of steps with inputs of one signature that made the same operations.

    hint: the input's leaves that are no tensors. reads: of parameters. strayed: steps that made others.
    patience: how many such steps there may be until another course is recorded. beside: bytes of outputs beside the
    loss from which the measured backward started, too. hints: of inputs whose steps have kept it. overwrites: whether
    each step has to be verified as the first one, since it writes unseen into what it made before.
    """

    profile: TapeProfile
    hint: str
    reads: Reads
    plan: StepPlan | None = None
    strayed: int = 0
    patience: int = PATIENCE
    beside: int = 0
    hints: set[str] = field(default_factory=set)
    overwrites: bool = False

    def watched(self, hint: str) -> bool:
        """Whether a step with such an input may make other operations, so that it is followed though it keeps
        everything."""
        return self.profile.varies or (hint != self.hint and hint not in self.hints and len(self.hints) < OF_ONE_KIND)

    def followed(self, step: TapeStep, hint: str) -> None:
        """Note whether a step has kept to this course."""
        if step.left_course:
            self.strayed += 1
        else:
            self.hints.add(hint)


class PlannedSize(NamedTuple):
    """The plan for one size of input.

    Attributes:
        shapes: of the input's tensors.
        measured: whether a step of this size has run; if not, its bytes are those of fake tensors.
        memory: expected peak of the step in bytes, in the terms of the limit.
        makespan: expected seconds of the step; under a `device_limit` with the updates.
        overhead: expected seconds over those of keeping everything, less 1.
    """

    shapes: tuple[tuple[int, ...], ...]
    measured: bool
    memory: int
    makespan: float
    overhead: float

    @classmethod
    def of(cls, profile: TapeProfile, figures: Figures) -> PlannedSize:
        """The row of a planned step."""
        step = figures.peak_bytes, figures.step_time, figures.overhead
        return cls(profile.shapes, profile.seen, *step)


@dataclass(eq=False)
class Recorded:
    """A step that is recorded, until its backward has ended."""

    step: RecordedStep
    key: Any
    hint: str
    shapes: tuple[tuple[int, ...], ...]
    batch_bytes: int


def _refuse_capture() -> None:
    if is_capturing():
        raise MeasureError(
            "a step cannot be planned or recorded while a CUDA graph is captured, which would replay its copies without"
            " their waits; run it outside of the capture, or plan with a limit that keeps everything"
        )


def _dropped(parameter: torch.Tensor) -> None:
    """Nobody reads the gradients of a sample, and all of them together may not fit."""
    parameter.grad = None


def _goes_on(gradients: object) -> None:
    """A backward leaves the step for what has made its input, which the step's log does not count."""
    with in_log(ASIDE):
        pass


class _InFlight:
    """A forward of which no backward has begun, and whose graph is alive: it holds this, and calls it then."""

    begun = False

    def __call__(self, gradients: object) -> None:
        self.begun = True


class _Aside(TapeStep):
    """A step beside one that is recorded, whose log does not count what the backward of this one does."""

    def advance(self, tape: Tape, stage: int) -> None:
        if not self._queued:
            with in_log(ASIDE):
                pass
        super().advance(tape, stage)

    def _end(self, tape: Tape) -> None:
        super()._end(tape)
        with in_log(BACK):
            pass


class StepRunner:
    """Runs steps of `model` within a `mem_limit`, and owns what lives longer than one step.

    Args:
        links: where steps take their links. check: whether every operation compares the bytes held with the bytes
            charged, and the model never runs as it is. group: of processes that follow one plan. root: returns the
            module that runs them, which FSDP2 may have sharded.

    Attributes:
        request: for every plan; None: none yet.
        latest: the course recorded or followed last.
        plain: why steps have had no plan.
        recording: records the times of the next step, if given.
        ceiling: the family and the sizes of the largest input that was announced, if one was.
        waits: whether steps wait for a plan that they make with others.
    """

    follows_all = True  # whether a step that may vary is followed though its plan keeps everything

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        links: LinkPool,
        check: bool = False,
        group: Any = None,
        root: Callable[[], nn.Module | None] = lambda: None,
    ) -> None:
        self.model, self.options, self.links = model, options, links
        self.request: Request | None = None
        self.latest: Course | None = None
        self.plain: list[str] = []
        self.recording: Recording | None = None
        self.ceiling: Any = None
        self.waits = False
        self.known = Known()
        self.new_tape: Callable[[Known], Tape] = kernel.Tape
        self.group, self.root, self._check = group, root, check
        self._courses: OrderedDict[Any, list[Course]] = OrderedDict()
        self._recorded: Recorded | None = None
        self._rates: dict[torch.device, LinkRates] = {}
        self._in_flight: weakref.WeakSet[_InFlight] = weakref.WeakSet()
        self._said: set[Any] = set()  # what has been warned of
        self._returned: list[tuple[StorageWeakRef, int]] = []  # by the step before, with their bytes
        self._retries: int | None = None  # of the allocator, before the first planned step
        self._taken: Course | None = None  # by the last step that was followed, if that is known
        self._after: dict[Course | None, Course | None] = {}  # which course followed each
        self._unforeseen: set[Any] = set()  # families of signatures whose other sizes cannot be foretold

    def __iter__(self) -> Iterator[Course]:
        return (course for courses in self._courses.values() for course in courses)

    def take_over(self, before: StepRunner) -> StepRunner:
        """Know what `before`, of the same model, has recorded; returns this."""
        before.settle()
        self.known, self.new_tape, self._rates = before.known, before.new_tape, before._rates
        self.plain, self.ceiling = before.plain, before.ceiling
        for key, known in before._courses.items():
            self._courses[key] = [replace(course, plan=None) for course in known]
            if before.latest in known:
                self.latest = self._courses[key][known.index(before.latest)]
        return self

    # -- a step

    def forward(self, run: Call) -> Any:
        """Run the forward of a training step; `run` is a call of the model's own."""
        value = run.args, run.keywords
        given = tensor_leaves(value)
        if not any(t.requires_grad for t in chain(self.model.parameters(), given)):
            return self.unplanned(run)
        self.settle()
        key, hint = self._key(value), constants(value)
        if (course := self._course(key, hint)) is None:
            self._say_larger(key)
            course = self._foretold(key, hint, run)
        if course is None or course.overwrites or self._is_new(course):
            _refuse_capture()
            return self._record(run, key, hint)
        if self.waits:
            return self._away(run)
        self.latest = course
        try:
            planned = self.planned(course)
        except InfeasibleError:
            if not course.profile.seen:  # what fake tensors foretell may be too much
                return self._record(run, key, hint)
            if not self._dropped(key, course):
                raise
            return self._away(run)
        self._warn_in_flight(planned)
        recorded = self.recording is not None and not self.recording.begun
        if planned.keeps_all and not recorded and not (self.follows_all and course.watched(hint)):
            return self._noted(self._as_it_is(run))
        _refuse_capture()
        return self._follow(key, course, planned, hint, run)

    def unplanned(self, run: Call) -> Any:
        """Run a forward that has no plan: in eval mode, without gradients, or of a model that needs none."""
        return run()

    def streamed(self) -> AbstractContextManager[object]:
        """Within this context, other methods of the model may be called than its forward."""
        return nullcontext()

    def _key(self, value: Any) -> Any:
        """What tells steps from others that need other plans."""
        return signature(value, self.model)

    def _as_it_is(self, run: Call) -> Any:
        """Run a step whose plan is the model as it is."""
        return run()

    def _watched(self, result: Any) -> Any:
        """Return what the forward of a step without a plan has returned."""
        return result

    def _lending(self) -> Lending | None:
        """What lends the parameters in a step without a plan; None where operations read them where they lie."""
        return None

    def _course(self, key: Any, hint: str) -> Course | None:
        """The course that is expected of an input: of those with its numbers the one that followed the last step's
        before, as with forwards that share an open region of autocast; or the one that was recorded last."""
        known = self._courses.get(key)
        if not known:
            return None
        self._courses.move_to_end(key)
        then = self._after.get(self._taken)
        if then in known and (then.hint == hint or all(one.hint != hint for one in known)):
            return then
        return next((one for one in known if one.hint == hint), known[0])

    def _is_new(self, course: Course) -> bool:
        """Whether steps have left a course so often that one is recorded where a course is expected that none knows."""
        unknown = self._after.get(self._taken) is None
        return unknown and course.strayed >= course.patience and self.group is None

    def _dropped(self, key: Any, course: Course) -> bool:
        """Forget a course for which there is no plan, if there is one for another course of such inputs: steps that
        take it leave that one."""
        known = self._courses[key]
        others = [one for one in known if one is not course and one.plan is not None]
        if not others or self.group is not None:
            return False
        known.remove(course)
        self.latest = others[0]
        return True

    def _took(self, key: Any, course: Course, step: TapeStep) -> None:
        """Note which course a step took; of two it is the other if it left this one."""
        if self.group is not None:
            return
        others = [one for one in self._courses.get(key, []) if one is not course]
        taken = course if not step.left_course else others[0] if len(others) == 1 else None
        self._after[self._taken] = taken
        self._taken = taken

    def _foretold(self, key: Any, hint: str, run: Call) -> Course | None:
        """The course of an input whose size no step has had, by the largest step that made the same operations."""
        family, _ = family_of(key)
        if self.group is not None or family in self._unforeseen:
            return None
        alike = (one for other, known in self._courses.items() if family_of(other)[0] == family for one in known)
        alike = (one for one in alike if not one.overwrites and not one.reads.larger)
        seen = (one for one in alike if one.profile.seen and one.hint == hint)
        if (near := max(seen, key=lambda one: one.profile.batch_bytes, default=None)) is None:
            return None
        try:
            profile = at_size(near.profile, self.known, self.model, run.args, run.keywords)
        except MeasureError:
            self._unforeseen.add(family)
            return None
        if profile is None:
            return None
        return self.take(key, Course(profile, hint, near.reads))

    def _record(self, run: Call, key: Any, hint: str) -> Any:
        """Run a step that no plan is for: what it saves leaves the device at once."""
        refuse_meta(self.model, (run.args, run.keywords))
        stop_complete()
        several = BUSY.locked() or within_backward()  # steps are under way
        profiled = not several and torch.autograd._profiler_enabled()
        if profiled:
            self.say_plain("it cannot be recorded while a profiler is active; train or measure one step before")
        if not everywhere(not several and not profiled, self.group):
            course = self._course(key, hint)
            return self._away(run) if course is None or not course.overwrites else self._as_it_is(run)
        recorded = together(partial(self._begin, key, hint, run), MEASURE, self.group)
        if self.group is None and not recorded.step.start():  # another thread has begun to record since
            return self._away(run)
        try:
            result = self._watched(together(partial(recorded.step.run, run), MEASURE, self.group))
        except BaseException:
            recorded.step.stop()
            raise
        self._recorded = recorded
        return self._noted(result)

    def _begin(self, key: Any, hint: str, run: Call, patient: bool = False) -> Recorded:
        given, step = tensor_leaves((run.args, run.keywords)), self._recorder(self._spill(run), patient)
        shapes = tuple(map(size_of, given))
        for t in given:
            if t.grad_fn is not None:
                t.grad_fn.register_prehook(_goes_on)
        return Recorded(step, key, hint, shapes, self._batch_bytes(given))

    def _recorder(self, spill: Spill, patient: bool) -> RecordedStep:
        """What records a step; its parameters lie where it reads them, or are lent."""
        if (lending := self._lending()) is None:
            return RecordedStep(self.known, self.model, spill, patient, gathered(self.root() or self.model))
        return RecordedLent(self.known, self.model, lending, spill, patient)

    def _batch_bytes(self, given: list[torch.Tensor]) -> int:
        """What the caller holds of a step's input."""
        return sum({storage_key(t): t.untyped_storage().nbytes() for t in given}.values())

    def device_for(self, given: list[torch.Tensor]) -> torch.device:
        """Where a step runs on these tensors."""
        every = (*self.model.parameters(), *self.model.buffers(), *given)
        device = self.options.device or device_of(self.root() or self.model)
        return device or next((t.device for t in every if not t.is_meta), torch.device("cpu"))

    def _spill(self, run: Call) -> Spill:
        return Spill(self.device_for(tensor_leaves((run.args, run.keywords))), self.options.host_directory)

    def _away(self, run: Call) -> Any:
        """Run a step without a plan or a record: what it saves leaves the device at once."""
        lending, step = self._lending(), _Aside(None, spill=self._spill(run))
        tape = self.new_tape(self.known) if lending is None else PlacedTape(self.known, lending)
        lent = nullcontext() if lending is None else lending.forward()
        with in_log(OWN), lent, gathering_apart(sharded(self.model).values(), tape), step.forward(tape):
            return self._watched(run())

    def settle(self) -> None:
        """Make a course of the step that was recorded last, if its backward has run; in a group, all together."""
        recorded = self._recorded
        if recorded is None or within_backward():
            return
        if not everywhere(recorded.step.ended, self.group):
            return
        self._recorded = None
        recorded.step.stop()
        if everywhere(recorded.step.shown, self.group):
            self._learn(recorded)
            most = recorded.step.most_bytes
            if self.request is not None and most > self.request.mem_limit:
                logger.warning(
                    "rotoff: the first step with an input of its kind took %s, though all that it saved left the device"
                    " at once; the limit is %s, which the next steps keep by a plan, if there is one",
                    format_bytes(most),
                    format_bytes(self.request.mem_limit),
                )

    def seen(self) -> Course | None:
        """Return the latest course; in a group, one process may ask alone.

        Raises:
            MeasureError: in a group, if all of it must meet before there is one.
        """
        if self.group is None:
            self.settle()
        elif self.latest is None and self._recorded is not None:
            raise MeasureError(APART)
        return self.latest

    def _learn(self, recorded: Recorded) -> Course:
        """Return the course of a recorded step."""
        units, device = sharded(self.model), recorded.step.device
        profile = TapeProfile(
            trace_of(recorded.step),
            device,
            self._rates_of(device, recorded.step.most_bytes),
            recorded.batch_bytes,
            tuple(filter(None, units)) or stages_of(self.model, self.options.stages),
            bool(self.options.forms),
            recorded.shapes,
            varies=recorded.step.varies,
            borders_stay=bool(units),
        )
        course = Course(common_profile(profile, self.group), recorded.hint, recorded.step.reading)
        course = self.take(recorded.key, course)
        course.profile = common_profile(course.profile, self.group)  # with the times of the step before, too
        course.overwrites = recorded.step.overwrites
        for found in course.profile.chains:
            recorded.step.trust_as(profile.trace.keys(found.layout.begins))
        return course

    def take(self, key: Any, course: Course) -> Course:
        """Keep a course of inputs with this signature; returns that which it is."""
        known, profile = self._courses.setdefault(key, []), course.profile
        patience = max((one.patience * (1 + (one.strayed > 0)) for one in known), default=PATIENCE)
        alike = [one for one in known if one.profile.chain_keys == profile.chain_keys]
        if alike:
            new, course = course, alike[0]
            seen = course.profile.seen  # else its bytes are those of fake tensors
            course.profile = course.profile.timed_by(profile.trace) if seen else profile
            course.reads, course.plan = new.reads, None
            known.remove(course)
        known.insert(0, course)
        del known[OF_ONE_KIND:]
        for one in known:
            one.strayed, one.patience = 0, patience
        self._courses.move_to_end(key)
        while len(self._courses) > MOST:
            self._courses.popitem(last=False)
        self.latest = course
        return course

    def _rates_of(self, device: torch.device, room: int) -> LinkRates:
        """Return the link's rates. room: what a step has taken, so that measuring exceeds no limit."""
        room = room if self.request is None else min(room, self.request.mem_limit)
        if device not in self._rates:
            found = agree_on_rates(lambda: self.links.bandwidth(device, LINK_BYTES, room), self.group)
            self._rates[device] = self.links.shared(found)
        return self._rates[device]

    def shown(self, course: Course) -> StepPlan:
        """Return the plan of a course; in a group, one process may ask alone.

        Raises:
            InfeasibleError: if nothing fits the request. MeasureError: in a group, if there is no plan yet.
        """
        if self.group is not None and course.plan is None:
            raise MeasureError(APART)
        return self.planned(course)

    def planned(self, course: Course) -> StepPlan:
        """Return the plan of a course; it is made now if there is none, in a group by all together.

        Raises:
            InfeasibleError: if nothing fits the request.
        """
        assert self.request is not None
        if course.plan is None:
            course.plan = self._made(course, self.request)
        return course.plan

    def _made(self, course: Course, request: Request) -> StepPlan:
        """Make a plan for a course."""
        near = [one.plan for one in self if one.plan is not None and not one.plan.keeps_all]
        profile, ways, room = course.profile, self._ways(course), room_of(course.profile.device, self.group)
        make = partial(make_plan, profile, request, near, room, ways)
        return agree_on_plan(profile, request, ways, make, self.group)

    def _ways(self, course: Course) -> Several[Way]:
        """The chains in which a course can be planned."""
        return course.profile.chains

    def _follow(self, key: Any, course: Course, planned: StepPlan, hint: str, run: Call) -> Any:
        device = course.profile.device
        self._warn_of_held(planned, tensor_leaves((run.args, run.keywords)))
        step, tape = self._begun(course, planned)
        if self.recording is not None and not self.recording.begun:
            step.times = self.recording.start(planned.execution.trace, device, step.link)
        step.on_graph = self._warn_of_graph
        self._warn_of_retries(device)
        with gathering_apart(sharded(self.model).values(), tape), step.forward(tape):
            result = run()
        course.followed(step, hint)
        self._took(key, course, step)
        if course.strayed:
            cure = "such a step is planned when it recurs"
            if self.group is not None:
                cure = "several processes plan the first step alone, so let that one leave nothing out"
            self._say(
                "astray",
                "the model's forward made other operations than the planned ones. Its result is that of the plain"
                " model, and what it saves leaves the device at once, which takes longer, and near the smallest limit"
                f" more bytes than that; {cure}",
            )
        return self._noted(result)

    def _begun(self, course: Course, planned: Any) -> tuple[TapeStep, Tape]:
        """Return a step by a plan, and its tape."""
        take, give_back = self._lender(planned.execution, course.profile.device)
        spill = Spill(course.profile.device, self.options.host_directory)
        check = self._held_check(planned)
        step = TapeStep(planned.execution, planned.tape_chain.layout, take, give_back, spill, check)
        return step, self.new_tape(self.known)

    def _lender(self, plan: ExecutionPlan, device: torch.device) -> tuple[Callable[[], Link] | None, Any]:
        """What lends a step its link, and takes it back."""
        take = partial(self.links.take, device, plan.host_bytes) if plan.host_bytes else None
        return take, self.links.give_back

    def _held_check(self, planned: StepPlan) -> HeldCheck | None:
        if not self._check or self.request is None:
            return None
        return HeldCheck(planned.sequence, planned.tape_chain.held(planned.sequence), self.request.mem_limit)

    def _warn_in_flight(self, planned: StepPlan) -> None:
        """Warn, once for each number, if this step makes more in flight than the plan counts on, and the limit has no
        room to keep everything of all."""
        assert self.request is not None
        many, counted = 1 + sum(not one.begun for one in self._in_flight), self.request.in_flight
        if many <= counted or many in self._said:
            return
        each = planned.profile.keep_all_bytes(2) - planned.profile.keep_all_bytes()
        if (planned.figures(None).keep_all_bytes or 0) + (many - counted) * each > self.request.mem_limit:
            self._say(
                many,
                f"{many} steps are between their forward and their backward at once, and the plan counts on {counted},"
                " so together they may exceed the limit; call each backward before the next forward, or plan with"
                f" compute_sequence(mem_limit, in_flight={many})",
            )

    def _warn_of_graph(self) -> None:
        """Warn, once, that the graph of a backward holds what it has read, which no plan counts."""
        self._say(
            "graph",
            "a backward with create_graph=True makes a graph that keeps what it has read, which no plan counts, so the"
            " limit may be exceeded until that graph is gone; compute the gradient within the model's forward to have"
            " it planned",
        )

    def _noted(self, result: Any) -> Any:
        """Return what a step has returned, and note its bytes, which the caller may hold until the next one, and that
        its backward has yet to come."""
        made = [t for t in tensor_leaves(result) if t.grad_fn is not None]
        self._in_flight.add(going := _InFlight())
        for t in made:
            t.grad_fn.register_prehook(going)  # type: ignore[union-attr]
        storages = {storage_key(t): t.untyped_storage() for t in made if is_plain(t) and t.dim()}
        self._returned = [(StorageWeakRef(one), one.nbytes()) for one in storages.values()]
        return result

    def _warn_of_held(self, planned: StepPlan, given: list[torch.Tensor]) -> None:
        """Warn, once, if the caller holds what the step before has returned, and the forward exceeds the limit by it.
        given: the input, which the plan counts."""
        if self.request is None or self.request.in_flight > 1:
            return
        if any(not one.begun for one in self._in_flight):  # what these hold is another warning
            return
        counted = {t.untyped_storage()._cdata for t in given if is_plain(t)}
        held = sum(nbytes for one, nbytes in self._returned if one.cdata not in counted and not one.expired())
        over = planned.forward_peak + held - self.request.mem_limit
        if held and over > 0:
            self._say(
                "held",
                f"while the forward runs, the loop still holds {format_bytes(held)} that the step before has returned,"
                f" which no plan counts, so the limit may be exceeded by {format_bytes(over)}; delete them after the"
                " backward (del output), or give a limit that is smaller by as much",
            )

    def _warn_of_retries(self, device: torch.device) -> None:
        """Warn, once, if since the first planned step the allocator has found no room and has tried again."""
        now = retries(device)
        self._retries = now if self._retries is None else self._retries
        if now > self._retries:
            self._say(
                "retries",
                f"{now - self._retries} times the allocator found no room on {device} and made the host wait while it"
                " gave back what it had cached, since it reserves more than steps allocate; lower the limit, or set"
                " PYTORCH_ALLOC_CONF=expandable_segments:True",
            )

    def _say_larger(self, key: Any) -> None:
        """Log a warning if an input is larger than the largest that was announced."""
        if self.ceiling is None:
            return
        (kind, most), (own, sizes) = self.ceiling, family_of(key)
        pairs = zip(most, sizes, strict=False)
        if kind == own and any(a < b for one, other in pairs for a, b in zip(one, other, strict=False)):
            logger.warning(
                "rotoff: the input %s is larger than up_to, so it had no plan before this step",
                [list(shape) for shape in sizes],
            )

    def _say(self, of: Any, message: str) -> None:
        """Log a warning, once of each kind."""
        if of not in self._said:
            self._said.add(of)
            logger.warning("rotoff: %s", message)

    def say_plain(self, why: str) -> None:
        """Log a warning, once for each reason, that a step has no plan."""
        if why not in self.plain:
            self.plain.append(why)
            logger.warning("rotoff: a step with a new input shape has no plan, since %s", why)

    # -- what is asked without a step

    def measure(self, run: Call, before_write: Callable[[torch.UntypedStorage], None]) -> Course:
        """Record a step on a sample. before_write: called with each storage that the forward is about to overwrite."""
        if torch.autograd._profiler_enabled() and not BUSY.locked():
            raise MeasureError("nothing can be measured while a profiler is active; measure before")
        value = run.args, run.keywords
        begin = partial(self._begin, self._key(value), constants(value), run, patient=True)
        recorded = together(begin, MEASURE, self.group)
        step = recorded.step
        step.before_write, step.arrived = before_write, step.arrived or _dropped

        names = read_backward_from(self.options.backward_from)
        record = partial(run_sample, step, lambda: self._watched(step.run(run)), names)
        try:
            roots = together(record, MEASURE, self.group)
        finally:
            step.stop()
        beside = sum(t.nbytes for t in roots if t.dim()) if any(not t.dim() for t in roots) else 0
        del roots
        course, self._taken = self._learn(recorded), None  # which is expected next, whatever the steps before took
        course.beside = beside
        if self.group is not None and self.request is not None:
            self.planned(course)  # while all are here
        return course

    def ask(self, request: Request) -> None:
        """Plan for a request from now on; for the latest course now.

        Raises:
            InfeasibleError: if nothing fits; the request before stays.
        """
        self.settle()
        before, self.request = self.request, request
        plans = [(course, course.plan) for course in self]
        for course in self:
            course.plan = None
        try:
            if self.latest is not None:
                self.planned(self.latest)
        except BaseException:
            self.request = before
            for course, plan in plans:
                course.plan = plan
            raise

    def plans(self) -> list[PlannedSize]:
        """The plans so far."""
        if self.group is None:
            self.settle()
        found = []
        for course in self:
            if course.plan is None and (self.request is None or self.group is not None):
                continue
            found.append(PlannedSize.of(course.profile, self.planned(course).figures(None)))
        return found

    def close(self, resident: bool = True) -> None:
        """Give back what belongs to no step. resident: whether a model that is placed comes to the device."""
        if self._recorded is not None:
            self._recorded.step.stop()
            self._recorded = None
