"""What smaller forms bring: planned and measured steps of a GPT and a ViT, without them and with them, beside the
peers.

Rows of each model: plain PyTorch; `torch.utils.checkpoint` around every block; selective checkpointing with the usual
policy (matrix products and attention saved); rotoff, remat and joint, each without forms and with them, at 60, 45 and
30 % of plain PyTorch's peak and at the two peers' own peaks. Steps alternate with plain PyTorch's, freed memory stays
with the process (`grid/memory.py`), and what counts is the median of the paired ratios.

Of a row: ``limit`` and ``peak`` in bytes beyond parameters, gradients and batch; ``planned``, ``bound``, ``ratio``,
``low``, ``high``: step times over plain's, low and high the quartiles; ``used``: stages in a smaller form.

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
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

# of the packages below; last, so that an installed rotoff goes first
sys.path.append(str(Path(__file__).parent.parent))
import rotoff
from benchmarks.grid import memory, methods, models, workloads
from benchmarks.grid.cell import Runner, in_turn, quartiles
from benchmarks.grid.run import commit, machine
from rotoff.solver.bounds import least_time_of

PEERS = ("checkpoint", "selective")
SHARES = {"60%": 0.6, "45%": 0.45, "30%": 0.3}
LEAST = 3  # pairs
Row = dict[str, Any]


def chosen(quick: bool) -> list[workloads.Workload]:
    """The grid's networks, in sizes for a minute or two."""
    layers, width, length, size = (3, 32, 32, 32) if quick else (10, 256, 256, 96)
    gpt = workloads._gpt("gpt", layers, width, 4, length, 2, 512, torch.float32)
    about = f"ViT, {layers} blocks of width {width}, patches of 8²"
    return [gpt, workloads._net("vit", about, lambda: models.vit(size, 8, layers, width, 4, 100), 4, size, 100)]


class Comparison:
    """One workload: plain PyTorch, and rotoff without forms (0) and with them (1), measured once."""

    def __init__(self, workload: workloads.Workload, host_directory: str | None) -> None:
        self.workload = workload
        model, self.x = workload.make(torch.device("cpu"))
        self.fresh = copy.deepcopy(model)
        self.plain = Runner(model, model, self.x)
        self.plain.step()
        self.gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        self.plain.step()
        self.kept = memory.peak_of(self.plain.step, self.x.device).allocated
        options: dict[str, Any] = {"host_directory": host_directory, "cache_directory": None}
        fresh = (copy.deepcopy(self.fresh) for _ in range(2))
        self.ours = [
            rotoff.Checkpointable(model, forms=bool(forms), **options).measure(self.x)
            for forms, model in enumerate(fresh)
        ]

    def rows(self) -> list[Row]:
        """Those to be measured; the peers' peaks are the limits of the last ones."""
        peers = [{"method": name, "forms": None, "at": ""} for name in ("plain", *PEERS)]
        cells = product((*SHARES, *PEERS), ("remat", "joint"), (False, True))
        ours = [{"method": mode, "forms": forms, "at": place} for place, mode, forms in cells]
        return [{"model": self.workload.name, "status": "ok", **row} for row in (*peers, *ours)]

    def runner(self, row: Row, done: list[Row]) -> Runner:
        if row["forms"] is None:
            model = copy.deepcopy(self.fresh)
            return Runner(methods.prepare(row["method"], model, self.x, None, None), model, self.x)
        peaks = {r["method"]: r["peak"] for r in done if r["model"] == row["model"] and r["forms"] is None}
        ours = self.ours[row["forms"]]
        row["limit"] = int(SHARES[row["at"]] * self.kept) if row["at"] in SHARES else peaks[row["at"]]
        ours.compute_sequence(row["limit"], mode=row["method"])
        kept, chain = ours.profile.chain.compute_time, ours.chain
        row["planned"] = ours.get_expected_makespan() / kept
        row["moved_bytes"] = rotoff.simulate(chain, ours.sequence).d2h_bytes
        row["used"] = len({op.stage for op in ours.sequence.ops if op.kind is rotoff.OpKind.F_SEL})
        if row["method"] == "remat":  # the bound is of all modes; a link of no use leaves recompute alone
            chain = replace(chain, d2h_bandwidth=1.0, h2d_bandwidth=1.0)
        row["bound"] = least_time_of(chain, ours.sequence.mem_limit) / kept if ours.sequence.mem_limit else None
        ours.zero_grad(set_to_none=True)
        return Runner(ours, ours, self.x)

    def measure(self, row: Row, seconds: float, done: list[Row]) -> None:
        """Fill `row`, with pairs of steps for about `seconds`."""
        try:
            runner = self.runner(row, done)
        except rotoff.InfeasibleError:
            row["status"] = "infeasible"
            return
        runner.step()
        gradients = [p.grad for p in runner.model.parameters() if p.grad is not None]
        same = map(torch.equal, gradients, self.gradients)
        row["equal_gradients"] = len(gradients) == len(self.gradients) and all(same)
        row["peak"] = memory.peak_of(runner.step, self.x.device).allocated
        for each in (runner, self.plain):
            each.step()
        times = in_turn([runner.timed, self.plain.timed], seconds, LEAST)
        row["low"], row["ratio"], row["high"] = quartiles(*times)
        row["step_time"], row["pairs"] = statistics.median(times[0]), len(times[0])
        if row["forms"] is None:
            runner.close()


def summary(rows: list[Row]) -> list[Row]:
    """Of each limit and mode the overhead with forms over that without: planned, measured, and by the bounds."""
    found = []
    for before, after in zip(rows, rows[1:], strict=False):
        if before["forms"] is False:
            shares = {
                name: (after[name] - 1) / (before[name] - 1) if before.get(name, 1) > 1 and after.get(name) else None
                for name in ("planned", "ratio", "bound")
            }
            found.append({**{key: before[key] for key in ("model", "method", "at")}, **shares})
    return found


def line(row: Row) -> str:
    """One line of the table."""
    forms = {None: "", True: "with forms", False: "without"}[row["forms"]]
    sizes = "".join(f"  {name} {row[name] / 2**20:.1f} MiB" for name in ("limit", "peak") if name in row)
    times = "".join(f"  {name} {row[name]:.3f}" for name in ("planned", "bound", "ratio") if row.get(name))
    bits = "" if row.get("equal_gradients", True) else "  OTHER GRADIENTS"
    return f"{row['model']:4} {row['method']:10} {forms:10} {row['at']:10} {row['status']}{sizes}{times}{bits}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--minutes", type=float, default=4.5, help="that all of it may take, about (%(default)s)")
    parser.add_argument("--host-directory", help="where the file of offloaded values lies; a real disk")
    parser.add_argument("--quick", action="store_true", help="tiny models and few steps, to see that it works")
    options = parser.parse_args(arguments)
    start, about, load = time.perf_counter(), machine("cpu"), os.getloadavg()
    torch.set_num_threads(max(1, (about["cores"] or 2) - 1))
    kept = memory.keep_freed_memory()
    ready = [Comparison(workload, options.host_directory) for workload in chosen(options.quick)]
    todo = [(comparison, row) for comparison in ready for row in comparison.rows()]
    rows: list[Row] = []
    for n, (comparison, row) in enumerate(todo):
        left = 60 * options.minutes - (time.perf_counter() - start)
        share = max(0.0, left / (len(todo) - n) - 2)  # less what planning and first steps take
        comparison.measure(row, 0.0 if options.quick else share, rows)
        rows.append(row)
        print(line(row), flush=True)
    for model in (model for comparison in ready for model in comparison.ours):
        model.close()
    figures = {
        "machine": {**about, "threads": torch.get_num_threads(), "load_before": load, "load_after": os.getloadavg()},
        "commit": commit(),
        "freed_memory_kept": kept,
        "models": {c.workload.name: c.workload.about for c in ready},
        "keep_all_bytes": {c.workload.name: c.kept for c in ready},
        "seconds": time.perf_counter() - start,
        "overhead_with_forms_over_without": summary(rows),
        "rows": rows,
    }
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
