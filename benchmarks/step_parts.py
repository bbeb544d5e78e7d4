"""What each part of the runtime adds to a step on the CPU: steps of a workload, in turn, each with one part more.

    python -m benchmarks.step_parts [--workloads gpt resnet] [--share 0.6] [--rounds 40] [--out FILE]

* ``plain``: PyTorch without rotoff.
* ``hooked``: the operations are noted on a tape, and what autograd saves goes through rotoff's hooks.
* ``moved``: the plan of pure offload at that share of the bytes.
* ``moved in line``: the same, but each copy is done by the thread that computes, and its time is taken off. Were the
  stages slowed by the copies that run beside them, this would be faster than ``moved``.
* ``expected``: of the plan, beside the chain that keeps everything.

What counts is the median of the ratios to the plain step beside it; quartiles beside it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch

import rotoff
from benchmarks.grid import workloads
from benchmarks.grid.cell import in_turn, quartiles
from benchmarks.grid.memory import keep_freed_memory
from benchmarks.grid.run import machine
from rotoff.planning.step_planner import keeping_all
from rotoff.runtime.links import file as link_file

WARM = 3


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


def measure(workload: workloads.Workload, share: float, rounds: int) -> dict[str, Any]:
    """The parts, as ratios to plain's; and what is expected of the plan."""
    device = torch.device("cpu")
    plain, x = workload.make(device)
    model, _ = workload.make(device)
    ours = rotoff.Checkpointable(model, cache_directory=None).measure(x)
    kept = keeping_all(ours.profile)
    moved = ours.compute_sequence(int(share * ours.keep_all_memory), mode="offload")._latest.plan
    assert moved is not None
    expected = {"expected": ours.get_expected_makespan() / ours.profile.chain.compute_time}
    hooked = replace(kept, execution=replace(kept.execution, keeps_all=False))
    plans = {"hooked": hooked, "moved": moved, "moved in line": moved}

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

    times = in_turn([partial(step, name) for name in ("plain", *plans)], 0.0, WARM + rounds)
    plains, *others = [column[WARM:] for column in times]
    ours.close()
    keys = ("low", "ratio", "high")
    found = (dict(zip(keys, quartiles(column, plains), strict=True)) for column in others)
    return {"parts": [{"name": name, **part} for name, part in zip(plans, found, strict=True)], **expected}


def main(arguments: list[str] | None = None) -> None:
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
        found[name] = measure(workloads.find(options.suite, name), options.share, options.rounds)
        print(json.dumps({name: found[name]}, indent=1))
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump({"machine": machine("cpu"), **about, "workloads": found}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
