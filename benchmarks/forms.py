"""What smaller forms bring: planned and measured steps of a GPT and a ViT, without them and with them, beside the
peers.

Rows of each model: plain PyTorch; `torch.utils.checkpoint` around every block; PyTorch's selective checkpointing with
the usual policy (matrix products and attention saved); rotoff, remat and joint, each without forms and with them, at
60, 45 and 30 % of plain PyTorch's peak and at the two peers' own peaks (at equal bytes).

Every method's steps alternate with plain PyTorch's, and what counts is the median of the paired ratios. Peaks are those
of the allocator. `planned` is the plan's makespan over keeping everything, `bound` what no plan within the limit can
beat; at the end the overheads with forms over those without. As in `prediction.py`, freed memory stays with the
process.

    python benchmarks/forms.py --json benchmarks/results/forms.json
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

# of the packages below; last, so that an installed rotoff goes first
sys.path.append(str(Path(__file__).parent.parent))
from benchmarks.prediction import keep_freed_memory

import rotoff
from benchmarks.grid import memory, methods, models, workloads
from benchmarks.grid.cell import Runner
from benchmarks.grid.run import commit, machine
from rotoff.solver.bounds import least_time_of

PEERS = ("checkpoint", "selective")
SHARES = (0.6, 0.45, 0.3)
WARM = 1  # steps of each that are not timed, after the first one and the one whose peak is taken
LEAST = 3  # pairs


@dataclass
class Row:
    """One method at one limit. limit, peak: bytes beyond parameters, gradients and batch; planned, bound, ratio, low,
    high: step times over plain's, low and high the quartiles; equal_gradients: bit for bit; used: stages in a smaller
    form."""

    model: str
    method: str
    forms: bool | None
    at: str
    limit: int | None = None
    status: str = "ok"
    planned: float | None = None
    bound: float | None = None
    used: int | None = None
    moved_bytes: int | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    step_time: float | None = None
    peak: int | None = None
    pairs: int = 0
    equal_gradients: bool | None = None


def chosen(quick: bool) -> list[workloads.Workload]:
    """The grid's networks, in sizes for a minute or two."""
    layers, width, length, n = (3, 32, 32, 2) if quick else (10, 256, 256, 2)
    about = f"{layers} blocks of width {width}, float32"
    gpt = workloads.Workload(
        "gpt",
        f"GPT, {about}, {n} x {length} tokens",
        lambda: models.gpt(layers, width, 4, length, 512),
        workloads._tokens(n, length, 512),
    )
    size = 32 if quick else 96
    vit = workloads.Workload(
        "vit",
        f"ViT, {about}, {2 * n} images of {size}², patches of 8²",
        lambda: models.vit(size, 8, layers, width, 4, 100),
        workloads._images(2 * n, size, 100),
    )
    return [gpt, vit]


class Comparison:
    """One workload: plain PyTorch, and rotoff without forms (0) and with them (1), measured once."""

    def __init__(self, workload: workloads.Workload, host_directory: str | None) -> None:
        self.workload = workload
        model, self.x = workload.make(torch.device("cpu"))
        self.fresh = copy.deepcopy(model)
        self.plain = Runner(model, model, self.x)
        self.plain.step()
        self.gradients = [p.grad.clone() if p.grad is not None else None for p in model.parameters()]
        self.plain.step()
        self.kept = memory.peak_of(self.plain.step, self.x.device).allocated
        self.ours = [
            rotoff.Checkpointable(
                copy.deepcopy(self.fresh), forms=forms, host_directory=host_directory, cache_directory=None
            ).measure(self.x)
            for forms in (False, True)
        ]

    def rows(self) -> list[Row]:
        """Those to be measured; limits of the last ones are known when the peers have run."""
        name = self.workload.name
        at = [f"{share:.0%}" for share in SHARES] + list(PEERS)
        peers = [Row(name, peer, None, "") for peer in PEERS]
        ours = [Row(name, mode, forms, place) for place in at for mode in ("remat", "joint") for forms in (False, True)]
        return [Row(name, "plain", None, ""), *peers, *ours]

    def limit(self, row: Row, done: list[Row]) -> int:
        """Bytes for `row`, given those already `done`."""
        shares = {f"{share:.0%}": share for share in SHARES}
        if row.at in shares:
            return int(shares[row.at] * self.kept)
        return next(r.peak for r in done if r.model == row.model and r.method == row.at and r.peak is not None)

    def measure(self, row: Row, seconds: float, done: list[Row]) -> None:
        """Fill `row`, with pairs of steps for about `seconds`."""
        if row.forms is None:
            model = copy.deepcopy(self.fresh)
            runner = Runner(methods.prepare(row.method, model, self.x, None, None), model, self.x)
        else:
            ours, row.limit = self.ours[row.forms], self.limit(row, done)
            try:
                ours.compute_sequence(row.limit, mode=row.method)
            except rotoff.InfeasibleError:
                row.status = "infeasible"
                return
            self._predict(ours, row)
            ours.zero_grad(set_to_none=True)
            runner = Runner(ours, ours, self.x)
        runner.step()
        pairs = list(zip(runner.model.parameters(), self.gradients, strict=True))
        row.equal_gradients = all(
            b is None if a.grad is None else b is not None and torch.equal(a.grad, b) for a, b in pairs
        )
        row.peak = memory.peak_of(runner.step, self.x.device).allocated
        self._time(runner, row, seconds)
        if row.forms is None:
            runner.close()

    @staticmethod
    def _predict(ours: rotoff.Checkpointable, row: Row) -> None:
        trace, kept = rotoff.simulate(ours.chain, ours.sequence), ours.profile.chain.compute_time
        row.planned, row.moved_bytes = ours.get_expected_makespan() / kept, trace.d2h_bytes
        row.used = len({op.stage for op in ours.sequence.ops if op.kind is rotoff.OpKind.F_SEL})
        limit, chain = ours.sequence.mem_limit, ours.chain
        if row.method == "remat":  # the bound is of all modes; a link of no use leaves recompute alone
            chain = replace(chain, d2h_bandwidth=1.0, h2d_bandwidth=1.0)
        row.bound = least_time_of(chain, limit) / kept if limit else None

    def _time(self, runner: Runner, row: Row, seconds: float) -> None:
        both = (runner, self.plain)
        for _ in range(WARM):
            for each in both:
                each.step()
        times: list[list[float]] = [[], []]
        end = time.perf_counter() + seconds
        while len(times[0]) < LEAST or time.perf_counter() < end:
            for n in (0, 1) if len(times[0]) % 2 else (1, 0):
                times[n].append(both[n].timed())
        ratios = [ours / plain for ours, plain in zip(*times, strict=True)]
        row.low, row.ratio, row.high = statistics.quantiles(ratios, n=4)
        row.step_time, row.pairs = statistics.median(times[0]), len(ratios)

    def close(self) -> None:
        for model in self.ours:
            model.close()


def summary(rows: list[Row]) -> list[dict[str, Any]]:
    """Of each limit and mode the overhead with forms over that without: planned, measured, and by the bounds."""
    found = []
    with_forms = {(r.model, r.method, r.at): r for r in rows if r.forms}
    for before in (r for r in rows if r.forms is False):
        after = with_forms[before.model, before.method, before.at]
        # of overheads
        shares = {name: _share(getattr(after, name), getattr(before, name)) for name in ("planned", "ratio", "bound")}
        found.append({"model": before.model, "method": before.method, "at": before.at, **shares})
    return found


def _share(after: float | None, before: float | None) -> float | None:
    return None if after is None or before is None or before <= 1 else (after - 1) / (before - 1)


def line(row: Row) -> str:
    """One line of the table."""
    forms = "" if row.forms is None else ("with" if row.forms else "without")
    numbers = "".join(
        f"{'-' if value is None else format(value, form):>{width}}"
        for value, form, width in (
            (None if row.limit is None else row.limit / 2**20, ".1f", 9),
            (None if row.peak is None else row.peak / 2**20, ".1f", 9),
            (row.planned, ".3f", 9),
            (row.bound, ".3f", 7),
            (row.ratio, ".3f", 10),
            (row.used, "d", 6),
            (row.equal_gradients, "", 7),
        )
    )
    return f"{row.model:4} {row.method:10} {forms:8} {row.at:10}{numbers}" + (
        "" if row.status == "ok" else f"  {row.status}"
    )


HEADER = "model method    forms    at             limit  peak/MiB  planned  bound  measured  used   bits"


def main(arguments: list[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--minutes", type=float, default=4.5, help="that all of it may take, about (%(default)s)")
    parser.add_argument("--host-directory", help="where the file of offloaded values lies; a real disk")
    parser.add_argument("--quick", action="store_true", help="tiny models and few steps, to see that it works")
    options = parser.parse_args(arguments)
    start, about, load = time.perf_counter(), machine("cpu"), os.getloadavg()
    torch.set_num_threads(max(1, (about["cores"] or 2) - 1))
    kept = keep_freed_memory()
    ready = [Comparison(workload, options.host_directory) for workload in chosen(options.quick)]
    todo = [(comparison, row) for comparison in ready for row in comparison.rows()]
    rows: list[Row] = []
    print(HEADER, flush=True)
    for n, (comparison, row) in enumerate(todo):
        left = 60 * options.minutes - (time.perf_counter() - start)
        share = max(0.0, left / (len(todo) - n) - 2)  # less what planning and first steps take
        comparison.measure(row, 0.0 if options.quick else share, rows)
        rows.append(row)
        print(line(row), flush=True)
    for comparison in ready:
        comparison.close()
    figures = {
        "machine": {**about, "threads": torch.get_num_threads(), "load_before": load, "load_after": os.getloadavg()},
        "commit": commit(),
        "freed_memory_kept": kept,
        "models": {c.workload.name: c.workload.about for c in ready},
        "keep_all_bytes": {c.workload.name: c.kept for c in ready},
        "seconds": time.perf_counter() - start,
        "overhead_with_forms_over_without": summary(rows),
        "rows": [asdict(row) for row in rows],
    }
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return rows


if __name__ == "__main__":
    main()
