"""One profile for all processes of a group: the largest value that any process measured for each cost, the smallest for
each saving.

`RULES` has a rule for every field of a `Profile` and of its parts. A plan within the limit on the common profile is
within it in each process. All processes reduce the same gathered list, so they get the same profile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from ..capture.partition.weight_casts import CastRegion
from ..core.chain import BIDIRECTIONAL, Chain, Form, Stage
from ..core.parameters import ParameterGroup
from ..errors import MeasureError
from ..profile.memory.eager_memory import FreedEarly, HeldLate
from ..profile.profile import Compact, Profile
from ..runtime.overhead import OverheadTimes

Rule = Callable[[Sequence[Any]], Any]  # from the values of all processes, in the order of ranks, to the common value
Identity = tuple[tuple[int, ...], str]  # `Recipe.identity` of a form


class Unlike(Exception):
    """The processes' values differ, and no common value can replace them."""


def own(values: Sequence[Any]) -> Any:
    """A field that each process keeps for itself and does not send, such as its modules. No plan may depend on it."""
    raise AssertionError("nothing in common is made of what is each process's own")


def first(values: Sequence[Any]) -> Any:
    """The first process's value, for descriptive fields."""
    return values[0]


def same(values: Sequence[Any]) -> Any:
    if any(value != values[0] for value in values):
        raise Unlike(values)
    return values[0]


def each(rule: Rule) -> Rule:
    """`rule` for each element of tuples of equal length."""

    def agreed(values: Sequence[Any]) -> Any:
        same([len(value) for value in values])
        return tuple(rule(one) for one in zip(*values, strict=True))

    return agreed


def parts(kind: type) -> Rule:
    """`RULES` of `kind`, field by field."""

    def agreed(values: Sequence[Any]) -> Any:
        return kind(**{name: rule([getattr(value, name) for value in values]) for name, rule in RULES[kind].items()})

    return agreed


def alike_or(otherwise: Any, rule: Rule) -> Rule:
    """`rule`, or `otherwise` if it raises `Unlike` or a process has None."""

    def agreed(values: Sequence[Any]) -> Any:
        try:
            return otherwise if None in values else rule(values)
        except Unlike:
            return otherwise

    return agreed


def longest(values: Sequence[tuple[HeldLate, ...]]) -> tuple[HeldLate, ...]:
    """For each span of stages, the most bytes that any process holds there."""
    most: dict[tuple[int, int], int] = {}
    for lingering in values:
        for one in lingering:
            most[one.first, one.until] = max(one.nbytes, most.get((one.first, one.until), 0))
    return tuple(HeldLate(*span, nbytes) for span, nbytes in sorted(most.items()))


def one_region(values: Sequence[tuple[CastRegion, ...]]) -> tuple[CastRegion, ...]:
    """The regions of all processes; if they differ, one for all, whose casts are in no ā."""
    every = [region for regions in values for region in regions]
    if all(regions == values[0] for regions in values):
        return values[0]
    most = max(region.nbytes for region in every)
    return (CastRegion(min(one.first for one in every), max(one.last for one in every), most, most, (), most),)


def named(rule: Rule, names: str) -> dict[str, Rule]:
    """`rule` for each of the fields `names`."""
    return dict.fromkeys(names.split(), rule)


TRANSIENTS = "forward_transient_bytes backward_transient_bytes"
RULES: dict[type, dict[str, Rule]] = {
    Form: {**named(max, f"saved_bytes backward_time {TRANSIENTS}"), "extra": first},
    Stage: {
        "name": same,
        **named(max, f"forward_time backward_time output_bytes saved_bytes grad_bytes {TRANSIENTS}"),
        "checkpoint_transient_bytes": max,
        "tail_time": min,
        "forms": each(parts(Form)),  # the forms that all processes have: `_with_forms`
        "extra": first,
    },
    ParameterGroup: {
        **named(same, "name stages"),
        **named(max, "bytes grad_bytes state_bytes update_time update_transient_bytes"),
        "host_update_time": alike_or(None, max),
        "extra": first,
    },
    Chain: {
        "stages": each(parts(Stage)),
        "parameters": each(parts(ParameterGroup)),
        **named(min, "d2h_bandwidth h2d_bandwidth"),
        **named(alike_or(None, min), " ".join(BIDIRECTIONAL)),
        **named(max, "input_bytes input_grad_bytes"),
        "duplex": all,
        **named(first, "name meta extra"),
    },
    FreedEarly: {**named(same, "first last until"), "nbytes": min},
    Compact: {
        "stages": each(parts(Stage)),
        "copied": same,
        "output_retention": each(max),
        "freed_before_backward": each(min),
    },
    OverheadTimes: named(max, "forward backward pack unpack"),
    Profile: {
        "device": own,
        "chain": parts(Chain),
        "prefix": own,
        "stages": own,
        "behaviours": own,
        "unmanaged_bytes": max,
        "replay_bytes": max,
        "prefix_peak_bytes": max,
        "made_input_bytes": max,
        "batch_bytes": max,
        "no_forms": first,
        "rng_bytes": max,
        "freed_before_backward": each(min),
        # if bytes or places differed, too much could be taken off the chain, and too little off the limit
        "skips": alike_or((), same),
        "freed_early": alike_or((), each(parts(FreedEarly))),
        "returned": alike_or((), each(parts(FreedEarly))),
        "held_late": longest,
        "placed": own,  # a group of processes does not place parameters
        "spare_bytes": each(each(min)),
        "outside_bytes": each(min),
        "output_retention": each(max),
        "compact": alike_or(None, parts(Compact)),
        "copy_bandwidth": alike_or(None, min),
        "overhead_times": parts(OverheadTimes),
        "host_bound": alike_or((), each(any)),
        "beside_loss_bytes": max,
        "twice_bytes": each(min),
        "casts": one_region,
        "cast_again": own,  # only the placement of parameters asks
        "formed_for": first,
        "timed": all,
        "alike": each(all),
    },
}


def check_rules(rules: dict[type, dict[str, Rule]]) -> None:
    """Raise TypeError if `rules` lack a field, or name one that does not exist."""
    for kind, said in rules.items():
        names = [field.name for field in fields(kind)] if is_dataclass(kind) else list(getattr(kind, "_fields", ()))
        if unlike := sorted(set(names) ^ set(said)):
            raise TypeError(
                f"RULES must say of each field of {kind.__name__} how processes agree on it: {', '.join(unlike)}"
            )


check_rules(RULES)  # on import, so that a new field without a rule is noticed at once


class SentProfile:
    """The part of a process's `profile` that it sends to the others: all fields but `own` ones, and the identities of
    each stage's forms."""

    def __init__(self, profile: Profile) -> None:
        self.costs = {name: getattr(profile, name) for name, rule in RULES[Profile].items() if rule is not own}
        self.forms = [[recipe.identity for recipe in behaviour.forms] for behaviour in profile.behaviours]


def common_profile(mine: Profile, everyone: Sequence[SentProfile]) -> Profile:
    """`mine` with the costs reduced over `everyone`, in the order of ranks.

    Raises:
        MeasureError: if the processes have different stages.
    """
    names = [[stage.name for stage in told.costs["chain"].stages] for told in everyone]
    if any(other != names[0] for other in names):
        raise MeasureError(
            f"the processes measured different stages ({names}); give all of them the same model and inputs of the same"
            " kind"
        )
    found = zip(*(told.forms for told in everyone), strict=True)
    forms = [[one for one in stage[0] if all(one in theirs for theirs in stage)] for stage in found]
    told = [_with_forms(theirs, forms) for theirs in everyone]
    agreed = {name: rule([one[name] for one in told]) for name, rule in RULES[Profile].items() if rule is not own}
    behaviours = []
    for behaviour, wanted in zip(mine.behaviours, forms, strict=True):
        recipes = {recipe.identity: recipe for recipe in behaviour.forms}
        behaviours.append(replace(behaviour, forms=tuple(recipes[one] for one in wanted)))
    profile = replace(mine, behaviours=tuple(behaviours), **agreed)
    return profile.described(profile.chain.name, profile.chain.meta)


def _with_forms(told: SentProfile, wanted: Sequence[Sequence[Identity]]) -> dict[str, Any]:
    """The costs in `told` with only the forms `wanted` of each stage, in that order."""

    def only(stages: Sequence[Stage]) -> tuple[Stage, ...]:
        rows = zip(stages, told.forms, wanted, strict=True)
        return tuple(replace(s, forms=tuple(s.forms[found.index(one)] for one in some)) for s, found, some in rows)

    costs = dict(told.costs)
    costs["chain"] = replace(costs["chain"], stages=only(costs["chain"].stages))
    if costs["compact"] is not None:
        costs["compact"] = costs["compact"]._replace(stages=only(costs["compact"].stages))
    return costs
