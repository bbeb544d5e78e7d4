"""What combining recompute and offload gains: the claims of the NeurIPS 2021 paper, from our chains.

The paper reports activations' memory divided by 4 to 6 at less than 20 % overhead, and a third of recompute's overhead
removed by offloading. For each network and limit: recompute alone (rotor, and ours), offload alone (GREEDY, and ours),
POFO as published (N = 50), and ours jointly. Everything is predicted by the machine on a V100 with PCIe 3.

    python benchmarks/papers/pofo_2021.py        # a few minutes; CSV in benchmarks/results/papers/
"""

from __future__ import annotations

import argparse
import statistics

from network_chains import V100, network
from tables import write

from rotoff import Chain, InfeasibleError, keep_all, simulate, solve

RESNETS = ("resnet50", 224, 32), ("resnet101", 224, 32), ("resnet152", 224, 32)
NETWORKS = (*RESNETS, ("resnet101", 500, 8), ("resnet101", 1000, 2), ("vgg19", 224, 32), ("inception_v4", 299, 32))
SHARES = (0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
METHODS = {"rotor": {"policy": "rotor"}, "remat": {"mode": "remat"}, "greedy": {"policy": "greedy"}}
METHODS |= {"offload": {"mode": "offload"}, "pofo": {"policy": "pofo"}, "joint": {"mode": "joint"}}


def overheads(chain: Chain, limit: int) -> dict[str, float | None]:
    """Step time over the time of keeping everything, less 1, by method; None where it does not fit."""
    made: dict[str, float | None] = {}
    for name, options in METHODS.items():
        try:
            made[name] = solve(chain, limit, **options).meta["makespan"] / chain.compute_time - 1
        except InfeasibleError:
            made[name] = None
    return made


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    rows, summary = [], []
    for name, image, batch in NETWORKS:
        chain = network(name, batch, image, V100)
        peak = simulate(chain, keep_all(chain)).peak_bytes
        points = []
        for share in SHARES:
            made = overheads(chain, int(share * peak))
            points.append((share, made))
            rows.append({"network": chain.name, "share": share, "limit_MiB": share * peak / 2**20, **made})
        summary.append(summarise(chain.name, points))
    write("pofo_2021", rows)
    write("pofo_2021_summary", summary)


def summarise(name: str, points: list[tuple[float, dict[str, float | None]]]) -> dict[str, object]:
    """Memory divided by what at less than 20 % overhead; the share of recompute's overhead that the joint plans
    remove."""
    row: dict[str, object] = {"network": name}
    for method in METHODS:
        fits = [share for share, made in points if made[method] is not None and made[method] < 0.2]
        row[f"{method} ÷"] = 1 / min(fits) if fits else None
    for recompute, both in (("rotor", "pofo"), ("remat", "joint")):
        gains = [
            1 - made[both] / made[recompute]
            for _, made in points
            if made[both] is not None and made[recompute] is not None and made[recompute] > 0.005
        ]
        row[f"{recompute} overhead removed by {both}"] = statistics.mean(gains) if gains else None
    return row


if __name__ == "__main__":
    main()
