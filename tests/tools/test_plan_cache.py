"""`rotoff.plan` answers a question that an earlier process asked from the cache on disk."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rotoff
from rotoff.tools import mode_comparison

SCRIPT = """
import importlib, sys, time
from pathlib import Path
import torch
from torch import nn
import helper
import rotoff

class Config:
    def __init__(self, width):
        self.width, self.names, self.of_process_hash = width, {"b", "a", "c"}, hash("x")

class Net(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.first, self.second = nn.Linear(config.width, config.width), nn.Linear(config.width, config.width)

    def forward(self, x):
        return helper.nonlinear(self.first(x)) + self.second(x)

with torch.device("meta"):
    model, batch = nn.Sequential(*(Net(Config(64)) for _ in range(4))), torch.empty(256, 64)
begun = time.process_time()
found = rotoff.plan(model, batch, device="V100")
print("solver", "rotoff.solver" in sys.modules, file=sys.stderr)
print(time.process_time() - begun, file=sys.stderr)
print(found)
for body in sys.argv[1:]:
    Path(helper.__file__).write_text(f"import torch\\n\\ndef nonlinear(x):\\n    return {body}\\n")
    importlib.invalidate_caches()
    importlib.reload(helper)
    print("edited", rotoff.plan(model, batch, device="V100"))
"""


@pytest.fixture
def question() -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4))), torch.empty(256, 64)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry for each answer that was not in the cache."""
    seen: list[Any] = []
    before = mode_comparison.answer
    monkeypatch.setattr(mode_comparison, "answer", lambda *args: seen.append(args) or before(*args))
    return seen


def test_the_second_answer_is_the_first(question: Any, planned: list[Any], tmp_path: Path) -> None:
    first, second = (rotoff.plan(*question, device="V100", cache_directory=tmp_path) for _ in range(2))
    assert len(planned) == 1
    assert first == second
    assert first.to_dict() == second.to_dict() and str(first) == str(second)
    assert first.chain.to_dict() == second.chain.to_dict()
    assert first.placed and second.placed


@pytest.mark.slow
def test_whatever_an_answer_depends_on_is_in_its_key(planned: list[Any], tmp_path: Path) -> None:
    def asked(width: int = 64, batch: int = 256, change: Any = None, **options: Any) -> None:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(64, width), nn.Dropout(0.1), nn.Linear(width, 64))
            sample = torch.empty(batch, 64)
        if change is not None:
            change(model)
        rotoff.plan(model, sample, **{"device": "V100", "cache_directory": tmp_path, **options})

    def freeze(model: nn.Sequential) -> None:
        model[0].weight.requires_grad_(False)

    def tie(model: nn.Sequential) -> None:
        model[2].weight = model[0].weight

    def transpose(model: nn.Sequential) -> None:
        model[0].weight = nn.Parameter(model[0].weight.detach().t().contiguous().t())

    def drop_more(model: nn.Sequential) -> None:
        model[1].p = 0.2

    asked()
    small = rotoff.Device("V100", 2**30, 1e12, {"float32": 1e12}, 1e10, 1e10)
    for n, other in enumerate(
        [
            {"width": 65}, {"batch": 257}, {"mem_limit": "1 MiB"}, {"modes": "remat"}, {"optimizer": "sgd"},
            {"mem_slots": 40}, {"host_bandwidth": 1e9}, {"device": "T4"}, {"device": small},
            {"change": freeze}, {"change": tie}, {"change": transpose}, {"change": drop_more},
            {"change": lambda model: model.bfloat16()},
        ],
        start=2,
    ):  # fmt: skip
        asked(**other)
        assert len(planned) == n, other
        asked(**other)
        assert len(planned) == n, other
    with torch.autocast("cpu", dtype=torch.bfloat16):
        asked()
    with torch.device("meta"):
        wrapped = rotoff.Checkpointable(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 64)), stages=1)
    rotoff.plan(wrapped, torch.empty(256, 64, device="meta"), device="V100", cache_directory=tmp_path)
    assert len(planned) == n + 2


def test_a_damaged_entry_is_planned_anew(
    question: Any, planned: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = rotoff.plan(*question, device="V100", cache_directory=tmp_path)
    (path,) = tmp_path.glob("step-*.json")
    whole = path.read_text()
    entry = json.loads(whole)
    entry["value"]["found"]["keep_all_time"] *= 2
    without = json.loads(whole)
    del without["value"]["files"]
    others = (json.dumps(one) for one in (entry, without, {**entry, "value": 7}))
    for n, damaged in enumerate(("", whole[: len(whole) // 2], *others), start=2):
        path.write_text(damaged)
        with caplog.at_level(logging.WARNING, logger="rotoff"):
            caplog.clear()
            assert rotoff.plan(*question, device="V100", cache_directory=tmp_path) == first
        assert len(planned) == n and "ignored" in caplog.text


def test_nothing_is_kept_of_what_another_process_cannot_recognise(question: Any, tmp_path: Path) -> None:
    model, batch = question
    model.extra = object()
    rotoff.plan(model, batch, device="V100", cache_directory=tmp_path)
    rotoff.plan(*question, device="V100", cache_directory=None)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_another_process_answers_at_once_until_the_code_is_edited(tmp_path: Path) -> None:
    helper = tmp_path / "helper.py"
    helper.write_text("import torch\n\ndef nonlinear(x):\n    return torch.tanh(x)\n")
    (tmp_path / "ask.py").write_text(SCRIPT)

    def ask(seed: str, *edits: str) -> tuple[str, float]:
        """What it prints, and the CPU seconds of the first answer, the import of what that needs included."""
        paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")]), *sys.path])
        environment = {"PYTHONPATH": paths, "ROTOFF_CACHE": str(tmp_path / "cache"), "PYTHONHASHSEED": seed}
        environment |= {"PYTHONDONTWRITEBYTECODE": ""}  # or each process would compile what it imports
        ran = subprocess.run(
            [sys.executable, str(tmp_path / "ask.py"), *edits],
            env={**os.environ, **environment}, capture_output=True, text=True, check=True, cwd=tmp_path,
        )  # fmt: skip
        assert f"solver {seed == '1'}" in ran.stderr  # an answer that is there imports nothing that would find one
        return ran.stdout, float(ran.stderr.split()[-1])

    first, _ = ask("1")
    _, seconds = ask("3")
    said, other = ask("2", "torch.exp(torch.tanh(x))")
    again, edited = said.split("edited ")
    assert again == first
    assert min(seconds, other) < 0.2  # measured: 0.04
    assert edited != first
    assert len(list((tmp_path / "cache").iterdir())) == 1  # the question is the same
