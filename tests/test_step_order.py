"""The order of a whole step is proved: recorded runs of the interpreter over the CUDA link's own code have no race, copies
that run as late as the waits allow give the right numbers, and no wait can be left out."""

from __future__ import annotations

import pytest
import torch
from models import fresh, plain, same, train
from random_programs import random_sequence
from test_runtime import with_sequence

import rotoff
from rotoff.runtime.link_recording import RecordingFileLink, RecordingLink

NAMES = ["residual", "convolutional", "tuples", "tied", "language"]


def run_over(link: RecordingLink | RecordingFileLink, name: str, seed: int) -> tuple[list[torch.Tensor], rotoff.Sequence]:
    """Train `name` with a random sequence whose moves go over `link`."""
    model, batch = fresh(name)
    wrapped = rotoff.Checkpointable(model).measure(batch(), repeats=1)
    sequence = random_sequence(wrapped.chain, seed, wildness=0.75)
    with_sequence(wrapped, sequence)

    def take(device: torch.device, nbytes: int) -> RecordingLink | RecordingFileLink:
        link.reserve(nbytes)
        return link

    wrapped._links.take = take
    wrapped._links.give_back = lambda link: None
    return train(wrapped, batch, steps=2), sequence


@pytest.mark.parametrize("eagerness", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", NAMES)
def test_no_race_and_the_right_numbers_however_late_copies_run(name: str, eagerness: float) -> None:
    expected = plain(name, steps=2)
    for seed in range(4):
        link = RecordingLink(eagerness, seed)
        got, sequence = run_over(link, name, seed)
        assert link.check() == [], str(sequence)
        assert same(got, expected), str(sequence)
        link.close()


@pytest.mark.parametrize("name", NAMES)
def test_the_file_link_has_no_race(name: str) -> None:
    link = RecordingFileLink(delay=0.002)
    got, sequence = run_over(link, name, 1)
    assert link.check() == [], str(sequence)
    assert same(got, plain(name, steps=2))
    link.close()


class Forgetful(RecordingLink):
    """Leaves the `n`-th wait of the interpreter out."""

    def __init__(self, n: int) -> None:
        super().__init__(eagerness=0.0)
        self.left = n

    def wait(self, ticket: object) -> None:
        self.left -= 1
        if self.left != 0:
            super().wait(ticket)
        else:
            self.forgotten = ticket  # alive, so that its end is not awaited in its place


class Counting(RecordingLink):
    waits = 0

    def wait(self, ticket: object) -> None:
        self.waits += 1
        super().wait(ticket)


def test_a_wait_that_is_left_out_is_noticed() -> None:
    """By the checker; unless a wait for a later copy of the same lane did its work, and then the latest copies prove it."""
    expected, noticed, superfluous = plain("residual", steps=2), 0, 0
    for seed in range(3, 12):
        counting = Counting()
        _, sequence = run_over(counting, "residual", seed)
        for n in range(1, counting.waits + 1):
            link = Forgetful(n)
            got, _ = run_over(link, "residual", seed)
            if link.check():
                noticed += 1
            else:
                assert same(got, expected), f"wait {n} of {counting.waits} was left out and nobody noticed:\n{sequence}"
                superfluous += 1
    assert noticed >= 20
    assert noticed > superfluous
