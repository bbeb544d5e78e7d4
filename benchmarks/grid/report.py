"""The page of results from JSON: of the grid and of `benchmarks/four_times.py`.

    python -m benchmarks.grid.report benchmarks/results/grid_cpu.json [more.json] --out docs/results.md --pictures
    docs/results

Nothing on the page is written by hand: run this again after a measurement. A file of cells that are not complete will
do.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import workloads
from .aims import EVERYTHING, ITSELF, MIB, Aim, Run, judge, read, timed
from .pictures import draw

COMMANDS = {
    "cpu": "scripts/cpu_results.sh grid",
    "cuda": "python -m benchmarks.grid.run --suite cuda",
}


def page(files: list[dict[str, Any]], pictures: dict[tuple[str, str], str]) -> str:
    """The whole page. pictures: (suite, workload) -> path of its plot, as the page names it."""
    parts = [
        "# Measured results",
        "`python -m benchmarks.grid.report` makes this page from the JSON files in `benchmarks/results/`. Do not edit"
        " it by hand.",
    ]
    for data in files:
        match data["format"]:
            case "rotoff.grid":
                parts += _grid(data, pictures)
            case "rotoff.four_times":
                parts += _four_times(data)
    return "\n\n".join(map(_folded, parts)) + "\n"


def _folded(part: str) -> str:
    """A paragraph in lines of at most 120 characters; tables, headings and pictures as they are."""
    if part.startswith(("|", "#", "!")):
        return part
    return textwrap.fill(part, 120, break_long_words=False, break_on_hyphens=False)


def _grid(data: dict[str, Any], pictures: dict[tuple[str, str], str]) -> Iterator[str]:
    about, runs = data["machine"], read(data)
    yield f"## Against every peer, {data['suite']}: {about.get('gpu') or about['cpu']}"
    yield _hardware(data, sorted({str(record["commit"]) for record in data["cells"].values()}))
    yield (
        "Every cell ran in a process of its own, and its steps alternated with plain PyTorch's. Ratios are medians of"
        " paired steps, with quartiles in brackets. A peak is what one step allocates, the loss included. No plan"
        " within the limit can beat `bound` on the measured chain; a bound of 1.000 means that nothing is known that"
        " must cost time (docs/method.md). Command:"
        f" `{COMMANDS[data['suite']]}`, or `python -m benchmarks.grid.run --suite"
        f" {data['suite']} --out FILE`." + _twice(data)
    )
    yield _aims(judge(runs, "cuda" if data["suite"] == "cuda" else "cpu"))
    for workload in dict.fromkeys(run.workload for run in runs):
        here = [run for run in runs if run.workload == workload]
        yield f"### {data['suite']}: {workload}"
        yield workloads.find(data["suite"], workload).about + "."
        if (path := pictures.get((data["suite"], workload))) is not None:
            yield f"![step time against bytes, {workload}]({path})"
        yield _table(here)
        yield _noise(here, data["suite"])


def _hardware(data: dict[str, Any], commits: list[str]) -> str:
    about = data["machine"]
    device = ", ".join(about[key] for key in ("gpu", "cpu") if about.get(key))
    threads = f", {data['threads']} compute threads of {about['cores']} cores" if data.get("threads") else ""
    cuda = f" (CUDA {about['cuda']})" if about.get("cuda") else ""
    versions = (
        f"Python {about['python']}, torch {about['torch']}{cuda}, rotoff {about['rotoff']} ({', '.join(commits)})"
    )
    return f"{device}{threads}; {versions}."


def _aims(aims: list[Aim]) -> str:
    rows = [f"| {aim.aim} | {'met' if aim.met else '**missed**'} | {aim.figures} |" for aim in aims]
    return "\n".join(["| aim | | figures |", "|---|---|---|", *rows])


def _noise(runs: list[Run], suite: str) -> str:
    """What the table above does not tell."""
    noise = "".join(
        f"Plain PyTorch against itself reads {r.ratio - 1:+.1%} here ({r.result['low'] - 1:+.1%} to"
        f" {r.result['high'] - 1:+.1%}): differences of that size are noise. "
        for r in timed(runs, lambda r: r.method == ITSELF)
    )
    file = "The file of offloaded values is the system's page cache, as fast as memory then; a disk is slower."
    return noise + ("" if suite == "cuda" else file)


def _table(runs: list[Run]) -> str:
    plain = next((run.result["peak_allocated"] for run in runs if run.method == "plain" and run.ok), None)
    lines = [
        "| method | step / plain | predicted | bound | peak (MiB) | of plain | predicted (MiB) | reserved | host (MiB)"
        " | gradients |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for run in sorted(runs, key=_place):
        r = run.result
        if not run.ok:
            if r["status"] != "not here":
                lines.append(f"| {run.title} | {r['status']} | | | | | | | | {_short(r['note'])} |")
            continue
        ratio = f"1 ({r['step_time']:.3g} s)" if run.method == "plain" else _ratio(r)
        share = f"{r['peak_allocated'] / plain:.0%}" if plain else ""
        lines.append(
            f"| {run.title} | {ratio} | {_number(r['predicted_ratio'], 3)} | {_number(r['bound_ratio'], 3)} |"
            f" {_mib(r['peak_allocated'])} | {share} | {_mib(r['predicted_peak'])} | {_mib(r['peak_reserved'])} |"
            f" {_mib(r['host_bytes'])} | {_gradients(r)} |"
        )
    absent = [run for run in runs if run.result["status"] == "not here"]
    notes = "; ".join(f"`{run.method}`: {run.result['note']}" for run in absent)
    return "\n".join(lines) + (f"\n\n{_folded(f'Not run: {notes}.')}" if notes else "")


def _place(run: Run) -> tuple[int, str, float]:
    """Peers first; then each mode by its limits, downwards; then in the peers' bytes."""
    if not run.limit:
        return (0, "", 0.0)
    if run.limit == EVERYTHING:
        return (1, run.method, -1e9)
    return (1, run.method, -float(run.limit[:-1])) if run.limit.endswith("%") else (2, run.method, 0.0)


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


# -- the other two


def _twice(data: dict[str, Any]) -> str:
    """Which cells had a second run."""
    count = len(data.get("twice", ()))
    return (
        f" {count} cells with quartiles far apart ran twice (`--wider`); the page shows the run with the closer ones."
        if count
        else ""
    )


def _four_times(data: dict[str, Any]) -> Iterator[str]:
    plain, held, paired = data["free"], data["limited"], data["paired"]
    yield f"## Four times the memory limit: {data['about']}"
    yield _hardware(data, [str(data["commit"])])
    done = "failure" not in held
    time = (
        f"{paired['ratio']:.3f} of plain's step ({paired['low']:.3f} to {paired['high']:.3f}; predicted"
        f" {paired['predicted_ratio']:.3f}, bound {paired['bound_ratio']:.3f})"
        if "failure" not in paired
        else f"no times ({paired['failure']})"
    )
    yield "Command: `scripts/cpu_results.sh four_times`."
    losses = (
        f"losses {'equal' if data['equal_losses'] else 'differ from'} plain's" if done else f"fails ({held['failure']})"
    )
    kernel = "fails" if data["limited_plain"]["fails"] else "trains too"
    found = f"{time}; under the kernel's limit of that many bytes rotoff's {losses}, and plain PyTorch {kernel}."
    met = done and data["equal_losses"] and data["limited_plain"]["fails"] and paired.get("ratio", 2.0) <= 1.15
    aim = "A model whose plain step needs 4 times the limit trains inside it, in at most 1.15 of plain's time"
    yield _aims([Aim(aim, found, met)])
    rows = ["| | step (s) | allocated (MiB) | resident memory grew (MiB) | file (MiB) |", "|---|---|---|---|---|"]
    limit = f"limit {_mib(data['limit'])} MiB"
    for name, row in (("plain, no limit", plain), (f"rotoff, {limit}", paired), (f"rotoff, hard {limit}", held)):
        if "failure" not in row:
            rows.append(
                f"| {name} | {row['step_time']:.3f} | {_mib(row.get('peak_allocated'))} |"
                f" {_mib(row.get('resident_bytes'))} | {_mib(row.get('host_bytes'))} |"
            )
    yield "\n".join(rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="the page")
    parser.add_argument("--pictures", type=Path, help="folder for the plots; without it there are none")
    options = parser.parse_args(arguments)
    files = [json.loads(path.read_text(encoding="utf-8")) for path in options.files]
    pictures: dict[tuple[str, str], str] = {}
    for data in files if options.pictures else []:
        if data["format"] != "rotoff.grid":
            continue
        runs = read(data)
        for workload in dict.fromkeys(run.workload for run in runs):
            path = options.pictures / f"{data['suite']}_{workload}.png"
            draw([r for r in runs if r.workload == workload], workloads.find(data["suite"], workload).about, path)
            if path.exists():
                pictures[data["suite"], workload] = path.relative_to(options.out.parent).as_posix()
    options.out.write_text(page(files, pictures), encoding="utf-8")


if __name__ == "__main__":
    main()
