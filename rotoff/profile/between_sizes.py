"""The profile of an input size that was not measured, from the profiles of two that were.

Bytes of a tensor are a product of sizes, and bytes at a moment of the step are a sum of those. Along the straight line
from one input's sizes to larger ones, such a sum is a polynomial with no negative coefficient, so it is convex, and the
chord between two measured profiles is never below it. Beyond the larger one the polynomial is bounded by its degree.
All fields of a profile are taken from the chord together: what one field subtracts from another it subtracts there,
too. Times follow the straight line.

What must be the same at both sizes is compared: stages, what each saves, changes and draws, which of its tensors share
storages, and how its smaller forms are made again. Where anything differs there is no profile in between, and the new
size is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from ..core.chain import Chain, Stage
from ..errors import ChainError
from ..tensors.recipe import Constant, Recipe, Stored, Unread
from ..tensors.stage import Behaviour, StageModule
from .memory.eager_memory import FreedEarly
from .memory.skips import Skip
from .profile import Profile

SUBTRACTED = (Skip, FreedEarly)  # parts of other fields, which their sum must not exceed
ROUNDING = 64  # bytes of a stage that whole numbers on the chord may be short of


class NotAlike(Exception):
    """The two profiles are not of the same step at other sizes."""


class Share(NamedTuple):
    """Where a size lies on the line from a smaller one, 0, to a larger one, 1. bytes: of the difference in bytes, time:
    in seconds."""

    bytes: float
    time: float

    @classmethod
    def at(cls, position: float, degree: int) -> Share:
        """At `position` on the line. Beyond its end bytes are no more than if all of the difference were of
        `degree`."""
        return cls(position**degree if position > 1 else position, position)


def between(low: Profile, high: Profile, share: Share) -> Profile:
    """The profile at `share` of the way from `low` to `high`.

    Raises:
        NotAlike: where they differ in more than bytes and seconds.
    """
    low, high = _with_common_forms(low, high)
    try:
        found: Profile = _mixed(low, high, share)
    except ChainError as error:
        raise NotAlike(str(error)) from None
    return replace(found, unmanaged_bytes=found.unmanaged_bytes + ROUNDING * len(found.chain))


def _mixed(low: Any, high: Any, share: Share, whole: Callable[[float], int] = math.ceil) -> Any:
    kind = type(high)
    if type(low) is not kind:
        raise NotAlike(f"a {type(low).__name__} and a {kind.__name__}")
    if kind is int:
        return high if low == high else max(0, whole(low + (high - low) * share.bytes))
    if kind is float:
        return max(0.0, low + (high - low) * share.time)
    if kind is StageModule or kind is Recipe:
        return high
    if kind is Chain:
        rest = {
            f.name: _mixed(getattr(low, f.name), getattr(high, f.name), share) for f in fields(high) if f.name != "meta"
        }
        return replace(high, **rest)
    if kind in SUBTRACTED:
        whole = math.floor
    if is_dataclass(high) and not isinstance(high, type):
        return replace(
            high, **{f.name: _mixed(getattr(low, f.name), getattr(high, f.name), share, whole) for f in fields(high)}
        )
    if isinstance(high, tuple):
        if len(low) != len(high):
            raise NotAlike(f"{len(low)} and {len(high)} of {kind.__name__}")
        mixed = [_mixed(a, b, share, whole) for a, b in zip(low, high, strict=True)]
        return kind(*mixed) if hasattr(kind, "_fields") else tuple(mixed)
    if isinstance(high, Mapping):
        if low.keys() != high.keys():
            raise NotAlike("other keys")
        return {key: _mixed(low[key], value, share) for key, value in high.items()}
    if low is not high and (isinstance(high, nn.Module | torch.Tensor) or low != high):
        raise NotAlike(f"{low!r} and {high!r}"[:200])
    return high


# -- smaller forms


def _with_common_forms(low: Profile, high: Profile) -> tuple[Profile, Profile]:
    """Both with the forms alone that each stage has at both sizes, whose redo runs and hands on the same operations."""
    if len(low.behaviours) != len(high.behaviours):
        raise NotAlike(f"{len(low.behaviours)} and {len(high.behaviours)} stages")
    pairs = [_common(a.forms, b.forms) for a, b in zip(low.behaviours, high.behaviours, strict=True)]
    return _keeping(low, [[i for i, _ in rows] for rows in pairs]), _keeping(
        high, [[j for _, j in rows] for rows in pairs]
    )


def _common(low: Sequence[Recipe], high: Sequence[Recipe]) -> list[tuple[int, int]]:
    places = {recipe.identity: i for i, recipe in enumerate(low)}
    found = [(places.get(recipe.identity), j) for j, recipe in enumerate(high)]
    return [(i, j) for i, j in found if i is not None and _same_redo(low[i], high[j])]


def _same_redo(a: Recipe, b: Recipe) -> bool:
    """Whether two recipes are the same but for how tensors lie, and the operations themselves tell how they do."""
    if (a.stop, a.functions, a.single, a.whole, a.views.keys()) != (
        b.stop,
        b.functions,
        b.single,
        b.whole,
        b.views.keys(),
    ):
        return False
    if a.results.keys() != b.results.keys():
        return False
    both = [pair for n in a.results for pair in zip(a.results[n], b.results[n], strict=True)]
    return all(map(_same_result, both)) and all(view.dense for recipe in (a, b) for view in recipe.views.values())


def _same_result(pair: tuple[Any, Any]) -> bool:
    a, b = pair
    if type(a) is not type(b):
        return False
    if isinstance(a, Stored):
        return bool(a.slot == b.slot and a.view.dense and b.view.dense)
    if isinstance(a, Unread):
        return bool(a.device == b.device and a.view.dense and b.view.dense)
    return bool(a.value == b.value if isinstance(a, Constant) else a.place == b.place)


def _keeping(profile: Profile, forms: Sequence[Iterable[int]]) -> Profile:
    """`profile`, where each stage has these of its forms alone, at any size."""
    chosen = [tuple(rows) for rows in forms]

    def staged(stages: Sequence[Stage]) -> tuple[Stage, ...]:
        return tuple(
            replace(stage, forms=tuple(stage.forms[n] for n in rows))
            for stage, rows in zip(stages, chosen, strict=True)
        )

    def behaving(behaviour: Behaviour, rows: Iterable[int]) -> Behaviour:
        return replace(behaviour, forms=tuple(replace(behaviour.forms[n], sized=False) for n in rows))

    return replace(
        profile,
        chain=replace(profile.chain, stages=staged(profile.chain.stages)),
        behaviours=tuple(map(behaving, profile.behaviours, chosen)),
        compact=profile.compact and profile.compact._replace(stages=staged(profile.compact.stages)),
        no_forms=("",) * len(profile.no_forms),
    )
