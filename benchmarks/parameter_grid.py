"""How near the bound `solve` comes where one limit covers parameters too, and what people place by hand.

    python benchmarks/parameter_grid.py --json benchmarks/results/parameter_grid.json

Limits go from the peak of keeping everything (share 1) down to the smallest that works (share 0). Times are over those
of forward and backward alone; a point is a hundredth of that. `by_hand` is the best of some 70 placements: r groups
resident, z with their parameters on the device and all else on the host, the others streamed one operation ahead; each
under the plan of `solve` for the activations in what it leaves. `bound` holds for the machine's step time, `endless`
for the mean step of a training that goes on, and `forty` is what the plan takes in steps 39 and 40.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import parameter_chains as chains

from rotoff import (
    Chain,
    InfeasibleError,
    Machine,
    OptionError,
    Sequence,
    keep_all,
    lower_bound,
    min_mem_limit,
    simulate,
    solve,
)
from rotoff.core.steady_step import at_rest
from rotoff.solver.placement import HOST_UPDATED, RESIDENT, STATE_STREAMED, STREAMED, STREAMED_HOST_UPDATED, Place
from rotoff.solver.policies.placed import Placed

SHARES = (1.0, 0.5, 0.25, 0.1, 0.03, 0.0)
OTHERS = ("zero-offload", "streaming")


def forty(chain: Chain, plan: Sequence) -> float:
    """Seconds of a step, over the last two of forty."""
    machine = Machine(chain, None, at_rest(chain, tuple(plan), plan.resident))
    for step in range(40):
        if step:
            machine.next_step()
        for op in plan:
            machine.step(op)
    return machine.finish().makespan


def placements(chain: Chain) -> Iterator[list[Place]]:
    """By hand: r groups resident, z with parameters on the device, the rest streamed and updated there, or here."""
    K = len(chain.parameters)
    host = [group.host_update_time is not None or not group.grad_bytes for group in chain.parameters]
    counts = sorted({round(K * n / 10) for n in range(11)})
    for r in counts:
        for z in (z for z in counts if r + z <= K):
            moved = [(HOST_UPDATED, STREAMED_HOST_UPDATED) if can else (STATE_STREAMED, STREAMED) for can in host]
            yield [RESIDENT if k < r else spots[0] if k < r + z else spots[1] for k, spots in enumerate(moved)]
        yield [RESIDENT] * r + [STREAMED] * (K - r)


def cell(chain: Chain, share: float, updates: str, effort: float | bool) -> dict[str, Any]:
    """One chain at one limit."""
    peak, least = simulate(chain, keep_all(chain, updates)).peak_bytes, min_mem_limit(chain, "joint", updates)
    limit, unit = int(least + share * max(0, peak - least)), chain.compute_time
    start = time.process_time()
    plan = solve(chain, limit, updates=updates, refine=effort)
    row: dict[str, Any] = {"chain": chain.name, "stages": len(chain), "updates": updates, "share": share}
    row |= {"limit": limit, "seconds": time.process_time() - start, "step": plan.meta["makespan"] / unit}
    row["forty"] = forty(chain, plan) / unit
    row["bound"] = lower_bound(chain, limit, updates=updates) / unit
    row["endless"] = lower_bound(chain, limit, updates=updates, steps=math.inf) / unit
    hand = Placed(chain, updates, refine=False)
    made = [hand.within(limit, places) for places in placements(chain)]
    row["by_hand"] = min((one.meta["makespan"] / unit for one in made if one is not None), default=None)
    for policy in OTHERS:
        try:
            other = solve(chain, limit, policy=policy, updates=updates, effort=False)
            row[policy] = other.meta["makespan"] / unit
        except (InfeasibleError, OptionError):
            row[policy] = None
    return row


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean gaps in points, by when updates come, and how often something else is faster than the plan."""
    found: dict[str, Any] = {}
    for updates in ("during", "after"):
        of = [row for row in rows if row["updates"] == updates]
        for name in ("bound", "endless"):
            found[f"{updates}_gap_to_{name}"] = mean(100 * (row["step"] - row[name]) for row in of)
            roomy = [100 * (row["step"] - row[name]) for row in of if row["share"] >= 0.1]
            found[f"{updates}_gap_to_{name}_from_0.1"] = mean(roomy) if roomy else None
    others = [row[name] for row in rows for name in ("by_hand", *OTHERS) if row[name] is not None]
    slower = [
        row for row in rows for name in ("by_hand", *OTHERS) if row[name] and row["step"] > row[name] * (1 + 1e-9)
    ]
    unsteady = [row for row in rows if abs(row["forty"] - row["step"]) > 1e-6 * row["step"]]
    return found | {"compared": len(others), "slower": len(slower), "unsteady": len(unsteady), "cells": len(rows)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the rows go; cells that it has already are kept")
    parser.add_argument("--effort", type=float, help="`refine` of solve (default: solve's own)")
    parser.add_argument("--chains", nargs="+", help="names of some chains")
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES)
    options = parser.parse_args()
    kept = json.loads(options.json.read_text(encoding="utf-8")) if options.json and options.json.exists() else {}
    rows = kept.get("rows", [])
    there = {(row["chain"], row["share"], row["updates"]) for row in rows}
    about = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    for chain in chains.grid():
        if options.chains and chain.name not in options.chains:
            continue
        for share in options.shares:
            for updates in ("during", "after"):
                if (chain.name, share, updates) in there:
                    continue
                rows.append(cell(chain, share, updates, True if options.effort is None else options.effort))
                row = {name: value for name, value in rows[-1].items() if isinstance(value, float)}
                print(
                    f"{chain.name:<22} {updates:<7}", {name: round(value, 3) for name, value in row.items()}, flush=True
                )
        if options.json and rows:
            text = json.dumps({**about, "effort": options.effort, "summary": summary(rows), "rows": rows}, indent=1)
            options.json.write_text(text + "\n", encoding="utf-8")
    print(json.dumps(summary(rows), indent=1) if rows else "nothing to do")


if __name__ == "__main__":
    main()
