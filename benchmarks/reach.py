"""How far 12 GB go: the deepest ResNet at 16 images and the largest batches of SuperNeurons' tables 4 and 5 (Wang et
al., 2018).

Each network is torchvision's or timm's own, on the meta device; `rotoff.estimate` gives its bytes as PyTorch allocates
them (docs/profiles.md says what is left out: cuDNN's workspaces). A size is reached where parameters, buffers,
gradients, one momentum, the batch, the loss's two copies of the logits and the smallest limit in which a joint plan
exists are together within the K40's memory. Then a plan within what is left is made and its peak is the machine's.
`binds` names the operation that needs most by itself, which is what the smallest limit in mode joint comes to, and of
what.

    python benchmarks/reach.py --out benchmarks/results/reach.json          # a few minutes, no device
    python benchmarks/reach.py --run --out benchmarks/results/reach.json    # also a step of each on CUDA, held to 12 GB
    python benchmarks/reach.py --run --known benchmarks/results/reach.json --out OUT  # the steps alone

Searches start at the paper's size; a few estimates find the largest.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn

# of the packages below; last, so that an installed rotoff goes first
sys.path += [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests" / "support")]
import torchvision_operators

import rotoff
from benchmarks.grid.run import commit, machine
from rotoff.core.chain import Form
from rotoff.planning.request import Request
from rotoff.planning.step_planner import least_limit, make_plan
from rotoff.profile.estimate.devices import find
from rotoff.profile.estimate.estimate import Estimate, estimate_profile
from rotoff.solver.bounds import largest_operation

torchvision = torchvision_operators.load()
K40 = find("K40")
STATES = 2  # of each parameter besides itself: gradient and momentum
CLASSES = 1000
GROUPS = (6, 32, 6)  # blocks of the deep ResNet's first, second and fourth group; table 4 varies the third
PAPER = {  # table 5, SuperNeurons: batch, and the images' side
    "alexnet": (1792, 227),
    "vgg16": (224, 224),
    "inception_v4": (240, 299),
    "resnet50": (384, 224),
    "resnet101": (256, 224),
    "resnet152": (176, 224),
}
DEEPEST, DEEP_BATCH = 1920, 16  # table 4


@dataclass(frozen=True)
class Size:
    """One network at one size: what is there beside a step, and the chain of a step. Bytes."""

    resident_bytes: int
    profile: Estimate

    @property
    def least_bytes(self) -> int:
        """All that training needs at least."""
        return self.resident_bytes + least_limit(self.profile, Request(K40.memory_bytes, "joint", 50, {}))

    @property
    def keep_all_bytes(self) -> int:
        return self.resident_bytes + self.profile.keep_all_bytes()


@dataclass
class Row:
    """reached: the largest size within `K40.memory_bytes`. keep_all: likewise, keeping everything. least_bytes: that
    the paper's size needs. overhead: of the plan at the size reached, by estimate. ran: what happened on CUDA."""

    name: str
    unit: str
    paper: int
    reached: int | None
    keep_all: int | None
    least_bytes: int
    resident_bytes: int
    overhead: float
    binds: str
    ran: str = "not executed"


def network(name: str) -> nn.Module:
    """The library's own model, where the default device says."""
    if name == "inception_v4":
        import timm

        return timm.create_model("inception_v4", num_classes=CLASSES)
    return getattr(torchvision.models, name)(num_classes=CLASSES)


def deep_resnet(third: int) -> nn.Sequential:
    """torchvision's ResNet of 6, 32, `third` and 6 blocks, block after block."""
    vision = torchvision.models.resnet
    net = vision.ResNet(vision.Bottleneck, [*GROUPS[:2], third, GROUPS[2]], num_classes=CLASSES)
    stem = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool)
    groups = (net.layer1, net.layer2, net.layer3, net.layer4)
    head = nn.Sequential(net.avgpool, nn.Flatten(), net.fc)
    return nn.Sequential(*stem, *[block for group in groups for block in group], *head)


def depth(third: int) -> int:
    """Layers, as the paper counts them: three to a block, and two."""
    return 3 * (sum(GROUPS) + third) + 2


# -- bytes at a size


def _size(model: nn.Module, x: torch.Tensor) -> Size:
    profile = estimate_profile(model, (x,), {}, K40)
    meta, logits = profile.chain.meta, 2 * len(x) * CLASSES * 4
    states = STATES * meta["trained_bytes"]
    resident = meta["parameter_bytes"] + meta["buffer_bytes"] + states + profile.batch_bytes + logits
    return Size(resident, profile)


@cache
def at_batch(name: str, batch: int) -> Size:
    with torch.device("meta"):
        return _size(network(name), torch.empty(batch, 3, PAPER[name][1], PAPER[name][1]))


@cache
def at_depth(third: int) -> Size:
    with torch.device("meta"):
        return _size(deep_resnet(third), torch.empty(DEEP_BATCH, 3, 224, 224))


def largest(needs: Callable[[int], int], room: int, guess: int) -> int | None:
    """The largest size, from 1, whose `needs` (bytes, growing with the size) stay within `room`; None where none does.

    Needs are nearly straight lines: the line through what is known on both sides says where to look next.
    """
    if needs(1) > room:
        return None
    low, high = 1, None
    probe = max(guess, 2)
    while high is None or high - low > 1:
        if needs(probe) <= room:
            low = probe
        else:
            high = probe
        if high is None:
            probe = max(low + 1, _between(needs, room, 1, low))
        else:
            probe = min(max(_between(needs, room, low, high), low + 1), high - 1)
    return low


def _between(needs: Callable[[int], int], room: int, low: int, high: int) -> int:
    """Where the line through two sizes meets `room`."""
    slope = (needs(high) - needs(low)) / (high - low)
    return low + int((room - needs(low)) / slope) if slope > 0 else 2 * high


def _row(name: str, unit: str, paper: int, at: Callable[[int], Size], said: Callable[[int], int]) -> Row:
    """paper: the paper's size, as `at` takes it. said: the size as the table names it."""
    room = K40.memory_bytes
    reached = largest(lambda n: at(n).least_bytes, room, paper)
    keep_all = largest(lambda n: at(n).keep_all_bytes, room, max(2, paper // 8))
    size = at(reached if reached is not None else paper)
    overhead, binds = float("nan"), "a step of one image"
    if reached is not None:
        overhead, binds = _planned(size, room)
    found = (None if one is None else said(one) for one in (reached, keep_all))
    return Row(name, unit, said(paper), *found, at(paper).least_bytes, size.resident_bytes, overhead, binds)


def _planned(size: Size, room: int) -> tuple[float, str]:
    """Of a plan in what `room` leaves, which the machine has accepted, the overhead; and what binds, in words."""
    plan = make_plan(size.profile, Request(room - size.resident_bytes, "joint", 50, {}))
    assert plan.peak + size.resident_bytes <= room
    text = f"{binding(size.profile.chain)}; what is resident takes {size.resident_bytes / room:.0%} of the memory"
    return plan.trace.makespan / size.profile.chain.compute_time - 1, text


def binding(chain: rotoff.Chain) -> str:
    """The operation that needs most by itself, and what its bytes are."""
    phase, i, nbytes = largest_operation(chain)
    stage = chain.stage(i)
    said = f"the {phase} of `{stage.name}` by itself, {nbytes / 1e9:.2f} GB"
    if phase == "forward":
        return said
    form = min((stage.form(k) for k in range(1 + len(stage.forms))), key=_while_backward)
    parts = {"its input": chain.output_bytes(i - 1) if i > 1 else 0, "what it saves": form.saved_bytes}
    parts |= {
        "gradients": chain.grad_bytes(i) + chain.grad_bytes(i - 1),
        "temporaries": form.backward_transient_bytes or 0,
    }
    return f"{said}: {', '.join(f'{name} {part / 1e9:.2f}' for name, part in parts.items() if part >= 5e6)}"


def _while_backward(form: Form) -> int:
    return form.saved_bytes + (form.backward_transient_bytes or 0)


def rows(only: list[str]) -> list[Row]:
    """Of the networks `only`, or of all."""
    made = []
    for name, (batch, _) in PAPER.items():
        if name in (only or [name]):
            made.append(_row(name, "images", batch, lambda n, name=name: at_batch(name, n), lambda n: n))  # type: ignore[misc]
            _say(made[-1])
    if "deepest" in (only or ["deepest"]):
        third = -(-(DEEPEST - 2) // 3) - sum(GROUPS)  # the first depth that is no less
        made.append(replace(_row("deepest", f"layers, {DEEP_BATCH} images", third, at_depth, depth), paper=DEEPEST))
        _say(made[-1])
    return made


def _say(row: Row) -> None:
    print(
        f"{row.name}: {row.reached} {row.unit} (paper {row.paper}, keeping everything {row.keep_all}); the paper's size"
        f" in {row.least_bytes / 1e9:.2f} GB; estimated overhead {row.overhead:+.0%}; {row.binds}",
        flush=True,
    )


# -- on CUDA


def step_on_cuda(name: str, size: int) -> str:
    """Two steps of SGD with momentum in a process held to the K40's memory; what came of them, in words."""
    device = torch.device("cuda")
    total = torch.cuda.get_device_properties(device).total_memory
    if total > K40.memory_bytes:
        torch.cuda.set_per_process_memory_fraction(K40.memory_bytes / total)
    deep = name == "deepest"
    batch, side = (DEEP_BATCH, 224) if deep else (size, PAPER[name][1])
    with device:
        model = deep_resnet(size) if deep else network(name)
    x, target = torch.randn(batch, 3, side, side, device=device), torch.randint(CLASSES, (batch,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    limit = K40.memory_bytes - torch.cuda.memory_allocated(device) - 2 * batch * CLASSES * 4
    wrapped = rotoff.Checkpointable(model, cache_directory=None).measure(x, repeats=1).compute_sequence(limit)
    times = []
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        torch.nn.functional.cross_entropy(wrapped(x), target).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return (
        f"executed on {torch.cuda.get_device_name()}: {times[-1]:.3g} s a step, at most {peaks[0] / 1e9:.2f} GB"
        f" allocated and {peaks[1] / 1e9:.2f} GB reserved"
    )


def run(row: Row) -> str:
    """`step_on_cuda` in a process of its own; a size that does not fit is tried with 3 % less, three times."""
    if row.reached is None:
        return "not executed"
    deep = row.name == "deepest"
    size, failures = ((row.reached - 2) // 3 - sum(GROUPS) if deep else row.reached), ""
    for _ in range(4):
        command = [sys.executable, __file__, "--step", row.name, str(size)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return f"{depth(size) if deep else size} {row.unit} {done.stdout.strip().splitlines()[-1]}{failures}"
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        failures += f"; {depth(size) if deep else size}: {why[:160]}"
        size = int(size * 0.97)
    return f"not executed{failures}"


def known_rows(path: Path, only: list[str]) -> list[Row]:
    """The rows of the networks `only`, or of all, as an earlier run found them; sizes depend on no machine."""
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["memory_bytes"] == K40.memory_bytes
    return [Row(**row) for row in found["rows"] if row["name"] in (only or [row["name"]])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="*", default=[], choices=[*PAPER, "deepest"], metavar="NAME", help="these networks"
    )
    parser.add_argument("--run", action="store_true", help="also execute a step of each on CUDA, held to 12 GB")
    parser.add_argument(
        "--known", type=Path, metavar="JSON", help="take the sizes from there in place of searching for them"
    )
    parser.add_argument("--out", type=Path, help="JSON; rows of other networks that are in it stay")
    parser.add_argument("--step", nargs=2, metavar=("NAME", "SIZE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        print(step_on_cuda(options.step[0], int(options.step[1])))
        return
    if options.run and not torch.cuda.is_available():
        parser.error("--run needs a CUDA device, and torch finds none; leave it out to plan")
    made = rows(options.only) if options.known is None else known_rows(options.known, options.only)
    for row in made if options.run else []:
        row.ran = run(row)
        print(f"{row.name}: {row.ran}", flush=True)
        if options.out:  # a run that is stopped has said what it knows
            _write(options.out, made)
    if options.out:
        _write(options.out, made)


def _write(out: Path, made: list[Row]) -> None:
    kept = json.loads(out.read_text(encoding="utf-8"))["rows"] if out.exists() else []
    fresh = {row.name: asdict(row) for row in made}
    versions = {"torchvision": torchvision.__version__, "timm": version("timm")}
    data = {
        "format": "rotoff.reach",
        "machine": machine("cuda" if torch.cuda.is_available() else "cpu") | versions,
        "commit": commit(),
        "memory_bytes": K40.memory_bytes,
        "of": [f"{name} {version}" for name, version in versions.items()],
        "counted": "parameters, buffers, gradients, one momentum, batch, twice the logits, and a step; no cuDNN"
        " workspaces",
        "rows": [fresh.pop(row["name"], row) for row in kept] + list(fresh.values()),
    }
    out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
