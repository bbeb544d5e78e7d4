"""The tests for CUDA, on a device that is none: what they need of a GPU but its time (`cuda_standin/standin.py`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA itself")
@pytest.mark.skipif(sys.platform != "linux", reason="the stand-in is loaded as on Linux")
def test_the_code_for_cuda_runs_on_the_stand_in(tmp_path: Path) -> None:
    plugin = TESTS / "cuda_standin"
    subprocess.run([sys.executable, str(plugin / "standin.py"), str(tmp_path)], check=True, timeout=300)
    environment = os.environ | {"PYTHONPATH": str(plugin), "STANDIN": str(tmp_path / "libstandin.so")}
    command = ["-m", "pytest", "-p", "standin", "-p", "no:cacheprovider", "-c", str(TESTS.parent / "pyproject.toml")]
    done = subprocess.run(
        [sys.executable, *command, "-m", "cuda and not concurrent", str(TESTS / "cuda")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " skipped" not in done.stdout.splitlines()[-1], done.stdout
