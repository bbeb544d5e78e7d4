"""What processes agree on of a profile: each field, in each process the same, and enough for all of them."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, make_dataclass, replace
from typing import Any

import pytest
import torch
from skip_models import made

import rotoff
from rotoff.core.chain import Stage
from rotoff.planning.memory_account import reported_bytes
from rotoff.planning.planner import least_limit, make_plan, plan_everything
from rotoff.planning.reduction import RULES, SentProfile, check_rules, common_profile, own
from rotoff.planning.request import Request
from rotoff.profile.memory.eager_memory import FreedEarly, HeldLate
from rotoff.profile.profile import Compact, Profile
from rotoff.runtime.overhead import OverheadTimes

NAMES = ("mlp", "residual", "convolutional", "frozen", "handed_on", "side_inputs", "unet", "concatenates")
DECIDED = [name for name, rule in RULES[Profile].items() if rule is not own]


def profile_of(name: str, rows: int) -> Profile:
    model, batch = made(name)
    several = [batch() for _ in range(rows)]
    first = several[0]
    x = tuple(map(torch.cat, zip(*several, strict=True))) if isinstance(first, tuple) else torch.cat(several)
    if isinstance(x, tuple):
        x = tuple(t.detach().requires_grad_(one.requires_grad) for t, one in zip(x, first, strict=True))
    wrapped = rotoff.Checkpointable(model, cache_directory=None).measure(x)
    wrapped.close()
    return wrapped.profile


def shaken(value: Any, rng: random.Random) -> Any:
    """`value` with each number in it another, by itself; what holds words, numbers of stages or modules is left as it
    is."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return value + rng.randrange(0, 1000)
    if isinstance(value, float):
        return value * rng.uniform(0.5, 2)
    if isinstance(value, (FreedEarly, HeldLate)):
        return value._replace(nbytes=value.nbytes + rng.randrange(1000))
    if isinstance(value, Compact):
        return value._replace(**{n: shaken(getattr(value, n), rng) for n in value._fields if n != "copied"})
    if isinstance(value, OverheadTimes):
        return OverheadTimes(*(shaken(one, rng) for one in value))
    if is_dataclass(value):
        named = {
            f.name: getattr(value, f.name) for f in fields(value) if f.name not in ("extra", "meta", "name", "duplex")
        }
        made = {name: shaken(one, rng) for name, one in named.items()}
        if isinstance(value, Stage):  # whose saved bytes count its output, and whose tail is a part of its forward
            made["tail_time"] = min(made["tail_time"], made["forward_time"])
            made["saved_bytes"] = max(made["saved_bytes"], made["output_bytes"])
            least = made["output_bytes"]
            made["forms"] = tuple(replace(one, saved_bytes=max(one.saved_bytes, least)) for one in made["forms"])
        return replace(value, **made)  # type: ignore[type-var]
    if isinstance(value, tuple):
        return tuple(shaken(one, rng) for one in value)
    return value


def unequal(profile: Profile, seed: int) -> Profile:
    rng = random.Random(seed)
    return replace(profile, **{n: shaken(getattr(profile, n), rng) for n in DECIDED if n not in ("skips", "no_forms")})


def agreed(profiles: Sequence[Profile]) -> list[Profile]:
    """What each process has in the end; what they tell goes through a pickle, as between processes."""
    everyone = [pickle.loads(pickle.dumps(SentProfile(one))) for one in profiles]
    return [common_profile(mine, copy.deepcopy(everyone)) for mine in profiles]


def outcome(profile: Profile, request: Request) -> Any:
    try:
        plan = make_plan(profile, request)
    except rotoff.InfeasibleError as error:
        return str(error), error.min_mem_limit
    return str(plan.sequence), plan.kept, plan.compact, plan.keeps_all


def decided(profile: Profile) -> dict[str, Any]:
    return {name: getattr(profile, name) for name in DECIDED} | {"meta": profile.chain.meta}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.grid
def test_all_processes_have_the_same_and_decide_alike(name: str) -> None:
    """Where every number is another in each of three processes, and between those that one of them alone would keep
    within."""
    few, many = profile_of(name, 1), profile_of(name, 3)
    for profiles in ([few, many], [many, few], [unequal(few, n) for n in range(3)]):
        ours = agreed(profiles)
        for one in ours:
            assert decided(one) == decided(ours[0])
        marks = sorted(reported_bytes(one, plan_everything(one)) for one in (*profiles, ours[0]))
        for limit in sorted({*marks, *((a + b) // 2 for a, b in zip(marks, marks[1:], strict=False))}):
            request = Request(limit, "remat", 50, {"refine": False})
            assert len({outcome(one, request) for one in ours}) == 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.grid
def test_what_is_enough_for_all_is_enough_for_each(name: str) -> None:
    few, many = profile_of(name, 1), profile_of(name, 3)
    for profiles in ([few, many], [unequal(few, n) for n in range(3)]):
        ours = agreed(profiles)[0]
        # each with the choices that all have
        alone = [replace(p, skips=ours.skips and p.skips, compact=ours.compact and p.compact) for p in profiles]
        for mode in ("joint", "remat", "offload"):
            request = Request(1 << 60, mode, 50, {})
            assert least_limit(ours, request) >= max(least_limit(one, request) for one in alone)
        most = max(reported_bytes(one, plan_everything(one)) for one in alone)
        assert reported_bytes(ours, plan_everything(ours)) >= most
        for stage, *theirs in zip(ours.chain.stages, *(one.chain.stages for one in profiles), strict=True):
            for field in ("saved_bytes", "output_bytes", "backward_transient_bytes", "forward_time"):
                assert getattr(stage, field) == max(getattr(one, field) for one in theirs)


def test_one_process_alone_agrees_with_itself() -> None:
    for name in NAMES:
        profile = profile_of(name, 1)
        assert decided(agreed([profile])[0]) == decided(profile)


def test_equal_processes_lose_nothing() -> None:
    """Skip connections stay in place, and waiting gradients are copied, as in a process by itself."""
    for name in ("unet", "concatenates"):
        profile = profile_of(name, 1)
        assert profile.skips or profile.compact
        ours = agreed([profile, copy.copy(profile)])[1]
        assert (ours.skips, ours.compact) == (profile.skips, profile.compact)


def test_forms_have_the_same_numbers_in_all_processes() -> None:
    """Those that all of them found, in the order of the first."""
    one = profile_of("residual", 2)
    n = next(n for n, behaviour in enumerate(one.behaviours) if behaviour.forms)
    recipe, form = one.behaviours[n].forms[0], one.chain.stages[n].forms[0]
    another = replace(recipe, kept=frozenset({*recipe.kept, 1000}))
    costs = form, replace(form, backward_time=2 * form.backward_time)

    def with_forms(order: Sequence[int]) -> Profile:
        stages, behaviours = list(one.chain.stages), list(one.behaviours)
        stages[n] = replace(stages[n], forms=tuple(costs[k] for k in order))
        behaviours[n] = replace(behaviours[n], forms=tuple((recipe, another)[k] for k in order))
        return replace(one, chain=replace(one.chain, stages=tuple(stages)), behaviours=tuple(behaviours))

    for ours in agreed([with_forms([0, 1]), with_forms([1, 0])]):
        assert ours.behaviours[n].forms == (recipe, another)
        assert ours.chain.stages[n].forms == costs
    for ours in agreed([with_forms([1, 0]), with_forms([0])]):
        assert ours.behaviours[n].forms == (recipe,)
        assert ours.chain.stages[n].forms == costs[:1]


def test_other_stages_are_one_sentence() -> None:
    with pytest.raises(rotoff.MeasureError, match="the processes measured different stages"):
        agreed([profile_of("mlp", 1), profile_of("residual", 1)])


def test_lingering_bytes_are_the_most_of_each_span() -> None:
    one = profile_of("mlp", 1)
    theirs = [((0, 2, 100), (3, 5, 10)), ((3, 5, 90),), ()]
    ours = agreed([replace(one, held_late=tuple(HeldLate(*span) for span in spans)) for spans in theirs])
    assert ours[0].held_late == (HeldLate(0, 2, 100), HeldLate(3, 5, 90))


@pytest.mark.parametrize("kind", RULES)
def test_every_field_says_how_processes_agree_on_it(kind: type) -> None:
    check_rules({kind: RULES[kind]})
    name, *rest = RULES[kind]
    with pytest.raises(
        TypeError, match=f"RULES must say of each field of {kind.__name__} how processes agree on it: {name}$"
    ):
        check_rules({kind: {one: RULES[kind][one] for one in rest}})
    with pytest.raises(TypeError, match=": other$"):
        check_rules({kind: {**RULES[kind], "other": max}})


def test_a_new_field_needs_a_rule() -> None:
    longer = make_dataclass("Longer", [("new_bytes", int, 0)], bases=(Profile,), frozen=True)
    with pytest.raises(TypeError, match="each field of Longer how processes agree on it: new_bytes"):
        check_rules({longer: RULES[Profile]})


@pytest.mark.parametrize("mode", ["joint", "remat", "offload"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.grid
def test_the_smallest_limit_is_exact_whatever_the_numbers_are(name: str, mode: str) -> None:
    for seed in range(3):
        profile = unequal(profile_of(name, 1), seed)
        for plain in (True, False):
            request = Request(1, mode, 20, {"refine": False}, plain=plain)
            least = least_limit(profile, request)
            make_plan(profile, replace(request, mem_limit=least))
            with pytest.raises(rotoff.InfeasibleError) as caught:
                make_plan(profile, replace(request, mem_limit=least - 1))
            assert caught.value.min_mem_limit == least
