"""Trains a model on tapes within a `device_limit`: where its parameters lie, and what its steps follow."""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..core.chain import Chain, LinkRates
from ..core.figures import Figures, percent
from ..core.sequence import Sequence as Ops
from ..core.sizes import format_bytes
from ..errors import ExecutionError, InfeasibleError, MeasureError
from ..profile.allocations import logged, peak_of
from ..profile.optimizer_probe import OptimizerProbe, UpdateCosts
from ..profile.other_size import at_size
from ..profile.reads import RecordedReads
from ..profile.recorded_step import BUSY, aside
from ..profile.tape_groups import (
    RecordedLent,
    RecordedProfile,
    TapeGroups,
    groups_of,
    waiting_plan,
    without_gradients,
)
from ..profile.tape_profile import TapeProfile
from ..profile.trace import trace_of
from ..report.expected_step import keep_all_step
from ..report.summary import in_words
from ..runtime.execution_plan import ExecutionPlan, compile_sequence
from ..runtime.links.pool import LinkPool, new_link
from ..runtime.links.spill import Spill
from ..runtime.placed.moving import all_on, settle_buffers
from ..runtime.placed.placed_plan import PlacedPlan
from ..runtime.placed.placement import Placement
from ..runtime.sharded import Shards, gathering_apart, sharded
from ..runtime.tape_placed import Filled, Lending, PlacedStep, PlacedTape
from ..runtime.tape_step import TapeStep
from ..solver import keep_all
from ..solver.search import parse_host_limit
from ..tape.tape import Known, Tape
from ..tensors.storage import local, storage_key
from ..tensors.tree import tensor_leaves
from .agreement import (
    APART,
    agree_on_placed,
    agree_on_rates,
    alike_cut,
    common_groups,
    everywhere,
    own_of,
    together,
)
from .distributed import not_answering
from .options import Options
from .request import Request
from .signatures import family_of, signature
from .stages import stages_of
from .step_courses import LINK_BYTES, PATIENCE, PlannedSize
from .tape_placed_planner import Found, check_updates, compiled, plan, read_optimizers

logger = logging.getLogger("rotoff")


@dataclass
class _Recorded:
    """A step that is recorded, until its backward has ended."""

    key: Any
    step: RecordedReads
    batch_bytes: int
    shapes: tuple[tuple[int, ...], ...]


@dataclass
class PlacedCourse:
    """What is planned for inputs of one signature. strayed: steps in a row that made other operations."""

    groups: TapeGroups
    plan: ExecutionPlan
    strayed: int = 0

    @property
    def placed(self) -> PlacedPlan | None:
        return self.plan.placed

    @property
    def keeps_all(self) -> bool:
        return self.plan.keeps_all

    @property
    def chain(self) -> Chain:
        return self.groups.chain

    @property
    def sequence(self) -> Ops:
        return self.plan.sequence

    @property
    def levels(self) -> tuple[int, ...]:
        """The most bytes that the device holds in each operation."""
        if self.placed is not None:
            return self.placed.levels
        return tuple(min(level, self.groups.expected) for level in self.groups.levels(self.sequence, False))

    def figures(self, device_limit: int | None) -> Figures:
        """The figures of the step under a `device_limit`, which counts the batch. The plain model's peak is that of a
        loop which sets gradients to None; `keep_all_bytes` is the smallest limit at which it runs unplanned."""
        placed = self.placed
        return Figures(
            device_limit,
            self.groups.expected if placed is None else placed.peak_bytes,
            self.plan.host_bytes + (0 if placed is None else placed.host_bytes),
            self.plan.trace.makespan,
            keep_all_step(self.chain).makespan,
            self.groups.whole,
        )


class PlacedRunner:
    """Runs the steps of `model`, whose parameters `optimizers` update, and owns what lives longer than one.

    Attributes:
        placement: of the parameters; None while the model is as the caller made it.

    Args:
        request: its `mem_limit` is for all that the device holds; None to `record` alone.
        before: the one that ran the steps so far, of which this takes over what it has recorded and placed.
        group: of processes that follow one plan. shards: of the model, if FSDP2 has sharded it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        request: Request | None,
        options: Options,
        links: LinkPool,
        before: PlacedRunner | None = None,
        group: Any = None,
        shards: Shards | None = None,
    ) -> None:
        if before is not None:
            before.plan_recorded()
        self.model, self.optimizers, self.request = model, tuple(optimizers), request
        self._options, self._links, self._before = options, links, before
        self._group, self._shards = group, shards
        if shards is not None:
            this = weakref.WeakMethod(self._explained)
            shards.tell(lambda error: error if (explained := this()) is None else explained(error))
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.device: torch.device = before.device if before is not None else options.device or device
        self.known: Known = Known() if before is None else before.known
        self.recordings: dict[Any, RecordedProfile] = {} if before is None else before.recordings
        self.times: dict[Any, UpdateCosts] = {} if before is None else before.times
        self._rates: LinkRates | None = None if before is None else before._rates
        self.latest: Any = None if before is None else before.latest  # the signature of the last step
        self.courses: dict[Any, PlacedCourse] = {}
        self.placement: Placement | None = None
        self._recorded: _Recorded | None = None
        self._unforeseen: set[Any] = set()  # families of signatures whose other sizes cannot be foretold
        self._staying: set[int] = set()  # by id, parameters that have to stay on the device
        self._streaming = False
        # by signature, what forwards without gradients allocate
        self._forward_bytes: dict[Any, int] = {} if before is None else before._forward_bytes

    # -- what is planned

    @property
    def course(self) -> PlacedCourse | None:
        """That of the latest step."""
        return self.courses.get(self.latest)

    @property
    def plan(self) -> ExecutionPlan | None:
        """That of the latest step; None if nothing is planned for it."""
        return None if self.course is None else self.course.plan

    def shown(self) -> PlacedCourse:
        """Return what is planned for the last step; in a group, one process may ask alone.

        Raises:
            InfeasibleError: if nothing fits. MeasureError: if nothing is recorded, or all of a group must meet before.
        """
        if self._group is not None and (self._recorded is not None or self.course is None):
            raise MeasureError(APART)
        self.plan_recorded()
        if self.latest not in self.recordings:
            raise MeasureError(
                "nothing has been measured yet; call measure(*sample), or train a step after compute_sequence"
            )
        if (course := self.planned(self.latest)) is None:
            raise MeasureError("the last step has no plan yet; its backward has to run")
        return course

    def plans(self) -> list[PlannedSize]:
        """The plans so far."""
        if self._group is None:
            self.plan_recorded()
        found = []
        for key, recording in self.recordings.items():
            course = self.planned(key) if self._group is None else self.courses.get(key)
            if course is not None:
                found.append(PlannedSize.of(recording.profile, course.figures(None)))
        return found

    def prepare(self) -> None:
        """Plan for what was recorded last, if there is something, and bring everything to where the plan has it.

        Raises:
            InfeasibleError: if nothing fits; nothing is moved then.
        """
        self.plan_recorded()
        course = self.planned(self.latest)
        if course is not None and course.plan.placed is not None:
            self._placed().begin(course.plan.placed)
            return
        self.close()
        if course is not None:
            all_on(self.model, self.optimizers, self.device)
        if course is None or self._during:  # a step's closure may call the forward
            with suppress(ExecutionError):  # no place for a file; a plan that needs one says so
                self._placed()

    @property
    def _during(self) -> bool:
        return self.request is not None and self.request.options.get("updates") == "during"

    def planned(self, key: Any) -> PlacedCourse | None:
        """Return what is planned for inputs of this signature; None if no step has shown what they need."""
        course = self.courses.get(key)
        if course is not None and (course.strayed < PATIENCE or self._group is not None):
            return course
        if self.request is None:
            return None
        read_optimizers(self.optimizers or None, self.model)  # its parameters may have been thawed
        recording = self.recordings.get(key)
        if recording is None or course is not None:
            return None
        began, ways = time.perf_counter(), common_groups(partial(self._ways, recording), self._group)
        if ways[0].whole <= self.request.mem_limit:
            chain = ways[0].chain
            everything = replace(compile_sequence(chain, keep_all(chain, "after")), keeps_all=True)
            course = PlacedCourse(own_of(ways[0]), everything)
        else:
            choose = partial(self.choose, ways, self.request)
            (groups, sequence), levels = agree_on_placed(ways, self._during, choose, self._group)
            course = PlacedCourse(groups, compiled(groups, sequence, self.request, levels))
            _report(self.request, course, time.perf_counter() - began)
        self.courses[key] = course
        return course

    def choose(self, ways: Sequence[TapeGroups], request: Request) -> Found:
        """Return a sequence for a step, and those of its groups that it moves."""
        check_updates(self.optimizers, request)
        near = [(one.groups, one.plan) for one in self.courses.values() if one.plan.placed is not None]
        return plan(ways, request, near)

    def _ways(self, recording: RecordedProfile) -> list[TapeGroups]:
        """Return the step's groups in its chains, with host updates and without where both are worth trying: a CPU
        shares its processor with the host."""
        probe = OptimizerProbe(self.optimizers, self.device, self.times)
        return [
            groups_of(recording.profile, found, recording.reads, self.model, probe, host, self._staying, self._shards)
            for found in without_gradients(recording.profile).chains
            for host in ((False, True) if self.device.type == "cpu" else (True,))
        ]

    # -- a training step

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward of a training step.

        Raises:
            InfeasibleError: if the step before was recorded, and nothing fits.
        """
        held = [*self.model.parameters(), *tensor_leaves((args, kwargs))]
        if self._streaming or not any(t.requires_grad for t in held):
            return self.unplanned(self.model, args, kwargs)
        if self.placement is not None:
            self.placement.forward_begins()
        self.plan_recorded()
        self.latest = key = self._key(args, kwargs)
        course = self.planned(key)
        if course is None and self._foretold(key, args, kwargs):
            course = self.planned(key)
        if course is None:
            if not everywhere(not (BUSY.locked() or torch.autograd._profiler_enabled()), self._group):
                return self._away(args, kwargs)
            return self._record(key, args, kwargs)
        if not course.plan.keeps_all:
            return self._follow(course, args, kwargs)
        if self.placement is not None:
            self.placement.wait(None)
            if not self.placement.waits:
                with self.streamed():
                    return self.watched(self.model(*args, **kwargs))
        return self.watched(self.model(*args, **kwargs))

    def _explained(self, error: BaseException) -> BaseException:
        """What a collective within a step raises."""
        told = not_answering(error, self._group)
        if self.placement is not None:
            self.placement.updates.backward_failed(told)
        return told

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What tells steps from others; those that add up whole gradients hold more."""
        key = signature((args, kwargs), self.model)
        return key if self._shards is None else (key, self._shards.reduces, bool(self._shards.waiting))

    def _foretold(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Note what a step takes at a size that none has had, if one at another size has made the same operations;
        returns whether there is one."""
        if self._group is not None:
            return False
        family, _ = family_of(key)
        alike = (one for other, one in reversed(self.recordings.items()) if family_of(other)[0] == family)
        near = next((one for one in alike if one.profile.seen), None)
        if near is None or key in self.recordings or self.request is None or family in self._unforeseen:
            return False
        profile = at_size(near.profile, self.known, self.model, args, kwargs)
        if profile is None:
            self._unforeseen.add(family)
            return False
        self.recordings[key] = RecordedProfile(profile, near.reads)
        return True

    def record(self, args: tuple[Any, ...], kwargs: dict[str, Any], backward: Callable[[Any], object]) -> None:
        """Record a step of which `backward` runs the backward, given what the model returns."""
        key = self.latest = signature((args, kwargs), self.model)
        try:
            backward(self._record(key, args, kwargs, patient=True))
        finally:
            self.plan_recorded()

    def _record(self, key: Any, args: Any, kwargs: Any, patient: bool = False) -> Any:
        """Run a step with everything on the host, from where its operations get it."""
        lending, spill = self._lending_all(), self._spill()
        step = RecordedReads(self.known, self.model, spill, patient)
        if lending is not None:
            step = RecordedLent(self.known, self.model, lending, self.device, spill, patient)
        given = tensor_leaves((args, kwargs))
        nbytes = sum({storage_key(t): t.untyped_storage().nbytes() for t in given}.values())
        nbytes += sum(t.nbytes for t in given if t.is_leaf and t.requires_grad)  # their gradients
        nbytes += 0 if self._shards is None else self._shards.waiting
        self._recorded = _Recorded(key, step, nbytes, tuple(tuple(t.shape) for t in given))
        if self._shards is not None:
            step.parameters, step.arrived = self._shards.parameters, self._placed().arrived
        try:
            with nullcontext() if lending is None else lending.forward():
                run = partial(step.run, self.model, *args, **kwargs)
                return self.watched(together(run, self._group))
        except BaseException:
            step.stop()
            self._recorded = None
            raise

    def _away(self, args: Any, kwargs: Any) -> Any:
        """Run a step without a plan or a record: what it saves leaves the device at once."""
        lending, step = self._lending_all(), TapeStep(None, spill=self._spill())
        with ExitStack() as stack:
            stack.enter_context(aside())
            if lending is not None:
                stack.enter_context(lending.forward())
            tape = Tape(self.known) if lending is None else PlacedTape(self.known, lending)
            stack.enter_context(gathering_apart(sharded(self.model).values(), tape))
            stack.enter_context(step.forward(tape))
            return self.watched(self.model(*args, **kwargs))

    def _lending_all(self) -> Lending | None:
        """Put all that can be placed on the host, and return what lends it; None where operations read it there."""
        if self.request is None and self.device.type == "cpu":
            return None
        placement = self._placed()
        placement.begin(self._waiting())
        return Lending(self.model, placement.away(), self.device, home=True) if placement.link.queues else None

    def _spill(self) -> Spill:
        return Spill(self.device, self._options.host_directory)

    def plan_recorded(self) -> None:
        """Take what the step that was recorded last has shown, if its backward has run."""
        recorded = self._recorded
        if recorded is None or not everywhere(recorded.step.ended, self._group):
            return
        self._recorded = None
        recorded.step.stop()
        if not everywhere(recorded.step.shown, self._group):
            return
        if self._rates is None:
            measure = partial(self._links.bandwidth, self.device, LINK_BYTES)
            self._rates = self._links.shared(agree_on_rates(measure, self._group))
        units = sharded(self.model)
        profile = TapeProfile(
            trace_of(recorded.step),
            self.device,
            self._rates,
            recorded.batch_bytes,
            tuple(filter(None, units)) or stages_of(self.model, self._options.stages),
            bool(self._options.forms),
            recorded.shapes,
            borders_stay=bool(units),
        )
        profile = alike_cut(profile, self._group)
        for found in profile.chains:
            recorded.step.trust_stages(found.layout.begins)
        known = self.recordings.get(recorded.key)
        if known is not None and known.profile.seen and known.profile.chain_keys == profile.chain_keys:
            profile = known.profile.timed_by(profile.trace)
        self.recordings[recorded.key] = RecordedProfile(profile, recorded.step.reading)
        self.courses.pop(recorded.key, None)

    def _follow(self, course: PlacedCourse, args: Any, kwargs: Any) -> Any:
        placed = course.plan.placed
        assert placed is not None
        placement = self._placed()
        placement.begin(placed)
        link = self._links.take(self.device, course.plan.host_bytes) if course.plan.host_bytes else None
        lending = Lending(self.model, placement.lent() if self._shards is None else (), self.device)
        tape = PlacedTape(self.known, lending)
        done = (lambda: None) if link is None else partial(self._links.give_back, link)
        step = PlacedStep(course.plan, course.groups.found.layout, link, placement, lending, done, self._spill())
        placement.takes(step)
        with gathering_apart(sharded(self.model).values(), tape), step.forward(tape):
            result = self.model(*args, **kwargs)
        course.strayed = course.strayed + 1 if step.left_course else 0
        if not lending.reached <= self._staying:
            self._staying |= lending.reached
            self.courses.clear()
        return result

    # -- a forward without a plan

    def unplanned(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a forward that has no plan: in eval mode, or without gradients. The first of each signature that saves
        nothing is measured. If it takes too much beside what a plan keeps on the device between steps, all that can be
        placed goes to the host.

        Raises:
            InfeasibleError: if it took more than the `device_limit`, with all that can be placed on the host, and no
                step is planned in that limit; else that is a warning.
        """
        run, request, placement = partial(plain, *args, **kwargs), self.request, self.placement
        held = [*self.model.parameters(), *tensor_leaves((args, kwargs))]
        saves = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in held)
        if placement is None or request is None or saves or not placement.between_steps:
            with self.streamed():
                return self.watched(run())
        key = signature((args, kwargs), self.model)
        held += [*self.model.buffers(), *placement.beside_parameters()]
        whole = sum({storage_key(tensor): local(tensor).nbytes for tensor in held}.values())
        held.clear()  # what goes to the host leaves the device
        known = self._forward_bytes.get(key)
        if placement.tight if known is None else whole - placement.away_bytes + known > request.mem_limit:
            self._clear(placement)
        if placement.waits and known is not None and whole + known <= request.mem_limit:
            placement.wait(None)
            return run()
        with self.streamed():
            if known is not None or torch.autograd._profiler_enabled():
                return run()
            result, log = logged(run, self.device)
        self._forward_bytes[key] = known = peak_of(log)
        taken = whole - placement.away_bytes + known
        if taken > request.mem_limit:
            self._clear(placement)
            least = whole - placement.away_bytes + known
            limit = f"the device_limit is {format_bytes(request.mem_limit)} ({request.mem_limit} bytes)"
            told = (
                f"a forward without gradients took {format_bytes(taken)} ({taken} bytes), and {limit}; the next one has"
                " its parameters on the host"
                if least <= request.mem_limit
                else f"a forward without gradients needs at least {format_bytes(least)} ({least} bytes), with its"
                f" parameters on the host; {limit}"
            )
            if self.plan is None:
                raise InfeasibleError(told, least)
            logger.warning("rotoff: %s", told)
        return result

    def _clear(self, placement: Placement) -> None:
        """Move all that is placed to the host, if nothing is in the way."""
        assert self.request is not None
        asked = self.request.options.get("host_limit")
        placement.clear(math.inf if asked is None else parse_host_limit(asked))

    def watched(self, result: Any) -> Any:
        """Return the `result` of a forward without a plan; its backward begins as a planned one's."""
        if self.placement is not None:
            self.placement.gradients.watch(result)
        return result

    @contextmanager
    def streamed(self) -> Iterator[None]:
        """Within this context, parameters on the host are fetched as the model's operations need them."""
        lazy = any(nn.parameter.is_lazy(p) for p in self.model.parameters())  # they have no bytes to place
        if self.placement is None or self.request is None or self._streaming or lazy:
            yield
            return
        self.placement.wait(self._waiting)
        self.placement.forward_begins()
        away = self.placement.away()
        if not away or not self.placement.link.queues:
            yield
            return
        self._streaming = True
        try:
            lending = Lending(self.model, away, self.device, self.placement.room, home=True)
            with Filled(lending).forward():
                yield
        finally:
            self._streaming = False

    # -- where parameters are

    def _waiting(self) -> PlacedPlan:
        return waiting_plan(self.model, OptimizerProbe(self.optimizers, self.device, None), self._shards)

    def _placed(self) -> Placement:
        """The placement of the parameters; that of the runner before if it was for the same optimizers. Buffers of a
        model that the caller has left elsewhere come to the device."""
        if self._options.device is not None:
            settle_buffers(self.model, self.device)
        if self.placement is None:
            before, self._before = self._before, None
            known = None if before is None else before.placement
            if before is not None and known is not None and known.here and known.optimizers == self.optimizers:
                self.placement, before.placement = known, None
            else:
                if before is not None:
                    before.close(resident=False)
                link = new_link(self.device, self._options.host_directory)
                self.placement = Placement(link, self.optimizers, {} if self._shards is None else self._shards.of)
                weakref.finalize(self.placement, link.close)
        return self.placement

    def close(self, resident: bool = True) -> None:
        """Return everything to the caller, on the device if `resident`, else where it lies."""
        if self._recorded is not None:
            self._recorded.step.stop()
            self._recorded = None
        before, self._before = self._before, None
        if before is not None:
            before.close(resident)
        placement, self.placement = self.placement, None
        if placement is not None:
            if not placement.here:  # the process that this one was forked from has placed them
                placement.gradients.marks.remove()
            placement.close(resident=resident and placement.here)


def _report(request: Request, course: PlacedCourse, seconds: float) -> None:
    figures, plan, groups = course.figures(request.mem_limit), course.plan, course.groups
    logger.info(
        "rotoff: planned %s in %.1f s, device_limit %s, keeping everything takes %s, predicted peak %s, step %.4g s (%s"
        " over keeping everything); the parameters of %d of %d groups lie on the device between steps, %s come in and"
        " %s go out in each; %s",
        request,
        seconds,
        format_bytes(request.mem_limit),
        figures.everything,
        format_bytes(figures.peak_bytes),
        figures.step_time,
        percent(figures.overhead),
        sum(name.startswith("w") for name in plan.sequence.resident),
        len(groups.placed),
        format_bytes(plan.trace.h2d_bytes),
        format_bytes(plan.trace.d2h_bytes),
        in_words(plan.sequence),
    )
