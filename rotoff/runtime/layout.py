"""Where a step on a tape finds the stages and the values of its chain."""

from __future__ import annotations

from dataclasses import dataclass

Key = tuple[int, int]  # the number of an operation, counted from the stage's first, and which of its results


@dataclass(frozen=True)
class Layout:
    """How a step on a tape finds the stages and values of the chain.

    begins: the position with which each stage begins. end: that after the last one. keys: of the operations of each.
    handed: the contents of a_i, with the stages that made them. forms: for each form of ā_i, the whole one first, what
    autograd saves and the form keeps. stay: contents of the stage that stay on the device until its backward.
    """

    begins: tuple[int, ...]
    end: int
    keys: tuple[int, ...]
    handed: tuple[tuple[tuple[int, Key], ...], ...]
    forms: tuple[tuple[frozenset[Key], ...], ...]
    stay: tuple[tuple[Key, ...], ...]


NO_LAYOUT = Layout((), 0, (), (), (), ())  # of a step without a plan
