"""The examples run, and print what they are there to show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rotoff

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


# As `python EXAMPLE ARGUMENTS`, but with a tenth of the search's default effort, as in the other tests.
QUICKLY = f"""
import os, runpy, sys
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
from rotoff.solver import anneal
anneal.DEFAULT_SECONDS *= 0.1
if "train_transformer" in sys.argv[0]:
    sys.path.append({str(ROOT / "tests" / "support")!r})
    import torchvision_operators
    torchvision_operators.declare()
runpy.run_path(sys.argv[0], run_name="__main__")
"""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SHOWN: list[tuple[str, list[str]]] = [  # a command, and what it prints
    (
        "compare_modes.py --quick --device cpu --limits 70,5",
        ["none +plain .* 0\n", "70 % +joint .* 0\n", "does not fit; the smallest limit that works is"],  # differences
    ),
    ("digits_resnet.py --size 24 --depth 1 --batch 32 --steps 3 --limit 0.85", ["largest difference of any loss: 0.0"]),
    ("train_transformer.py --layers 2 --width 32 --context 32 --steps 3", ["largest difference of any loss: 0.0"]),
    ("plan_without_device.py --blocks 4 --limit 6GiB --out OUT", ["peak .* of 6.00 GiB"]),
    ("beyond_ram.py --blocks 10 --width 128 --room 160MiB --steps 2", ["can't allocate memory", "same losses: True"]),
    (  # less memory than parameters and gradients take
        "larger_than_memory.py --width 512 --blocks 16 --rows 64 --steps 2 --memory 240MiB",
        ["plain, limited +fails", "the losses are the same"],
    ),
    ("torchrun ddp.py --limit 1.7MiB --width 64 --rows 256 --steps 4", ["peak .* of ", "step 3 loss"]),
    ("torchrun ddp.py --limit 2.3MiB --width 64 --rows 256 --steps 4 --shard", ["peak .* of ", "step 3 loss"]),
    (
        "torchrun sharded.py --blocks 10 --width 512 --rows 128 --memory 160MiB --steps 2",
        ["FSDP2, limited +fails", "losses and parameters are equal"],
    ),
    ("torchrun pipeline.py --width 32 --rows 64 --steps 3", ["rank 0: ", "rank 1: ", r"losses( [\d.]+){3}"]),
]


def run(*command: str) -> str:
    """What an example prints, run as a user would, against the rotoff that these tests import."""
    environment = {**os.environ, "PYTHONPATH": str(Path(rotoff.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    launched = [*TORCHRUN, str(EXAMPLES / command[1]), *command[2:]]
    alone = ["-c", QUICKLY, str(EXAMPLES / command[0]), *command[1:]]
    words = [sys.executable, *(launched if command[0] == "torchrun" else alone)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_readme_shows_the_quick_start_that_runs_here() -> None:
    code = (EXAMPLES / "quickstart.py").read_text(encoding="utf-8").split('"""', 2)[2].strip()
    assert f"```python\n{code}\n```" in (ROOT / "README.md").read_text(encoding="utf-8")


ROWS = [
    pytest.param(*row, marks=[pytest.mark.slow] if n else [], id=row[0].split(" -")[0]) for n, row in enumerate(SHOWN)
]


@pytest.mark.parametrize(("command", "shows"), ROWS)
def test_an_example_runs_and_prints_what_it_shows(command: str, shows: list[str], tmp_path: Path) -> None:
    needs = {"digits_resnet.py": "sklearn", "train_transformer.py": "accelerate"}
    pytest.importorskip(needs.get(command.split()[0], "torch"))
    said = run(*command.replace("OUT", str(tmp_path)).split())
    assert [one for one in shows if not re.search(one, said)] == [], said


@pytest.mark.slow
def test_a_loop_as_torchtitans_reaches_the_plain_losses() -> None:
    pytest.importorskip("yaml")
    plain, *others = (
        run("titan_loop.py", str(EXAMPLES / "titan_loop.yaml"), *more) for more in (["--plain"], [], ["--checkpoint"])
    )
    steps = [re.findall("^step.*", said, re.MULTILINE) for said in (plain, *others)]
    assert steps[1] == steps[2] == steps[0] and len(steps[0]) == 4
    assert re.search("moved|recomputed", others[0]) and "layers.0" in others[1]
