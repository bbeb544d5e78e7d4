"""Every system of the papers in one table: policies × networks × limits; a dash where a system fits nothing.

    python benchmarks/papers/table.py
    python benchmarks/papers/table.py --networks resnet50 --shares 0.5 0.3

A cell is the step time over that of keeping everything; the rows `mode ...` are rotoff's own, `bound` is
`rotoff.lower_bound` for any mode, and `fractional` the optimum of offloading with copies cut anywhere (one direction at
a time). Limits are shares of what keeping everything needs. Writes benchmarks/results/papers/table.csv.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable

import fractional
import tables
from network_chains import vision_chain

from rotoff import Chain, InfeasibleError, lower_bound, simulate, solve
from rotoff.solver import keep_all
from rotoff.solver.policies import POLICIES

NETWORKS = ("resnet50", "resnet101", "densenet121", "inception_v3")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS))
    parser.add_argument("--shares", nargs="+", type=float, default=[0.8, 0.6, 0.4, 0.3])
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    cases = []
    for name in arguments.networks:
        chain = vision_chain(name, 224, 32)
        peak = simulate(chain, keep_all(chain)).peak_bytes
        cases += [(f"{name} {share:.0%}", chain, int(share * peak)) for share in arguments.shares]
    rows: list[dict[str, object]] = []
    ways: dict[str, Callable[[Chain, int], float]] = {
        name: lambda chain, limit, name=name: solve(chain, limit, policy=name).meta["makespan"] for name in POLICIES
    }
    for mode in ("offload", "remat", "joint"):
        ways[f"mode {mode}"] = lambda chain, limit, mode=mode: solve(chain, limit, mode).meta["makespan"]
    ways |= {"fractional": lambda *asked: fractional.optimum(*asked).makespan, "bound": lower_bound}
    for name, seconds in ways.items():
        row: dict[str, object] = {"system": name}
        for label, chain, limit in cases:
            try:
                row[label] = seconds(chain, limit) / chain.compute_time
            except InfeasibleError:
                row[label] = None
        rows.append(row)
        print(name, flush=True)
    tables.write("table", rows)


if __name__ == "__main__":
    main()
