"""The order of placed training on streams: every copy comes after what it needs and before what needs it, on the CUDA
link's own code, whose copies here run as late as its waits allow."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from forced_plans import force
from models import Residual
from recording_link import RecordingLink
from torch import nn

import rotoff
from rotoff.planning import tape_placed_runner
from rotoff.profile import tape_groups
from rotoff.runtime.placed import group_updates as group_updates_of
from rotoff.runtime.placed import updates as updates_of
from rotoff.runtime.tape_placed import Lent


def model() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 32), Residual(32)) for _ in range(5)]
    return nn.Sequential(*blocks, nn.Linear(32, 8)), torch.randn(16, 32)


def trained(
    updates: str, share: float, eagerness: float, host: bool, between: Any = lambda _: None
) -> tuple[list[torch.Tensor], list[torch.Tensor], RecordingLink]:
    """The plain model's parameters and losses after four steps, those of the placed one, and its link."""
    net, x = model()
    plain = copy.deepcopy(net)
    link = RecordingLink(eagerness, seed=1)
    wrapped = rotoff.Checkpointable(net, cache_directory=None).measure(x)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (plain, net)]
    own_step, bring = updates_of.own_step, Lent.bring

    def recorded_step(optimizer: torch.optim.Optimizer) -> None:
        given = [p for group in optimizer.param_groups for p in group["params"]]
        own_step(optimizer)
        states = [t for p in given for t in optimizer.state[p].values() if t.numel() > 1]
        link.touched("an update", [*given, *(p.grad for p in given), *states])

    def recorded_use(lent: Lent) -> torch.UntypedStorage:
        storage = bring(lent)
        link.access("a stage", [storage], [])
        return storage

    with (
        mock.patch.object(tape_placed_runner, "new_link", return_value=link),
        mock.patch.object(tape_groups, "is_accelerator", return_value=True),  # the host is another device
        # one lane in the record
        mock.patch.object(group_updates_of, "HostLane", return_value=updates_of.HostLane(False)),
        mock.patch.object(updates_of, "own_step", recorded_step),
        mock.patch.object(Lent, "bring", recorded_use),
    ):
        force(wrapped, optimizers[1], share, host, updates)
        assert any(op.of for op in wrapped.sequence)
        assert any(op.kind.value == "H" for op in wrapped.sequence) >= host
        results: list[list[torch.Tensor]] = [[], []]
        for found, one, optimizer in zip(results, (plain, wrapped), optimizers, strict=True):
            torch.manual_seed(3)
            for _ in range(4):
                loss = one(x).square().mean()
                loss.backward()
                between(one)
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.detach())
            found += [p.detach().clone() for p in one.parameters()]
    return results[0], results[1], link


@pytest.mark.parametrize("eagerness", [0.0, 0.5])
@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("updates", ["after", "during"])
@pytest.mark.parametrize("share", [0.2, 0.5])
@pytest.mark.grid(every=8)
def test_copies_come_in_order(updates: str, share: float, eagerness: float, host: bool) -> None:
    plain, placed, link = trained(updates, share, eagerness, host)
    assert all(map(torch.equal, placed, plain))
    assert link.check() == []
    assert sum("copy" in str(entry) for entry in link.log.entries) > 40
    assert sum("an update" in str(entry) for entry in link.log.entries) > 40


def test_a_caller_that_changes_gradients_and_parameters_finds_them_there() -> None:
    def between(one: nn.Module) -> None:
        nn.utils.clip_grad_norm_(one.parameters(), 0.01)
        for p in one.parameters():
            p.data.clamp_(-0.1, 0.1)

    plain, placed, link = trained("after", 0.3, 0.0, True, between)
    assert all(map(torch.equal, placed, plain))
    assert link.check() == []


WAITS = {
    "wait": ("after", "the device waits for a copy"),
    "join": ("during", "the host waits for a gradient before it updates with it"),
    "join drain": ("after", "likewise, or for all copies before the caller looks"),
}


@pytest.mark.parametrize("names", WAITS)
@pytest.mark.grid
def test_a_wait_that_is_left_out_shows(names: str) -> None:
    """In the record, or in wrong numbers, since copies come as late as they may."""
    with ExitStack() as stack:
        for name in names.split():
            stack.enter_context(mock.patch.object(RecordingLink, name, return_value=None))
        plain, placed, link = trained(WAITS[names][0], 0.2, 0.0, True)
    assert not all(map(torch.equal, placed, plain)) or link.check()
