"""The order of a whole step is proved: recorded runs of the interpreter over the CUDA link's own code have no race,
copies that run as late as the waits allow give the right numbers, and no wait can be left out."""

from __future__ import annotations

import copy

import pytest
import torch
from models import fresh, plain, same, train
from planned_steps import with_sequence
from random_programs import random_sequence
from recording_link import Forgetful, RecordingFileLink, RecordingLink, moves_over
from thoroughness import seeds

import rotoff

NAMES = ["residual", "convolutional", "tuples", "tied", "language"]


class Trainee:
    """A model that is measured once and then trained over one link after another, each time from its first
    parameters."""

    def __init__(self, name: str) -> None:
        model, self.batch = fresh(name)
        self.state = copy.deepcopy(model.state_dict())
        self.wrapped = rotoff.Checkpointable(model).measure(self.batch())
        self.sequence = rotoff.Sequence(())

    def follow(self, seed: int) -> rotoff.Sequence:
        """Take up a random sequence."""
        self.sequence = random_sequence(self.wrapped.chain, seed, wildness=0.75)
        with_sequence(self.wrapped, self.sequence)
        return self.sequence

    def train(self, link: RecordingLink | RecordingFileLink) -> list[torch.Tensor]:
        """Two steps whose moves go over `link`."""
        moves_over(self.wrapped, link)
        self.wrapped.load_state_dict(self.state)
        return train(self.wrapped, self.batch, steps=2)


@pytest.mark.parametrize("name", NAMES)
def test_no_race_and_the_right_numbers_however_late_copies_run(name: str) -> None:
    trainee, expected = Trainee(name), plain(name, steps=2)
    for seed in seeds(4):
        sequence = trainee.follow(seed)
        for eagerness in (0.0, 0.5, 1.0):
            link = RecordingLink(eagerness, seed)
            got = trainee.train(link)
            assert link.check() == [], f"eagerness {eagerness}\n{sequence}"
            assert same(got, expected), f"eagerness {eagerness}\n{sequence}"
            link.close()


@pytest.mark.parametrize("name", NAMES)
def test_the_file_link_has_no_race(name: str) -> None:
    trainee, link = Trainee(name), RecordingFileLink(delay=0.002)
    sequence = trainee.follow(1)
    got = trainee.train(link)
    assert link.check() == [], str(sequence)
    assert same(got, plain(name, steps=2))
    link.close()


@pytest.mark.slow
def test_a_wait_that_is_left_out_is_noticed() -> None:
    """By the checker; unless a wait for a later copy of the same lane did its work, and then the latest copies prove
    it."""
    trainee, expected, noticed, superfluous = Trainee("residual"), plain("residual", steps=2), 0, 0
    for seed in range(3, 12):
        sequence = trainee.follow(seed)
        counting = Forgetful()
        assert same(trainee.train(counting), expected)
        for n in range(1, counting.waits + 1):
            link = Forgetful(n)
            got = trainee.train(link)
            if link.check():
                noticed += 1
            else:
                assert same(got, expected), f"wait {n} of {counting.waits} was left out and nobody noticed:\n{sequence}"
                superfluous += 1
    assert noticed >= 20
    assert noticed > superfluous
