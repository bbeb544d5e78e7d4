"""The order that links keep. Of the stream link, the CUDA link's own code, it is proved: recorded steps and random
programs have no race, copies that run as late as the waits allow give the right numbers, and every wait and event is
needed. The file link, whose one thread keeps its order, is judged by the bytes."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from forced_plans import force, twins
from models import Residual, fresh
from planned_steps import Beside
from random_programs import random_sequence
from recording_link import Lane, LateFileLink, RecordingLink, RecordingStreams, moves_over
from thoroughness import seeds
from torch import nn
from transfer_programs import TransferProgram, storages

from rotoff.planning import tape_placed_runner
from rotoff.profile import tape_groups
from rotoff.runtime.links import cuda as link_cuda
from rotoff.runtime.links.cuda import StreamLink
from rotoff.runtime.placed import group_updates as group_updates_of
from rotoff.runtime.placed import updates as updates_of
from rotoff.runtime.tape_placed import Lent

NAMES = ["residual", "convolutional", "tuples", "tied", "language"]


@pytest.mark.parametrize("name", NAMES)
def test_no_race_and_the_right_numbers_however_late_copies_run(name: str) -> None:
    model, batch = fresh(name)
    beside = Beside(model, sample=(batch(),))
    for seed in seeds(4):
        beside.following(sequence := random_sequence(beside.planned.chain, seed, wildness=0.75, forms=True))
        for eagerness in (0.0, 0.5, 1.0):
            link = RecordingLink(eagerness, seed)
            moves_over(beside.planned, link)
            for _ in range(2):
                beside.step(batch())
            assert link.check() == [], f"eagerness {eagerness}\n{sequence}"
            link.close()


# -- the links alone

PROGRAMS = range(25)
STEPS = 150


def on_another_stream(link: Any) -> Any:
    """Compute moves to a second stream, which waits for the first as a user's would, and does not wait back."""
    other = Lane("compute 2", eager=True)

    @contextmanager
    def elsewhere():
        streams, event = link.streams, link.streams.event()
        streams.record(event, streams.current())
        streams.wait(other, event)
        with streams.compute_on(other):
            yield

    return elsewhere


class TestStreamLink:
    @pytest.mark.parametrize("eagerness", [0.0, 0.4, 1.0])
    def test_random_programs_race_nowhere_and_see_the_right_bytes(self, eagerness: float):
        reads = 0
        for seed in PROGRAMS:
            link = RecordingLink(eagerness, seed)
            program = TransferProgram(link, seed, elsewhere=on_another_stream(link))
            assert program.run(STEPS) == []
            link.close()
            assert link.check() == []
            reads += len(program.seen)
        assert reads > 1000

    def test_a_copy_that_fails_half_way_leaves_nothing_in_flight(self, monkeypatch: pytest.MonkeyPatch):
        link = RecordingLink()
        link.reserve(16)
        data = [torch.arange(8, dtype=torch.uint8), torch.arange(8, dtype=torch.uint8)]
        link.access("make", [], storages(data))
        copy = RecordingStreams.copy

        def half(self: RecordingStreams, stream: Lane, pairs: Any) -> None:
            copy(self, stream, list(pairs)[:1])
            raise RuntimeError("the device failed")

        monkeypatch.setattr(RecordingStreams, "copy", half)
        with pytest.raises(RuntimeError, match="the device failed"):
            link.copy_out(data, 0)
        gc.collect()
        link.release("give up", storages(data))
        assert link.check() == []
        monkeypatch.undo()
        link.wait(link.copy_out([torch.ones(8, dtype=torch.uint8)], 0))  # and the link still works


class MutantStreams(RecordingStreams):
    """Streams on which one call of the link's, told by its place in the source, does nothing."""

    def __init__(self, mutant: str | None, sites: Counter[str]) -> None:
        super().__init__()
        self.mutant = mutant
        self.sites = sites

    def skipped(self, verb: str) -> bool:
        frame = sys._getframe(2)
        if frame.f_code.co_filename != link_cuda.__file__:
            return False
        site = f"{verb} in {frame.f_code.co_name}, line {frame.f_lineno}"
        self.sites[site] += 1
        return site == self.mutant


def skippable(verb: str) -> Any:
    own = getattr(RecordingStreams, verb)

    def call(streams: MutantStreams, *args: Any) -> None:
        if not streams.skipped(verb):
            own(streams, *args)

    return call


for _verb in ("record", "wait", "finish"):
    setattr(MutantStreams, _verb, skippable(_verb))


class MutantLink(RecordingLink):
    def __init__(self, mutant: str | None, sites: Counter[str]) -> None:
        self.streams = MutantStreams(mutant, sites)
        self.log = self.streams.recording
        StreamLink.__init__(self, self.streams)


def first_race(mutant: str | None, sites: Counter[str]) -> str:
    """What the check says of the first program that races; some close their link, others leave that to the
    collector."""
    for seed in PROGRAMS:
        link = MutantLink(mutant, sites)
        TransferProgram(link, seed, elsewhere=on_another_stream(link)).run(STEPS)
        log = link.log
        if seed % 2:
            link.close()
        del link
        gc.collect()
        if log.races:
            return log.races[0]
    return ""


def test_every_single_record_wait_and_finish_of_the_stream_link_is_needed():
    sites: Counter[str] = Counter()
    assert first_race(None, sites) == ""
    assert Counter(site.split()[0] for site in sites) == {"record": 2, "wait": 5, "finish": 2}
    for site in list(sites):
        assert first_race(site, Counter()), f"nothing is lost without: {site}"


class TestFileLink:
    @pytest.mark.parametrize("delay", [0.0, 0.001])
    def test_random_programs_see_the_right_bytes(self, delay: float):
        for seed in range(10):
            link = LateFileLink(delay)
            program = TransferProgram(link, seed)
            assert program.run(STEPS) == []
            link.close()
            assert len(program.seen) > 10

    def test_closing_ends_all_copies_before_the_file_goes(self):
        link = LateFileLink(0.01)
        link.reserve(8)
        ticket = link.copy_out([torch.ones(8, dtype=torch.uint8)], 0)
        link.close()
        assert ticket.failure is None


def trained(
    updates: str, share: float, eagerness: float, host: bool, between: Any = lambda _: None
) -> tuple[list[torch.Tensor], list[torch.Tensor], RecordingLink]:
    """The plain model's parameters and losses after four steps, those of the placed one, and its link."""
    blocks = [nn.Sequential(nn.Linear(32, 32), Residual(32)) for _ in range(5)]
    x, link = torch.randn(16, 32), RecordingLink(eagerness, seed=1)
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
        pairs = twins(
            nn.Sequential(*blocks, nn.Linear(32, 8)), x, updates=updates, share=share, plan=partial(force, host=host)
        )
        sequence = pairs[1][1].sequence
        assert any(op.of for op in sequence)
        assert any(op.kind.value == "H" for op in sequence) >= host
        results: list[list[torch.Tensor]] = []
        for _, one, (optimizer,) in pairs:
            torch.manual_seed(3)
            found = []
            for _ in range(4):
                loss = one(x).square().mean()
                loss.backward()
                between(one)
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.detach())
            results.append([*found, *(p.detach().clone() for p in one.parameters())])
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
    assert sum("copy" in what for what in link.log.accesses) > 40
    assert sum("an update" in what for what in link.log.accesses) > 40


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
