"""What the interpreter itself costs: microseconds for each operation and each saved tensor, on stages that compute next to
nothing, as JSON.

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
from rotoff.runtime.plan import compile_sequence

STAGES = 20


class Chained(nn.Module):
    """`count` operations on 4 numbers, each of which saves a tensor."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.count):
            x = x.tanh()
        return x


def synchronize(x: torch.Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


def least_step(model: nn.Module, x: torch.Tensor, repeats: int) -> float:
    """Of the host's time; a device's work is waited for in between and is shorter than its launches."""
    times = []  # the least counts: whatever else runs on the machine only adds
    for _ in range(repeats):
        synchronize(x)
        start = time.perf_counter()
        model(x).backward(x)
        times.append(time.perf_counter() - start)
    return min(times)


def least_forward(model: nn.Module, x: torch.Tensor, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        synchronize(x)
        start = time.perf_counter()
        model(x)
        times.append(time.perf_counter() - start)
    return min(times)


def sequences(L: int) -> dict[str, list[str]]:
    """Everything kept; and every stage's output alone kept, so that each stage but the last runs twice."""
    back = [f"B {i}" for i in range(L, 0, -1)]
    kept = [f"F_all {i}" for i in range(1, L + 1)] + back
    twice = [f"F_ck {i}" for i in range(1, L)] + [f"F_all {L}", f"B {L}"]
    for i in range(L - 1, 0, -1):
        twice += [f"F_all {i}", f"B {i}"]
    return {"kept": kept, "run twice": twice}


def measure(count: int, repeats: int, device: str = "cpu") -> dict[str, float]:
    """Seconds of a step: of the plain model, and of each sequence."""
    x = torch.ones(4, device=device, requires_grad=True)
    model = nn.Sequential(*[Chained(count) for _ in range(STAGES)])
    found = {"plain": least_step(model, x, repeats), "forward": least_forward(model, x, repeats)}
    wrapped = rotoff.Checkpointable(model).measure(x).compute_sequence(1 << 40)
    for name, text in sequences(STAGES).items():
        plan = compile_sequence(wrapped.chain, rotoff.Sequence.from_text(text))
        if name == "kept":  # as if each stage had to be hooked
            object.__setattr__(plan, "keeps_all", False)
        wrapped._latest.plan = plan
        found[name] = least_step(wrapped, x, repeats)
    wrapped.close()
    return found


def main(show: Callable[[str], None] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--json", help="write the figures here too")
    parser.add_argument("--device", default="cpu", help="where the stages compute (%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    few, many = (measure(count, options.repeats, options.device) for count in (1, 21))

    def per_tensor(name: str) -> float:
        extra = [times[name] - times["plain"] for times in (few, many)]
        return (extra[1] - extra[0]) / (20 * STAGES)

    def base(name: str) -> float:
        return few[name] - few["plain"] - STAGES * per_tensor(name)

    # A stage that is run twice pays its own forward again, which is no cost of the interpreter.
    own = (many["forward"] - few["forward"]) / (20 * STAGES)
    call = few["forward"] / STAGES - own
    hooked = {"us_per_stage": 1e6 * base("kept") / STAGES, "us_per_tensor": 1e6 * per_tensor("kept")}
    again = {
        "us_per_replay": 1e6 * ((base("run twice") - base("kept")) / (STAGES - 1) - call),
        "us_per_tensor": 1e6 * (per_tensor("run twice") - own),
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
