"""scripts/gpu_check.sh without a GPU: what it says and runs. A stand-in for python3 notes its arguments and says what it is told."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "gpu_check.sh"
STAND_IN = """#!/bin/sh
[ "$1" = - ] && [ $# -eq 1 ] && { cat >/dev/null; echo "$REASON"; exit 0; }
echo "$@" >>"$NOTES"
case "$*" in *"--suite cuda"* | *reach.py*) exit "$CODE" ;; esac
"""

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def check(
    tmp_path: Path, *arguments: str, reason: str = "", code: int = 0
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """(what the script did, the commands that it gave python3 after having asked whether there is a device)"""
    python, notes = tmp_path / "python", tmp_path / "notes"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python), "NOTES": str(notes), "REASON": reason, "CODE": str(code)}
    done = subprocess.run(
        ["bash", str(SCRIPT), *arguments], capture_output=True, text=True, env=environment, timeout=60, check=False
    )
    return done, notes.read_text().splitlines() if notes.exists() else []


@pytest.mark.parametrize("mode", [[], ["grid"], ["reach"]])
def test_without_a_device_nothing_is_run(tmp_path: Path, mode: list[str]) -> None:
    done, commands = check(tmp_path, str(tmp_path / "out"), *mode, reason="torch finds no CUDA device")
    assert done.returncode == 3
    assert "Nothing was checked: torch finds no CUDA device." in done.stdout
    assert commands == []


@pytest.mark.parametrize("arguments", [[], ["out", "other"], ["out", "checks", "more"]])
def test_wrong_usage(tmp_path: Path, arguments: list[str]) -> None:
    done, commands = check(tmp_path, *arguments)
    assert done.returncode == 2
    assert "usage:" in done.stderr
    assert commands == []


@pytest.mark.parametrize(("code", "returned"), [(0, 0), (3, 4), (1, 1)])
def test_the_grid_is_run_in_the_given_folder_and_says_whether_to_call_again(
    tmp_path: Path, code: int, returned: int
) -> None:
    out = tmp_path / "out"
    done, commands = check(tmp_path, str(out), "grid", "gpt-1.3b", "unet", code=code)
    assert done.returncode == returned
    assert ("run this again" in done.stdout) == (code == 3)
    grid = commands[1]
    assert grid.startswith("-m benchmarks.grid.run --suite cuda ")
    assert f"--start benchmarks/results/grid_cuda.json --out {out.resolve()}/grid_cuda.json" in grid
    assert grid.endswith("--workloads gpt-1.3b unet")
    assert len(commands) == 2  # no page without a file


def test_the_whole_grid_and_its_page(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "grid_cuda.json").write_text("{}")
    done, commands = check(tmp_path, str(out), "grid", code=3)
    assert done.returncode == 4
    assert "--workloads" not in commands[1]
    assert commands[-1].startswith(
        f"-m benchmarks.grid.report {out.resolve()}/grid_cuda.json --out {out.resolve()}/results.md"
    )


def test_reach_is_executed_on_the_device(tmp_path: Path) -> None:
    done, commands = check(tmp_path, str(tmp_path / "out"), "reach", "vgg16")
    assert done.returncode == 0
    assert commands[1].startswith("benchmarks/reach.py --run ")
    assert commands[1].endswith("--only vgg16")


def test_time_limits_of_a_call_of_the_grid_add_up_to_nine_and_a_half_minutes() -> None:
    lines = SCRIPT.read_text().split('if [ "$mode" != checks ]; then')[1].split("\nfi\n")[0].splitlines()
    build = next(int(line.split()[1]) for line in lines if line.strip().startswith("build "))
    limits = {
        line.split("run ")[1].split()[0]: int(line.split("run ")[1].split()[1])
        for line in lines
        if "run " in line and '"$python"' in line
    }
    assert build + max(limits["grid"], limits["reach"]) + limits["page"] + 5 <= 570


def test_so_do_those_of_the_checks_which_write_few_files() -> None:
    checks = SCRIPT.read_text().split("\nfi\n")[-1].splitlines()
    limits = [
        int(line.split()[2 if line.startswith("run ") else 1]) for line in checks if line.startswith(("run ", "build "))
    ]
    assert len(limits) == 6
    assert sum(limits) <= 570
    assert sum(line.count('"$out/') for line in checks) <= 8 - 2  # beside log.txt and summary.json
