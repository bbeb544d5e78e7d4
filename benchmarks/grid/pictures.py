"""Step time over plain's against bytes over plain's, of one workload."""

from __future__ import annotations

from pathlib import Path

from . import methods
from .aims import OURS, Run, timed

STYLES = {  # Okabe and Ito's colours; markers and dashes tell the same apart in print
    "joint": ("#0072B2", "o", "-"),
    "remat": ("#D55E00", "s", "--"),
    "offload": ("#009E73", "^", ":"),
}
PEER_MARKERS = dict(zip([*methods.PEERS, *methods.BUDGETS], ["P", "X", "D", "v", "<", "1", "2"], strict=True))


def draw(runs: list[Run], title: str, path: Path) -> None:
    """rotoff's modes as lines, peers as points, the certified bound in grey; nothing where plain PyTorch has not
    run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    plain = next((run.result["peak_allocated"] for run in runs if run.method == "plain" and run.ok), None)
    if plain is None:
        return
    figure, axes = pyplot.subplots(figsize=(8.0, 3.8), layout="constrained")
    for mode, (colour, marker, dashes) in STYLES.items():
        points = timed(runs, lambda r, mode=mode: r.method == mode)  # type: ignore[misc]
        points.sort(key=lambda r: r.result["peak_allocated"])
        if points:
            x = [r.result["peak_allocated"] / plain for r in points]
            y = [r.result["ratio"] for r in points]
            errors = [
                [max(0.0, r.result["ratio"] - r.result["low"]) for r in points],
                [max(0.0, r.result["high"] - r.result["ratio"]) for r in points],
            ]
            axes.errorbar(
                x, y, errors, color=colour, marker=marker, linestyle=dashes, markersize=4, capsize=2, label=OURS[mode]
            )
    limited = timed(runs, lambda r: r.method == "joint" and r.cell["limit"] <= plain)
    bound = sorted((r.cell["limit"] / plain, r.result["bound_ratio"]) for r in limited)
    if bound:
        axes.plot(*zip(*bound, strict=True), color="#666666", linewidth=1, label="certified bound of the chain")
    for run in timed(runs, lambda r: r.method in PEER_MARKERS and not r.limit):
        place = (run.result["peak_allocated"] / plain, run.result["ratio"])
        label = run.method.replace("budget:", "compiled, budget ")
        axes.plot(*place, color="black", marker=PEER_MARKERS[run.method], linestyle="", label=label)
    axes.plot(1, 1, color="black", marker="*", markersize=10, linestyle="", label="plain PyTorch")
    axes.set(xlabel="peak bytes of a step, over plain's", ylabel="step time, over plain's", title=title)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)  # within the axes it would lie over points
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
