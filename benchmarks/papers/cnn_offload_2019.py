"""CPU offloading of CNNs (Hascoet et al., JSEA 2019): its figure 4 and its tables 2 and 3, from our chains.

A Titan X behind 6.5 / 6.1 GB/s (1.75 / 4.1 GB/s from pageable memory), a batch of 32 images of 128 by 128, everything
predicted by the machine.

    python benchmarks/papers/cnn_offload_2019.py        # a minute or two; CSV and PNG in benchmarks/results/papers/
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
from network_chains import TITAN_X, TITAN_X_WINOGRAD, network
from tables import figure, save, write

from rotoff import Chain, InfeasibleError, keep_all, min_mem_limit, simulate, solve
from rotoff.solver.policies.overlap import operations, subsets

BATCH, IMAGE = 32, 128
PAPER_TABLE_2 = {"baseline": 560, "pinned memory": 355, "parallelization": 236}
PAPER_TABLE_3 = {"vgg16": (19.5, 32.5), "vgg19": (21.0, 36.9), "resnet18": (17.6, 54.4), "resnet50": (15.3, 56.8)}
PAPER_TABLE_3["mobilenet"] = (63.2, 67.8)


def resident_bytes(chain: Chain) -> int:
    """Parameters and their gradients, which the paper's memory includes."""
    return 2 * chain.meta["parameter_bytes"]


def reduction(chain: Chain, peak: int, plain: int) -> tuple[float, float]:
    """Per cent of the activations' peak, and of the peak with parameters and gradients, that `peak` saves."""
    rest = resident_bytes(chain)
    return 100 * (1 - peak / plain), 100 * (1 - (peak + rest) / (plain + rest))


def table_2() -> list[dict[str, object]]:
    """All of VGG19's layers moved: from pageable memory in turn, from pinned memory in turn, and beside compute."""
    chain = network("vgg19", BATCH, IMAGE, TITAN_X_WINOGRAD)
    pageable = replace(chain, d2h_bandwidth=1.75e9, h2d_bandwidth=4.1e9)
    layers = list(range(1, len(chain)))
    cases = {
        "baseline": simulate(pageable, operations(len(chain), layers, parallel=False)),
        "pinned memory": simulate(chain, operations(len(chain), layers, parallel=False)),
        "parallelization": simulate(chain, operations(len(chain), layers)),
    }
    cases["solve(mode='offload')"] = simulate(chain, solve(chain, cases["parallelization"].peak_bytes, mode="offload"))
    rows, before = [], None
    for name, trace in cases.items():
        ms = 1e3 * trace.makespan
        gain = None if before is None else 100 * (ms / before - 1)
        row = {"case": name, "ms": ms, "change_%": gain, "paper_ms": PAPER_TABLE_2.get(name)}
        rows.append({**row, "peak_MiB": trace.peak_bytes / 2**20})
        before = ms
    return [
        {"case": "nothing moved", "ms": 1e3 * chain.compute_time, "change_%": None, "paper_ms": None, "peak_MiB": None},
        *rows,
    ]


def table_3() -> list[dict[str, object]]:
    """The paper's five networks: its system at the paper's reduction, or the most that it reaches; ours for the same
    bytes."""
    rows = []
    for name, (paper_time, paper_memory) in PAPER_TABLE_3.items():
        device = TITAN_X_WINOGRAD if name.startswith("vgg") else TITAN_X
        plain = network(name, BATCH, IMAGE, device)
        chain = network(name, BATCH, IMAGE, device, invertible=not name.startswith("vgg"))
        peak = simulate(plain, keep_all(plain)).peak_bytes
        traces = [simulate(chain, operations(len(chain), layers)) for layers in subsets(chain)]
        wanted = (1 - paper_memory / 100) * peak
        enough = max(wanted, min(trace.peak_bytes for trace in traces))
        trace = min((trace for trace in traces if trace.peak_bytes <= enough), key=lambda t: t.makespan)
        limit = max(trace.peak_bytes, min_mem_limit(chain, "joint"))
        ours = solve(chain, limit).meta["makespan"]
        alone, all_of_it = reduction(plain, trace.peak_bytes, peak)
        rows.append(
            {
                "network": name,
                "activations_%": alone,
                "memory_%": all_of_it,
                "paper_memory_%": paper_memory,
                "overhead_%": 100 * (trace.makespan / plain.compute_time - 1),
                "paper_overhead_%": paper_time,
                "joint_overhead_%": 100 * (ours / plain.compute_time - 1),
            }
        )
    return rows


def figure_4() -> list[dict[str, object]]:
    """VGG19: relative memory reduction against relative increase of the time, by system."""
    chain = network("vgg19", BATCH, IMAGE, TITAN_X_WINOGRAD)
    plain = simulate(chain, keep_all(chain)).peak_bytes
    rows = []
    methods = {"overlap": {"policy": "overlap"}, "checkpointing": {"policy": "periodic"}}
    methods |= {mode: {"mode": mode} for mode in ("remat", "offload", "joint")}
    for share in np.linspace(min_mem_limit(chain, "joint") / plain, 1, 16):
        for method, options in methods.items():
            try:
                made = solve(chain, int(np.ceil(share * plain)), **options)
            except InfeasibleError:
                continue
            alone, all_of_it = reduction(chain, made.meta["peak_bytes"], plain)
            increase = 100 * (made.meta["makespan"] / chain.compute_time - 1)
            row = {"method": method, "activations_%": alone, "memory_%": all_of_it, "increase_%": increase}
            rows += [row] if row not in rows else []
    return sorted(rows, key=lambda row: row["method"])


def draw(rows: list[dict[str, object]]) -> None:
    fig, ((axes,),) = figure()
    for method in dict.fromkeys(row["method"] for row in rows):
        points = sorted((row["activations_%"], row["increase_%"]) for row in rows if row["method"] == method)
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=method)
    axes.plot([36.9], [21.0], "k*", label="the paper, offloading")
    axes.set(xlabel="activations' peak saved, %", ylabel="step time added, %", title="VGG19", ylim=(-2, 60))
    axes.legend()
    save("cnn_offload_2019_figure_4", fig)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    write("cnn_offload_2019_table_2", table_2())
    write("cnn_offload_2019_table_3", table_3())
    rows = figure_4()
    write("cnn_offload_2019_figure_4", rows)
    draw(rows)


if __name__ == "__main__":
    main()
