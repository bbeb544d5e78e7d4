"""Pipelines of GPTs of 7 to 70 billion parameters: planned against what people tune by hand, at equal memory.

    python benchmarks/pipeline_grid.py --out benchmarks/results/pipeline_grid.json

Every rank has the same limit, a share of the most that keeping everything takes on one. Times are of the simulator
(`rotoff.core.pipeline`), over those of keeping everything, which is a bound: no plan is faster. Chains are from data
sheets (`parameter_chains.py`): bfloat16, attention that saves no matrix, micro-batches of one sequence. A block also
has the form of Megatron's selective saving: outputs of norms and of the activation function are computed again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import replace
from pathlib import Path

from parameter_chains import ELEMENT, H100, Machine, transformer

from rotoff import Chain, Form
from rotoff.core.pipeline import orders
from rotoff.solver.pipeline import Pipeline, cut, plan_pipeline

A100 = Machine(190e12, 25e9, 1.6e12, 100e9)  # PCIe 4; H100 has PCIe 5
MODELS = {"7B": (32, 4096), "13B": (40, 5120), "30B": (48, 7168), "70B": (80, 8192)}
CELLS = (("7B", 4, 16), ("13B", 4, 16), ("13B", 8, 32), ("30B", 8, 32), ("70B", 8, 32), ("70B", 16, 64))
SHARES = (0.75, 0.5, 0.25)
REDONE = 6  # of 17 tensors of a block's width: outputs of two norms, and of the activation function


def chain_of(model: str, machine: Machine, sequence: int) -> Chain:
    blocks, width = MODELS[model]
    made = transformer(machine, blocks, width, sequence).without_parameters()
    hidden = sequence * width * ELEMENT

    def with_form(stage):  # type: ignore[no-untyped-def]
        if not stage.name.startswith("block"):
            return stage
        again = stage.backward_time + 2 * REDONE * hidden / machine.memory
        smaller = Form(stage.saved_bytes - REDONE * hidden, again, 2 * hidden, 4 * hidden + 4 * hidden)
        return replace(stage, forms=(smaller,))

    return replace(made, stages=tuple(map(with_form, made.stages)))


def cell(model: str, ranks: int, many: int, schedule: str, link: str, shared: int, refine: float) -> list[dict]:
    """One row for each limit."""
    machine = {"PCIe 4": A100, "PCIe 5": H100}[link]
    pieces = cut(chain_of(model, machine, 4096), ranks)
    pipeline = Pipeline(pieces, orders(schedule, ranks, many), ranks_per_link=shared)
    everything = pipeline.keep_everything()
    most = max(rank.peak_bytes for rank in everything.ranks)
    rows = []
    for share in SHARES:
        found = plan_pipeline(pipeline, [int(share * most)] * ranks, refine=refine)
        over = {
            name: round(seconds / everything.makespan, 5) if math.isfinite(seconds) else None
            for name, seconds in found.rules
        }
        rows.append(
            {"model": model, "ranks": ranks, "micro_batches": many, "schedule": schedule, "link": link}
            | {
                "ranks_per_link": shared,
                "share": share,
                "limit": int(share * most),
                "bubble": round(everything.bubble, 5),
            }
            | {"keep_all_seconds": everything.makespan}
            | {"over_bound": round(found.trace.makespan / everything.makespan, 5)}
            | {"fastest": found.name, "rules": over, "peaks": [rank.peak_bytes for rank in found.trace.ranks]}
        )
        hand = min((value for value in over.values() if value is not None), default=math.inf)
        told = f"{model} {ranks}x{many} {schedule} {link} /{shared} {share}"
        print(f"{told}: {rows[-1]['over_bound']:.4f}, by hand {hand:.4f} ({found.name})", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("pipeline_grid.json"))
    parser.add_argument("--refine", type=float, default=0.1, help="effort of each stage's search, in seconds")
    parser.add_argument(
        "--cells", type=int, default=len(CELLS), help="how many of the models and ranks, from the first"
    )
    options = parser.parse_args()
    rows: list[dict] = []
    for model, ranks, many in CELLS[: options.cells]:
        for link, shared in (("PCIe 4", 1), ("PCIe 5", 1), ("PCIe 5", 2)):
            rows += cell(model, ranks, many, "1F1B", link, shared, options.refine)
            lines = ",\n ".join(map(json.dumps, rows))
            options.out.write_text(f'{{"format": "rotoff.pipeline_grid", "version": 1, "rows": [\n {lines}\n]}}\n')
    assert all(row["over_bound"] <= min(v for v in row["rules"].values() if v) for row in rows), "a rule was faster"
    half = [row["over_bound"] for row in rows if row["share"] == 0.5]
    print(f"{len(rows)} cells on {os.cpu_count()} cores; at half of the memory at most {max(half):.4f} of the bound")


if __name__ == "__main__":
    main()
