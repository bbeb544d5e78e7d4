"""The order of a whole step is proved: recorded runs of the interpreter over the CUDA link's own code have no race,
and copies that run as late as the waits allow give the right numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from models import fresh, plain, same, train
from planned_steps import with_sequence
from random_programs import random_sequence
from recording_link import LateFileLink, RecordingLink, moves_over
from thoroughness import seeds

import rotoff
from rotoff.runtime.links import pool as link_pool

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

    def train(self, link: RecordingLink) -> list[torch.Tensor]:
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
def test_the_right_numbers_however_late_the_file_link_copies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = fresh(name)
    wrapped = rotoff.Checkpointable(model).measure(batch())
    with_sequence(wrapped, sequence := random_sequence(wrapped.chain, 1, wildness=0.75))
    model.load_state_dict(fresh(name)[0].state_dict())
    wrapped.close()
    link = LateFileLink(0.002)
    monkeypatch.setattr(link_pool, "new_link", lambda *_: link)
    assert same(train(wrapped, batch, steps=2), plain(name, steps=2)), str(sequence)
    assert link.capacity > 0
    wrapped.close()
