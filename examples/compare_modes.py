"""Train one small GPT under memory limits, in every mode, side by side with plain PyTorch, and print one table.

The model is built here from torch's own parts and reads text that every machine has: the source code of Python's
standard library. It is measured once. Then, for each limit and mode, the same steps are trained twice from the same
seed, by plain PyTorch and by rotoff, one step of each in turn, so that both meet the same state of the machine.

What the columns say:

* step: seconds of forward and backward, loss included, optimizer left out. Predicted: of the plan, and its ratio to
  keeping everything. Measured: median over the steps, and the median ratio of a step to plain PyTorch's step beside it.
* peak: bytes that one step allocates beyond what was there before it (parameters, their gradients, optimizer, batch),
  as the allocator reports them, in a step of its own that is not timed.
* host: bytes reserved behind the device: a file on the CPU, pinned memory on CUDA.
* max |Δgrad|: largest difference of any gradient, in any step, from plain PyTorch's.

On the CPU all methods, plain PyTorch included, compute with one thread less than there are cores: the copies to and
from the file need one.

    python examples/compare_modes.py
    python examples/compare_modes.py --layers 12 --width 512 --limits 60,40,20 --json out.json
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import rotoff

VOCABULARY = 128  # ASCII; what else occurs in the text becomes "?"
MODES = ("offload", "remat", "joint")
MIB = 1024**2

Batch = tuple[torch.Tensor, torch.Tensor]  # (tokens or what became of them, the characters to predict)


# -- the model: a Sequential whose stages pass (activations, targets) on


class Embedding(nn.Module):
    def __init__(self, width: int, context: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(0.02 * torch.randn(context, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, batch: Batch) -> Batch:
        tokens, targets = batch
        return self.dropout(self.tokens(tokens) + self.positions), targets


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.merge(mixed.transpose(1, 2).reshape(n, length, width))

    def forward(self, batch: Batch) -> Batch:
        x, targets = batch
        x = x + self.dropout(self.attend(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x))), targets


class Head(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.project = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, batch: Batch) -> Batch:
        x, targets = batch
        return self.project(self.norm(x)), targets


class Loss(nn.Module):
    def forward(self, batch: Batch) -> torch.Tensor:
        logits, targets = batch
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build_gpt(options: argparse.Namespace) -> nn.Sequential:
    torch.manual_seed(options.seed)
    blocks = [Block(options.width, options.heads, options.dropout) for _ in range(options.layers)]
    model = nn.Sequential(
        Embedding(options.width, options.context, options.dropout), *blocks, Head(options.width), Loss()
    )
    return model.to(options.device)


# -- the text


def read_text() -> torch.Tensor:
    """The standard library's modules (packages below it left out), one after another, a byte for a character."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "".join(path.read_text(encoding="utf-8", errors="replace") for path in files)
    return torch.tensor(list(text.encode("ascii", errors="replace")), dtype=torch.uint8)


def batches(text: torch.Tensor, options: argparse.Namespace) -> Iterator[Batch]:
    """The same batches, in the same order, for the same seed."""
    random = torch.Generator().manual_seed(options.seed)
    while True:
        starts = torch.randint(len(text) - options.context - 1, (options.batch,), generator=random)
        rows = torch.stack([text[start : start + options.context + 1] for start in starts]).long().to(options.device)
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


# -- what is measured


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed_step(model: nn.Module, batch: Batch) -> tuple[float, float]:
    """Loss and seconds of one forward and backward; gradients are zeroed in place before."""
    device = batch[0].device
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    synchronize(device)
    start = time.perf_counter()
    loss = model(batch)
    loss.backward()
    synchronize(device)
    return loss.item(), time.perf_counter() - start


def peak_of_step(model: nn.Module, batch: Batch) -> int:
    """The most bytes that one step has allocated, at any time, beyond what there was at its start."""
    device = batch[0].device
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        timed_step(model, batch)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes two lines of its own
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profiler:
        timed_step(model, batch)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def largest_difference(model: nn.Module, plain: nn.Module) -> float:
    """Largest difference of any gradient between two models with the same parameters."""
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max((a.grad - b.grad).abs().max().item() for a, b in pairs if a.grad is not None and b.grad is not None)


@dataclass
class Row:
    """One line of the table; times in seconds, memory in bytes, None where nothing was run."""

    limit: str
    mode: str
    mem_limit: int
    predicted_time: float | None = None
    predicted_ratio: float | None = None
    measured_time: float | None = None
    measured_ratio: float | None = None
    predicted_peak: int | None = None
    measured_peak: int | None = None
    host_bytes: int | None = None
    loss: float | None = None
    grad_difference: float | None = None
    note: str = ""


class Comparison:
    """One plain model and one that rotoff runs, trained in turn from the same state."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.plain = build_gpt(options)
        # what the table says is measured now, not taken from what an earlier run left on disk
        self.model = rotoff.Checkpointable(copy.deepcopy(self.plain))
        self.start = copy.deepcopy(self.plain.state_dict())
        self.text = read_text()
        self.plain_times: list[float] = []

    def measure(self) -> None:
        self.model.measure(next(batches(self.text, self.options)))

    def run(self, row: Row, progress: Progress) -> None:
        """Plan for `row`, train, and fill the row in."""
        progress.show("planning")
        try:
            self.model.compute_sequence(row.mem_limit, mode="joint" if row.mode == "keep-all" else row.mode)
        except rotoff.InfeasibleError as error:
            least, share = error.min_mem_limit / MIB, 100 * error.min_mem_limit / self.model.keep_all_memory
            row.note = f"does not fit; the smallest limit that works is {least:.1f} MiB ({share:.0f} %)"
            return
        row.predicted_time = self.model.get_expected_makespan()
        row.predicted_ratio = row.predicted_time / self.model.profile.chain.compute_time
        row.predicted_peak = self.model.get_expected_memory()
        row.host_bytes = self.model.get_expected_host_memory()
        self._train(row, progress)
        progress.show("measuring the peak")
        row.measured_peak = peak_of_step(self.model, next(batches(self.text, self.options)))

    def _train(self, row: Row, progress: Progress) -> None:
        both = (self.plain, self.model)
        for model in both:
            model.load_state_dict(self.start)
        optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-4) for model in both]
        times: tuple[list[float], list[float]] = ([], [])
        losses = [0.0, 0.0]
        row.grad_difference = 0.0
        data = batches(self.text, self.options)
        for step in range(self.options.steps + 1):  # one more, not timed: it allocates gradients and warms caches
            progress.show(f"step {step} of {self.options.steps}")
            batch = next(data)
            for which in (0, 1) if step % 2 else (1, 0):  # neither always goes first
                torch.manual_seed(self.options.seed + step)  # the same dropout for both
                losses[which], seconds = timed_step(both[which], batch)
                if step > 0:
                    times[which].append(seconds)
            row.grad_difference = max(row.grad_difference, largest_difference(self.model, self.plain))
            for optimizer in optimizers:
                optimizer.step()
        self.plain_times += times[0]
        row.loss = losses[1]
        row.measured_time = statistics.median(times[1])
        row.measured_ratio = statistics.median(ours / plain for plain, ours in zip(*times, strict=True))

    def plain_row(self, reference: Row) -> Row:
        """Plain PyTorch, from the steps in between all others; its prediction is that of keeping everything."""
        peak = peak_of_step(self.plain, next(batches(self.text, self.options)))
        chain = self.model.profile.chain
        return Row(
            limit="none",
            mode="plain",
            mem_limit=0,
            predicted_time=chain.compute_time,
            measured_time=statistics.median(self.plain_times),
            predicted_ratio=1.0,
            measured_ratio=1.0,
            predicted_peak=self.model.keep_all_memory,
            measured_peak=peak,
            host_bytes=0,
            loss=reference.loss,
            grad_difference=0.0,
        )


# -- what is shown


class Progress:
    """What is going on, on stderr: one line that changes on a terminal, a line for each row elsewhere."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.title = total, 0, ""
        self.live = sys.stderr.isatty()

    def begin(self, title: str) -> None:
        self.done, self.title = self.done + 1, title
        if not self.live:
            print(f"[{self.done}/{self.total}] {title}", file=sys.stderr, flush=True)

    def show(self, what: str) -> None:
        if self.live:
            bar = "#" * (24 * self.done // self.total)
            print(f"\r\x1b[K[{bar:<24}] {self.title}: {what}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self.live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


HEADER = """\
                   predicted step   measured step        peak (MiB)       host
limit    mode          s   /plain       s   /plain  predicted  measured  (MiB)    loss  max |Δgrad|"""


def line(row: Row) -> str:
    head = f"{row.limit:<8} {row.mode:<8}"
    if row.measured_time is None:
        return f"{head}  {row.note}"
    times = (
        f"{row.predicted_time:>7.3f} {row.predicted_ratio:>7.2f} {row.measured_time:>8.3f} {row.measured_ratio:>7.2f}"
    )
    memory = f"{row.predicted_peak / MIB:>10.1f} {row.measured_peak / MIB:>9.1f} {row.host_bytes / MIB:>6.1f}"
    return f"{head} {times} {memory} {row.loss:>7.4f}  {row.grad_difference:>11.3g}"


def table(rows: list[Row]) -> str:
    lines, previous = [HEADER, "-" * len(HEADER.splitlines()[-1])], "none"
    for row in rows:
        if row.limit != previous and previous != "none":
            lines.append("")
        lines.append(line(row))
        previous = row.limit
    return "\n".join(lines)


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (text.split(":", 1)[1].strip() for text in lines if text.startswith("model name")), platform.processor()
    )


def machine(options: argparse.Namespace) -> dict[str, Any]:
    cuda = options.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(options.device) if cuda else cpu_name(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rotoff": rotoff.__version__,
    }


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="timed training steps of each row (%(default)s)")
    parser.add_argument("--limits", default="80,50,30", help="limits, in %% of the bytes of keeping all (%(default)s)")
    parser.add_argument("--device", help="cpu, cuda or cuda:1; by default CUDA where there is one")
    parser.add_argument("--layers", type=int, default=8, help="blocks (%(default)s)")
    parser.add_argument("--width", type=int, default=256, help="channels (%(default)s)")
    parser.add_argument("--heads", type=int, default=4, help="attention heads (%(default)s)")
    parser.add_argument("--context", type=int, default=128, help="characters in a row of a batch (%(default)s)")
    parser.add_argument("--batch", type=int, default=12, help="rows in a batch (%(default)s)")
    parser.add_argument("--dropout", type=float, default=0.1, help="dropout (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and dropout (%(default)s)")
    parser.add_argument(
        "--threads", type=int, default=max(1, cores() - 1), help="compute threads, cores - 1 (%(default)s)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="also write the rows, the machine and the options there"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model and two steps: does it run?")
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.layers, options.width, options.context, options.batch = 2, 3, 64, 64, 4
    try:
        options.limits = [float(part) for part in options.limits.split(",")]
    except ValueError:
        parser.error(f"--limits {options.limits}: give percentages, such as 80,50,30")
    if not all(0 < limit <= 100 for limit in options.limits):
        parser.error("--limits: percentages are above 0 and at most 100")
    for name in ("steps", "layers", "width", "heads", "context", "batch", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if options.width % options.heads:
        parser.error(f"--width {options.width} is not a multiple of --heads {options.heads}")
    options.device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if options.device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: torch finds no CUDA device here")
    return options


def main(arguments: list[str] | None = None) -> list[Row]:
    options = parse_options(arguments)
    torch.set_num_threads(options.threads)
    progress = Progress(2 + len(options.limits) * len(MODES))

    progress.begin("measuring the model")
    comparison = Comparison(options)
    comparison.measure()
    keep_all = comparison.model.keep_all_memory
    rows = [Row("100 %", "keep-all", keep_all)]
    rows += [Row(f"{part:g} %", mode, int(keep_all * part / 100)) for part in options.limits for mode in MODES]
    for row in rows:
        progress.begin(f"{row.mode} within {row.limit}, {row.mem_limit / MIB:.1f} MiB")
        comparison.run(row, progress)
    rows.insert(0, comparison.plain_row(rows[0]))
    progress.end()
    comparison.model.close()

    about = machine(options)
    parameters = sum(parameter.numel() for parameter in comparison.plain.parameters())
    print(f"GPT of {options.layers} blocks, width {options.width}, {parameters / 1e6:.1f} M parameters,", end=" ")
    print(f"batch {options.batch} x {options.context} characters, {options.steps} steps")
    print(f"{about['device']}, {about['threads']} compute threads of {about['cores']} cores,", end=" ")
    print(f"Python {about['python']}, torch {about['torch']}, rotoff {about['rotoff']}")
    print(f"keeping everything needs {keep_all / MIB:.1f} MiB beyond parameters, gradients, optimizer and batch\n")
    print(table(rows))
    if options.json:
        settings = {key: str(value) if key in ("device", "json") else value for key, value in vars(options).items()}
        result = {
            "machine": about,
            "options": settings,
            "keep_all_bytes": keep_all,
            "rows": [asdict(row) for row in rows],
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return rows


if __name__ == "__main__":
    main()
