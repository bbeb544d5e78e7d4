"""Convolutions by other algorithms: which flags are in force when, and that they are put back. On a CPU they change no
bits."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from models import Fails, fresh, plain, same, train
from planned_steps import every_form, step_peak, with_sequence
from random_programs import random_sequence
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import rotoff
from rotoff.core.chain import Form
from rotoff.core.sequence import parse
from rotoff.errors import OptionError
from rotoff.profile.timing.timing_cache import KnownForm
from rotoff.tensors.convolutions import Algorithms, forward_by, other_algorithms
from rotoff.tensors.kernel_flags import kernel_flags
from rotoff.tensors.recipe import Recipe
from rotoff.tensors.stage import SavedKind

USUAL = (True, False, False)  # enabled, deterministic, benchmark
IN_FORCE = {Algorithms.NATIVE: (False, False, False), Algorithms.DETERMINISTIC: (True, True, False)}


@pytest.fixture(autouse=True)
def _flags_are_put_back() -> Iterator[None]:
    assert kernel_flags()[:3] == USUAL
    yield
    assert kernel_flags()[:3] == USUAL


class Look(torch.autograd.Function):
    """Notes the flags in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, noted: list[tuple[bool, bool, bool]]) -> torch.Tensor:
        ctx.noted = noted
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.noted.append(kernel_flags()[:3])
        return gradient, None


class Block(nn.Module):
    """A convolution and batch norm; notes the flags in its backward, and those that it sees itself in its forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.forwards: list[tuple[bool, bool, bool]] = []
        self.backwards: list[tuple[bool, bool, bool]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards.append(kernel_flags()[:3])
        return x + Look.apply(torch.relu(self.norm(self.conv(x))), self.backwards)


class Convolutions(TorchDispatchMode):
    """Notes the flags at each convolution, and those at every other operation."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[bool, bool, bool]] = []
        self.others: set[tuple[bool, bool, bool]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution.default:
            self.noted.append(kernel_flags()[:3])
        elif func is not torch.ops.aten.convolution_backward.default:
            self.others.add(kernel_flags()[:3])
        return func(*args, **(kwargs or {}))


def with_forms(wrapped: rotoff.Checkpointable, by: Algorithms) -> rotoff.Checkpointable:
    """Give stages, but the last, the whole of ā by other algorithms as form 1, and their smaller forms by them after
    that."""
    profile, stages, behaviours = wrapped.profile, [], []
    for stage, behaviour in zip(profile.chain.stages[:-1], profile.behaviours[:-1], strict=True):
        own = frozenset(n for n, kind in enumerate(behaviour.saved) if kind is SavedKind.OWN)
        recipes = [Recipe(own, {}, 0, (), {}, algorithms=by), *(replace(r, algorithms=by) for r in behaviour.forms)]
        whole = Form(
            stage.saved_bytes, stage.backward_time, stage.forward_transient_bytes, stage.backward_transient_bytes
        )
        stages.append(replace(stage, forms=(whole, *stage.forms)))
        behaviours.append(replace(behaviour, forms=tuple(recipes)))
    stages.append(profile.chain.stages[-1])
    behaviours.append(profile.behaviours[-1])
    course = wrapped._latest
    course.profile = replace(profile, chain=replace(profile.chain, stages=tuple(stages)), behaviours=tuple(behaviours))
    course._planned = None
    return wrapped


def planned(*ops: str) -> rotoff.Sequence:
    return rotoff.Sequence(tuple(parse(op) for op in ops))


def blocks() -> tuple[rotoff.Checkpointable, list[Block], torch.Tensor]:
    model = nn.Sequential(*[Block(4) for _ in range(3)])
    x = torch.randn(2, 4, 8, 8)
    wrapped = rotoff.Checkpointable(model, stages=list(model)).measure(x)
    for block in model:
        block.forwards.clear()
        block.backwards.clear()
    return wrapped, list(model), x


@pytest.mark.parametrize("by", list(Algorithms))
def test_flags_change_per_forward_convolution_and_for_whole_backward(by: Algorithms) -> None:
    wrapped, (first, second, third), x = blocks()
    smallest = len(with_forms(wrapped, by).chain.stages[1].forms)
    with_sequence(wrapped, planned("F_sel 1 1", "F_ck 2", "F_all 3", "B 3", f"F_sel 2 {smallest}", "B 2", "B 1"))
    with Convolutions() as seen:
        loss = wrapped(x).sum()
        loss.backward()
    # F_sel 1, F_ck 2, F_all 3, F_sel 2, its redo
    assert seen.noted == [IN_FORCE[by], USUAL, USUAL, IN_FORCE[by], IN_FORCE[by]]
    assert first.backwards == second.backwards == [IN_FORCE[by]]
    assert third.backwards == [USUAL]
    assert {*first.forwards, *second.forwards, *third.forwards} == {USUAL}


def test_last_form_determines_backward_algorithms() -> None:
    wrapped, (first, *_), x = blocks()
    with_forms(wrapped, Algorithms.NATIVE)
    with_sequence(wrapped, planned("F_sel 1 1", "F_all 2", "F_all 3", "drop abar 1", "B 3", "F_all 1", "B 2", "B 1"))
    wrapped(x).sum().backward()
    assert first.backwards == [USUAL]


def test_every_way_to_call_a_convolution_is_recognised() -> None:
    x, weight = torch.randn(1, 2, 6, 6), torch.randn(2, 2, 3, 3)
    with Convolutions() as seen, forward_by(Algorithms.NATIVE):
        nn.Conv2d(2, 2, 3, padding="same")(x)
        nn.Conv1d(6, 2, 3)(x[0])
        nn.Conv3d(2, 2, 1)(x[..., None])
        nn.ConvTranspose2d(2, 2, 3)(x)
        nn.functional.conv2d(x, weight)
        torch.ops.aten.conv2d(x, weight)
        torch.ops.aten.conv2d.default(x, weight)
        torch.convolution(x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    assert seen.noted == [IN_FORCE[Algorithms.NATIVE]] * 8
    assert seen.others == {USUAL}


@pytest.mark.parametrize("by", list(Algorithms))
@pytest.mark.parametrize("name", ["convolutional", "stateful", "double"])
@pytest.mark.grid(every=8)
def test_random_sequences_keep_predicted_bytes(name: str, by: Algorithms) -> None:
    model, batch = fresh(name)
    wrapped = with_forms(rotoff.Checkpointable(model).measure(batch()), by)
    chain = wrapped.chain
    for sequence in (every_form(chain, 1), *(random_sequence(chain, seed) for seed in range(3))):
        again, batch = fresh(name)
        wrapped.load_state_dict(again.state_dict())
        wrapped.zero_grad()
        with_sequence(wrapped, sequence)
        assert same(train(wrapped, batch, steps=2), plain(name, steps=2))
        assert step_peak(wrapped, batch) <= wrapped.get_expected_memory()


class Failing(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(Fails.apply(x))


def test_failing_backward_restores_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(Block(4), Failing(4), Block(4))
    x = torch.randn(2, 4, 8, 8)
    wrapped = rotoff.Checkpointable(model, stages=list(model)).measure(x)
    with_sequence(with_forms(wrapped, Algorithms.NATIVE), every_form(wrapped.chain, 1))
    loss = wrapped(x).sum()
    monkeypatch.setattr(Fails, "now", True)
    with pytest.raises(MemoryError, match="injected") as caught:
        loss.backward()
    assert kernel_flags()[:3] == USUAL  # though loss and error, and with them the graph and the step, are still there
    assert model[1].backwards[-1] == IN_FORCE[Algorithms.NATIVE]
    assert caught.value.args == ("injected",)


def test_failing_forward_restores_flags() -> None:
    wrapped, (_, second, _), x = blocks()
    with_sequence(with_forms(wrapped, Algorithms.NATIVE), every_form(wrapped.chain, 1))
    second.conv.dilation = (9, 9)  # the convolution itself raises
    with pytest.raises(RuntimeError, match="size"):
        wrapped(x)
    assert kernel_flags()[:3] == USUAL


def test_aborted_step_restores_flags() -> None:
    wrapped, (first, *_), x = blocks()
    with_sequence(with_forms(wrapped, Algorithms.DETERMINISTIC), every_form(wrapped.chain, 1))
    output = wrapped(x)
    (gradient,) = torch.autograd.grad(output.sum(), [first.conv.weight], retain_graph=True)
    assert kernel_flags()[:3] == USUAL
    assert torch.isfinite(gradient).all()
    del output
    gc.collect()


# -- the option


def test_cpu_offers_no_algorithms() -> None:
    model, batch = fresh("convolutional")
    wrapped = rotoff.Checkpointable(model, conv_algorithms="any").measure(batch())
    assert other_algorithms(torch.device("cpu")) == ()
    assert all(by is None for row in wrapped.profile.forms for by in row.algorithms)
    assert any(row.algorithms for row in wrapped.profile.forms)
    wrapped.compute_sequence(int(0.9 * wrapped.keep_all_memory))
    assert same(train(wrapped, batch), plain("convolutional"))


def test_flags_determine_available_algorithms() -> None:
    cuda = torch.device("cuda")
    assert other_algorithms(cuda) == (Algorithms.DETERMINISTIC, Algorithms.NATIVE)
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        assert other_algorithms(cuda) == (Algorithms.NATIVE,)
    with torch.backends.cudnn.flags(enabled=False):
        assert other_algorithms(cuda) == ()


@pytest.mark.parametrize("bad", [True, None, "all", 3, ["any"]])
def test_unknown_conv_algorithms_are_refused(bad: Any) -> None:
    with pytest.raises(OptionError, match="conv_algorithms is .*; give 'plain'"):
        rotoff.Checkpointable(nn.Linear(2, 2), conv_algorithms=bad)
    with pytest.raises(OptionError, match="conv_algorithms is .*; give 'plain'"):
        rotoff.attach(nn.Linear(2, 2), conv_algorithms=bad)


def test_forms_with_equal_storage_differ_by_algorithm() -> None:
    recipes = [Recipe(frozenset({3, 1}), {}, 0, (), {}, algorithms=by) for by in (None, *Algorithms)]
    assert [recipe.identity for recipe in recipes] == [((1, 3), ""), ((1, 3), "deterministic"), ((1, 3), "native")]
    assert KnownForm(recipes[1].identity, 1.0) == (((1, 3), "deterministic"), 1.0)
