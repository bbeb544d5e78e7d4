"""A training step, and its forward phase: the model's own code runs, stage by stage.

A stage's first forward runs in the user's own graph under saved-tensor hooks: ``F_all`` keeps what autograd saves,
``F_ck`` and ``F_none`` release it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ..capture.course import OUTSIDE, Course
from ..core.sequence import FORWARDS, Op, OpKind, a, abar
from ..errors import ExecutionError
from ..tensors.eager_mode import without
from ..tensors.grad_mode import recording
from ..tensors.storage import View, copy_of, storage_key
from ..tensors.tree import flatten, look_into
from ._follow import Var
from .backward_phase import GIVEN_UP, BackwardPhase
from .call_interception import following
from .hollowing import current_key, renew_graph
from .interpreter import has_own_bytes
from .live import LiveForward
from .placed.brought import bring
from .placed.tensor import PlacedTensor
from .replay import ReplayState
from .stage_run import StageRun
from .stage_tape import StageTape
from .values import Held, compact

HELD = -1  # `Step.astray` if all calls were expected, but a tensor was needed for longer


class Step(BackwardPhase):
    """One training step: runs the operations of the forward phase as the model's own code reaches its stages.

    Attributes:
        astray: as of `LiveForward`, or `HELD`.
        unknown: whether it made calls that were not expected, or held more tensors.
    """

    astray: int | None = None
    unknown = False
    _open: Op | None = None  # the forward operation of the open stage
    _outputs: Sequence[tuple[Var, int]] = ()  # the outputs of the stage that has just ended
    _weights: dict[int, PlacedTensor]  # by id, the parameters that the plan brings for the open stage
    # of each tensor that a later stage has changed: this stage, the content from before, and the tensor, kept alive
    _before: dict[Var, list[tuple[int, torch.Tensor, torch.Tensor]]]

    def forward(self, value: Any) -> Any:
        """Run the forward phase on the chain's input, stage by stage; returns the last stage's output, in the user's
        graph."""

        def run() -> Any:
            out = value
            for i, stage in enumerate(self._stages, start=1):
                self.enter(i)
                out = stage.run(out)
                assert self._live is not None
                self._outputs = self._live.handed(flatten(out)[0])
            return out

        return self.follow(None, flatten(value)[0], run)

    def follow(self, course: Course | None, given: list[torch.Tensor], forward: Callable[[], Any]) -> Any:
        """Run the forward phase; `forward` calls the model's own code on the tensors `given`. Returns its result."""
        live = self._live = self._live_forward(course, given)
        self._before = {}
        self._held[a(0)] = Held((a(0), "input"), [])
        try:
            try:
                with following(live), self._checked():
                    result = forward()
                    self._refuse_given_up()
                    if self._open is None:
                        self.enter(1)
                    live.inside = True
                    with without(live):
                        self._end_forward(live, result)
                self._leave()
            finally:
                if self._open is not None:
                    self._runs[self._open.stage].cease()
                live.forget()
                self._copies.clear()
                self._before.clear()
            while self._next < self._plan.forward_end:
                self._execute_or_skip()
            if self._plan.lets_go:  # the caller's part is not charged
                self._let_result_go()
            self.more_bytes = max(self.more_bytes, self._held.device_bytes(self._kept()) - self._plan.held_bytes)
            self._let_result_go()
            return result
        except BaseException:
            self._give_up()
            raise
        finally:
            self._live = None

    def _live_forward(self, course: Course | None, given: list[torch.Tensor]) -> LiveForward:
        """Return the mode that records the forward's calls."""
        live = LiveForward(course, self, self._generators, given)
        if self._placement is not None:
            self._lender = self._placement.lender()
            live.lend(self._lender, self._placement.in_turn())
        return live

    def _end_forward(self, live: LiveForward, result: Any) -> None:
        live.finish()
        self.astray = HELD if live.astray is None and live.kept_more else live.astray
        self.unknown = live.unknown or live.kept_more
        look_into(result)
        assert self._open is not None
        self._outputs = self._outputs or live.results(result, self._open.stage)

    def enter(self, stage: int) -> None:
        """The first call of `stage` is about to be made."""
        live = self._live
        assert live is not None
        self._refuse_given_up()
        before, live.inside = live.inside, True
        try:
            # the first call may be made without gradients, and others of the stage with them
            with without(live), recording():
                live.instead = {}  # views that hold the input's bytes, and the input
                arriving = [] if self._outputs or self._open is None else live.crossing(stage - 1)
                # also enter the stages that the forward leaves out
                while self._open is None or self._open.stage < stage:
                    if self._open is not None:
                        self._outputs = self._outputs or arriving
                        self._leave(None if self._open.stage == stage - 1 else live.made_by(self._open.stage))
                    while (op := self._plan.sequence.ops[self._next]).kind not in FORWARDS or op.stage in self._runs:
                        self._execute(op)
                    self._enter(op, live)
        except BaseException:  # the model may catch the error and go on without a stage
            for run in self._runs.values():
                run.cease()
            self._open = None
            self._give_up()
            raise
        finally:
            live.inside = before

    def _refuse_given_up(self) -> None:
        if self._closed:
            raise ExecutionError(GIVEN_UP)

    def _enter(self, op: Op, live: LiveForward) -> None:
        self._begins(op, self._next)
        i, recipe = op.stage, None
        if op.kind is OpKind.F_SEL:
            form = self._form(op)
            recipe = None if form.complete else form
            live.algorithms = form.algorithms
        behaviour = self._behaviours[i - 1]
        crossing, needs = self._crossing.get(i - 1, ([], []))
        given = self._held[self._held.input_of(i)].tensors()
        tape = StageTape(self._stage_name(i))
        tape.inputs = [var for var, _ in crossing]
        self._bring(i, tape, live)
        for (var, at), now in zip(crossing, given, strict=True):
            live.frames.fill(var, now)
            if at in behaviour.copied and (tensor := var()) is not None:
                # a view has an autograd node of its own, which runs when the backward leaves the stage
                live.instead[var] = own = tensor.view_as(tensor)
                own.register_hook(compact)
        changed = behaviour.changed_buffers
        replay = ReplayState(self._generators, changing=changed)
        run = StageRun(i, tape, behaviour, needs, replay)
        self._runs[i] = run
        run.brought = {storage_key(copy): self._weights[p] for p, copy in live.brought.items()}
        live.autocast_before = replay.autocast if torch._C._is_any_autocast_enabled() else None
        live.kernels_before = replay.kernels
        live.reads.changing = {id(module._buffers[name]) for module, name in changed} if changed else set()
        live.begin_stage(i, tape, replay)
        kept = self._behaviours[i - 2].kept if i > 1 else ()
        staying = [n for n, (_, at) in enumerate(crossing) if at in kept] if kept else ()
        self._open = op
        run.open(live, given, staying, op.kind in (OpKind.F_ALL, OpKind.F_SEL), recipe, self)

    def _bring(self, i: int, tape: StageTape, live: LiveForward) -> None:
        """Let calls of stage i, and their replays, use the copies on the device of parameters that the plan moves."""
        if self._placement is None:
            return
        live.brought, weights, needs = {}, {}, {}
        for parameter, weight, gradient in self._placement.brought(self._plan.readers.get(i, ())):
            assert weight.device is not None
            weights[id(parameter)], needs[id(parameter)] = weight, parameter.requires_grad
            copy = self._copies.get(id(parameter))
            if copy is None or storage_key(copy) != storage_key(weight.device):
                # derived from the earlier copy, so that gradients are added up in the order of the plain model
                copy = bring(parameter, weight.device, live.newest.get(id(parameter)), gradient)
                live.newest[id(parameter)] = copy
            live.brought[id(parameter)] = self._copies[id(parameter)] = copy
        self._weights = weights
        if weights:
            tape.brought = partial(_content, weights, needs)

    def _leave(self, made: dict[Var, int] | None = None) -> None:
        """End the open stage. made: the measured places of its own outputs; given if the tensors that it hands on
        are inputs of a later stage than the next."""
        op, live, crossing = self._open, self._live, self._outputs
        self._outputs = ()
        assert op is not None
        assert live is not None
        self._open = None
        i = op.stage
        live.instead = {}
        run, behaviour = self._runs[i], self._behaviours[i - 1]
        v = abar(i) if op.kind in (OpKind.F_ALL, OpKind.F_SEL) else a(i)
        if v.saved:
            self._algorithms.ran(i, live.algorithms)
        live.algorithms = None
        outputs, needs, own, kept = [], [], [], []
        for n, (var, at) in enumerate(crossing):
            tensor = var()
            assert tensor is not None
            if live.views_changed:
                renew_graph(tensor)
            if var.stage == i and tensor.grad_fn is not None:
                _register_first(tensor, partial(self.gradient_arrived, i))
            if made is not None:
                at = made.get(var, -1)
            outputs.append(tensor.detach())
            needs.append(tensor.requires_grad)
            own.append(tensor.device == self.device and has_own_bytes(behaviour, at))
            run.tape.outputs.append(var)
            if at in behaviour.kept:
                kept.append(n)
        run.close(outputs, kept)
        live.kept_more |= run.holds_more
        run.own = own
        self._crossing[i] = crossing, needs
        self._held[v] = Held((v, self._stage_name(i)), outputs, own, run.saved() if v.saved else [])
        self._held.touch(op, [self._held.input_of(i)] if i > 1 else [], [v])
        if op.kind is OpKind.F_NONE and i > 1:
            self._held.drop(a(i - 1))
            self._hollow(i - 1)
        self._last = i
        self._done_with(op)

    def keep_before(self, key: int, every: Sequence[Var]) -> None:
        copy: torch.UntypedStorage | None = None

        def old(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal copy
            copy = copy or copy_of(tensor.untyped_storage())
            return View.of(tensor).on(copy)

        for held in self._held.values():
            if any(slot.tensor is not None and current_key(slot.tensor) == key for slot in held.outputs):
                held.settle()
        outputs = [slot for held in self._held.values() for slot in held.outputs]
        for slot in (*outputs, *(slot for run in self._runs.values() for slot in run.kept.values())):
            if slot.tensor is not None and current_key(slot.tensor) == key:
                slot.put(old(slot.tensor))
                slot.stale = True
        for var in every:
            tensor = var()
            assert self._open is not None
            assert tensor is not None
            self._before.setdefault(var, []).append((self._open.stage, old(tensor), tensor))

    def _content_before(self, var: Var, i: int) -> torch.Tensor | None:
        """Return the tensor of `var` as stage i found it, if a later stage, or i itself, has changed it since."""
        return next((content for stage, content, _ in self._before.get(var, ()) if stage >= i), None)

    def restore(self, every: Sequence[Var]) -> list[torch.Tensor]:
        """Return the contents of hollow tensors, by one replay of each stage that made them or, if inputs are gone,
        makes a part of these."""
        wanted: dict[int, list[Var]] = {}
        for var in every:
            wanted.setdefault(var.stage, []).append(var)
        content: dict[Var, torch.Tensor] = {}
        last_use = dict.fromkeys(every, len(self._stages) + 1)
        for i in range(max(wanted), OUTSIDE, -1):
            for one in self._runs[i].tape.inputs if i in wanted else ():
                if one in last_use or self._content_before(one, i) is not None:
                    continue
                last_use[one] = i
                if (tensor := one()) is None or one.hollow:
                    wanted.setdefault(one.stage, []).append(one)
                else:
                    content[one] = tensor.detach()
        for i in sorted(wanted):
            if i == OUTSIDE:
                assert self._live is not None
                made = self._live.outside.run([], wanted[i])
            else:
                given = [
                    content[one] if (old := self._content_before(one, i)) is None else old
                    for one in self._runs[i].tape.inputs
                ]
                made = self._runs[i].restored(given, wanted[i])
            content.update(zip(wanted[i], made, strict=True))
            content = {one: tensor for one, tensor in content.items() if last_use[one] > i}
        return [content[var] for var in every]


def _register_first(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Register a hook that runs before the model's own: what those return is held while the hooks after them run."""
    key = tensor.register_hook(hook).id
    hooks = tensor._backward_hooks
    if hooks is not None and len(hooks) > 1:
        every = {key: hooks[key], **hooks}  # `move_to_end` does not change the order in which C++ code goes through it
        hooks.clear()
        hooks.update(every)


def _content(weights: dict[int, PlacedTensor], needs: dict[int, bool]) -> dict[int, torch.Tensor]:
    """Return, by id of a parameter, its copy on the device for a replay. needs: whether it needed a gradient."""
    there = ((key, weight.device) for key, weight in weights.items())
    return {key: device.detach().requires_grad_(needs[key]) for key, device in there if device is not None}
