"""Forms of stages that save what is not the same in any two runs: memory that nobody wrote, sums in another order."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from models import Residual
from torch import nn

import rotoff
from rotoff.profile.profile import StageForms
from rotoff.profile.selective import variant_meter as form_meter
from rotoff.runtime.execution_plan import compile_sequence

Vague = Callable[[int, torch.Tensor], torch.Tensor]  # the number of the run and a tensor, to what is saved beside it
runs = count(1)
in_redo: list[bool] = []  # filled while one runs


class SavesBeside(torch.autograd.Function):
    """Passes its input through a cosine and saves something else beside it, as fused attention does its random
    state."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, vague: Vague) -> torch.Tensor:
        ctx.save_for_backward(x.sin(), vague(next(runs), x))
        return x.cos()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return -grad * ctx.saved_tensors[0], None


class Block(nn.Module):
    def __init__(self, vague: Vague) -> None:
        super().__init__()
        self.vague = vague
        self.inner = Residual(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(SavesBeside.apply(x, self.vague))


def forms(vague: Vague) -> tuple[StageForms, rotoff.Checkpointable, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Block(vague), nn.Linear(16, 4))
    x = torch.randn(64, 16)
    wrapped = rotoff.Checkpointable(model, stages=list(model)).measure(x)
    return wrapped.profile.forms[1], wrapped, x


def number_of_the_run(run: int, x: torch.Tensor) -> torch.Tensor:
    return torch.full((2,), run, dtype=torch.int64)


def rounded(run: int, x: torch.Tensor) -> torch.Tensor:
    return torch.full((64,), 1 + 1e-6 * run)


def another_size(run: int, x: torch.Tensor) -> torch.Tensor:
    return torch.full((64,), float(run * run))


def other_in_a_redo(run: int, x: torch.Tensor) -> torch.Tensor:
    return torch.full((2,), len(in_redo), dtype=torch.int64)


@pytest.mark.parametrize("vague", [number_of_the_run, rounded])
def test_nondeterministic_bits_do_not_reject_a_form(vague: Vague) -> None:
    found, wrapped, x = forms(vague)
    assert found.forms, found.reason
    assert not any("full" in name for name in found.keeps[-1])  # the smallest form makes it again
    wrapped.compute_sequence(1 << 40)
    ops = ["F_all 1", f"F_sel 2 {len(found.forms)}", "F_all 3", "B 3", "B 2", "B 1"]
    wrapped._latest.plan = compile_sequence(wrapped.profile.chain, rotoff.Sequence.from_text(ops))
    torch.manual_seed(1)
    wrapped(x).square().sum().backward()
    torch.manual_seed(1)
    plain = torch.autograd.grad(wrapped._model(x).square().sum(), list(wrapped._model.parameters()))
    assert all(torch.equal(p.grad, g) for p, g in zip(wrapped._model.parameters(), plain, strict=True))


def test_floats_beyond_rounding_reject_a_form() -> None:
    found, _, _ = forms(another_size)
    assert all(any("full" in name for name in names) for names in found.keeps)  # what is stored need not be made again


def test_integers_that_only_a_redo_changes_reject_a_form(monkeypatch: pytest.MonkeyPatch) -> None:
    original = form_meter.redo

    def redo(*args: Any, **kwargs: Any) -> None:
        in_redo.append(True)
        try:
            original(*args, **kwargs)
        finally:
            in_redo.clear()

    monkeypatch.setattr(form_meter, "redo", redo)
    found, _, _ = forms(other_in_a_redo)
    assert all(any("full" in name for name in names) for names in found.keeps)


def test_out_of_memory_while_measuring_forms_is_tolerated(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(form_meter, "_same_bits", full)
    found, wrapped, x = forms(number_of_the_run)
    assert found.forms == ()
    assert found.reason == "the device has too little memory left to measure them"
    wrapped.compute_sequence(wrapped.keep_all_memory)
    wrapped(x).sum().backward()
