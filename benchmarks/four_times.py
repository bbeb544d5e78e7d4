"""A model whose plain step needs four times the memory limit, trained inside it: step time over plain's, and a hard
limit.

A GPT of 12 blocks of width 512 on 8 x 512 tokens, loss included, on the CPU with cores - 1 compute threads; what is
moved lies in a file. It has about the arithmetic for each saved byte that small language models have; a narrower one
has less and shows the disk. Four processes, one after the other:

* free: plain PyTorch with all the memory it wants. What a step allocates, over four, is the limit
* plain, rotoff: the kernel enforces the limit (RLIMIT_DATA, beyond parameters, gradients and batch) while a few steps
  are trained. Plain PyTorch has to fail. rotoff's plan gets --others less: what measuring and planning leave in a
  process (about 125 MiB), threads
* paired: no hard limit; rotoff planned for the whole limit, its steps in turn with plain PyTorch's, medians of the
  ratios

Under the hard limit glibc gives freed memory back at once (MALLOC_MMAP_THRESHOLD_), so resident memory shows what is
held; for the paired times it keeps it, as in the grid. Linux only.

    python benchmarks/four_times.py --out benchmarks/results/four_times.json      # about 6 minutes
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

# of the packages below; last, so that an installed rotoff goes first
sys.path.append(str(Path(__file__).parent.parent))
import rotoff
from benchmarks.grid import memory, workloads
from benchmarks.grid.cell import Runner, in_turn, quartiles
from benchmarks.grid.memory import keep_freed_memory
from benchmarks.grid.run import commit, machine
from rotoff.planning.request import Request
from rotoff.planning.step_planner import least_time

TIMES, STEPS = 4, 3
WORKLOAD = workloads._gpt("gpt", 12, 512, 8, 512, 8, 512, torch.float32)


def status_bytes(name: str) -> int:
    """A size of this process from the kernel: VmData (private writable memory), VmRSS, VmHWM (the most resident)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def forget_highest() -> None:
    """Have VmHWM begin anew."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


class Training(Runner):
    """Steps of plain gradient descent; the losses are kept."""

    def __init__(self, run: Any, model: torch.nn.Module, x: torch.Tensor) -> None:
        super().__init__(run, model, x)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.losses: list[float] = []

    def step(self) -> None:
        loss = self.run(self.x)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        self.losses.append(loss.item())


def begin(options: argparse.Namespace) -> tuple[torch.nn.Module, torch.Tensor]:
    """Model and batch; gradients are there, threads and kernels set up."""
    torch.set_num_threads(options.threads)
    model, x = WORKLOAD.make(torch.device("cpu"))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    tiny, tokens = workloads._gpt("tiny", 1, 32, 2, 16, 2, 32, torch.float32).make(torch.device("cpu"))
    tiny(tokens).backward()
    return model, x


def free(options: argparse.Namespace) -> dict[str, Any]:
    """Plain PyTorch: what a step allocates, how long it takes, what stays resident at most."""
    model, x = begin(options)
    runner = Training(model, model, x)
    before = status_bytes("VmRSS")
    forget_highest()
    times = [runner.timed() for _ in range(STEPS)]
    resident = status_bytes("VmHWM") - before
    peak = memory.peak_of(runner.step, x.device).allocated
    found = {"losses": runner.losses[:STEPS], "step_time": statistics.median(times)}
    return {**found, "peak_allocated": peak, "resident_bytes": resident}


def limited(options: argparse.Namespace, ours: bool) -> dict[str, Any]:
    """A few steps under the kernel's limit."""
    model, x = begin(options)
    resource.setrlimit(resource.RLIMIT_DATA, (status_bytes("VmData") + options.limit,) * 2)
    run: Any = model
    if ours:
        run = rotoff.Checkpointable(model, host_directory=options.host_directory)
        run.measure(x, repeats=1).compute_sequence(options.limit - options.others)
    runner = Training(run, model, x)
    before = status_bytes("VmRSS")
    forget_highest()
    times = [runner.timed() for _ in range(STEPS)]
    found = {"losses": runner.losses, "step_time": statistics.median(times)}
    found["resident_bytes"] = status_bytes("VmHWM") - before
    if ours:
        found |= {"host_bytes": run.get_expected_host_memory(), "predicted_peak": run.get_expected_memory()}
    return found


def paired(options: argparse.Namespace) -> dict[str, Any]:
    """Times in turn, the plan for the whole limit."""
    keep_freed_memory()
    model, x = begin(options)
    other, _ = begin(options)
    wrapped = rotoff.Checkpointable(model, host_directory=options.host_directory)
    wrapped.measure(x).compute_sequence(options.limit)
    both = Runner(wrapped, model, x), Runner(other, other, x)
    for runner in both:
        runner.step()
    peak = memory.peak_of(both[0].step, x.device).allocated
    times = in_turn([runner.timed for runner in both], options.seconds)
    low, middle, high = quartiles(*times)
    kept = wrapped.profile.chain.compute_time  # without the copies of gradients that a plan may add
    found = {
        "ratio": middle,
        "low": low,
        "high": high,
        "pairs": len(times[0]),
        "step_time": statistics.median(times[0]),
        "plain_time": statistics.median(times[1]),
        "predicted_ratio": wrapped.get_expected_makespan() / kept,
        "bound_ratio": least_time(wrapped.profile, Request(options.limit, "joint", 50, {})) / kept,
        "predicted_peak": wrapped.get_expected_memory(),
        "peak_allocated": peak,
        "host_bytes": wrapped.get_expected_host_memory(),
    }
    wrapped.close()
    return found


def child(way: str, arguments: list[str], limit: int) -> tuple[dict[str, Any] | None, str]:
    """(what it found, or None where it failed; the last line that it said)."""
    environment = dict(os.environ)
    if way != "paired":  # one arena, of which blocks of this size and more go back to the kernel when they are freed
        environment |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, __file__, *arguments, "--way", way, "--limit", str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    said = (done.stderr.strip().splitlines() or [""])[-1][:300]
    print(f"{way}: {done.stdout.strip() if done.returncode == 0 else 'fails: ' + said}", flush=True)
    return (json.loads(done.stdout.strip().splitlines()[-1]), said) if done.returncode == 0 else (None, said)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON")
    parser.add_argument("--seconds", type=float, default=120, help="of paired steps (%(default)s)")
    parser.add_argument(
        "--others", type=rotoff.parse_bytes, default="144 MiB", help="of the hard limit, not for the plan"
    )
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--host-directory", help="where the file lies; a real disk")
    parser.add_argument("--way", choices=("free", "plain", "rotoff", "paired"), help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.way:
        ways = {"free": free, "paired": paired}
        ways |= {"plain": lambda o: limited(o, False), "rotoff": lambda o: limited(o, True)}
        print(json.dumps(ways[options.way](options)))
        return 0
    passed = sys.argv[1:] if arguments is None else arguments
    plain, said = child("free", passed, 0)
    if plain is None:
        raise SystemExit(f"plain PyTorch fails with all memory: {said}")
    limit = plain["peak_allocated"] // TIMES
    fails, failure = child("plain", passed, limit)
    held, held_failure = child("rotoff", passed, limit)
    times, times_failure = child("paired", passed, limit)
    data = {
        "format": "rotoff.four_times",
        "about": WORKLOAD.about,
        "machine": machine("cpu"),
        "threads": options.threads,
        "commit": commit(),
        "limit": limit,
        "free": plain,
        "limited_plain": {"fails": fails is None, "failure": failure},
        "limited": held or {"failure": held_failure},
        "paired": times or {"failure": times_failure},
        "equal_losses": held is not None and held["losses"] == plain["losses"],
    }
    if options.out:
        options.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 0 if held and times else 1


if __name__ == "__main__":
    sys.exit(main())
