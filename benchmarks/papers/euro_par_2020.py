"""The data of figures 5 to 19 of Euro-Par 2020 again: ratio to the bound of proposition 3, and images a second, against
the limit; and figure 5 drawn.

    python benchmarks/papers/euro_par_2020.py            # all of it, about a quarter of an hour on two cores
    python benchmarks/papers/euro_par_2020.py --only resnet50 densenet121 --images 224

Chains are torchvision's networks on a V100 (bytes from the modules, times from the data sheet), one direction of the
link at a time at 12.2 GB/s, as the paper measured. Limits go from the smallest at which offloading is possible to
M_peak, scaled to 0 and 100 %. Written to benchmarks/results/papers/: euro_par_2020.csv and euro_par_2020_figure_5.png.
`rotoff joint` recomputes too, so it is not drawn as a ratio to a bound that holds for offloading only.
"""

from __future__ import annotations

import argparse
import time
import warnings

import fractional
import numpy as np
import tables
from network_chains import vision_chain

from rotoff import Chain, InfeasibleError, min_mem_limit, solve

NETWORKS = [f"resnet{n}" for n in (18, 34, 50, 101, 152)] + [f"densenet{n}" for n in (121, 161, 169, 201)]
# The smallest batches of the paper's range: "powers of 2, starting from the smallest batch size that ensures a
# reasonable throughput". Where bytes and times both grow with the batch, so does everything drawn here, and ratios
# stay.
BATCHES = {224: 32, 500: 8, 1000: 2}
POLICIES = ("greedy", "dynprog", "vdnn", "tflms", "autoswap")
OURS = {"rotoff offload": "offload", "rotoff joint": "joint"}
STYLES = {
    "greedy": ("#E69F00", "o"),
    "dynprog": ("#0072B2", "s"),
    "vdnn": ("#CC79A7", "^"),
    "tflms": ("#999999", "v"),
    "autoswap": ("#009E73", "P"),
    "rotoff offload": ("#D55E00", "D"),
    "fractional": ("#000000", None),
}
DRAWN = ("resnet50", "resnet101", "densenet121", "inception_v3")  # at 224, in figure 5


def rows_of(network: str, image: int, batch: int, chain: Chain, points: int) -> list[dict[str, object]]:
    """One row for each limit and method; seconds are None where the method fits nothing."""
    least, peak = min_mem_limit(chain, "offload"), fractional.peak_bytes(chain)
    rows: list[dict[str, object]] = []
    for limit in sorted({round(x) for x in np.linspace(least, peak, points)}):
        bound = fractional.offload_bound(chain, limit)
        times: dict[str, float | None] = {"fractional": fractional.optimum(chain, limit).makespan}
        for name in (*POLICIES, *OURS):
            try:
                made = solve(chain, limit, OURS[name]) if name in OURS else solve(chain, limit, policy=name)
                times[name] = made.meta["makespan"]
            except InfeasibleError:
                times[name] = None
        for name, seconds in times.items():
            rows.append(
                {
                    "network": network,
                    "image": image,
                    "batch": batch,
                    "limit_bytes": limit,
                    "limit_percent": round(100 * (limit - least) / max(1, peak - least), 2),
                    "method": name,
                    "seconds": seconds,
                    "bound": bound,
                    "ratio": None if seconds is None else seconds / bound,
                    "images_per_second": None if seconds is None else batch / seconds,
                }
            )
    return rows


def draw(rows: list[dict[str, object]]) -> None:
    """A panel for each network, a line for each method."""
    panels = list(dict.fromkeys((row["network"], row["image"], row["batch"]) for row in rows))
    across = min(3, len(panels))
    figure, axes = tables.figure(across, -(-len(panels) // across), (5, 3.6))
    for axis, (network, image, batch) in zip(axes.flat, panels, strict=False):
        mine = [r for r in rows if r["network"] == network and r["ratio"] is not None]
        for method, (colour, marker) in STYLES.items():
            if line := [(r["limit_percent"], r["ratio"]) for r in mine if r["method"] == method]:
                style = "--" if method == "fractional" else "-"
                axis.plot(*zip(*line, strict=True), style, color=colour, marker=marker, markersize=4, label=method)
        axis.set(title=f"{network}, {image} × {image}, batch {batch}", ylabel="step time / bound of proposition 3")
        axis.set_xlabel("limit, % of the way from the least to M_peak")
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    axes.flat[0].legend(frameon=False, fontsize=7)
    tables.save("euro_par_2020_figure_5", figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[*NETWORKS, "inception_v3"], help="networks")
    parser.add_argument("--images", nargs="+", type=int, default=[224, 500, 1000])
    parser.add_argument("--points", type=int, default=11, help="limits of each panel")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    rows: list[dict[str, object]] = []
    for image in arguments.images:
        for network in arguments.only:
            start, batch = time.perf_counter(), BATCHES[image]
            chain = vision_chain(network, image, batch, duplex=False)
            rows += rows_of(network, image, batch, chain, arguments.points)
            print(f"{chain.name}: {len(chain)} stages, {time.perf_counter() - start:.0f} s", flush=True)
    tables.write("euro_par_2020", rows)
    if shown := [row for row in rows if row["image"] == 224 and row["network"] in DRAWN]:
        draw(shown)


if __name__ == "__main__":
    main()
