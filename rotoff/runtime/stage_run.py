"""One stage between its first forward and its backward, and what autograd is given in place of the tensors that it saves."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch

from .replay import ReplayState
from .selective import Recipe
from .values import Slot, View


class InputRef(NamedTuple):
    """A saved view of the stage's input, found anew when it is needed."""

    place: int  # of the tensor among the inputs
    view: View | None  # None: all of it


class Resident(NamedTuple):
    """A saved tensor that was there before the stage ran, or that stays in place."""

    tensor: torch.Tensor
    version: int


Packed = Slot | InputRef | Resident


class StageRun:
    """What a step remembers of one stage between its first forward and its backward."""

    def __init__(self, requires_grad: list[bool], replay: ReplayState | None) -> None:
        self.requires_grad = requires_grad  # of the inputs
        self.replay = replay
        self.slots: list[weakref.ref[Slot] | None] = []  # one for each tensor saved; None where it is not the stage's own
        self.shapes: list[tuple[torch.Size, torch.dtype] | None] = []  # of those
        self.made: list[tuple[torch.Size, torch.dtype]] = []  # of its outputs
        self.recipe: Recipe | None = None  # of the form in which ā exists, where it is a smaller one
        self.stored: dict[int, Slot] = {}  # what that form stores, whatever becomes of the graph that saved it
        self.kept: dict[int, torch.Tensor] = {}  # outputs that lie in skip connections kept in place
        self.kept_saved: dict[int, torch.Tensor] = {}  # and tensors that autograd saved there
