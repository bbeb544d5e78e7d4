"""The inverse questions: the largest size that trains, what binds beyond it, and the first device that will do."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Residual
from torch import nn

import rotoff
from rotoff.cli import main
from rotoff.errors import InfeasibleError, OptionError
from rotoff.tools.size_search import searched

WIDTH = 64
SMALL = rotoff.Device("small", 2**24, 1e10, {"float32": 1e10}, 1e9, 1e9)


def blocks(depth: int = 2) -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(*[Residual(WIDTH) for _ in range(depth)])


def rows(n: int) -> tuple[nn.Module, torch.Tensor]:
    return blocks(), torch.empty(n, WIDTH, device="meta")


def deep(n: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return blocks(n), (torch.empty(64, WIDTH, device="meta"),)


@pytest.mark.parametrize(("build", "step"), [(rows, 1000), pytest.param(deep, 4, marks=pytest.mark.slow)])
def test_the_largest_fits_and_the_next_is_proven_not_to(build: Any, step: int) -> None:
    found = rotoff.largest(build, device=SMALL, step=step)
    assert found.size > 0 and found.size % step == 0 and found.refused == found.size + step
    assert found.proven and found.planned is not None and found.planned.fits
    assert f"{found.size} works; {found.refused} cannot work: " in str(found)
    assert len(found.tried) <= 8  # halving what is open asks twice as often
    model, sample = build(found.refused)
    sample = sample if isinstance(sample, tuple) else (sample,)
    try:
        refused = rotoff.plan(model, *sample, device=SMALL, modes="joint")
    except rotoff.LimitError:
        return  # what is resident fills it
    assert not refused.fits
    assert "alone needs" in found.binds


def test_parameters_move_unless_a_mem_limit_is_given_and_what_binds_is_named() -> None:
    tiny = rotoff.Device("tiny", 2**22, 1e10, {"float32": 1e10}, 1e9, 1e9)
    assert rotoff.largest(deep, device=tiny, most=12).size == 12
    model, (x,) = deep(12)
    assert rotoff.first_device(model, x, devices=[tiny]).best.name.startswith("rotoff, device_limit")
    stay = rotoff.largest(deep, device=tiny, mem_limit="2 MiB", most=12)
    assert 0 < stay.size < 12 and stay.binds.startswith("resident bytes take ") and "(parameters " in stay.binds
    given = rotoff.largest(deep, device=tiny, mem_limit="100 KiB")
    assert (given.size, given.refused) == (0, 1) and given.binds.startswith("the training step needs at least")
    with pytest.raises(InfeasibleError, match="none of the devices works. tiny.*at least"):
        rotoff.first_device(*rows(2**17), devices=[tiny])


@pytest.mark.slow
def test_a_limit_above_the_device_is_the_device() -> None:
    model, x = rows(4096)
    large = rotoff.Device("large", 2**30, 1e9, {"float32": 1e9}, 1e9, 1e9)
    found = rotoff.first_device(model, x, devices=[large], mem_limit="1 TiB")
    assert found.fits and found.mem_limit < 2**30
    most = rotoff.largest(rows, device=SMALL, mem_limit="1 TiB", step=1000)
    assert most.planned is not None and most.planned.fits
    assert most.size == rotoff.largest(rows, device=SMALL, step=1000).size


@pytest.mark.slow
def test_a_time_bounds_it_as_well() -> None:
    free = rotoff.largest(rows, device=SMALL, step=1000)
    assert free.planned is not None
    seconds = free.planned.best.step_time / 2
    found = rotoff.largest(rows, device=SMALL, step_time=seconds, step=1000)
    assert 0 < found.size < free.size
    assert found.planned is not None and found.planned.best.step_time <= seconds
    assert "s a step" in found.binds
    nothing = rotoff.largest(rows, device=SMALL, step_time=1e-12)
    assert (nothing.size, nothing.refused, nothing.planned) == (0, 1, None)
    assert str(nothing).startswith("nothing works; 1 cannot work: the best plan found takes")


@pytest.mark.parametrize("last", [1, 2, 3, 1000])
@pytest.mark.parametrize("power", [0, 0.5, 1, 2, 3])
def test_the_search_ends_beside_the_largest_for_any_shape_of_what_is_left(power: float, last: int) -> None:
    for largest in (0, 1, 2, 5, 37, 999, 5000):
        asked: list[int] = []

        def ask(n: int, asked: list[int] = asked, largest: int = largest) -> Any:
            asked.append(n)
            left = (largest + 0.5) ** power - n**power if power else 0.5 - (n > largest)
            return {"bytes": left}

        tried = searched(ask, last)
        assert len(asked) == len(set(asked)) <= 3 * math.log2(last + 1) + 3
        low = max((n for n in tried if tried[n]["bytes"] >= 0), default=0)
        assert low == min(largest, last)
        assert low == last or low + 1 in tried


def test_all_that_was_asked_for_may_work() -> None:
    found = rotoff.largest(rows, device=SMALL, most=3)
    assert (found.size, found.refused, found.proven) == (3, None, True)
    assert str(found) == "3 works, and nothing larger was asked for"
    assert all(found.tried.values())


def test_bad_questions() -> None:
    with pytest.raises(OptionError, match=r"build\(1\) returned Sequential; it must return \(model, sample\)"):
        rotoff.largest(lambda n: blocks())
    with pytest.raises(OptionError, match="step is 0; give a whole number from 1"):
        rotoff.largest(rows, step=0)
    with pytest.raises(OptionError, match="most is 3, and sizes are multiples of 4"):
        rotoff.largest(rows, step=4, most=3)
    with pytest.raises(OptionError, match="build is a Sequential; give a function of a size"):
        rotoff.largest(blocks())
    with pytest.raises(OptionError, match="optimizer is 'lion'; known ones are sgd"):
        rotoff.largest(rows, optimizer="lion")
    with pytest.raises(OptionError, match="mem_slots is 0"):
        rotoff.largest(rows, mem_slots=0)
    for seconds in (-1, "1 s", float("nan"), True):
        with pytest.raises(OptionError, match=r"step_time is .*; give seconds above 0"):
            rotoff.largest(rows, step_time=seconds)
        with pytest.raises(OptionError, match=r"step_time is .*; give seconds above 0"):
            rotoff.first_device(*rows(8), devices=[SMALL], step_time=seconds)


@pytest.mark.slow
def test_the_first_device_of_a_list_is_the_first_that_will_do() -> None:
    model, x = rows(4096)
    slow = rotoff.Device("slow", 2**30, 1e9, {"float32": 1e9}, 1e9, 1e9)
    fast = rotoff.Device("fast", 2**30, 1e12, {"float32": 1e13}, 1e9, 1e9)
    devices = [SMALL, slow, fast]
    assert rotoff.first_device(model, x, devices=devices).device == "slow"
    assert rotoff.first_device(model, x, devices="V100").device == "V100"
    seconds = rotoff.plan(model, x, device=fast, modes="joint").best.step_time
    assert rotoff.first_device(model, x, devices=devices, step_time=seconds).device == "fast"
    with pytest.raises(
        InfeasibleError,
        match=r"none of the devices works\. .*small.*slow: a step takes.*fast: a step takes",
    ):
        rotoff.first_device(model, x, devices=devices, step_time=seconds / 2)


class Sliced(nn.Module):
    """Takes contexts of up to 128."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.empty(1, 128, 16))
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x + self.positions[:, : x.shape[1]])


def test_a_size_that_the_model_does_not_take_is_named_and_not_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        sliced, linear = Sliced(), nn.Linear(256, 16)
    logged: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "callHandlers", logged.append)
    with pytest.raises(rotoff.MeasureError, match=r"^size \d+: .* give the largest that it takes as most=$"):
        rotoff.largest(lambda n: (sliced, torch.empty(1, n, 16, device="meta")), device="T4")
    with pytest.raises(rotoff.MeasureError, match="^size 1: .*reduction dim"):
        rotoff.largest(lambda n: (linear, torch.empty(n, 255, device="meta")), device="T4")
    assert not logged


def test_arguments_that_are_none_are_named_with_a_cure() -> None:
    model, x = rows(8)
    for name, sentence in (
        ("modes", "modes is no argument of first_device, which plans in mode joint"),
        ("limit", "limit is no argument of rotoff.plan, nor of the forward of Sequential; did you mean mem_limit?"),
    ):
        with pytest.raises(OptionError, match=sentence):
            rotoff.first_device(model, x, devices=[SMALL], **{name: 3})
    with pytest.raises(OptionError, match="devices is 3; give names or Devices"):
        rotoff.first_device(model, x, devices=3)
    with pytest.raises(OptionError, match="build cannot be called with a size .*; give a function such as build"):
        rotoff.largest(lambda: (model, x))


def test_no_device_at_all_is_refused() -> None:
    with pytest.raises(rotoff.OptionError, match="devices is empty; give at least one"):
        rotoff.first_device(torch.nn.Linear(4, 4), torch.randn(2, 4), devices=[])


class Asks(nn.Module):
    """Asks for a value that its inputs do not decide, as the mask of a language model does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) if torch.arange(4).diff().eq(1).all() else -x
        return x


def test_a_question_that_the_batch_does_not_decide_can_be_estimated_and_is_not_asked_again() -> None:
    names = [f"layers.{n}" for n in range(3)]
    chain = rotoff.estimate(rotoff.Checkpointable(Asks(), stages=names), torch.randn(256, 16), device="CPU")
    model = rotoff.Checkpointable(Asks(), stages=names, cache_directory=None).measure(torch.randn(256, 16), repeats=1)
    found, measured = ([(s.name, s.output_bytes, s.saved_bytes) for s in one.stages] for one in (chain, model.chain))
    assert found == measured and len(found) == 3
    model.compute_sequence(model.min_mem_limit("remat"), mode="remat", refine=False)
    plain = Asks()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(256, 16)
    for one in (model, plain):
        one(x).square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sized.py").write_text(
        "import torch\nfrom torch import nn\n\n\ndef build_for(n):\n    with torch.device('meta'):\n"
        "        return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), torch.empty(n, 64)\n"
    )
    command = ["largest", "sized.py:build_for", "--device", "T4", "--mem-limit", "4 MiB", "--step", "512"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["size"] % 512 == 0 and found["refused"] == found["size"] + 512
    assert found["planned"]["fits"]
    assert main(command) == 0
    assert f"{found['size']} works; {found['refused']} cannot work" in capsys.readouterr().out
    assert main([*command, "--step-time", "1e-12"]) == 1
    (tmp_path / "unsized.py").write_text("def build():\n    pass\n")
    assert main(["largest", "unsized.py:build"]) == 2
    assert "unsized.py:build cannot be called with a size" in capsys.readouterr().err
