"""Every system of the papers in one table: policies × networks × limits; a dash where a system fits nothing.

    python benchmarks/papers/table.py
    python benchmarks/papers/table.py --networks resnet50 --shares 0.5 0.3 --device K40

A cell is the step time over that of keeping everything; the rows `mode ...` are rotoff's own, `bound` is
`rotoff.lower_bound` for any mode, and `fractional` the optimum of offloading with copies cut anywhere (one direction at
a time). Limits are shares of what keeping everything needs. Writes benchmarks/results/papers/table.csv.
"""

from __future__ import annotations

import argparse
import warnings

import fractional
import tables
from network_chains import vision_chain

from rotoff import InfeasibleError, lower_bound, simulate, solve
from rotoff.solver import keep_all
from rotoff.solver.policies import POLICIES

NETWORKS = ("resnet50", "resnet101", "densenet121", "inception_v3")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS))
    parser.add_argument("--shares", nargs="+", type=float, default=[0.8, 0.6, 0.4, 0.3])
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--device", default="V100")
    parser.add_argument(
        "--half-duplex", action="store_true", help="one direction of the link at a time, as in Euro-Par 2020"
    )
    parser.add_argument(
        "--skip", nargs="+", default=["nonpersistent"], help="policies to leave out (that one is for short chains)"
    )
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    cases = []
    for name in arguments.networks:
        chain = vision_chain(name, arguments.image, arguments.batch, arguments.device, duplex=not arguments.half_duplex)
        peak = simulate(chain, keep_all(chain)).peak_bytes
        cases += [(f"{name} {share:.0%}", chain, int(share * peak)) for share in arguments.shares]
    rows: list[dict[str, object]] = []
    methods = [name for name in POLICIES if name not in arguments.skip]
    methods += ["offload", "remat", "joint", "fractional", "bound"]
    for method in methods:
        known = method in POLICIES
        row: dict[str, object] = {"system": f"mode {method}" if method in ("offload", "remat", "joint") else method}
        for label, chain, limit in cases:
            try:
                if known:
                    seconds = solve(chain, limit, policy=method).meta["makespan"]
                elif method == "fractional":
                    seconds = fractional.optimum(chain, limit).makespan
                elif method == "bound":
                    seconds = lower_bound(chain, limit)
                else:
                    seconds = solve(chain, limit, method).meta["makespan"]
                row[label] = seconds / chain.compute_time
            except InfeasibleError:
                row[label] = None
        rows.append(row)
        print(method, flush=True)
    tables.write("table", rows)


if __name__ == "__main__":
    main()
