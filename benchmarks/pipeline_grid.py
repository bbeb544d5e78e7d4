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
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from parameter_chains import ELEMENT, H100, Machine, transformer

from rotoff import Chain, Form, Op, parse
from rotoff.core.pipeline import orders
from rotoff.solver.pipeline import Pipeline, cut, plan_pipeline
from rotoff.solver.policies.lowering import ENDLESS, lower
from rotoff.solver.policies.segments import periods

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


def recomputed(chain: Chain, n: int) -> tuple[Op, ...]:
    """Of the first n stages only the outputs are kept."""
    return tuple(periods(len(chain), list(range(1, n + 1))))


def selective(chain: Chain, n: int) -> tuple[Op, ...]:
    """The first n stages are kept in their smaller form."""
    L = len(chain)
    forwards = [f"F_sel {i} 1" if i <= n and chain.stage(i).forms else f"F_all {i}" for i in range(1, L + 1)]
    return tuple(map(parse, [*forwards, *(f"B {i}" for i in range(L, 0, -1))]))


def offloaded(chain: Chain, n: int) -> tuple[Op, ...]:
    """The first n stages leave once each copy has ended, and come back two stages ahead."""
    made = lower(chain, ENDLESS, range(1, min(n, len(chain) - 1) + 1), ahead=2)
    assert made is not None  # within endless bytes
    return made.ops


# What is done to as few stages as fit, and where: as many on each rank as it needs ("less"), as on the rank that needs
# most ("uniform"), or all of them ("full").
RULES: dict[str, tuple[Callable[[Chain, int], tuple[Op, ...]], str]] = {
    "less recompute on later ranks": (recomputed, "less"),
    "full recompute": (recomputed, "full"),
    "selective saving": (selective, "full"),
    "uniform offload": (offloaded, "uniform"),
    "less offload on later ranks": (offloaded, "less"),
}


def by_hand(pipeline: Pipeline, name: str, limit: int) -> float | None:
    """Seconds of the step by a rule, with one stage on each rank; None if it does not fit."""
    rule, where = RULES[name]
    pieces, most = pipeline.pieces, max(map(len, pipeline.pieces))

    def run(treated: list[int]) -> tuple[float, list[bool]]:
        trace = pipeline.run([rule(piece, min(n, len(piece))) for piece, n in zip(pieces, treated, strict=True)])
        return trace.makespan, [rank.peak_bytes <= limit for rank in trace.ranks]

    counts = [most] if where == "full" else range(most + 1)
    fits = [run([n] * len(pieces))[1] for n in counts]
    if not all(map(any, zip(*fits, strict=True))):
        return None
    treated = [next(n for n, row in zip(counts, fits, strict=True) if row[rank]) for rank in range(len(pieces))]
    seconds, fit = run([max(treated)] * len(pieces) if where == "uniform" else treated)
    return seconds if all(fit) else None


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
        times = {name: by_hand(pipeline, name, int(share * most)) for name in RULES}
        over = {name: seconds and round(seconds / everything.makespan, 5) for name, seconds in times.items()}
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
            | {"rules": over, "peaks": [rank.peak_bytes for rank in found.trace.ranks]}
        )
        hand = min((value for value in over.values() if value is not None), default=math.inf)
        told = f"{model} {ranks}x{many} {schedule} {link} /{shared} {share}"
        print(f"{told}: {rows[-1]['over_bound']:.4f}, by hand {hand:.4f}", flush=True)
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
    hand = [min(v for v in row["rules"].values() if v) for row in rows]
    assert all(row["over_bound"] <= 1.001 * v for row, v in zip(rows, hand, strict=True)), "a rule was faster"
    half = [row["over_bound"] for row in rows if row["share"] == 0.5]
    print(f"{len(rows)} cells on {os.cpu_count()} cores; at half of the memory at most {max(half):.4f} of the bound")


if __name__ == "__main__":
    main()
