"""One cell of the grid, in a process of its own: one workload, one method, one limit.

    python -m benchmarks.grid.cell '{"suite": "cpu", "workload": "gpt", "method": "joint", "limit": 200000000, ...}'

The last line printed is the result as JSON. The method's peak comes first, in steps of its own; then its steps
alternate with plain PyTorch's in this very process, so that both meet the same state of the machine, and what counts is
the median of the paired ratios. Where plain PyTorch does not fit beside it, times stand alone and the ratio is left
out.

glibc is told to hold on to freed memory, for every method: the page faults that plain PyTorch, which frees most, would
pay in each step (`memory.py`) are no merit of the others.
"""

from __future__ import annotations

import gc
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import nn

import rotoff
from rotoff.planning.request import Request
from rotoff.planning.step_planner import least_time

from . import memory, methods, workloads
from .memory import keep_freed_memory

WARM = 2  # steps of each that are not timed: gradients are allocated, kernels chosen, pinned memory taken


@dataclass(frozen=True)
class Cell:
    """What to run. limit: bytes, None for methods that take none. seconds: that the timed steps may take, about."""

    suite: str
    workload: str
    method: str
    limit: int | None = None
    device: str = "cpu"
    seconds: float = 20.0
    threads: int | None = None
    host_directory: str | None = None


@dataclass
class Result:
    """What came out; times in seconds, memory in bytes, ratios to plain's; None where nothing was run.

    status: ok, infeasible, out of memory, not here. ratio, low, high: median and quartiles of the paired ratios.
    gradient_difference: the largest of any gradient from plain's in the first step; equal_gradients: bit for bit.
    predicted_peak: where plain PyTorch runs out of memory, what it would take, from a measurement stage by stage.
    plan: digest of the sequence, the same for the same operations.
    """

    status: str = "ok"
    note: str = ""
    step_time: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    pairs: int = 0
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    host_bytes: int | None = None
    predicted_ratio: float | None = None
    predicted_peak: int | None = None
    bound_ratio: float | None = None
    gradient_difference: float | None = None
    equal_gradients: bool | None = None
    plan: str | None = None


class Runner:
    """Steps of one model, which returns its loss, on one batch; gradients are zeroed in place before each."""

    def __init__(self, run: methods.Run, model: nn.Module, x: torch.Tensor) -> None:
        self.run, self.model, self.x = run, model, x

    def step(self) -> None:
        if gradients := [p.grad for p in self.model.parameters() if p.grad is not None]:
            torch._foreach_zero_(gradients)  # one by one they are thousands of launches
        self.run(self.x).backward()

    def timed(self) -> float:
        _synchronize(self.x.device)
        start = time.perf_counter()
        self.step()
        _synchronize(self.x.device)
        return time.perf_counter() - start

    def close(self) -> None:
        """Let gradients and whatever the method holds go."""
        self.model.zero_grad(set_to_none=True)
        if isinstance(self.run, rotoff.Checkpointable):
            self.run.close()


def measure(cell: Cell) -> Result:
    """Run the cell; a step that runs out of memory is a result, not an error."""
    result = Result()
    try:
        _measure(cell, result)
    except rotoff.InfeasibleError as error:
        result.status, result.note = "infeasible", str(error)
    except methods.NotHere as error:
        result.status, result.note = "not here", str(error)
    except (torch.OutOfMemoryError, MemoryError) as error:
        result.status, result.note = "out of memory", str(error).splitlines()[0]
    if result.status == "out of memory" and cell.method == "plain":
        result.predicted_peak = _plain_peak(cell)  # here, where the frames that hold the step's tensors are gone
    return result


def _plain_peak(cell: Cell) -> int:
    """What a plain step would take, of which at most one stage is held to find out: limits are shares of it."""
    device = torch.device(cell.device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    model, x = workloads.find(cell.suite, cell.workload).make(device)
    return rotoff.Checkpointable(model).measure(x).keep_all_memory


def _measure(cell: Cell, result: Result) -> None:
    device = torch.device(cell.device)
    if cell.threads:
        torch.set_num_threads(cell.threads)
    keep_freed_memory()
    workload = workloads.find(cell.suite, cell.workload)
    model, x = workload.make(device)
    best = _best_segments(cell.method, model, x)
    run = methods.prepare(best, model, x, cell.limit, cell.host_directory)
    runner = Runner(run, model, x)
    torch.manual_seed(1)
    runner.step()
    result.note = best if best != cell.method else ""
    first = [None if p.grad is None else p.grad.clone() for p in model.parameters()] if cell.method != "plain" else []
    runner.step()
    peak = memory.peak_of(runner.step, device)
    result.peak_allocated, result.peak_reserved = peak.allocated, peak.reserved
    if isinstance(run, rotoff.Checkpointable):
        kept = run.profile.chain.compute_time  # without the copies of gradients that a plan may add
        _predictions(run, cell, kept, result)
    plain = _plain_beside(workload, device, result) if cell.method != "plain" else None
    if plain is not None:
        _compare(first, plain.model, result)
    del first
    _time(runner, plain, cell.seconds, result)
    runner.close()


def _best_segments(method: str, model: nn.Module, x: torch.Tensor) -> str:
    """`checkpoint_sequential` with its best count; other methods as they are."""
    if method != "checkpoint_sequential":
        return method

    def peak(count: int) -> int:
        runner = Runner(methods.prepare(f"{method}:{count}", model, x, None, None), model, x)
        runner.step()
        return memory.peak_of(runner.step, x.device).allocated

    counts = methods.segment_counts(model)
    return f"{method}:{min(counts, key=peak)}" if counts else method


def _predictions(run: rotoff.Checkpointable, cell: Cell, kept: float, result: Result) -> None:
    """kept: seconds that the plain model's stages take."""
    assert cell.limit is not None
    result.predicted_ratio = run.get_expected_makespan() / kept
    result.predicted_peak = run.get_expected_memory()
    result.host_bytes = run.get_expected_host_memory()
    result.plan = hashlib.sha256("\n".join(map(str, run.sequence)).encode()).hexdigest()[:12]
    result.bound_ratio = least_time(run.profile, Request(cell.limit, "joint", 50, {})) / kept


def _plain_beside(workload: workloads.Workload, device: torch.device, result: Result) -> Runner | None:
    """Plain PyTorch ready to be timed, its first step done; None where it does not fit."""
    try:
        model, x = workload.make(device)  # of the same seed
        runner = Runner(model, model, x)
        torch.manual_seed(1)
        runner.step()
        _synchronize(device)
        return runner
    except (torch.OutOfMemoryError, MemoryError):
        result.note = (result.note + "; " if result.note else "") + "plain does not fit beside it"
    model = runner = None  # type: ignore[assignment]
    gc.collect()
    return None


def _compare(first: list[torch.Tensor | None], plain: nn.Module, result: Result) -> None:
    pairs = list(zip(first, (p.grad for p in plain.parameters()), strict=True))
    result.equal_gradients = all((a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in pairs)
    differences = [(a.float() - b.float()).abs().max().item() for a, b in pairs if a is not None and b is not None]
    result.gradient_difference = max(differences, default=0.0)


def _time(runner: Runner, plain: Runner | None, seconds: float, result: Result) -> None:
    both = [r for r in (runner, plain) if r is not None]
    for _ in range(WARM):
        for each in both:
            each.step()
    times = in_turn([each.timed for each in both], seconds)
    result.pairs = len(times[0])
    result.step_time = statistics.median(times[0])
    if plain is not None:
        result.low, result.ratio, result.high = quartiles(*times)


def in_turn(steps: Sequence[Callable[[], float]], seconds: float, least: int = 5) -> list[list[float]]:
    """What each of `steps` returns, run in turn for about `seconds`, but `least` times, the first one changing."""
    times: list[list[float]] = [[] for _ in steps]
    end = time.perf_counter() + seconds
    while len(times[0]) < least or (time.perf_counter() < end and len(times[0]) < 200):
        order = range(len(steps)) if len(times[0]) % 2 else reversed(range(len(steps)))
        for n in order:
            times[n].append(steps[n]())
    return times


def quartiles(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Those of the ratios of paired times; the second is the median."""
    return statistics.quantiles([a / b for a, b in zip(ours, theirs, strict=True)], n=4)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    print(json.dumps(asdict(measure(Cell(**json.loads(sys.argv[1]))))), flush=True)
