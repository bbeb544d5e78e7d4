"""What the runtime itself takes of the compute lane: its parts timed where they are as slow as in a step.

In a step kernels run between two saved tensors, and the interpreter's code and data are as cold after them as anything:
20 microseconds for a stage in a loop of nothing else become 200. So stages of the very model run under the interpreter,
and a clock is read where that begins and ends: as a stage is entered and left, and around each of its calls, less the
call itself. What PyTorch takes to get to the interpreter and back is not seen, nor what it takes to compare a call with
the one expected; a replay, whose calls nobody follows, takes less than a first run, and is charged the same.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ...capture.course import Course
from ...core.chain import Chain, Stage
from ...core.sequence import Op
from ...core.sequence import Sequence as Operations
from ...runtime.execution_plan import compile_sequence
from ...runtime.interpreter import Step
from ...runtime.live import LiveForward
from ...runtime.overhead import UpkeepTimes
from ...runtime.stage_tape import Var
from ...tensors.stage import Behaviour, StageModule
from ...tensors.tree import flatten
from .harness import Run, backward, get_edges, ones

logger = logging.getLogger("rotoff")
MOST = 2e-3  # seconds: what is above was no measurement of this
STAGES, RUNS = 3, 3  # that many stages run that often; the first run of each does not count


class UpkeepMeter:
    """Times the interpreter on some stages of a model: the host's time, on CUDA too."""

    def __init__(self) -> None:
        self._spans: list[_Spans] = []

    def sample(self, run: Run, behaviour: Behaviour) -> None:
        """Run a stage under the interpreter, where not enough have been and it is like most: something of its input is
        differentiated."""
        fit = len(self._spans) < STAGES and any(t.requires_grad for t in run.tensors)
        if not fit or run.last or behaviour.varying or run.collective:
            return
        spans = _Spans()
        for n in range(RUNS):
            if n == 1:
                spans = _Spans()
            try:
                _run_step(run, behaviour, spans)
            except Exception as error:  # whatever is wrong is better told by a step of the user's
                said = "stage %s did not run by itself under the interpreter (%s: %s); others tell its times"
                logger.info(said, run.stage.name, type(error).__name__, error)
                return
        self._spans.append(spans)

    def times(self) -> UpkeepTimes:
        """What the runtime takes, by the medians over all that ran."""

        def median(name: str) -> float:
            found = [seconds for spans in self._spans for seconds in getattr(spans, name)]
            return min(MOST, statistics.median(found)) if found else 0.0

        return UpkeepTimes(*map(median, UpkeepTimes._fields))


@dataclass
class _Spans:
    """Seconds. forward: of the interpreter in a stage's forward, without hooks; so_far: of that, in the stage that is
    open. backward: between two stages' backwards. pack, unpack: of one tensor."""

    forward: list[float] = field(default_factory=list)
    so_far: float = 0.0
    backward: list[float] = field(default_factory=list)
    pack: list[float] = field(default_factory=list)
    unpack: list[float] = field(default_factory=list)


class _Front(nn.Module):
    """Hands its input on."""

    def forward(self, value: Any) -> Any:
        tensors, rebuild = flatten(value)
        return rebuild([t.view_as(t) for t in tensors])


class _TimedForward(LiveForward):
    """Times what it takes to follow calls, without what they do; spans: where to."""

    spans: _Spans

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        start = time.perf_counter()
        result = super().call(function, args, kwargs)
        self.spans.so_far += time.perf_counter() - start
        return result

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        start = time.perf_counter()
        result = super()._run(function, args, kwargs)
        self.spans.so_far -= time.perf_counter() - start
        return result


class _TimedStep(Step):
    """A step of two stages, of which the second is timed; spans: where to."""

    spans: _Spans

    def _live_forward(self, course: Course | None, given: list[torch.Tensor]) -> LiveForward:
        live = _TimedForward(course, self, self._generators, given)
        live.spans = self.spans
        return live

    def _enter(self, op: Op, live: LiveForward) -> None:
        start = time.perf_counter()
        super()._enter(op, live)
        self.spans.so_far = time.perf_counter() - start

    def _leave(self, made: dict[Var, int] | None = None) -> None:
        start, op = time.perf_counter(), self._open
        super()._leave(made)
        if op is not None and op.stage == 2:
            self.spans.forward.append(self.spans.so_far + time.perf_counter() - start)

    def gradient_arrived(self, i: int, gradient: torch.Tensor) -> None:
        start = time.perf_counter()
        super().gradient_arrived(i, gradient)
        if i == 1 and len(self.spans.backward) < len(self.spans.forward):  # the first of several that the stage takes
            self.spans.backward.append(time.perf_counter() - start)

    def hooks(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> saved_tensors_hooks:
        def timed(act: Callable[[Any], Any], seconds: list[float], one: Any) -> Any:
            start = time.perf_counter()
            result = act(one)
            seconds.append(time.perf_counter() - start)
            return result

        return super().hooks(partial(timed, pack, self.spans.pack), partial(timed, unpack, self.spans.unpack))


_CHAIN = Chain((Stage("front", 1.0, 1.0, 1, 1), Stage("timed", 1.0, 1.0, 1, 1)), 1.0, 1.0, 1)
_PLAN = compile_sequence(_CHAIN, Operations.from_text(["F_all 1", "F_all 2", "B 2", "B 1"]))


def _run_step(run: Run, behaviour: Behaviour, spans: _Spans) -> None:
    """A forward and a backward of the stage under the interpreter, after a stage that does nothing."""
    leaves = run.leaves()
    stages = [StageModule("front", (_Front(),)), run.stage]
    behaviours = [Behaviour((), (False,) * len(leaves)), replace(behaviour, copied=(), kept=())]
    step = _TimedStep(_PLAN, stages, behaviours, leaves[0].device, None, lambda _: None)
    step.spans = spans
    outputs = flatten(step.forward(run.rebuild(leaves)))[0]
    edges, gradients = get_edges(outputs), ones(outputs)
    del outputs, step
    backward(edges, gradients, run.targets(leaves))
