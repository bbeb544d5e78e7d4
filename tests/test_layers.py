"""Who may import whom: planning needs no torch, and the judge (the simulator) knows nothing of the solver."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rotoff

ROOT = Path(rotoff.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py"))

# A module may import the layers listed here, and its own; what is not listed here may import everything.
KERNELS = {path.name.split(".")[0] for path in ROOT.glob("_*.pyx")}
MAY_IMPORT = {
    "errors": set(),
    "sizes": {"errors"},
    "whole_file": set(),
    "json_file": {"whole_file"},
    "chain_fields": {"errors", "json_file"},
    "parameters": {"errors", "chain_fields"},
    "chain": {"errors", "json_file", "chain_fields", "parameters"},
    "sequence": {"errors", "sizes", "json_file"},
    "trace": {"sizes", "sequence"},
    "steady_step": {"errors", "chain", "sequence"},
    "simulator": {"errors", "sizes", "chain", "sequence", "steady_step", "trace"},
    "fractional": {"errors", "sizes", "chain", "sequence", "simulator", "bounds"},
    "bounds": {"errors", "sizes", "chain", "sequence", "simulator", "steady_step", "steady_bounds", *KERNELS},
    "solver": {
        *(
            "errors",
            "sizes",
            "chain",
            "parameters",
            "sequence",
            "steady_step",
            "steady_bounds",
            "simulator",
            "fractional",
            "bounds",
        ),
        *("whole_file", *KERNELS),
    },
    "plot": {"errors", "sizes", "chain", "sequence", "simulator", "bounds", "solver"},
    "nn": {"errors"},
}
MAY_IMPORT_TORCH = {"profile", "capture", "runtime", "nn"} | {
    "like_its_model",
    "checkpointable",
    "in_place",
    "estimation",
    "found_stages",
    "planned_modes",
}


def layer(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_names(path: Path) -> set[str]:
    """Absolute names of all that the file imports, those inside functions and ``if TYPE_CHECKING`` included."""
    package = ("rotoff", *path.relative_to(ROOT).parts[:-1])
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            parts = [*base, *(node.module or "").split(".")] if node.module else list(base)
            names |= {".".join([*parts, alias.name]) for alias in node.names}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_layers(path: Path) -> None:
    own = layer(path)
    names = imported_names(path)
    if own not in MAY_IMPORT_TORCH:
        assert not [name for name in names if name.split(".")[0] in ("torch", "torchvision")]
    if own in MAY_IMPORT:
        layers = {name.split(".")[1] for name in names if name.startswith("rotoff.")}
        assert layers <= MAY_IMPORT[own] | {own}


def test_the_layers_named_here_exist() -> None:
    layers = {layer(path) for path in FILES}
    assert {"errors", "chain", "sequence", "simulator", "bounds", "solver"} <= layers


PLAN_WITHOUT_TORCH = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, Absent())
import rotoff

stage = rotoff.Stage("s", forward_time=1.0, backward_time=2.0, output_bytes=10, saved_bytes=30)
chain = rotoff.Chain((stage,) * 4, d2h_bandwidth=10.0, h2d_bandwidth=10.0, input_bytes=10)
for mode in ("remat", "offload", "joint"):
    limit = rotoff.min_mem_limit(chain, mode)
    trace = rotoff.simulate(chain, rotoff.solve(chain, limit, mode=mode), limit)
    assert trace.makespan >= rotoff.lower_bound(chain, limit) * (1 - 1e-9)
assert "torch" not in sys.modules
try:
    rotoff.Checkpointable
except ImportError as error:
    assert "torch" in str(error), error
else:
    raise AssertionError("Checkpointable without torch")
print("planned")
"""


def test_planning_works_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PLAN_WITHOUT_TORCH], capture_output=True, text=True, cwd=ROOT.parent, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "planned\n"
