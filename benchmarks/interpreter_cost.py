"""What the tape and the plan cost: microseconds for each operation, each saved tensor, each stage and each step, on
stages that compute next to nothing, as JSON.

    python benchmarks/interpreter_cost.py [--json FILE]
"""

import argparse
import json
import platform
import time
from collections.abc import Callable

import torch
from torch import nn

import rotoff
from rotoff.planning.step_planner import compiled

STAGES, FEW_STAGES = 20, 5
CALLS = 21


class Chained(nn.Module):
    """`count` operations on 4 numbers, each of which saves a tensor, or none does."""

    def __init__(self, count: int, saves: bool) -> None:
        super().__init__()
        self.count = count
        self.saves = saves

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.count):
            x = x.tanh() if self.saves else x.add(1.0)
        return x


class Chain(nn.Module):
    """Stages one after another, by a forward of its own."""

    def __init__(self, stages: int, count: int, saves: bool) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Chained(count, saves) for _ in range(stages))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


def synchronize(x: torch.Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


def least(run: Callable[[torch.Tensor], object], x: torch.Tensor, repeats: int) -> float:
    """Return the least seconds of the host's: whatever else runs on the machine only adds. On the CPU those of this
    thread; a device's work, which has other threads, is waited for in between and is shorter than its launches."""
    clock = time.perf_counter if x.is_cuda else time.thread_time
    times = []
    for _ in range(repeats):
        synchronize(x)
        start = clock()
        run(x)
        times.append(clock() - start)
    return min(times)


def least_step(model: nn.Module, x: torch.Tensor, repeats: int) -> float:
    return least(lambda x: model(x).backward(x), x, repeats)


def sequences(L: int) -> dict[str, list[str]]:
    """Everything kept; and every stage's output alone kept, so that each stage but the last runs twice."""
    back = [f"B {i}" for i in range(L, 0, -1)]
    kept = [f"F_all {i}" for i in range(1, L + 1)] + back
    twice = [f"F_ck {i}" for i in range(1, L)] + [f"F_all {L}", f"B {L}"]
    for i in range(L - 1, 0, -1):
        twice += [f"F_all {i}", f"B {i}"]
    return {"kept": kept, "run twice": twice}


def measure(stages: int, count: int, saves: bool, repeats: int, device: str = "cpu") -> dict[str, float]:
    """Seconds of a step: of the plain model, and what each sequence adds."""
    x = torch.ones(4, device=device, requires_grad=True)
    model = Chain(stages, count, saves)
    plain, forward = least_step(model, x, repeats), least(model, x, repeats)
    wrapped = (
        rotoff.Checkpointable(model, stages=list(model.stages), cache_directory=None)
        .measure(x)
        .compute_sequence(1 << 40)
    )
    found = {"forward": forward}
    for name, text in sequences(stages).items():
        course = wrapped._latest
        course.plan = compiled(course.profile, course.profile.chains[0], rotoff.Sequence.from_text(text))
        found[name] = least_step(wrapped, x, repeats) - plain
    wrapped.close()
    return found


def main(show: Callable[[str], None] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--json", help="write the figures here too")
    parser.add_argument("--device", default="cpu", help="where the stages compute (%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = {
        "few": (STAGES, 1, True),
        "fewer": (FEW_STAGES, 1, True),
        "saving": (STAGES, CALLS, True),
        "calls": (STAGES, CALLS, False),
        "call": (STAGES, 1, False),
    }
    found = {name: measure(*case, options.repeats, options.device) for name, case in cases.items()}

    def per(name: str) -> dict[str, float]:
        """Of one sequence, in seconds."""
        few, fewer, saving, calls, call = (found[case][name] for case in cases)
        per_call = (calls - call) / (STAGES * (CALLS - 1))
        per_tensor = (saving - few) / (STAGES * (CALLS - 1)) - per_call
        per_stage = (few - fewer) / (STAGES - FEW_STAGES)
        per_step = few - STAGES * per_stage
        return {"call": per_call, "tensor": per_tensor, "stage": per_stage - per_call - per_tensor, "step": per_step}

    # A stage that is run twice pays its own forward again, which is no cost of the plan.
    kept, twice = per("kept"), per("run twice")
    own = (found["saving"]["forward"] - found["few"]["forward"]) / (STAGES * (CALLS - 1))
    plainly = (found["calls"]["forward"] - found["call"]["forward"]) / (STAGES * (CALLS - 1))
    module = found["few"]["forward"] / STAGES - own
    hooked = {f"us_per_{name}": 1e6 * seconds for name, seconds in kept.items()}
    again = {
        "us_per_replay": 1e6 * ((twice["stage"] - kept["stage"]) * STAGES / (STAGES - 1) - module),
        "us_per_call": 1e6 * (twice["call"] - plainly),
        "us_per_tensor": 1e6 * (twice["tensor"] - (own - plainly)),
    }
    figures = {
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "hooked": hooked,
        "run twice": again,
    }
    show(json.dumps(figures, indent=1))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
