"""What systems that place parameters by rule make of one limit for everything: step time over that of compute alone.

Every system is under the best plan for the activations in what it leaves, on the machine of `rotoff.simulate`. Run

    python benchmarks/parameter_policies.py --json benchmarks/results/parameter_policies.json
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import parameter_chains as chains

from rotoff import Chain, InfeasibleError, solve
from rotoff.solver.policies import PLACEMENTS

CELLS: list[tuple[Callable[[], Chain], tuple[float, ...]]] = [
    (chains.gpt_7b, (40e9, 24e9, 16e9, 10e9)),
    (chains.gpt_1b, (12e9, 8e9, 5e9)),
    (chains.mixture_of_experts, (24e9,)),
    (chains.half_frozen, (24e9,)),
]


def cell(chain: Chain, limit: int, updates: str, policy: str, effort: float) -> dict[str, Any]:
    """One system at one limit; `over` is None where it does not fit, and `needs` then the bytes that it works with."""
    start = time.perf_counter()
    row: dict[str, Any] = {"chain": chain.name, "limit": limit, "updates": updates, "policy": policy}
    try:
        made = solve(chain, limit, policy=policy, updates=updates, effort=effort or False)
        row |= {"over": made.meta["makespan"] / chain.compute_time, "source": made.meta["source"], "needs": None}
    except InfeasibleError as error:
        row |= {"over": None, "source": "", "needs": error.min_mem_limit}
    return row | {"seconds": time.perf_counter() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the rows go")
    parser.add_argument("--policies", nargs="+", default=list(PLACEMENTS), choices=list(PLACEMENTS))
    parser.add_argument("--effort", type=float, default=1.0, help="seconds of search for the activations' plan")
    options = parser.parse_args()
    rows = []
    print(f"{'chain':<22} {'limit':>7} {'updates':<7}" + "".join(f" {name:>16}" for name in options.policies))
    for build, limits in CELLS:
        chain = build()
        for limit in limits:
            for updates in ("during", "after"):
                found = [cell(chain, round(limit), updates, name, options.effort) for name in options.policies]
                rows += found
                shown = "".join(f" {row['over'] or float('nan'):>16.3f}" for row in found)
                print(f"{chain.name:<22} {limit / 1e9:>4g} GB {updates:<7}{shown}", flush=True)
    if options.json:
        about = {"machine": platform.processor() or platform.machine(), "python": platform.python_version()}
        options.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
