"""Steps by plans on either tape: nothing left behind, right after errors, and within the limit off their course."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from allocated import left_bytes, peak_bytes
from models import ALL, TIMES, many, same
from on_tape import TAPES
from torch import nn
from torch.utils._pytree import tree_leaves
from trunks import Block, Long, drawn

import rotoff


def train(run: Any, args: Any) -> torch.Tensor:
    torch.manual_seed(1)
    out = run(*args)
    parts = [t.float().square().mean() for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
    loss = torch.stack(parts).sum()
    loss.backward()
    return loss.detach()


def gradients(net: nn.Module) -> list[torch.Tensor]:
    """Zeros are left."""
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in net.parameters()]
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    return found


def within(net: nn.Module, args: Any, share: float, new_tape: Any, mode: str = "joint") -> rotoff.Checkpointable:
    """`net` within a limit that is a part of the way from the smallest to keeping everything, followed by `new_tape`."""
    run = rotoff.Checkpointable(net).measure(*args)
    least = run.min_mem_limit(mode)
    run._steps.new_tape = new_tape
    return run.compute_sequence(least + int(share * (run.keep_all_memory - least)), mode, refine=False)


@pytest.mark.parametrize("name", ALL)
def test_the_plain_step_is_foretold_to_the_byte_and_runs_as_it_is(name: str) -> None:
    net, draw = many(name)
    args = (draw(),)
    run = rotoff.Checkpointable(net, stages=20).compute_sequence(1 << 50)
    train(run, args)
    gradients(net)
    assert run.keep_all_memory
    measured = peak_bytes(lambda: train(run, args))
    assert measured <= run.get_expected_memory() <= 1.01 * measured


@pytest.mark.parametrize("new_tape", TAPES)
def test_a_step_frees_all_that_it_made_once_its_graph_is_gone(new_tape: Any) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*[Block() for _ in range(6)])
    run = within(net, (drawn(0),), 0.2, new_tape)
    train(run, (drawn(0),))

    def step(ends: bool) -> None:
        out = run(drawn(0))
        if ends:
            out.sum().backward()

    for ends in (True, True, False):
        assert left_bytes(functools.partial(step, ends)) <= 0


class Skips(Long):
    skip = False

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return torch.sin(x) * 2 if self.skip and n == 4 else x


@pytest.mark.parametrize("mode", ["joint", "remat"])
@pytest.mark.parametrize("new_tape", TAPES)
@pytest.mark.grid(every=2)
def test_a_forward_off_its_course_is_right_within_the_limit_and_planned_when_it_recurs(
    new_tape: Any, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    net = Skips()
    x = drawn(0).repeat(TIMES, *(1 for _ in drawn(0).shape[1:]))
    run = within(net, (x,), 0.4, new_tape, mode)
    for n in range(8):
        net.skip = n >= 3
        train(net, (x,))
        expected = gradients(net)
        peak = peak_bytes(lambda: train(run, (x,))) if n != 5 else train(run, (x,)).nbytes  # that one is recorded
        assert same(gradients(net), expected), n
        assert run.mem_limit is not None and peak <= run.mem_limit, n
        assert len(run.plans()) == 1 + (n >= 5)
    assert caplog.text.count("made other operations") == 1
