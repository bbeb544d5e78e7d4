"""What the first step takes on the CPU beyond a plain one: CPU seconds of one thread.

    python -m benchmarks.first_step [--workloads gpt vit resnet unet] [--rounds 3] [--out FILE]

* ``room``: the limit has room for everything, so that bytes are all that is measured.
* ``measured``: `Checkpointable.measure` with its times and smaller forms, for comparison.

What counts is the least of some rounds; other work on the machine does not lengthen CPU seconds by much.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import rotoff
from benchmarks.grid import workloads
from benchmarks.grid.run import machine

PLAIN = 5  # plain steps, of which the median counts


def seconds(run: Callable[[], object]) -> float:
    """CPU seconds that `run` takes."""
    start = time.process_time()
    run()
    return time.process_time() - start


def measure(workload: workloads.Workload, rounds: int) -> dict[str, float]:
    """CPU seconds of a plain step, and of the others beyond it."""
    device = torch.device("cpu")
    model, x = workload.make(device)

    def step(run: nn.Module) -> None:
        run(x).backward()

    plain = statistics.median(seconds(lambda: step(model)) for _ in range(PLAIN))
    room, measured = [], []
    for _ in range(rounds):
        wrapped = rotoff.Checkpointable(workload.make(device)[0], cache_directory=None).compute_sequence("1 TiB")
        room.append(seconds(lambda wrapped=wrapped: step(wrapped)) - plain)
        wrapped.close()
        wrapped = rotoff.Checkpointable(workload.make(device)[0], cache_directory=None)
        measured.append(seconds(lambda wrapped=wrapped: wrapped.measure(x, progress=False)))
        wrapped.close()
    return {"plain": plain, "room": min(room), "measured": min(measured)}


def main(arguments: list[str] | None = None, show: Callable[[str], None] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--suite", choices=["cpu", "tiny"], default="cpu", help="of the grid (%(default)s)")
    parser.add_argument("--workloads", nargs="+", default=["gpt", "vit", "resnet", "unet"], help="of that suite (all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", help="write the figures here too, as JSON")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = {}
    for name in options.workloads:
        found[name] = one = measure(workloads.find(options.suite, name), options.rounds)
        told = [f"{what} {spent:.2f} s ({spent / one['plain']:.1f} plain steps)" for what, spent in one.items()]
        show(f"{name:8s} {', '.join(told)}")
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump({"machine": machine("cpu"), "threads": 1, "workloads": found}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
