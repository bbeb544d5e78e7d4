"""Run the grid, cell by cell, each in a fresh process, and write one JSON file; an interrupted run goes on where it stopped.

    python -m benchmarks.grid.run --suite cpu --out benchmarks/results/grid_cpu.json
    python -m benchmarks.grid.run --suite cuda --minutes 9 --out benchmarks/results/grid_cuda.json   # again until it says "complete"

Cells of one workload: plain; the peers; rotoff's modes at --limits (percent of the plain peak); then rotoff joint at each
peer's own peak, named ``joint@PEER``. A cell that is in the file already, from the same machine, versions and commit, is not
run again (--again CELL forces it). Cells go round by method, so that no method has the machine's best hour.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import methods, workloads

MODES = ("joint", "remat", "offload")


def machine(device: str) -> dict[str, Any]:
    """Hardware and versions; cells from another machine or other versions do not mix."""
    import torch

    import rotoff

    about: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rotoff": rotoff.__version__,
    }
    if device.startswith("cuda"):
        about |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return about


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def commit() -> str | None:
    """The commit that runs, marked where files differ from it."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


class Grid:
    """The file of results, and what is still to do.

    cells: name -> what was asked ("cell") and what came out ("result"). The name is ``workload/method[@limit]``.
    """

    def __init__(self, path: Path, options: argparse.Namespace) -> None:
        self.path, self.options = path, options
        self.data: dict[str, Any] = {"format": "rotoff.grid", "suite": options.suite, "machine": machine(options.device)}
        self.data |= {"threads": options.threads, "limits": options.limits, "cells": {}}
        if path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            if before.get("machine") != self.data["machine"]:
                raise SystemExit(f"{path} is of another machine or other versions; name another --out, or move it away")
            self.data["cells"] = before["cells"]
        for name in options.again:
            self.data["cells"].pop(name, None)

    def result(self, name: str) -> dict[str, Any] | None:
        """What came out of the cell `name`, if it ran."""
        found = self.data["cells"].get(name)
        return found["result"] if found else None

    def todo(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(name, cell) of all cells that have not run, in order; later ones need the results of earlier ones."""
        chosen = [w.name for w in workloads.SUITES[self.options.suite] if w.name in (self.options.workloads or [w.name])]
        for method in ("plain", *methods.PEERS, *(methods.BUDGETS if self.options.compiled else ())):
            for workload in chosen:
                yield from self._new(f"{workload}/{method}", workload, method, None)
        for percent in self.options.limits:
            for mode in MODES:
                for workload in chosen:
                    if (plain := self._peak(f"{workload}/plain")) is not None:
                        yield from self._new(f"{workload}/{mode}@{percent:g}%", workload, mode, int(plain * percent / 100))
        for peer in (*methods.PEERS, *(methods.BUDGETS if self.options.compiled else ())):
            mode = "joint-compiled" if peer in methods.BUDGETS else "joint"
            for workload in chosen:
                if (peak := self._peak(f"{workload}/{peer}")) is not None:
                    yield from self._new(f"{workload}/{mode}@{peer}", workload, mode, peak)

    def _peak(self, name: str) -> int | None:
        found = self.result(name)
        return found["peak_allocated"] if found else None

    def _new(self, name: str, workload: str, method: str, limit: int | None) -> Iterator[tuple[str, dict[str, Any]]]:
        if name not in self.data["cells"]:
            cell = {"suite": self.options.suite, "workload": workload, "method": method, "limit": limit}
            cell |= {"device": self.options.device, "seconds": self.options.seconds, "threads": self.options.threads}
            yield name, cell | {"host_directory": self.options.host_directory}

    def run(self, name: str, cell: dict[str, Any]) -> dict[str, Any]:
        """Run one cell in a process of its own and keep what came out."""
        command = [sys.executable, "-m", "benchmarks.grid.cell", json.dumps(cell)]
        begin = time.time()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=self.options.cell_minutes * 60)
            result = json.loads(done.stdout.strip().splitlines()[-1])
        except subprocess.TimeoutExpired:
            result = {"status": "too slow", "note": f"stopped after {self.options.cell_minutes:g} minutes"}
        except (IndexError, ValueError):  # it died: killed for memory, or a fault that the note shows
            killed = done.returncode in (-9, 137)
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            result = {"status": "out of memory" if killed else "failed", "note": last[:500]}
        kept = {key: value for key, value in cell.items() if key != "host_directory"}
        empty = {"peak_allocated": None, "ratio": None}
        record = {"cell": kept, "commit": commit(), "seconds": round(time.time() - begin, 1), "result": empty | result}
        self.data["cells"][name] = record
        self.save()
        return record["result"]

    def save(self) -> None:
        """Write the file; an interruption leaves the one before."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_suffix(".part")
        fresh.write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")
        os.replace(fresh, self.path)


def said(name: str, result: dict[str, Any]) -> str:
    """One line of progress."""
    if result["status"] != "ok":
        return f"{name}: {result['status']} ({result['note']})"
    ratio = "" if result["ratio"] is None else f"{result['ratio']:.3f} of plain's time, "
    return f"{name}: {ratio}{result['peak_allocated'] / 2**20:.1f} MiB"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=list(workloads.SUITES), default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workloads", nargs="*", metavar="NAME", help="only these")
    parser.add_argument("--limits", nargs="*", type=float, default=[80, 60, 45, 30, 20], help="%% of the plain peak")
    parser.add_argument(
        "--compiled", action="store_true", help="also torch.compile with its memory budget, and rotoff over it"
    )
    parser.add_argument("--seconds", type=float, default=12, help="that a cell's timed steps may take (%(default)s)")
    parser.add_argument("--cell-minutes", type=float, default=5, help="after which a cell is stopped (%(default)s)")
    parser.add_argument("--minutes", type=float, help="begin no cell after this many")
    parser.add_argument("--again", nargs="*", default=[], metavar="CELL", help="run these anew")
    parser.add_argument("--host-directory", help="where the file of offloaded values lies; a real disk")
    parser.add_argument("--threads", type=int, help="compute threads of every method (CPU: cores - 1)")
    options = parser.parse_args(arguments)
    options.device = "cuda" if options.suite == "cuda" else "cpu"
    if options.threads is None and options.device == "cpu":
        options.threads = max(1, (machine("cpu")["cores"] or 2) - 1)
    return options


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 when complete, 3 where the time was up before."""
    options = parse(arguments)
    grid = Grid(options.out, options)
    end = time.time() + 60 * options.minutes if options.minutes else None
    while (following := next(grid.todo(), None)) is not None:
        if end is not None and time.time() > end:
            print(f"time is up; {len(grid.data['cells'])} cells are in {options.out}; run this again to go on")
            return 3
        print(said(following[0], grid.run(*following)), flush=True)
    grid.save()
    print(f"complete: {len(grid.data['cells'])} cells in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
