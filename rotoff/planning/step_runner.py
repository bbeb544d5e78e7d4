"""Runs the planned training steps of a model."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from ..accelerator import block_bytes, retries
from ..capture import strategy
from ..capture.interception import without_checkpoints
from ..capture.sharding import gathers
from ..capture.unrepeatable import compiled
from ..core.sizes import format_bytes
from ..errors import InfeasibleError, OptionError
from ..profile.memory.allocator import DeviceAllocator
from ..runtime.execution_plan import ExecutionPlan
from ..runtime.links.base import Link
from ..runtime.links.pool import LinkPool, new_link
from ..runtime.memory_check import MemoryChecker
from ..runtime.placed.placement import Placement
from ..runtime.step import Step
from ..runtime.step_times import Recording, StepTimes
from ..solver.search import parse_host_limit
from ..tensors.allocated import allocated_bytes
from ..tensors.storage import storage_key
from ..tensors.tree import leaves
from .memory_account import expected_levels
from .options import Options
from .placed import PlacedPlanner
from .request import Request
from .specialization import Specialization, signature
from .specializations import Specializations

logger = logging.getLogger("rotoff")


class StepRunner:
    """Runs steps by their plans, and owns what lives longer than one step.

    Args:
        check: whether every operation compares the bytes held with the bytes charged.

    Attributes:
        recording: records the times of the next step, if given.
        placement: of the parameters, under a `device_limit`.
        links: where steps take their links.
    """

    def __init__(self, specializations: Specializations, links: LinkPool, options: Options, check: bool) -> None:
        self._specializations = specializations
        self.links = links
        self._options = options
        self._check = check
        self._in_flight: weakref.WeakSet[Step] = weakref.WeakSet()
        self._said_in_flight = 0
        self._retries: int | None = None  # of the allocator, before the first planned step
        self._said_retries = False
        self._forward_bytes: dict[Any, int] = {}  # by signature, what forwards without gradients allocate
        self.recording: Recording | None = None
        self.placement: Placement | None = None

    @property
    def request(self) -> Request | None:
        return self._specializations.request

    @request.setter
    def request(self, request: Request | None) -> None:
        self._specializations.request = request

    @property
    def plain(self) -> list[str]:
        return self._specializations.plain

    @property
    def latest(self) -> Any:
        return self._specializations.latest

    def settle(self) -> None:
        """Do nothing: a course is measured before its first step runs."""

    # -- a step

    def forward(self, plain: Callable[..., Any], value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward of a training step on the chain's input `value`; `plain` is the model's own forward."""
        if self.placement is not None:
            self.placement.forward_begins()
        specialization, taped = self._specializations.take(value)
        if specialization is None:
            return self.unplanned(plain, args, kwargs)
        if taped is None:
            return self._run(specialization, value, partial(specialization.captured.own, plain, value))
        try:
            taped.rewind(specialization.captured.tape)
            result = self._run(specialization, value, taped.again)
            taped.exchange()
        except BaseException:
            taped.put_back()
            raise
        return result

    def unplanned(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a forward that has no plan: in eval mode, or without gradients. The first of each signature that saves
        nothing is measured. If it takes too much beside what a plan keeps on the device between steps, all that can be
        placed goes to the host.

        Raises:
            InfeasibleError: if it took more than the `device_limit`, with all that can be placed on the host, and no
                step is planned in that limit; else that is a warning.
        """
        run, request, placement = partial(plain, *args, **kwargs), self._specializations.request, self.placement
        model, value = self._specializations.meter.model, (args, kwargs)
        held = [*model.parameters(), *(leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor))]
        saves = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in held)
        if placement is None or request is None or saves or not placement.between_steps:
            with self.streamed():
                return self.watched(run())
        key = signature(value, model)
        held += [*model.buffers(), *placement.beside_parameters()]
        whole = sum({storage_key(tensor): tensor.nbytes for tensor in held}.values())
        known = self._forward_bytes.get(key)
        if placement.tight if known is None else whole - placement.away_bytes + known > request.mem_limit:
            self._clear(placement, request)
        if placement.waits and known is not None and whole + known <= request.mem_limit:
            placement.wait(None)
            return run()
        with self.streamed():
            if known is not None or torch.autograd._profiler_enabled():
                return run()
            result, log = DeviceAllocator(self._device).log(run)
        self._forward_bytes[key] = known = log.peak()
        taken = whole - placement.away_bytes + known
        if taken > request.mem_limit:
            self._clear(placement, request)
            least = whole - placement.away_bytes + known
            limit = f"the device_limit is {format_bytes(request.mem_limit)} ({request.mem_limit} bytes)"
            told = (
                f"a forward without gradients took {format_bytes(taken)} ({taken} bytes), and {limit}; the next one has"
                " its parameters on the host"
                if least <= request.mem_limit
                else f"a forward without gradients needs at least {format_bytes(least)} ({least} bytes), with its"
                f" parameters on the host; {limit}"
            )
            latest = self._specializations.latest
            if latest is None or latest.plan is None:
                raise InfeasibleError(told, least)
            logger.warning("rotoff: %s", told)
        return result

    def _run(self, specialization: Specialization, value: Any, own: Callable[[], Any]) -> Any:
        """Run a step by the plan of `specialization`; `own` runs the model's own forward."""
        assert specialization.plan is not None
        recording = self.recording if self.recording is not None and self.recording.times is None else None
        if specialization.plan.keeps_all and not self._check and recording is None:
            if self.placement is not None:
                self.placement.wait(None)
            before = allocated_bytes(specialization.profile.device)
            with without_checkpoints():  # with room for everything they would only cost
                result = specialization.captured.started(own())
            after = allocated_bytes(specialization.profile.device)
            if before is not None and after is not None:
                self._specializations.ran_plain(specialization, value, after - before)
            return self.watched(result)
        if recording is not None:  # the recorded times are compared with predicted ones
            specialization = self._specializations.timed(specialization)
        profile, plan = specialization.planned, specialization.plan
        assert plan is not None
        strategy.refuse_passed_by()
        given = [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]
        if plan.placed is not None and recording is not None:
            raise OptionError(
                "record_step needs a plan with a mem_limit; with a device_limit the updates come after the step"
            )
        placement = self._placed(plan)
        take = partial(self.links.take, profile.device, plan.host_bytes) if plan.host and placement is None else None
        link = None if take is None else take()
        if placement is not None:
            link = placement.link
        checker = self._checker(specialization, plan) if self._check else None
        times: StepTimes | None = None if recording is None else recording.begin(plan.trace, profile.device, link)
        done = self.links.give_back if placement is None else _keep
        stages, behaviours = profile.stages, profile.behaviours
        step = Step(plan, stages, behaviours, profile.device, link, done, checker, times, placement, take)
        if placement is not None:
            placement.takes(step)
        self._warn_in_flight(step)
        self._warn_of_retries(profile.device)
        result = step.follow(specialization.expected, given, own)
        self._specializations.followed(specialization, value, step)
        return specialization.captured.started(result)

    def _checker(self, specialization: Specialization, plan: ExecutionPlan) -> MemoryChecker:
        assert self._specializations.request is not None
        planned, measured = specialization.planned, specialization.profile
        seen = not any(compiled(m) or gathers(m) for stage in planned.stages for m in stage.every_module())
        return MemoryChecker(
            planned.chain,
            plan.sequence,
            block_bytes(planned.device),
            measured.kept_bytes(plan.kept),
            expected_levels(measured, replace(plan, in_flight=1)) if seen else (),
            self._specializations.request.mem_limit,
        )

    def _warn_in_flight(self, step: Step) -> None:
        """Warn, once for each number, if more steps are in flight than the plan counts on."""
        self._in_flight.add(step)
        many, request = sum(not one.closed for one in self._in_flight), self._specializations.request
        if request is not None and max(request.in_flight, self._said_in_flight) < many and request.planner is None:
            self._said_in_flight = many
            logger.warning(
                "rotoff: %d forwards have run before the backward of the first, and the limit counts on %d; give"
                " compute_sequence(limit, in_flight=%d), or rotoff.attach_schedule a pipeline's schedule",
                many,
                request.in_flight,
                many,
            )

    def _warn_of_retries(self, device: torch.device) -> None:
        """Warn, once, if since the first planned step the allocator has found no room and has tried again."""
        if self._said_retries:
            return
        now = retries(device)
        self._retries = now if self._retries is None else self._retries
        if now > self._retries:
            self._said_retries = True
            logger.warning(
                "rotoff: %d times the allocator found no room on %s and made the host wait while it gave back what it"
                " had cached, since it reserves more than steps allocate; lower the limit, or set"
                " PYTORCH_ALLOC_CONF=expandable_segments:True",
                now - self._retries,
                device,
            )

    # -- where parameters are

    def _clear(self, placement: Placement, request: Request) -> None:
        """Move all that is placed to the host, if nothing is in the way."""
        asked = request.options.get("host_limit")
        placement.clear(math.inf if asked is None else parse_host_limit(asked))

    def _placed(self, plan: ExecutionPlan) -> Placement | None:
        """The placement of parameters, brought to the state in which `plan` begins; None if it moves none."""
        request = self._specializations.request
        assert request is not None
        if plan.placed is None or not isinstance(request.planner, PlacedPlanner):
            return None
        placement = self.placement_for(request.planner.optimizers)
        placement.begin(plan.placed, plan.host_bytes)
        return placement

    def placement_for(self, optimizers: tuple[Optimizer, ...]) -> Placement:
        """The placement of the parameters of `optimizers`; a new one if there was another before."""
        if self.placement is None or self.placement.optimizers != optimizers:
            self.unplace(resident=False)
            link = new_link(self._device, self._options.host_directory)
            self.placement = Placement(link, optimizers)
            weakref.finalize(self.placement, link.close)
        return self.placement

    def unplace(self, resident: bool = True) -> None:
        """End the placement. resident: whether parameters return to the device; otherwise they stay where they are."""
        if self.placement is not None:
            placement, self.placement = self.placement, None
            placement.close(resident=resident)

    def watched(self, result: Any) -> Any:
        """Return the `result` of a forward without a plan; its backward begins as a planned one's."""
        if self.placement is not None:
            self.placement.gradients.watch(result)
        return result

    def streamed(self) -> AbstractContextManager[object]:
        """Within this context, parameters on the host are fetched as the model's calls need them."""
        request = self._specializations.request
        if self.placement is None or request is None or not isinstance(request.planner, PlacedPlanner):
            return nullcontext()
        if strategy.lazy(request.planner.model) is not None:  # its parameters have no bytes to place
            return nullcontext()
        self.placement.wait(partial(request.planner.waiting, self._device))
        return self.placement.streamed() or nullcontext()

    @property
    def _device(self) -> torch.device:
        device = self._specializations.meter.device
        assert device is not None
        return device


def _keep(_: Link) -> None:
    """Do not give back the link: the parameters' placement keeps it."""
