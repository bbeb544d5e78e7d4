"""Convolutions by other algorithms on CUDA: within the bytes that the allocator counts, gradients close to plain's,
flags put back.

What cuDNN takes for a workspace is the GPU's own matter; the stand-in of tests/cuda_standin always takes one. The
figures of each form (bytes and milliseconds of a step) are written beside the test's result.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from device_bytes import Peak, step_peak
from models import Fails
from torch import nn

import rotoff
from rotoff.core.sequence import Op, OpKind
from rotoff.errors import InfeasibleError
from rotoff.profile.selective import conv_forms
from rotoff.runtime.execution_plan import compile_sequence
from rotoff.tensors.convolutions import Algorithms
from rotoff.tensors.kernel_flags import kernel_flags

pytestmark = pytest.mark.cuda

STANDIN = "STANDIN" in os.environ
WIDTH, BATCH, SIDE = (8, 4, 16) if STANDIN else (96, 32, 56)
Record = Callable[[str, object], None]


class Block(nn.Module):
    """Two convolutions, each with batch norm: the norm is cuDNN's as well, and must stay so."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = [(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()) for _ in range(2)]
        self.layers = nn.Sequential(*(layer for three in layers for layer in three))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(Fails.apply(x))


@pytest.fixture(autouse=True)
def _usual_flags() -> Iterator[None]:
    """float32 all through, so that algorithms differ by rounding alone; and no test leaves flags behind."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        before = kernel_flags()[:3]
        yield
        assert kernel_flags()[:3] == before == (True, False, False)


def model_and_batch() -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    blocks = [Block(WIDTH) for _ in range(4)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 10)]
    model = nn.Sequential(nn.Conv2d(3, WIDTH, 3, padding=1), *blocks, *head).cuda()
    return model, torch.randn(BATCH, 3, SIDE, SIDE, device="cuda")


def measured(**options: Any) -> tuple[rotoff.Checkpointable, torch.Tensor]:
    model, x = model_and_batch()
    return rotoff.Checkpointable(model, **options).measure(x), x


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def apart(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The norm of all differences over that of what was expected."""
    differences = sum(float((a - b).double().square().sum()) for a, b in zip(got, expected, strict=True))
    return (differences / sum(float(b.double().square().sum()) for b in expected)) ** 0.5


def peak_of(model: nn.Module, x: torch.Tensor) -> Peak:
    ones = torch.ones(BATCH, 10, device="cuda")  # the caller's
    return step_peak(lambda: model(x).backward(ones), warm=2)


def step_milliseconds(model: nn.Module, x: torch.Tensor) -> float:
    spans = []
    for _ in range(2 if STANDIN else 12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        model(x).sum().backward()
        end.record()
        torch.cuda.synchronize()
        spans.append(begin.elapsed_time(end))
    return statistics.median(spans[1:])


def choice(wrapped: rotoff.Checkpointable, by: Algorithms | None, whole: bool) -> tuple[rotoff.Sequence, int]:
    """Each stage once, convolutions by other algorithms where a form has them, else as ever; and in how many stages."""
    ops = []
    for i, behaviour in enumerate(wrapped.profile.behaviours, start=1):
        forms = [
            k
            for k, r in enumerate(behaviour.forms, start=1)
            if by is not None and r.algorithms is by and r.complete == whole
        ]
        ops.append(Op(OpKind.F_SEL, i, forms[0]) if forms else Op(OpKind.F_ALL, i))
    chosen = sum(op.kind is OpKind.F_SEL for op in ops)
    return rotoff.Sequence((*ops, *(Op(OpKind.B, i) for i in range(len(ops), 0, -1)))), chosen


def test_every_form_keeps_to_its_bytes_and_nearly_to_the_gradients(record_property: Record) -> None:
    model, x = model_and_batch()
    expected = gradients(model, x)
    model.load_state_dict(model_and_batch()[0].state_dict())  # batch norm's statistics too
    wrapped = rotoff.Checkpointable(model, conv_algorithms="any").measure(x)
    tried = 0
    for by in (None, *Algorithms):
        for whole in (True, False):
            sequence, chosen = choice(wrapped, by, whole)
            if by is not None and not chosen:
                continue
            tried += chosen
            wrapped.compute_sequence(1 << 45)
            wrapped._latest.plan = compile_sequence(wrapped.profile.chain, sequence)
            got = gradients(wrapped, x)
            assert apart(got, expected) < 1e-3
            if STANDIN:  # whose other algorithms round otherwise
                assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)) == (by is None)
            assert kernel_flags()[:3] == (True, False, False)
            peak, predicted = peak_of(wrapped, x), wrapped.get_expected_memory()
            assert peak.asked <= predicted, (by, whole, peak)
            assert peak.given <= predicted + peak.slack, (by, whole, peak)
            name = f"{'flags' if by is None else by.value}, {'whole' if whole else 'smallest'}"
            record_property(f"{name}: peak bytes, predicted", f"{peak.given}, {predicted}")
            record_property(
                f"{name}: step ms, predicted",
                f"{step_milliseconds(wrapped, x):.3f}, {wrapped.get_expected_makespan() * 1e3:.3f}",
            )
    record_property("stages times forms with other algorithms", tried)
    if STANDIN:
        assert tried >= 5
    elif not tried:
        pytest.skip("cuDNN takes no workspace here that another algorithm would spare")


def test_plans_stay_within_their_limit_which_may_be_smaller_than_without_the_choice() -> None:
    wrapped, x = measured(conv_algorithms="any")
    chain = wrapped.profile.chain
    stages = []
    for stage, behaviour in zip(chain.stages, wrapped.profile.behaviours, strict=True):
        forms = tuple(f for f, r in zip(stage.forms, behaviour.forms, strict=True) if r.algorithms is None)
        stages.append(replace(stage, forms=forms))
    without = replace(chain, stages=tuple(stages))
    for mode in ("remat", "joint"):
        least = rotoff.min_mem_limit(chain, mode)
        assert least <= rotoff.min_mem_limit(without, mode)
    with pytest.raises(InfeasibleError) as refused:
        wrapped.compute_sequence(1, mode="remat")
    used = 0
    for share in (0.85, 0.65, 0.5, 0.0):
        limit = max(int(share * wrapped.keep_all_memory), refused.value.min_mem_limit)
        wrapped.compute_sequence(limit, mode="remat")
        recipes = [wrapped.profile.behaviours[op.stage - 1].forms[op.form - 1] for op in wrapped.sequence if op.form]
        used += sum(recipe.algorithms is not None for recipe in recipes)
        peak = peak_of(wrapped, x)
        assert peak.asked <= limit, (share, peak, limit)
        assert peak.given <= limit + peak.slack, (share, peak, limit)
        assert kernel_flags()[:3] == (True, False, False)
    if STANDIN:  # the least bytes are those of another algorithm
        assert used > 0
        assert rotoff.min_mem_limit(chain, "remat") < rotoff.min_mem_limit(without, "remat")


def test_by_default_there_are_none() -> None:
    wrapped, _ = measured()
    assert all(by is None for row in wrapped.profile.forms for by in row.algorithms)
    switched_off, _ = measured(conv_algorithms="any", forms=False)
    assert all(by is not None for row in switched_off.profile.forms for by in row.algorithms)
    assert not STANDIN or any(row.algorithms for row in switched_off.profile.forms)


@pytest.mark.parametrize("costly", [True, False])
def test_the_times_of_such_forms_are_known_again(costly: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # they hold, however busy the machine is
    monkeypatch.setattr("rotoff.profile.timing.timing_cache.TOLERANCE", math.inf)
    if not costly:  # those of other algorithms are better than what they are forms of, which is left out
        monkeypatch.setattr(conv_forms, "_more_seconds", lambda context, plain, trials: [0.0] * len(trials))
    first, _ = measured(conv_algorithms="any", cache_directory=tmp_path)
    again, _ = measured(conv_algorithms="any", cache_directory=tmp_path)
    for a, b in zip(first.profile.behaviours, again.profile.behaviours, strict=True):
        assert [r.identity for r in a.forms] == [r.identity for r in b.forms]
    assert [s.forms for s in first.chain.stages] == [s.forms for s in again.chain.stages]


def test_a_backward_that_fails_leaves_the_flags_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped, x = measured(conv_algorithms="any")
    by = next((by for by in Algorithms if choice(wrapped, by, True)[1]), None)
    if by is None and not STANDIN:
        pytest.skip("no stage has such a form here")
    sequence, _ = choice(wrapped, by, True)
    wrapped.compute_sequence(1 << 45)
    wrapped._latest.plan = compile_sequence(wrapped.profile.chain, sequence)
    loss = wrapped(x).sum()
    monkeypatch.setattr(Fails, "now", True)
    with pytest.raises(MemoryError, match="injected"):
        loss.backward()
    # autograd's thread for the device lets go of the backward a moment after the caller has the error
    end = time.monotonic() + 10
    while kernel_flags()[:3] != (True, False, False) and time.monotonic() < end:
        time.sleep(0.001)
    assert kernel_flags()[:3] == (True, False, False)  # though the loss, and with it the step, is still there
    monkeypatch.setattr(Fails, "now", False)
    wrapped(x).sum().backward()
