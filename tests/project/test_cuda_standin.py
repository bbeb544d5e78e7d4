"""The tests for CUDA, on a device that is none: what they need of a GPU but its speed (`cuda_standin/standin.py`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rotoff

TESTS = Path(__file__).parents[1]


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA itself"),
    pytest.mark.skipif(sys.platform != "linux", reason="the stand-in is loaded as on Linux"),
]


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def on_standin(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a command of Python on the stand-in; with one argument, that is its program. settings: of the environment."""
    plugin, folder = TESTS / "cuda_standin", tmp_path_factory.mktemp("standin")
    subprocess.run([sys.executable, str(plugin / "standin.py"), str(folder)], check=True, timeout=300)
    path = os.pathsep.join([str(plugin), str(Path(rotoff.__file__).parent.parent)])
    found = os.environ | {"PYTHONPATH": path, "STANDIN": str(folder / "libstandin.so")}

    def run(*command: str, timeout: float = 300, **settings: str) -> subprocess.CompletedProcess[str]:
        words = ["-c", f"import standin\n{command[0]}"] if len(command) == 1 else command
        how: Any = {"env": found | settings, "capture_output": True, "text": True, "timeout": timeout}
        done = subprocess.run([sys.executable, *words], check=False, **how)
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
        return done

    return run


@pytest.mark.early
@pytest.mark.parametrize(
    ("files", "settings"),
    [
        ([""], {}),
        (["test_reserved_cuda.py", "test_step_cuda.py"], {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    ],
    ids=["all", "expandable segments"],
)
def test_the_code_for_cuda_runs_on_the_stand_in(on_standin: Run, files: list[str], settings: dict[str, str]) -> None:
    """Of each grid a part; a GPU runs all of it (`scripts/gpu_check.sh`)."""
    pytest_words = [
        "-m",
        "pytest",
        "-p",
        "standin",
        "-p",
        "no:cacheprovider",
        "-m",
        "cuda and not concurrent and not slow",
    ]
    where = ["-c", str(TESTS.parent / "pyproject.toml"), *(str(TESTS / "cuda" / name) for name in files)]
    done = on_standin(*pytest_words, *where, timeout=3600, **settings)
    assert " skipped" not in done.stdout.splitlines()[-1], done.stdout


def test_training_where_the_driver_registers_no_memory(on_standin: Run) -> None:
    on_standin(SECOND, STANDIN_DEVICE="1", STANDIN_REGISTERS="no", STANDIN_SEED="1")


DOCTOR = """
import runpy, sys, standin
from rotoff.tools import doctor

doctor.SIZES, doctor.PAIRS = doctor.SIZES[-1:], 1
sys.exit(runpy.run_module("rotoff", run_name="__main__"))
"""


def test_the_doctor_finds_nothing_failed(on_standin: Run, tmp_path: Path) -> None:
    out = tmp_path / "doctor.json"
    done = on_standin("-c", DOCTOR, "doctor", "-o", str(out), ROTOFF_HOST_MEMORY="100 MiB")
    data = json.loads(out.read_text())
    found = {check["check"]: check["figures"] for check in data["checks"]}
    assert data["device"] == "cuda:0"
    assert found["machine"]["device"] == "stand-in"
    assert found["planned steps"]["link"]["h2d_bandwidth"] > 0 and "registers no pages" not in done.stdout
    assert done.stdout.splitlines()[-1].startswith("WORKS")
    for row in found["planned steps"]["rows"]:
        assert row["bit_for_bit"]
        assert row["asked"] <= row["predicted_bytes"] <= row["limit"]
        assert row["given"] <= row["limit"] + row["slack"]


SECOND = """
import torch
from torch import nn
import rotoff

x = torch.randn(64, 16, device="cuda:1")

def trained(model, optimizer):
    torch.manual_seed(3)
    for _ in range(3):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().cpu() for p in model.parameters()]

def net():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 16)) for _ in range(4)])

plain = net().to("cuda:1")
expected = trained(plain, torch.optim.AdamW(plain.parameters()))
for mode in ("joint", "remat", "offload", "placed"):
    model = rotoff.Checkpointable(net(), device="cuda:1").measure(x)
    optimizer = torch.optim.AdamW(model.parameters())
    limit = {"device_limit": 1, "optimizer": optimizer} if mode == "placed" else {"mem_limit": 1, "mode": mode}
    try:
        model.compute_sequence(**limit)
    except rotoff.InfeasibleError as error:
        limit[next(iter(limit))] = error.min_mem_limit
    model.compute_sequence(**limit)
    assert all(map(torch.equal, trained(model, optimizer), expected)), mode
    model.close()
assert torch.cuda.current_device() == 0
"""


def test_a_second_device_is_used_alone(on_standin: Run) -> None:
    """The first, which is the current one, refuses to give memory."""
    on_standin(SECOND, STANDIN_DEVICE="1")
