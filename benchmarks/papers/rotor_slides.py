"""The slides *Memory Saving Strategies for Deep Neural Network Training* (2021): their comparisons, from our chains.

"Comparison of our implementation with other approaches": throughput against memory of rotor, Revolve,
checkpoint_sequential and √L, and where persistence costs something (small chains). Predicted by the machine on a V100
with PCIe 3.

    python benchmarks/papers/rotor_slides.py        # a minute or two; CSV in benchmarks/results/papers/
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from network_chains import V100, network
from tables import write

from rotoff import Chain, InfeasibleError, Stage, keep_all, simulate, solve

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from oracles.exhaustive import Search

NETWORKS = (("resnet101", 1000, 2), ("resnet101", 224, 32), ("resnet50", 500, 8), ("inception_v4", 299, 32))
METHODS = {
    **{name: {"policy": name} for name in ("rotor", "revolve", "periodic", "chen")},
    "remat": {"mode": "remat"},
    "joint": {"mode": "joint"},
}
SHARES = [n / 20 for n in range(4, 21)]


def comparison() -> list[dict[str, object]]:
    """Images per second by method, at shares of the peak of keeping everything; empty where a method does not fit."""
    rows = []
    for name, image, batch in NETWORKS:
        chain = network(name, batch, image, V100)
        peak = simulate(chain, keep_all(chain)).peak_bytes
        for share in SHARES:
            row: dict[str, object] = {"network": chain.name, "limit_MiB": share * peak / 2**20, "share": share}
            for method, options in METHODS.items():
                try:
                    made = solve(chain, int(share * peak), **options)
                    row[method] = batch / made.meta["makespan"]
                except InfeasibleError:
                    row[method] = None
            rows.append(row)
    return rows


def persistence(count: int, seed: int = 0) -> list[dict[str, object]]:
    """On random chains of six stages: how often, and by how much, a non-persistent sequence beats the persistent
    optimum."""
    rng, gains, searched = random.Random(seed), [], 0
    for _ in range(count):
        sizes = [rng.randint(1, 16) for _ in range(6)]
        stages = [
            Stage("", float(rng.randint(1, 8)), 2.0, size, size + rng.randint(0, 16), grad_bytes=0) for size in sizes
        ]
        chain = Chain(tuple(stages), 1.0, 1.0)
        peak = simulate(chain, keep_all(chain)).peak_bytes
        limit = rng.randint(peak // 3, peak - 1)
        try:
            persistent = solve(chain, limit, policy="rotor", slots=limit).meta["makespan"]  # a slot is a byte: exact
        except InfeasibleError:
            continue
        searched += 1
        ours = solve(chain, limit, mode="remat").meta["makespan"]
        best = Search(chain, limit, moves=False).optimum(ours)
        assert best is not None, "six stages have few states"
        gains.append((persistent / best - 1, ours / best - 1))
    worse = [gain for gain, _ in gains if gain > 1e-9]
    return [
        {
            "chains": searched,
            "persistence_costs_on": len(worse),
            "by_mean_%": 100 * sum(worse) / max(1, len(worse)),
            "by_most_%": 100 * max(worse, default=0.0),
            "remat_above_the_optimum_on": sum(1 for _, gain in gains if gain > 1e-9),
        }
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chains", type=int, default=200, help="random chains for the cost of persistence")
    arguments = parser.parse_args()
    write("rotor_slides_persistence", persistence(arguments.chains))
    write("rotor_slides", comparison())


if __name__ == "__main__":
    main()
