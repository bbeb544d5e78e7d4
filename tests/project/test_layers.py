"""The floors of the house: nothing imports upwards, no files import each other in a circle, and planning needs no
torch."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import rotoff

ROOT = Path(rotoff.__file__).parent
FILES = {path.relative_to(ROOT): path for path in sorted(ROOT.rglob("*.py"))}

# From the ground up. A folder or a file of the package may import what stands before it here, and its own.
WITHOUT_TORCH = ["version", "errors", "io", "core", "_dp", "solver", "report", "plot"]
WITH_TORCH = [
    "accelerator",
    "tensors",
    "tape",
    "runtime",
    "profile",
    "planning",
    "module_proxy",
    "checkpointable",
    "tools",
]
ABOVE = ["integrations", "cli", "__init__", "__main__"]  # which import torch, and what needs it, on use
FLOORS = [*WITHOUT_TORCH, *WITH_TORCH, *ABOVE]


def floor(module: str) -> str:
    """The folder or file right below the package that `module` belongs to."""
    return module.split(".")[1] if "." in module else "__init__"


def module_of(relative: Path) -> str:
    parts = relative.with_suffix("").parts
    return ".".join(("rotoff", *(parts[:-1] if parts[-1] == "__init__" else parts)))


MODULES = {module_of(relative) for relative in FILES}
KERNELS = {module_of(path.relative_to(ROOT)) for path in ROOT.rglob("*.pyx")}


def imported(relative: Path) -> set[str]:
    """The modules that a file imports, those inside functions and ``if TYPE_CHECKING`` included; torch's as "torch"."""
    package = ("rotoff", *relative.parts[:-1])
    found: set[str] = set()
    for node in ast.walk(ast.parse(FILES[relative].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            source = ".".join((*base, *((node.module,) if node.module else ())))
            every = {f"{source}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES | KERNELS else source for name in every}
    return found


@pytest.mark.parametrize("relative", FILES, ids=str)
def test_nothing_imports_upwards(relative: Path) -> None:
    own = FLOORS.index(floor(module_of(relative)))
    names = imported(relative)
    if FLOORS[own] in WITHOUT_TORCH:
        assert not {name for name in names if name.split(".")[0] in ("torch", "torchvision")}
    inside = {name for name in names if name.split(".")[0] == "rotoff"}
    assert inside <= MODULES | KERNELS
    if len(relative.parts) == 1:
        inside.discard("rotoff")
    assert not {name for name in inside if FLOORS.index(floor(name)) > own}


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = {module_of(relative): imported(relative) & MODULES for relative in FILES}
    TopologicalSorter(graph).prepare()  # raises CycleError with the files of the circle


def test_every_floor_exists() -> None:
    assert {floor(module) for module in MODULES | KERNELS} == set(FLOORS)


def test_contributing_shows_every_floor_in_this_order() -> None:
    page = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = page.split("| folder in `rotoff/` |")[1].split("\n\n")[0]
    shown = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)(?:/|\.pyx?)`", row.split("|")[1])]
    assert shown == [name for name in FLOORS if not name.startswith("__")]


MOST_LINES = 60  # of a function; `pyproject.toml` limits its branches


def test_every_function_fits_on_a_page() -> None:
    longer = {
        f"{relative}: {node.name}"
        for relative, path in FILES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= MOST_LINES
    }
    assert not longer


PLAN_WITHOUT_TORCH = """
import runpy
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, Absent())
import rotoff

stage = rotoff.Stage("s", forward_time=1.0, backward_time=2.0, output_bytes=10, saved_bytes=30)
chain = rotoff.Chain((stage,) * 4, d2h_bandwidth=10.0, h2d_bandwidth=10.0, input_bytes=10)
limits = {mode: rotoff.min_mem_limit(chain, mode) for mode in ("remat", "offload", "joint")}
times = {limit: rotoff.simulate(chain, rotoff.solve(chain, limit, mode=mode)).makespan for mode, limit in limits.items()}
assert "scipy" not in sys.modules
assert all(time >= rotoff.lower_bound(chain, limit) * (1 - 1e-9) for limit, time in times.items())
assert "torch" not in sys.modules
try:
    rotoff.Checkpointable
except ImportError as error:
    assert "torch" in str(error), error
else:
    raise AssertionError("Checkpointable without torch")
chain.save("chain.json")
sys.argv = ["rotoff", "solve", "chain.json", "--mem-limit", "200", "--option", "refine=false", "--json"]
runpy.run_module("rotoff", run_name="__main__")
"""


def test_planning_works_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    told = {**os.environ, "PYTHONPATH": str(ROOT.parent)}
    command = [sys.executable, "-c", PLAN_WITHOUT_TORCH]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=told, timeout=120)
    assert (run.returncode, run.stderr) == (0, "")  # no progress bar where there is no terminal
    assert json.loads(run.stdout)["mem_limit"] == 200
