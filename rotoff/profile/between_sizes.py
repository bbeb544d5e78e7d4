"""Interpolates the profile of an input size that was not measured, from profiles of measured sizes.

The bytes of a tensor are a product of sizes, the bytes held at a moment are a sum of such products, and a peak is the
largest of such sums. `planning.sizes` chooses weights for which the weighted sum of the measured profiles is never
below any of these. All fields of a profile use the same weights, because some fields are subtracted from others.

The measured profiles must agree in everything else: the stages, what each saves, changes and draws, which tensors share
storages, and how the smaller forms are redone. If they differ anywhere, no profile is interpolated and the new size is
measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from ..core.chain import LinkRates, Stage
from ..errors import ChainError
from ..tensors.recipe import Constant, Recipe, Stored, Unread
from ..tensors.stage import Behaviour, StageModule
from ..tensors.storage import View
from .memory.eager_memory import FreedEarly
from .memory.skips import Skip
from .profile import Profile

SUBTRACTED = (Skip, FreedEarly)  # are subtracted from other fields, so their bytes are rounded down
CHARGED = ("staying_bytes",)  # but for these
ROUNDING = 64  # bytes added for each stage, since whole numbers of bytes may be rounded down
# fields that do not depend on the size of the input; taken from the first profile
OF_FIRST = ("meta", "formed_for", *LinkRates._fields, "copy_bandwidth", "overhead_times", "host_bound", "alike")
# whole numbers that are not bytes
PLACES = ("first", "last", "until", "early_stop", "outputs", "saved", "kept", "copied")
TIMES = ("forward_time", "backward_time", "tail_time")  # of a stage
# fields that are subtracted from others: where they are too high, too little is charged
SPARED = ("freed_before_backward", "placed", "spare_bytes", "twice_bytes", "returned")

_REDONE = attrgetter("stop", "functions", "single", "whole")  # the fields of a recipe that say what its redo runs


class NotAlike(Exception):
    """Raised if profiles differ in more than sizes."""


class Share(NamedTuple):
    """The weight of a measured profile: for its bytes, and for its seconds."""

    bytes: float
    time: float


def between(profiles: Sequence[Profile], shares: Sequence[Share]) -> Profile:
    """Return the sum of `profiles`, weighted with `shares`. All but bytes and seconds comes from the first profile.

    Raises:
        NotAlike: if the profiles differ in more than bytes and seconds.
    """
    try:
        found: Profile = _mixed(_with_common_forms(profiles), shares)
    except ChainError as error:
        raise NotAlike(str(error)) from None
    return replace(found, unmanaged_bytes=found.unmanaged_bytes + ROUNDING * len(found.chain))


def without_times(profile: Profile) -> Profile:
    """`profile` as if only its bytes had been measured."""
    chain = profile.chain
    stages = tuple(replace(one, forward_time=0.0, backward_time=0.0, tail_time=0.0, forms=()) for one in chain.stages)
    return replace(
        profile,
        chain=replace(chain, stages=stages),
        behaviours=tuple(replace(one, forms=(), early_stop=0) for one in profile.behaviours),
        no_forms=(),
        compact=None,
        copy_bandwidth=None,
        timed=False,
    )


def with_times(profile: Profile, timed: Profile) -> Profile:
    """Return `profile` with the times and the smaller forms of `timed`; both are for the same size."""
    chain, pairs = profile.chain, zip(profile.chain.stages, timed.chain.stages, strict=True)
    stages = tuple(
        replace(
            mine,
            **{name: getattr(theirs, name) for name in TIMES},
            forms=tuple(replace(one, saved_bytes=max(one.saved_bytes, mine.output_bytes)) for one in theirs.forms),
        )
        for mine, theirs in pairs
    )
    behaviours = zip(profile.behaviours, timed.behaviours, strict=True)
    others = ("no_forms", "formed_for", "compact", "copy_bandwidth", "overhead_times", "host_bound", "timed")
    return replace(
        profile,
        chain=replace(
            timed.chain, stages=stages, input_bytes=chain.input_bytes, input_grad_bytes=chain.input_grad_bytes
        ),
        behaviours=tuple(
            replace(mine, forms=theirs.forms, early_stop=theirs.early_stop) for mine, theirs in behaviours
        ),
        **{name: getattr(timed, name) for name in others},
        **{name: _least(getattr(profile, name), getattr(timed, name)) for name in ("skips", "freed_early", *SPARED)},
    )


def _least(one: Any, other: Any) -> Any:
    """The smaller of each number: what is taken off fields of both profiles must not exceed what it is in either."""
    if isinstance(one, int):
        return min(one, other)
    if is_dataclass(one) and not isinstance(one, type):
        return replace(one, **{f.name: _least(getattr(one, f.name), getattr(other, f.name)) for f in fields(one)})
    least = [_least(a, b) for a, b in zip(one, other, strict=True)]
    return type(one)(*least) if hasattr(one, "_fields") else tuple(least)


def _mixed(values: Sequence[Any], shares: Sequence[Share], whole: Callable[[float], int] = math.ceil) -> Any:
    first, kind = values[0], type(values[0])
    if len({*map(type, values)}) > 1:
        raise NotAlike(" and ".join(sorted({type(value).__name__ for value in values})))
    if kind is int:
        if len(values) > 1 and all(value == first for value in values):
            return first
        return max(0, whole(sum(value * share.bytes for value, share in zip(values, shares, strict=True))))
    if kind is float:
        return sum(value * share.time for value, share in zip(values, shares, strict=True))
    if kind is StageModule or kind is Recipe:
        return first
    if names := _names(kind):  # type: ignore[arg-type]  # a class is hashable
        rows = {name: [getattr(value, name) for value in values] for name in names}
        if any(name in PLACES and any(one != row[0] for one in row) for name, row in rows.items()):
            raise NotAlike(f"places in several {kind.__name__}")
        low, lesser = (math.floor, _spared(shares)) if kind in SUBTRACTED else (whole, shares)
        mixed = {
            name: row[0]
            if name in OF_FIRST + PLACES
            else _mixed(row, shares)
            if name in CHARGED
            else _mixed(row, _spared(shares) if name in SPARED else lesser, low)
            for name, row in rows.items()
        }
        return kind(**mixed) if hasattr(kind, "_fields") else replace(first, **mixed)
    if isinstance(first, tuple):
        if any(len(value) != len(first) for value in values):
            raise NotAlike(f"{sorted({len(value) for value in values})} of {kind.__name__}")
        return tuple(_mixed(row, shares, whole) for row in zip(*values, strict=True))
    if isinstance(first, Mapping):
        if any(value.keys() != first.keys() for value in values):
            raise NotAlike("other keys")
        return {key: _mixed([value[key] for value in values], shares, whole) for key in first}
    compared = not isinstance(first, nn.Module | torch.Tensor)
    if any(value is not first and not (compared and value == first) for value in values):
        raise NotAlike(f"{values!r}"[:200])
    return first


@cache
def _names(kind: type) -> Sequence[str]:
    """Return the names of the fields of a dataclass or named tuple; empty for other types."""
    return [f.name for f in fields(kind)] if is_dataclass(kind) else getattr(kind, "_fields", ())


def _spared(shares: Sequence[Share]) -> Sequence[Share]:
    """`shares`, where a single profile counts at most once: it does not tell which bytes no size changes."""
    return [share._replace(bytes=min(1.0, share.bytes)) for share in shares] if len(shares) == 1 else shares


# -- smaller forms


def _with_common_forms(profiles: Sequence[Profile]) -> list[Profile]:
    """Reduce each profile to the forms that all have, and whose redo runs the same operations with the same results."""
    counts = {len(profile.behaviours) for profile in profiles}
    if len(counts) > 1:
        raise NotAlike(f"{sorted(counts)} stages")
    stages = zip(*(profile.behaviours for profile in profiles), strict=True)
    rows = [_common([behaviour.forms for behaviour in stage]) for stage in stages]
    return [_keeping(profile, [[of[n] for of in row] for row in rows]) for n, profile in enumerate(profiles)]


def _common(forms: Sequence[Sequence[Recipe]]) -> list[list[int]]:
    """For each form that all profiles have, return its index in each of them."""
    places = [{recipe.identity: n for n, recipe in enumerate(one)} for one in forms]

    def everywhere(recipe: Recipe) -> bool:
        key, pairs = recipe.identity, zip(places, forms, strict=True)
        return all(key in at and _same_redo(recipe, one[at[key]]) for at, one in pairs)

    return [[at[recipe.identity] for at in places] for recipe in forms[0] if everywhere(recipe)]


def _same_redo(a: Recipe, b: Recipe) -> bool:
    """Whether two recipes differ in sizes alone. All their tensors must be dense, so that the operations themselves
    determine the layouts."""
    if _REDONE(a) != _REDONE(b) or a.views.keys() != b.views.keys() or a.results.keys() != b.results.keys():
        return False
    both = [pair for n in a.results for pair in zip(a.results[n], b.results[n], strict=True)]
    return all(map(_same_result, both)) and all(view.dense for recipe in (a, b) for view in recipe.views.values())


def _same_result(pair: tuple[Any, Any]) -> bool:
    a, b = pair
    if type(a) is not type(b):
        return False
    if isinstance(a, Stored):
        return bool(a.slot == b.slot and _same_layout(a.view, b.view))
    if isinstance(a, Unread):
        return bool(a.device == b.device and _same_layout(a.view, b.view))
    return bool(a.value == b.value if isinstance(a, Constant) else a.place == b.place)


def _same_layout(a: View, b: View) -> bool:
    """Whether two tensors of different sizes traverse their storages in the same order, without gaps."""
    return a.dense and b.dense and a.order == b.order


def _keeping(profile: Profile, forms: Sequence[Iterable[int]]) -> Profile:
    """Return `profile` with the given forms of each stage alone; their recipes then apply to any size."""
    chosen = [tuple(rows) for rows in forms]

    def staged(stages: Sequence[Stage]) -> tuple[Stage, ...]:
        pairs = zip(stages, chosen, strict=True)
        return tuple(
            stage if rows == (*range(len(stage.forms)),) else replace(stage, forms=tuple(stage.forms[n] for n in rows))
            for stage, rows in pairs
        )

    def behaving(behaviour: Behaviour, rows: Iterable[int]) -> Behaviour:
        forms = tuple(replace(behaviour.forms[n], sized=False) for n in rows)
        return replace(behaviour, forms=forms) if behaviour.forms else behaviour

    return replace(
        profile,
        chain=replace(profile.chain, stages=staged(profile.chain.stages)),
        behaviours=tuple(map(behaving, profile.behaviours, chosen)),
        compact=profile.compact and profile.compact._replace(stages=staged(profile.compact.stages)),
        no_forms=("",) * len(profile.no_forms),
    )
