"""What it is worth to know that the directions of the link slow each other down.

Each chain is planned with a link that has 95 % of its bandwidth out and 45 % of that in while both are busy, and with
one that is not slowed down; both plans are judged on the former.

    python benchmarks/bidirectional.py
"""

from __future__ import annotations

from dataclasses import replace

import parameter_chains
import solver_chains

from rotoff import Chain, lower_bound, min_mem_limit, simulate, solve
from rotoff.solver import keep_all

OUT, BACK = 0.95, 0.45
EFFORT = 0.3  # of the search
CHAINS = (
    solver_chains.gpt(24),
    solver_chains.resnet((3, 4, 6, 3)),
    solver_chains.heterogeneous(1, 20),
    solver_chains.heterogeneous(2, 16),
    parameter_chains.gpt_1b(),
    parameter_chains.drawn(0, 8),
    parameter_chains.drawn(2, 8),
    parameter_chains.gpt_7b(),
)


def row(chain: Chain, share: float) -> str:
    """share: of the way from the smallest limit to keeping everything."""
    free = replace(chain, duplex=True)
    rates = {"d2h_bidirectional_bandwidth": OUT * chain.d2h_bandwidth}
    busy = replace(free, **rates, h2d_bidirectional_bandwidth=BACK * chain.h2d_bandwidth)
    least, most = min_mem_limit(free), simulate(free, keep_all(free)).peak_bytes
    limit = int(least + share * (most - least))
    without, aware = solve(free, limit, refine=EFFORT), solve(busy, limit, refine=EFFORT)
    promised, takes = without.meta["makespan"], simulate(busy, without).makespan
    gap = aware.meta["makespan"] / lower_bound(busy, limit)
    return (
        f"{chain.name:16} {share:>5.0%} {takes / promised:>8.4f} {aware.meta['makespan'] / promised:>8.4f} {gap:>8.4f}"
    )


def main() -> None:
    print(f"{'chain':16} {'limit':>5} {'without':>8} {'with':>8} {'/ bound':>8}   step / what is promised without")
    for chain in CHAINS:
        for share in (0.1, 0.35):
            print(row(chain, share), flush=True)


if __name__ == "__main__":
    main()
