"""What was aimed at, and the cells that miss it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

OURS = {mode: f"rotoff {mode}" for mode in ("joint", "remat", "offload")}
EVERYTHING = "everything"  # where a limit leaves room for all
ITSELF = "plain-again"  # plain PyTorch, its steps in turn with plain PyTorch's
MIB = 2**20
# what PyTorch's caching allocator may take beyond need: a segment of 20 MiB for blocks up to 10, and 2
SEGMENTS = 22 * MIB
TIME_ERROR = {"cuda": 0.03, "cpu": 0.05}


@dataclass(frozen=True)
class Run:
    """One cell: workload, method, where its limit came from ("60%", a peer's name, "everything" or ""), and what came
    out."""

    workload: str
    method: str
    limit: str
    cell: dict[str, Any]
    result: dict[str, Any]

    @property
    def ok(self) -> bool:
        return bool(self.result["status"] == "ok")

    @property
    def ratio(self) -> float:
        return float(self.result["ratio"])

    @property
    def title(self) -> str:
        name = "`plain` against plain" if self.method == ITSELF else OURS.get(self.method, f"`{self.method}`")
        if not self.limit:
            return name
        if self.limit == EVERYTHING:
            return f"{name}, room for everything"
        return f"{name} at {self.limit}" if self.limit.endswith("%") else f"{name} in `{self.limit}`'s bytes"


@dataclass(frozen=True)
class Aim:
    """aim: what was wanted. figures: in how many cells it was met, and the others with their figure."""

    aim: str
    figures: str
    met: bool


def read(data: dict[str, Any]) -> list[Run]:
    """The cells of a file, in its order."""
    runs = []
    for name, record in data["cells"].items():
        workload, _, rest = name.partition("/")
        method, _, limit = rest.partition("@")
        runs.append(Run(workload, method, limit, record["cell"], record["result"]))
    return runs


def timed(runs: list[Run], wanted: Callable[[Run], bool]) -> list[Run]:
    """Those of `wanted` that ran and have a step time over plain's."""
    return [run for run in runs if run.ok and run.result["ratio"] is not None and wanted(run)]


def judge(runs: list[Run], device: str) -> list[Aim]:
    """Each aim that the cells can judge. device: "cpu" or "cuda"."""
    asked = [r for r in runs if r.method in OURS and r.limit]
    ours = [r for r in asked if r.ok and r.result["predicted_peak"] is not None]
    peaks = [(r, r.result["predicted_peak"] / r.result["peak_allocated"]) for r in ours]
    times = [(r, r.ratio / r.result["predicted_ratio"] - 1) for r in timed(ours, lambda _: True)]
    exact = [r for r in ours if r.result["equal_gradients"] is not None]
    reserved = [r for r in ours if r.result["peak_reserved"] is not None]
    everything = timed(runs, lambda r: r.limit == EVERYTHING)
    most = TIME_ERROR[device]
    found = [
        _duels("At every limit joint is the fastest method that keeps it", list(_rivals(runs))),
        _duels("In each peer's own bytes joint is faster than that peer", list(_in_bytes(runs))),
        _aim("There is a plan at every limit", ((r, r.result["status"] != "infeasible", "") for r in asked)),
        _aim(
            "The limit holds for allocated bytes",
            ((r, r.result["peak_allocated"] <= r.cell["limit"], "") for r in ours),
        ),
        _aim(
            f"The limit holds for reserved bytes, within the allocator's rounding ({SEGMENTS // MIB} MiB)",
            ((r, r.result["peak_reserved"] <= r.cell["limit"] + SEGMENTS, "") for r in reserved),
        ),
        _aim(
            "The predicted peak is within 3 % and never under the measured one",
            ((r, 1 <= share <= 1.03, f"{share:.3f}") for r, share in peaks),
        ),
        _aim(
            f"The predicted step time, over plain's, is within {most:.0%}",
            ((r, abs(gap) <= most, f"{gap:+.1%}") for r, gap in times),
            _median("Measured over predicted", [gap for _, gap in times]),
        ),
        _aim(
            "With all in memory: at most 1 % over plain",
            ((r, r.ratio <= 1.01, f"{r.ratio - 1:+.1%}") for r in everything),
        ),
        _aim("Gradients are plain's bit for bit", ((r, bool(r.result["equal_gradients"]), "") for r in exact)),
    ]
    return [aim for aim in found if aim is not None]


def _median(what: str, values: list[float]) -> str:
    return f" {what}, median {statistics.median(values):+.1%}." if values else ""


def _aim(what: str, cells: Iterable[tuple[Run, bool, str]], note: str = "") -> Aim | None:
    """cells: each with whether it meets the aim, and the figure that says so."""
    judged = list(cells)
    if not judged:
        return None
    missing = [f"{r.workload}, {r.title}{figure and f' ({figure})'}" for r, met, figure in judged if not met]
    text = f"in {len(judged) - len(missing)} of {len(judged)} cells.{note}"
    return Aim(what, text + (f" Not: {'; '.join(missing)}." if missing else ""), not missing)


def _duels(what: str, duels: list[tuple[Run, Run]]) -> Aim | None:
    """Who has the smaller median; apart where the quartiles do not overlap."""
    apart = sum(ours.result["high"] < other.result["low"] for ours, other in duels)
    cells = ((r, r.ratio <= other.ratio, f"{r.ratio:.3f} to {other.title}'s {other.ratio:.3f}") for r, other in duels)
    return _aim(what, cells, f" In {apart} all quartiles are apart.")


def _rivals(runs: list[Run]) -> Iterable[tuple[Run, Run]]:
    """Each joint cell at a limit, and the fastest other method that keeps it; not a mode with the same plan."""
    for run in timed(runs, lambda r: r.method == "joint" and r.limit.endswith("%")):
        plan = run.result.get("plan")
        rivals = [
            r
            for r in timed(runs, lambda r: r.method not in ("joint", "plain", ITSELF))
            if r.workload == run.workload
            and r.result["peak_allocated"] <= run.cell["limit"]
            and (plan is None or r.result.get("plan") != plan)
        ]
        if rivals:
            yield run, min(rivals, key=lambda r: r.ratio)


def _in_bytes(runs: list[Run]) -> Iterable[tuple[Run, Run]]:
    """Each joint cell in a peer's bytes, and that peer."""
    peers = {(r.workload, r.method): r for r in timed(runs, lambda r: not r.limit)}
    for run in timed(runs, lambda r: r.method.startswith("joint") and (r.workload, r.limit) in peers):
        yield run, peers[run.workload, run.limit]
