"""Trains a model on tapes within a `device_limit`: where its parameters lie, and what its steps follow."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..core.sizes import format_bytes
from ..errors import ExecutionError, InfeasibleError
from ..profile.allocations import logged, peak_of
from ..profile.optimizer_probe import OptimizerProbe
from ..profile.recorded_step import RecordedStep
from ..profile.tape_groups import RecordedLent, TapeGroups, groups_of, waiting_plan
from ..runtime.links.pool import new_link
from ..runtime.links.spill import Spill
from ..runtime.placed.groups import all_on, settle_buffers
from ..runtime.placed.placed_plan import PlacedPlan
from ..runtime.placed.placement import Placement
from ..runtime.sharded import Shards
from ..runtime.tape_placed import Lending, PlacedStep, PlacedTape, filled
from ..runtime.tape_step import TapeStep
from ..solver.search import parse_host_limit
from ..tape.tape import Tape
from ..tensors.storage import local, storage_key, stored
from ..tensors.tree import tensor_leaves
from .agreement import common_groups, not_answering
from .inputs import signature
from .request import Request, check_updates, read_optimizers
from .step_courses import Call, Course, Recorded, StepRunner
from .step_planner import StepPlan

logger = logging.getLogger("rotoff")


class PlacedRunner(StepRunner):
    """Runs steps within a `device_limit`: the parameters, which `optimizers` update, lie where the plans have them.

    Attributes:
        device: of the steps. placement: of the parameters; None while the model is as the caller made it.

    Args:
        before: the one that ran the steps so far, of which this takes over what it has recorded and placed.
        shards: of the model, if FSDP2 has sharded it.
    """

    follows_all = False

    def __init__(self, before: StepRunner, optimizers: Sequence[Optimizer] = (), shards: Shards | None = None) -> None:
        super().__init__(before.model, before.options, before.links, group=before.group, root=before.root)
        self.take_over(before)
        self.optimizers, self.device = tuple(optimizers), before.device_for([])
        self.placement: Placement | None = None
        self._shards = shards
        if shards is not None:
            this = weakref.WeakMethod(self._explained)
            shards.tell(lambda error: error if (explained := this()) is None else explained(error))
        self._before = before if isinstance(before, PlacedRunner) else None
        self._times: dict[Any, float] = {} if self._before is None else self._before._times
        # by signature, what forwards without gradients allocate
        self._forward_bytes: dict[Any, int] = {} if self._before is None else self._before._forward_bytes
        self._staying: set[int] = set()  # by id, parameters that have to stay on the device
        self._streaming = False

    def device_for(self, given: list[torch.Tensor]) -> torch.device:
        return self.device

    # -- what is planned

    def ask(self, request: Request) -> None:
        """Plan for a request from now on, and bring everything to where the plan of the latest course has it.

        Raises:
            InfeasibleError: if nothing fits; nothing is moved then.
        """
        super().ask(request)
        plan = None if self.latest is None else self.planned(self.latest)
        placed = None if plan is None else plan.placed
        before, self._before = self._before, None
        if before is not None:
            known = before.placement
            if known is not None and known.here and known.optimizers == self.optimizers:
                self.placement, before.placement = known, None
            before.close(resident=placed is None)
        if placed is not None:
            self._placed().begin(placed)
            return
        self.close()
        if plan is not None:
            all_on(self.model, self.optimizers, self.device, self._shards is None)
        if plan is None or self._during:  # a step's closure may call the forward
            with suppress(ExecutionError):  # no place for a file; a plan that needs one says so
                self._placed()

    @property
    def _during(self) -> bool:
        return self.request is not None and self.request.options.get("updates") == "during"

    def _ways(self, course: Course) -> list[TapeGroups]:
        assert self.request is not None
        ways = common_groups(partial(self.ways, course), self.group)
        if ways[0].whole > self.request.mem_limit:
            check_updates(self.optimizers, self.request)
        return ways

    def ways(self, course: Course) -> list[TapeGroups]:
        """Return the step's groups in its chains, with host updates and without where both are worth trying: a CPU
        shares its processor with the host."""
        probe = OptimizerProbe(self.optimizers, self.device, self._times)
        return [
            groups_of(course.profile, found, course.reads, self.model, probe, host, self._staying, self._shards)
            for found in course.profile.moving.chains
            for host in ((False, True) if self.device.type == "cpu" else (True,))
        ]

    # -- a training step

    def forward(self, run: Call) -> Any:
        if self._streaming:
            return self.unplanned(run)
        if self._shards is not None:
            self._shards.refuse_after_failure()
        if self.placement is not None:
            self.placement.forward_begins()
        return super().forward(run)

    def _as_it_is(self, run: Call) -> Any:
        if self.placement is not None:
            self.placement.wait(None)
            if not self.placement.waits:
                with self.streamed():
                    return self._watched(run())
        return self._watched(run())

    def _explained(self, error: BaseException) -> BaseException:
        """What a collective within a step raises."""
        told = not_answering(error, self.group)
        if self.placement is not None:
            self.placement.updates.give_up(told)
        return told

    def _key(self, value: Any) -> Any:
        """Steps that add up whole gradients hold more."""
        key = super()._key(value)
        return key if self._shards is None else (*key, self._shards.reduces, bool(self._shards.waiting))

    def _batch_bytes(self, given: list[torch.Tensor]) -> int:
        gradients = sum(t.nbytes for t in given if t.is_leaf and t.requires_grad)
        return super()._batch_bytes(given) + gradients + (0 if self._shards is None else self._shards.waiting)

    def _recorder(self, spill: Spill, patient: bool) -> RecordedStep:
        if self.request is not None:
            every = self.model.parameters() if self._shards is None else self._shards.every(self.model)
            read_optimizers(self.optimizers or None, every)  # its parameters may have been thawed
        step = super()._recorder(spill, patient)
        if self._shards is not None:
            step.parameters, step.arrived = self._shards.parameters, self._placed().arrived
        return step

    def _lending(self) -> Lending | None:
        """Put all that can be placed on the host, and return what lends it; None where operations read it there."""
        if self.request is None and self.device.type == "cpu":
            return None
        placement = self._placed()
        placement.begin(self._waiting())
        return (
            Lending(self.model, placement.away(), home=True) if placement.link.queues and self._shards is None else None
        )

    def _begun(self, course: Course, planned: StepPlan) -> tuple[TapeStep, Tape]:
        assert planned.placed is not None
        placement = self._placed()
        placement.begin(planned.placed)
        lending = Lending(self.model, placement.lent() if self._shards is None else ())
        how = *self._lender(planned.execution, self.device), Spill(self.device, self.options.host_directory)
        step = PlacedStep(placement, lending, planned.execution, planned.tape_chain.layout, *how)
        placement.takes(step)
        return step, PlacedTape(self.known, lending)

    def _took(self, key: Any, course: Course, step: TapeStep) -> None:
        super()._took(key, course, step)
        assert isinstance(step, PlacedStep)
        self._stay(step.lending)

    def _learn(self, recorded: Recorded) -> Course:
        if isinstance(recorded.step, RecordedLent):
            self._stay(recorded.step.lending)
        return super()._learn(recorded)

    def _stay(self, lending: Lending) -> None:
        """What the model's code keeps of parameters beyond its forward stays on the device."""
        if not lending.reached <= self._staying:
            self._staying |= lending.reached
            for one in self:
                one.plan = None

    # -- a forward without a plan

    def unplanned(self, run: Call) -> Any:
        """Run a forward that has no plan: in eval mode, or without gradients. The first of each signature that saves
        nothing is measured. If it takes too much beside what a plan keeps on the device between steps, all that can be
        placed goes to the host.

        Raises:
            InfeasibleError: if it took more than the `device_limit`, with all that can be placed on the host, and no
                step is planned in that limit; else that is a warning.
        """
        request, placement, value = self.request, self.placement, (run.args, run.keywords)
        held = [*stored(self.model.parameters()), *tensor_leaves(value)]
        saves = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in held)
        if placement is None or request is None or saves or not placement.between_steps:
            with self.streamed():
                return self._watched(run())
        key = signature(value, self.model)
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
            if self.latest is None or self.latest.plan is None:
                raise InfeasibleError(told, least)
            logger.warning("rotoff: %s", told)
        return result

    def _clear(self, placement: Placement) -> None:
        """Move all that is placed to the host, if nothing is in the way."""
        assert self.request is not None
        asked = self.request.options.get("host_limit")
        placement.clear(math.inf if asked is None else parse_host_limit(asked))

    def _watched(self, result: Any) -> Any:
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
        if not away or not self.placement.link.queues or self._shards is not None:
            yield
            return
        self._streaming = True
        try:
            lending = Lending(self.model, away, self.placement.room, home=True)
            with filled(lending):
                yield
        finally:
            self._streaming = False

    # -- where parameters are

    def _waiting(self) -> PlacedPlan:
        return waiting_plan(self.model, OptimizerProbe(self.optimizers, self.device, None), self._shards)

    def _placed(self) -> Placement:
        """The placement of the parameters. Buffers of a model that the caller has left elsewhere come to the device."""
        if self.options.device is not None:
            settle_buffers(self.model, self.device)
        if self.placement is None:
            link = new_link(self.device, self.options.host_directory)
            self.placement = Placement(link, self.optimizers, {} if self._shards is None else self._shards.of)
            weakref.finalize(self.placement, link.close)
        return self.placement

    def close(self, resident: bool = True) -> None:
        """Return everything to the caller, on the device if `resident`, else where it lies."""
        super().close()
        placement, self.placement = self.placement, None
        if placement is not None:
            if not placement.here:  # the process that this one was forked from has placed them
                placement.gradients.clear()
            placement.close(resident=resident and placement.here)
