"""How near the certified bound `solve` comes, and what the papers' dynamic program alone reaches.

    python benchmarks/solver_quality.py --out benchmarks/results/solver_quality.json
    python benchmarks/solver_quality.py --figure --out benchmarks/results/solver_figure.json

Points are percent of the keep-all time. With --figure: step time against limit for two chains, by the papers' dynamic
program at N = 50, 100 and 150 slots with every size rounded up, by `solve`, and the bound.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import mean

from solver_chains import gpt, grid, resnet, save

from rotoff import Chain, InfeasibleError, lower_bound, simulate, solve
from rotoff.solver import joint, keep_all
from rotoff.solver.search import judged

SHARES = (0.8, 0.6, 0.45, 0.3, 0.2)
FIGURE_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)


def quality(chain: Chain, refine: bool | float) -> list[dict[str, object]]:
    """A row for each limit: step time and bound over the keep-all time, share of the limit used, seconds of the
    search."""
    peak, rows = simulate(chain, keep_all(chain)).peak_bytes, []
    for share in SHARES:
        limit, start = int(share * peak), time.perf_counter()
        row: dict[str, object] = {"chain": chain.name, "stages": len(chain), "share": share, "limit": limit}
        try:
            sequence = solve(chain, limit, refine=refine)
        except InfeasibleError as error:
            rows.append({**row, "min_mem_limit": error.min_mem_limit})
            continue
        seconds = time.perf_counter() - start
        step, bound = sequence.meta["makespan"] / chain.compute_time, lower_bound(chain, limit) / chain.compute_time
        used = sequence.meta["peak_bytes"] / limit
        rows.append(
            {**row, "step": step, "bound": bound, "gap": 100 * (step - bound), "used": used, "seconds": seconds}
        )
    return rows


def figure(chain: Chain) -> list[dict[str, object]]:
    """Step times over the keep-all time, by method, at each limit; None where a method finds nothing."""
    peak, rows = simulate(chain, keep_all(chain)).peak_bytes, []
    for share in FIGURE_SHARES:
        limit = int(share * peak)
        row: dict[str, object] = {"chain": chain.name, "share": share, "limit": limit}
        for slots in (50, 100, 150):
            _, codes = joint.solve_slots(chain, limit, slots, "up")
            made = None if codes is None else judged(chain, limit, codes, "joint-up")
            row[f"dp_{slots}"] = None if made is None else made.makespan / chain.compute_time
        row["solve"] = simulate(chain, solve(chain, limit), limit).makespan / chain.compute_time
        row["bound"] = lower_bound(chain, limit) / chain.compute_time
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--refine", type=float, help="seconds of search (default: solve's own)")
    parser.add_argument("--figure", action="store_true")
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    summary: dict[str, object] = {}
    if args.figure:
        for chain in (gpt(24), resnet((3, 4, 23, 3))):
            rows += figure(chain)
    else:
        for chain in grid():
            found = quality(chain, True if args.refine is None else args.refine)
            rows += found
            cells = [f"{r['step']:.4f} ({r['gap']:.2f})" if "gap" in r else "does not fit" for r in found]
            print(f"{chain.name:14} {len(chain):4} " + "  ".join(f"{cell:>15}" for cell in cells), flush=True)
        gaps = [float(str(r["gap"])) for r in rows if "gap" in r]
        tight = [float(str(r["gap"])) for r in rows if "gap" in r and float(str(r["share"])) <= 0.3]
        summary = {"mean_gap": mean(gaps), "worst_gap": max(gaps), "mean_gap_at_0.3_or_less": mean(tight)}
        summary["problems"] = len(gaps)
        print(summary)
    save(args.out, rows, summary=summary)


if __name__ == "__main__":
    main()
