"""Steps by plans on either tape: nothing left behind, right after errors, and within the limit off their course."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from allocated import left_bytes
from models import ALL, TIMES, many
from on_tape import TAPES
from planned_steps import Beside
from torch import nn
from trunks import Block, Long, drawn


def within(net: nn.Module, x: Any, share: float, new_tape: Any, mode: str = "joint") -> Beside:
    """`net` within a limit that is a part of the way from the smallest to keeping everything, followed by `new_tape`."""
    beside = Beside(net, sample=(x,))
    beside.planned._steps.new_tape = new_tape
    return beside.within(mode, share)


@pytest.mark.parametrize("name", ALL)
def test_the_plain_step_is_foretold_to_the_byte_and_runs_as_it_is(name: str) -> None:
    net, draw = many(name)
    beside = Beside(net, 1 << 50, stages=20)
    beside.step(draw())
    assert beside.planned.keep_all_memory
    assert beside.planned.get_expected_memory() <= 1.01 * beside.check(draw())


@pytest.mark.parametrize("new_tape", TAPES)
def test_a_step_frees_all_that_it_made_once_its_graph_is_gone(new_tape: Any) -> None:
    torch.manual_seed(0)
    beside = within(nn.Sequential(*[Block() for _ in range(6)]), drawn(0), 0.2, new_tape)
    beside.step(drawn(0))

    def step(ends: bool) -> None:
        out = beside.planned(drawn(0))
        if ends:
            out.sum().backward()

    for ends in (True, True, False):
        assert left_bytes(functools.partial(step, ends)) <= 0


class Skips(Long):
    skip = False

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return torch.sin(x) * 2 if self.skip and n == 4 else x


@pytest.mark.parametrize(("mode", "share"), [("joint", 0.4), ("remat", 0.01)])
@pytest.mark.parametrize("new_tape", TAPES)
@pytest.mark.grid(every=2)
def test_a_forward_off_its_course_is_right_within_the_limit_and_planned_when_it_recurs(
    new_tape: Any, mode: str, share: float, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    x = drawn(0).repeat(TIMES, 1)
    beside = within(Skips(), x, share, new_tape, mode)
    for n in range(8):
        beside.plain.skip = beside.model.skip = n >= 3
        if n == 5:  # that one is recorded
            beside.step(x)
        else:
            assert beside.peak(x) <= beside.limit, n
        assert len(beside.planned.plans()) == 1 + (n >= 5)
    assert caplog.text.count("made other operations") == 1
