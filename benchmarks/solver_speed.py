"""How long the tables take, and what memory: remat at 500 slots, joint at 50, each in a process of its own; whole
plans; and plans over four forms a stage beside the same without ("forms": both in one process, in turn, the least of
three each).

python benchmarks/solver_speed.py --out benchmarks/results/solver_speed.json
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from solver_chains import heterogeneous, save, with_forms

from rotoff import Chain, simulate, solve
from rotoff.solver import joint, keep_all, remat

STAGES = {"remat": (30, 100, 350), "joint": (50, 100, 350), "solve": (20, 50, 100), "forms": (20, 50, 100)}
SLOTS = {"remat": 500, "joint": 50}
SHARE = 0.45  # limit over the keep-all peak


def measured(what: str, stages: int) -> dict[str, object]:
    """Seconds (by the clock, and of CPU in all threads) and peak bytes of one table, or of a whole `solve`, in this
    process."""
    chain = heterogeneous(11, stages)
    limit = int(SHARE * simulate(chain, keep_all(chain)).peak_bytes)
    if what == "forms":
        costs = plan_costs((chain, with_forms(chain)), limit)
        return {"what": what, "stages": stages, "cpu_seconds_without": costs[0], "cpu_seconds_with": costs[1]}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, cpu = time.perf_counter(), time.process_time()
    if what == "remat":
        remat.solve_slots(chain, limit, SLOTS[what], "up")
    elif what == "joint":
        joint.solve_slots(chain, limit, SLOTS[what], "up")
    else:
        solve(chain, limit)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    slots, grown = SLOTS.get(what), 1024 * (after - before)
    return {"what": what, "stages": stages, "slots": slots, "seconds": seconds, "cpu_seconds": cpu, "bytes": grown}


def plan_costs(chains: tuple[Chain, ...], limit: int) -> list[float]:
    """Of each chain, the processor seconds of a joint plan: the least of three, in turn."""
    costs = [float("inf")] * len(chains)
    for _ in range(3):
        for n, chain in enumerate(chains):
            remat.solve_slots.cache_clear()
            start = time.process_time()
            solve(chain, limit)
            costs[n] = min(costs[n], time.process_time() - start)
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("WHAT", "STAGES"))
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measured(args.one[0], int(args.one[1]))))
        return
    rows = []
    for what, counts in STAGES.items():
        for stages in counts:
            command = [sys.executable, __file__, "--one", what, str(stages)]
            rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
            row = rows[-1]
            if what == "forms":
                share = row["cpu_seconds_with"] / row["cpu_seconds_without"]
                print(f"{what:6} {stages:4} stages {share:8.2f} x the CPU seconds of no forms", flush=True)
                continue
            print(
                f"{what:6} {stages:4} stages {row['seconds']:8.2f} s {row['cpu_seconds']:8.2f} s of CPU"
                f" {row['bytes'] / 2**20:8.0f} MiB",
                flush=True,
            )
    save(args.out, rows)


if __name__ == "__main__":
    main()
