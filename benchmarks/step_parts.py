"""What each part of the runtime adds to a step on the CPU: steps of a workload, in turn, each with one part more.

    python -m benchmarks.step_parts [--workloads gpt resnet] [--share 0.6] [--rounds 40] [--out FILE]

* ``plain``: PyTorch without rotoff.
* ``hooked``: the calls are followed and taped, and what autograd saves goes through rotoff's hooks.
* ``moved``: the plan of pure offload at that share of the bytes.
* ``moved in line``: the same, but each copy is done by the thread that computes, and its time is taken off. Were the
  stages slowed by the copies that run beside them, this would be faster than ``moved``.
* ``expected``: of the plan, beside the chain that keeps everything; and ``expected without upkeep``.

What counts is the median of the ratios to the plain step beside it; quartiles beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest import mock

import torch

import rotoff
from benchmarks.grid import workloads
from benchmarks.grid.memory import keep_freed_memory
from benchmarks.grid.run import machine
from rotoff.runtime.links import file as link_file

WARM = 3


@dataclass(frozen=True)
class Part:
    """Of a step, as a ratio to plain's: median and quartiles."""

    name: str
    ratio: float
    low: float
    high: float


@contextmanager
def in_line(spent: list[float]) -> Iterator[None]:
    """Copies are done where they are asked for, by the thread that asks; their seconds are added to `spent`."""

    def run_here(worker: Any, ticket: Any) -> None:
        ticket.run(worker.file)
        spent.append(ticket.ended - ticket.began)

    with mock.patch.object(link_file._Worker, "submit", run_here):
        yield


def timed(run: torch.nn.Module, x: torch.Tensor) -> float:
    for parameter in run.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    start = time.perf_counter()
    run(x).backward()
    return time.perf_counter() - start


def measure(workload: workloads.Workload, share: float, rounds: int) -> tuple[list[Part], dict[str, float]]:
    """The parts; and what is expected of the plan, as a ratio, with upkeep and without."""
    device = torch.device("cpu")
    plain, x = workload.make(device)
    model, _ = workload.make(device)
    ours = rotoff.Checkpointable(model, cache_directory=None).measure(x)
    kept = ours.compute_sequence(2 * ours.keep_all_memory)._latest.plan
    whole = ours.profile.chain.compute_time
    moved = ours.compute_sequence(int(share * ours.keep_all_memory), mode="offload")._latest.plan
    assert kept is not None
    assert moved is not None
    expected = {
        "expected": ours.get_expected_makespan() / whole,
        "expected without upkeep": rotoff.simulate(ours.profile.chain, moved.sequence).makespan / whole,
    }
    plans = {"hooked": replace(kept, keeps_all=False), "moved": moved, "moved in line": moved}

    def step(name: str) -> float:
        if name == "plain":
            return timed(plain, x)
        ours._latest.plan = plans[name]
        if name != "moved in line":
            return timed(ours, x)
        spent: list[float] = []
        with in_line(spent):
            seconds = timed(ours, x)
        return seconds - sum(spent)

    names = ["plain", *plans]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for n in range(WARM + rounds):
        for name in names if n % 2 else reversed(names):
            taken = step(name)
            if n >= WARM:
                seconds[name].append(taken)
    ours.close()
    parts = []
    for name in plans:
        ratios = [our / their for our, their in zip(seconds[name], seconds["plain"], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        parts.append(Part(name, statistics.median(ratios), low, high))
    return parts, expected


def main(arguments: list[str] | None = None, show: Callable[[str], None] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--suite", choices=["cpu", "tiny"], default="cpu", help="of the grid (%(default)s)")
    parser.add_argument("--workloads", nargs="+", default=["gpt", "resnet"], help="of that suite (gpt resnet)")
    parser.add_argument("--share", type=float, default=0.6, help="of the bytes of keeping everything (%(default)s)")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", help="write the figures here too, as JSON")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    about = {"share": options.share, "rounds": options.rounds, "threads": 1, "freed_memory_kept": keep_freed_memory()}
    found = {}
    for name in options.workloads:
        parts, expected = measure(workloads.find(options.suite, name), options.share, options.rounds)
        show(name)
        for part in parts:
            show(f"  {part.name:24s} {part.ratio:.4f} ({part.low:.4f} to {part.high:.4f})")
        for what, ratio in expected.items():
            show(f"  {what:24s} {ratio:.4f}")
        found[name] = {"parts": [asdict(part) for part in parts], **expected}
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump({"machine": machine("cpu"), **about, "workloads": found}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
