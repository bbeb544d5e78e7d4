"""Tables and plots from the grid's JSON, as a page of Markdown.

    python -m benchmarks.grid.report benchmarks/results/grid_cpu.json [more.json] --out docs/results.md --pictures docs/results

Nothing on the page is written by hand: run this again after the grid.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import methods, workloads

OURS = {
    "joint": "rotoff joint",
    "remat": "rotoff remat",
    "offload": "rotoff offload",
    "joint-compiled": "rotoff joint, compiled",
}
MIB = 2**20


@dataclass(frozen=True)
class Run:
    """One cell: workload, method, where its limit came from ("60%", a peer's name, or ""), and what came out."""

    workload: str
    method: str
    limit: str
    cell: dict[str, Any]
    result: dict[str, Any]

    @property
    def ok(self) -> bool:
        return bool(self.result["status"] == "ok")

    @property
    def title(self) -> str:
        name = OURS.get(self.method, f"`{self.method}`")
        if not self.limit:
            return name
        return f"{name} at {self.limit}" if self.limit.endswith("%") else f"{name} in `{self.limit}`'s bytes"


def read(data: dict[str, Any]) -> list[Run]:
    """The cells of a file, in its order."""
    runs = []
    for name, record in data["cells"].items():
        workload, _, rest = name.partition("/")
        method, _, limit = rest.partition("@")
        runs.append(Run(workload, method, limit, record["cell"], record["result"]))
    return runs


def page(files: list[dict[str, Any]], pictures: dict[tuple[str, str], str]) -> str:
    """The whole page. pictures: (suite, workload) -> path of its plot, as the page names it."""
    parts = [
        "# Measured results",
        "Made by `python -m benchmarks.grid.report` from the JSON under `benchmarks/results/`; every cell ran in a process of"
        " its own, its steps in turn with plain PyTorch's, and what counts is the median of the paired ratios (quartiles in"
        " brackets). Peaks are what one step allocates beyond what was there before it.",
    ]
    for data in files:
        parts += list(_suite(data, pictures))
    return "\n\n".join(parts) + "\n"


def _suite(data: dict[str, Any], pictures: dict[tuple[str, str], str]) -> Iterator[str]:
    about, runs = data["machine"], read(data)
    device = about.get("gpu") or about["cpu"]
    commits = sorted({str(record["commit"]) for record in data["cells"].values()})
    threads = f", {data['threads']} compute threads of {about['cores']} cores" if data.get("threads") else ""
    yield f"## {data['suite']}: {device}"
    yield (
        f"{device}{threads}; Python {about['python']}, torch {about['torch']}, rotoff {about['rotoff']}"
        f" ({', '.join(commits)}). Command: `python -m benchmarks.grid.run --suite {data['suite']} --out FILE`."
    )
    yield "### In short"
    yield "\n".join(f"- {sentence}" for sentence in verdicts(runs))
    for workload in dict.fromkeys(run.workload for run in runs):
        here = [run for run in runs if run.workload == workload]
        yield f"### {workload}"
        yield workloads.find(data["suite"], workload).about + "."
        if (path := pictures.get((data["suite"], workload))) is not None:
            yield f"![step time against bytes, {workload}]({path})"
        yield _table(here)


def _table(runs: list[Run]) -> str:
    plain = next((run.result["peak_allocated"] for run in runs if run.method == "plain" and run.ok), None)
    lines = [
        "| method | step / plain | predicted | bound | peak (MiB) | of plain | predicted (MiB) | host (MiB) | gradients |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        r = run.result
        if not run.ok:
            if r["status"] != "not here":
                lines.append(f"| {run.title} | {r['status']} | | | | | | | {_short(r['note'])} |")
            continue
        ratio = "1" if run.method == "plain" else _ratio(r)
        share = f"{r['peak_allocated'] / plain:.0%}" if plain else ""
        lines.append(
            f"| {run.title} | {ratio} | {_number(r['predicted_ratio'], 3)} | {_number(r['bound_ratio'], 3)} |"
            f" {_mib(r['peak_allocated'])} | {share} | {_mib(r['predicted_peak'])} | {_mib(r['host_bytes'])} |"
            f" {_gradients(r)} |"
        )
    return "\n".join(lines)


def _ratio(r: dict[str, Any]) -> str:
    if r["ratio"] is None:
        return f"{r['step_time']:.4g} s"
    return f"{r['ratio']:.3f} ({r['low']:.3f} to {r['high']:.3f})"


def _gradients(r: dict[str, Any]) -> str:
    if r["equal_gradients"] is None:
        return ""
    return "equal" if r["equal_gradients"] else f"within {r['gradient_difference']:.1e}"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _mib(value: int | None) -> str:
    return "" if value is None else f"{value / MIB:.1f}"


def _short(note: str) -> str:
    return note if len(note) <= 120 else note[:117] + "..."


# -- what the figures say of the aims


def verdicts(runs: list[Run]) -> list[str]:
    """One sentence for each claim that the grid can judge, met or missed, worst case first."""
    sentences = [_fastest(runs), _same_bytes(runs), _plenty(runs), _times(runs), _peaks(runs), _gradients_equal(runs)]
    return [sentence for sentence in sentences if sentence]


def _fastest(runs: list[Run]) -> str:
    """Is joint the fastest of all methods that keep a limit, at every limit? Eager methods against eager ones."""
    duels = []
    for run in _ok(runs, lambda run: run.method == "joint" and run.limit.endswith("%")):
        rivals = _ok(runs, lambda r, run=run: r.workload == run.workload and r.method not in ("joint", "plain"))  # type: ignore[misc]
        keeping = [r for r in rivals if r.result["peak_allocated"] <= run.cell["limit"] and not _is_compiled(r)]
        if keeping:
            duels.append((run, min(keeping, key=lambda r: r.result["ratio"])))
    return _said("Joint against the fastest other method that keeps the same limit", duels)


def _same_bytes(runs: list[Run]) -> str:
    duels = []
    for run in _ok(runs, lambda run: run.method.startswith("joint") and bool(run.limit) and not run.limit.endswith("%")):
        duels.append((run, next(r for r in runs if r.workload == run.workload and r.method == run.limit and not r.limit)))
    return _said("Joint in a peer's own bytes against that peer", duels)


def _is_compiled(run: Run) -> bool:
    return run.method.startswith("budget") or run.method.endswith("compiled")


def _said(what: str, duels: list[tuple[Run, Run]]) -> str:
    """Faster, level (the quartiles of the two overlap) or behind, and where it is behind."""
    if not duels:
        return ""
    behind = [(run, other) for run, other in duels if other.result["high"] < run.result["low"]]
    faster = sum(run.result["high"] < other.result["low"] for run, other in duels)
    text = f"{what}: faster in {faster} of {len(duels)} cells, level in {len(duels) - faster - len(behind)}, behind in {len(behind)}."
    for run, other in behind:
        text += f" Behind: {run.workload}, {run.title}, {run.result['ratio']:.3f} to {other.title}'s {other.result['ratio']:.3f}."
    return text


def _plenty(runs: list[Run]) -> str:
    over = [r for r in _ours(runs) if r.result["predicted_ratio"] is not None and r.result["predicted_ratio"] <= 1.0005]
    if not over:
        return ""
    worst = max(over, key=lambda r: r.result["ratio"])
    middle = statistics.median(r.result["ratio"] for r in over)
    return (
        f"Where the plan predicts no overhead at all ({len(over)} cells), the step takes {middle:.3f} of plain's at the median,"
        f" {worst.result['ratio']:.3f} at worst ({worst.workload}, {worst.title})."
    )


def _times(runs: list[Run]) -> str:
    gaps = [(r.result["ratio"] / r.result["predicted_ratio"] - 1, r) for r in _ours(runs) if r.result["predicted_ratio"]]
    if not gaps:
        return ""
    within = sum(abs(gap) <= 0.05 for gap, _ in gaps)
    worst = max(gaps, key=lambda entry: abs(entry[0]))
    return (
        f"Measured step time over predicted: within 5 % in {within} of {len(gaps)} cells, median"
        f" {statistics.median(gap for gap, _ in gaps):+.1%}, furthest {worst[0]:+.1%} ({worst[1].workload}, {worst[1].title})."
    )


def _peaks(runs: list[Run]) -> str:
    ours = _ok(runs, lambda r: r.result["predicted_peak"] is not None)
    if not ours:
        return ""
    kept = sum(r.result["peak_allocated"] <= r.cell["limit"] for r in ours)
    under = sum(r.result["peak_allocated"] <= r.result["predicted_peak"] for r in ours)
    shares = [r.result["predicted_peak"] / r.result["peak_allocated"] for r in ours]
    return (
        f"The limit was kept in {kept} of {len(ours)} cells; the measured peak was at or below the predicted one in {under};"
        f" predicted over measured: median {statistics.median(shares):.3f}, at most {max(shares):.3f}."
    )


def _gradients_equal(runs: list[Run]) -> str:
    ours = [r for r in _ours(runs) if r.result["equal_gradients"] is not None and not r.method.endswith("compiled")]
    if not ours:
        return ""
    return f"Gradients are plain's bit for bit in {sum(r.result['equal_gradients'] for r in ours)} of {len(ours)} cells of rotoff."


def _ours(runs: list[Run]) -> list[Run]:
    return _ok(runs, lambda run: run.method in OURS)


def _ok(runs: list[Run], wanted: Callable[[Run], bool]) -> list[Run]:
    return [run for run in runs if run.ok and (run.result["ratio"] is not None or run.method == "plain") and wanted(run)]


# -- pictures

STYLES = {  # Okabe and Ito's colours; markers and dashes tell the same apart in print
    "joint": ("#0072B2", "o", "-"),
    "remat": ("#D55E00", "s", "--"),
    "offload": ("#009E73", "^", ":"),
}
PEER_MARKERS = dict(zip([*methods.PEERS, *methods.BUDGETS], ["P", "X", "D", "v", "<", "1", "2", "3"], strict=True))


def draw(runs: list[Run], title: str, path: Path) -> None:
    """Step time over plain's against bytes over plain's: rotoff's modes as lines, peers as points."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    plain = next((run.result["peak_allocated"] for run in runs if run.method == "plain" and run.ok), None)
    if plain is None:
        return
    figure, axes = pyplot.subplots(figsize=(6.4, 3.8), layout="constrained")
    for mode, (colour, marker, dashes) in STYLES.items():
        points = _ok(runs, lambda r, mode=mode: r.method == mode)
        points.sort(key=lambda r: r.result["peak_allocated"])
        if points:
            x = [r.result["peak_allocated"] / plain for r in points]
            y = [r.result["ratio"] for r in points]
            errors = [
                [max(0.0, r.result["ratio"] - r.result["low"]) for r in points],
                [max(0.0, r.result["high"] - r.result["ratio"]) for r in points],
            ]
            axes.errorbar(x, y, errors, color=colour, marker=marker, linestyle=dashes, capsize=2, label=OURS[mode])
    bound = sorted((r.cell["limit"] / plain, r.result["bound_ratio"]) for r in _ok(runs, lambda r: r.method == "joint"))
    if bound:
        axes.plot(*zip(*bound, strict=True), color="#666666", linewidth=1, label="certified bound of the chain")
    for run in _ok(runs, lambda r: r.method in PEER_MARKERS and not r.limit):
        place = (run.result["peak_allocated"] / plain, run.result["ratio"])
        axes.plot(*place, color="black", marker=PEER_MARKERS[run.method], linestyle="", label=run.method)
    axes.plot(1, 1, color="black", marker="*", markersize=10, linestyle="", label="plain PyTorch")
    axes.set(xlabel="peak bytes of a step, over plain's", ylabel="step time, over plain's", title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="the page")
    parser.add_argument("--pictures", type=Path, help="folder for the plots; without it there are none")
    options = parser.parse_args(arguments)
    files = [json.loads(path.read_text(encoding="utf-8")) for path in options.files]
    pictures: dict[tuple[str, str], str] = {}
    for data in files if options.pictures else []:
        runs = read(data)
        for workload in dict.fromkeys(run.workload for run in runs):
            path = options.pictures / f"{data['suite']}_{workload}.png"
            draw([r for r in runs if r.workload == workload], workloads.find(data["suite"], workload).about, path)
            if path.exists():
                pictures[data["suite"], workload] = path.relative_to(options.out.parent).as_posix()
    options.out.write_text(page(files, pictures), encoding="utf-8")


if __name__ == "__main__":
    main()
