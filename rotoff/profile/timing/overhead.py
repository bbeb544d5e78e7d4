"""Measures the interpreter's overhead on the compute lane, as slow as it is in a step.

In a step, kernels run between two saved tensors and evict the interpreter's code and data from the caches: 20
microseconds for a stage in a tight loop become 200. So stages of the model itself run under the interpreter, and clocks
measure entering and leaving a stage, and each of its calls without the call itself. What PyTorch takes to reach the
interpreter and the comparison of a call with the expected one are not measured. A replay does not follow calls and
takes less than a first run, but is charged the same.
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
from ...runtime._follow import Var
from ...runtime.execution_plan import compile_sequence
from ...runtime.live import LiveForward
from ...runtime.overhead import OverheadTimes
from ...runtime.step import Step
from ...tensors.stage import Behaviour, StageModule
from ...tensors.tree import flatten
from .harness import Run, backward, get_edges

logger = logging.getLogger("rotoff")
MAX_SECONDS = 2e-3  # a longer time is not credible
STAGES, RUNS = 3, 2  # numbers of stages and of runs of each; the last run counts
LONG = 50 * MAX_SECONDS  # of a stage, forward and backward, from which on its overhead is lost in its noise


class OverheadMeter:
    """Times the interpreter on some stages of a model: the host's time, also on CUDA."""

    def __init__(self) -> None:
        self._spans: list[_Spans] = []

    def sample(self, run: Run, behaviour: Behaviour) -> None:
        """Run a stage under the interpreter, unless enough have run or it is not typical: no input needs a gradient,
        for example."""
        fit = len(self._spans) < STAGES and any(t.requires_grad for t in run.tensors)
        if not fit or run.last or behaviour.varying or run.collective:
            return
        for _ in range(RUNS):
            spans = _Spans()
            try:
                _run_step(run, behaviour, spans)
            except Exception as error:  # the user's own step gives a better message
                message = "stage %s failed by itself under the interpreter (%s: %s); its overhead is not measured"
                logger.info(message, run.stage.name, type(error).__name__, error)
                return
        self._spans.append(spans)

    def times(self) -> OverheadTimes:
        """Return the medians over all stages that ran."""

        def median(name: str) -> float:
            found = [seconds for spans in self._spans for seconds in getattr(spans, name)]
            return min(MAX_SECONDS, statistics.median(found)) if found else 0.0

        return OverheadTimes(*map(median, OverheadTimes._fields))


@dataclass
class _Spans:
    """Seconds of the interpreter.

    Attributes:
        forward: in a stage's forward, without hooks.
        so_far: the part of that in the open stage.
        backward: between the backwards of two stages.
        pack, unpack: of one tensor.
    """

    forward: list[float] = field(default_factory=list)
    so_far: float = 0.0
    backward: list[float] = field(default_factory=list)
    pack: list[float] = field(default_factory=list)
    unpack: list[float] = field(default_factory=list)


class _Identity(nn.Module):
    """Passes its input on."""

    def forward(self, value: Any) -> Any:
        tensors, rebuild = flatten(value)
        return rebuild([t.view_as(t) for t in tensors])


class _TimedForward(LiveForward):
    """Adds the time that following calls takes, without the calls themselves, to `spans`."""

    spans: _Spans
    timed = True

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
    """A step of two stages, which records the times of the second in `spans`."""

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
        if i == 1 and len(self.spans.backward) < len(self.spans.forward):  # the first gradient of the stage
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
    """Run forward and backward of the stage under the interpreter, after a stage that does nothing."""
    leaves = run.leaves()
    stages = [StageModule("front", (_Identity(),)), run.stage]
    behaviours = [Behaviour((), (False,) * len(leaves)), replace(behaviour, copied=(), kept=())]
    step = _TimedStep(_PLAN, stages, behaviours, leaves[0].device, None, lambda _: None)
    step.spans = spans
    outputs = flatten(step.forward(run.rebuild(leaves)))[0]
    edges, needed = get_edges(outputs), [t.requires_grad for t in outputs]
    del outputs, step
    gradients = run.gradients(needed)
    backward(edges, gradients, run.targets(leaves, edges))
