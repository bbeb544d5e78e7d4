"""A naive annealing in plain Python, as the yardstick that `solve` must not be behind.

    python benchmarks/naive_annealing.py --out benchmarks/results/naive_annealing.json

Each stage but the last is kept, moved, kept as a checkpoint, moved as a checkpoint, or dropped; dropped stages are made
again, all of a segment at once, from the nearest checkpoint. Moves leave at once and come back one stage ahead. The
machine judges every proposal; bytes over the limit are punished.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import time
from pathlib import Path

from solver_chains import gpt, heterogeneous, resnet

from rotoff import Chain, InfeasibleError, Machine, lower_bound, simulate, solve
from rotoff.core import sequence as q
from rotoff.solver import keep_all

KEEP, MOVE, CHECKPOINT, MOVE_CHECKPOINT, DROP = range(5)
SHARES = (0.8, 0.45, 0.3, 0.2)


class Step:
    """The operations that choices, one for each stage but the last, stand for, run on the machine as they are found."""

    def __init__(self, chain: Chain, choices: list[int]) -> None:
        self.machine = machine = Machine(chain)
        L = len(chain)
        how = [CHECKPOINT, *choices, KEEP]  # a_0 is there anyway
        for i in range(1, L + 1):
            dropped = i > 1 and how[i - 1] == DROP
            if how[i] in (KEEP, MOVE):
                machine.step(q.F_all(i))
                if dropped:
                    machine.step(q.drop(q.a(i - 1)))
            else:
                machine.step(q.F_none(i) if dropped else q.F_ck(i))
            if i > 1 and how[i - 1] in (MOVE, MOVE_CHECKPOINT):
                v = q.abar(i - 1) if how[i - 1] == MOVE else q.a(i - 1)
                machine.step(q.offload(v))
                machine.step(q.free(v))
        for i in range(L, 0, -1):
            self.bring_saved(i)
            self.bring_input(i)
            for v in (q.abar(i - 1), q.a(i - 2)):  # one stage ahead
                if v in machine.host and v not in machine.device:
                    machine.step(q.prefetch(v))
            machine.step(q.B(i))
        self.trace = machine.finish()

    def bring_saved(self, i: int) -> None:
        if not self.arrived(q.abar(i)):
            self.bring_input(i)
            self.machine.step(q.F_all(i))

    def bring_input(self, i: int) -> None:
        if self.machine.input_of(i) is None and not self.arrived(q.a(i - 1)) and not self.arrived(q.abar(i - 1)):
            self.bring_input(i - 1)
            self.machine.step(q.F_all(i - 1))

    def arrived(self, v: q.Value) -> bool:
        """Have v on the device if it is anywhere."""
        machine = self.machine
        if v in machine.host and v not in machine.device:
            machine.step(q.prefetch(v))
        if v in machine.arriving:
            machine.step(q.wait(v))
        return machine.usable(v)


def judge(chain: Chain, choices: list[int]) -> tuple[float, int]:
    """Step time and peak of a proposal on the machine."""
    trace = Step(chain, choices).trace
    return trace.makespan, trace.peak_bytes


def anneal(chain: Chain, limit: int, steps: int, seed: int = 0) -> float:
    """The best step time found, infinite where nothing fits."""
    rng = random.Random(seed)
    now = [rng.choice((KEEP, MOVE, DROP)) for _ in range(len(chain) - 1)]

    def cost(choices: list[int]) -> tuple[float, bool]:
        seconds, peak = judge(chain, choices)
        over = max(0.0, peak / limit - 1)
        return seconds + 3 * over * chain.compute_time, over == 0

    value, fits = cost(now)
    best = value if fits else math.inf
    for step in range(steps):
        trial = list(now)
        for _ in range(rng.choice((1, 1, 2, 3))):
            trial[rng.randrange(len(trial))] = rng.randrange(5)
        new, fits = cost(trial)
        heat = 0.02 * chain.compute_time * (1 - step / steps) ** 2 + 1e-12
        if new <= value or rng.random() < math.exp((value - new) / heat):
            now, value = trial, new
        if fits:
            best = min(best, new)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=6000)
    arguments = parser.parse_args()
    rows = []
    for chain in (gpt(24), resnet((3, 4, 23, 3)), resnet((3, 8, 36, 3)), heterogeneous(2, 30), heterogeneous(4, 50)):
        peak, unit = simulate(chain, keep_all(chain)).peak_bytes, chain.compute_time / 100
        for share in SHARES:
            limit = int(share * peak)
            try:
                begin = time.perf_counter()
                ours = simulate(chain, solve(chain, limit), limit).makespan
                middle = time.perf_counter()
            except InfeasibleError:
                continue
            naive = anneal(chain, limit, arguments.steps)
            seconds = [round(middle - begin, 1), round(time.perf_counter() - middle, 1)]
            bound = lower_bound(chain, limit)
            row = {"chain": chain.name, "stages": len(chain), "share": share, "seconds_solve_naive": seconds}
            gaps = {"solve": (ours - bound) / unit, "naive": (naive - bound) / unit if naive < math.inf else None}
            rows.append({**row, "gap": gaps})
            print(rows[-1], flush=True)
    machine = {"processor": platform.processor() or platform.machine(), "python": platform.python_version()}
    if arguments.out:
        arguments.out.write_text(
            json.dumps({"machine": machine, "steps": arguments.steps, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
