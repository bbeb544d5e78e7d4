"""How often stages are timed, and what is shown meanwhile."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rotoff
from rotoff.profile.timing import convergence as steady
from rotoff.profile.timing.convergence import Repeats, Series, half_width

pytestmark = pytest.mark.full_timing


def test_median_interval_is_that_of_the_sign_test() -> None:
    # Conover's table of the binomial: 95 % of the interval needs k = 0 up to 8 runs, 1 up to 11, 2 up to 14, 3 at 15
    for n, k in [(3, 0), (5, 0), (8, 0), (9, 1), (11, 1), (12, 2), (14, 2), (15, 3), (100, 39)]:
        times = [float(t) for t in range(n)]
        assert half_width(times) == (n - 1) / 2 - k, n
    assert half_width([7.0]) == 0


def count(times: Callable[[int], float], repeats: Repeats) -> int:
    made: list[float] = []
    for n in repeats.rounds(lambda: [Series([1.0] * len(made)), Series(made)]):
        assert n == len(made)
        made.append(times(n))
    return len(made)


def test_constant_times_run_thrice_and_outliers_add_six() -> None:
    assert count(lambda n: 1 + 0.001 * n, Repeats()) == 3
    assert count(lambda n: 50.0 if n == 1 else 1 + 0.001 * n, Repeats()) == 9
    assert count(lambda n: 1 + n % 2, Repeats()) == 15
    assert count(lambda n: 1 + n % 2, Repeats.read(7)) == 7


def test_slow_stages_stop_at_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(steady.time, "perf_counter", lambda: now[0])

    def wavering(seconds: float) -> Callable[[int], float]:
        def time(n: int) -> float:
            now[0] += seconds
            return 1 + n % 2

        return time

    assert count(wavering(0.06), Repeats()) == 3
    assert count(lambda n: wavering(0.06)(n) and 1 + 0.05 * n, Repeats()) == 2  # long runs that agree
    assert count(wavering(0.02), Repeats()) == 5
    assert count(wavering(0.001), Repeats()) == 15


def test_spread_of_difference_is_relative_to_its_scale() -> None:
    assert Series([0.01, 0.02, 0.03], scale=1.0).converged(0.02)
    assert not Series([0.01, 0.02, 0.03]).converged(0.02)


@pytest.mark.parametrize("repeats", [0, -1, 2.5, True])
def test_invalid_repeats_are_refused(repeats: object) -> None:
    with pytest.raises(rotoff.OptionError, match="repeats is"):
        rotoff.Checkpointable(nn.Sequential(nn.Linear(4, 4))).measure(torch.randn(2, 4), repeats=repeats)


class Counted(torch.autograd.Function):
    """Counts the forwards that it is in."""

    runs = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Counted.runs += 1
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Counting(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(Counted.apply(x))


def runs(model: nn.Module, repeats: int | None, x: torch.Tensor | None = None) -> int:
    Counted.runs = 0
    rotoff.Checkpointable(model, forms=False).measure(torch.randn(2, 4) if x is None else x, repeats=repeats)
    return Counted.runs


def test_repeats_fixes_runs_and_processes_use_default(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(Counting(4, 4), nn.Tanh())
    untimed = runs(model, 1) - 1
    assert runs(model, 9) == untimed + 9
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    looked: list[Sequence[Series]] = []
    monkeypatch.setattr(Series, "converged", lambda self, _: looked.append(self.seconds) or False)
    assert runs(model, None) == untimed + steady.FIXED
    assert not looked  # what one process sees, another may not


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_line_is_shown_on_terminals_only(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rotoff.io import progress as progress_bar

    monkeypatch.setattr(progress_bar.sys.stderr, "isatty", lambda: terminal, raising=False)
    clock = iter(range(1000))
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: float(next(clock)))
    model = rotoff.Checkpointable(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    model.measure(torch.randn(2, 4), progress=False)
    assert capsys.readouterr().err == ""
    model.measure(torch.randn(2, 4))
    said = capsys.readouterr()
    assert said.out == ""
    shown = re.findall(r"measuring \[[#.]{24}\] +(\d+)% (\w*)", said.err)
    assert shown == ([("0", "0"), ("50", "1"), ("100", "")] if terminal else [])
    assert said.err.endswith("\r\x1b[2K") is terminal
    assert "\n" not in said.err


class Alike(nn.Module):
    """Of which all are of one kind; counts the forwards of all."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(Counted.apply(x)))


def test_stages_of_one_kind_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*[Alike() for _ in range(12)])
    monkeypatch.setattr(Series, "converged", lambda self, width: True)
    monkeypatch.setattr(steady, "LONG", math.inf)  # however busy the machine is
    x = torch.randn(512, 256)
    fewest = runs(model, 1, x)  # one timed run of each kind
    # of the first (whose input needs no gradient), the second and the last (on whose output nobody runs); the others
    # are as the second
    assert runs(model, 4, x) == fewest + 3 * 3
    assert runs(model, None, x) == fewest + 3 * 2
    wrapped = rotoff.Checkpointable(model).measure(torch.randn(512, 256))
    stages = wrapped.chain.stages
    assert len({(s.forward_time, s.backward_time, s.tail_time) for s in stages[1:-1]}) == 1
    assert len({tuple(form.backward_time for form in s.forms) for s in stages[1:-1]}) == 1
    assert stages[1].backward_time != stages[-1].backward_time


def test_stages_of_different_kinds_are_timed_separately() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 65), nn.Tanh(), nn.Linear(65, 64), nn.Tanh())
    wrapped = rotoff.Checkpointable(model, stages=[str(n) for n in range(6)]).measure(torch.randn(512, 64))
    assert len({s.forward_time for s in wrapped.chain.stages}) == 6


@pytest.mark.slow
def test_measuring_and_training_import_no_compiler() -> None:
    """Importing ``torch._dynamo`` takes seconds; a dispatch mode does so unless it says that it need not."""
    program = """
import sys, torch, rotoff
from torch import nn
block = lambda: nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 64), nn.Tanh())
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = block()
    def forward(self, x):
        return x + self.inner(x)
model, x = nn.Sequential(*[Block() for _ in range(4)]), torch.randn(256, 64)
wrapped = rotoff.Checkpointable(model, cache_directory=None).measure(x)
assert any(stage.forms for stage in wrapped.chain.stages)
wrapped.compute_sequence(int(0.6 * wrapped.keep_all_memory), mode="remat", refine=False)
wrapped(x).sum().backward()
assert "torch._dynamo" not in sys.modules
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(rotoff.__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
