"""Every policy, on any chain and limit: what it returns passes the machine, or it says from which limit on it works; and
models train under it as under any other plan."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.chains import chains, groups
from thoroughness import examples

from rotoff import Chain, InfeasibleError, OptionError, Stage, lower_bound, simulate, solve
from rotoff.solver import keep_all
from rotoff.solver.policies import PLACEMENTS, POLICIES, WITHOUT_RECOMPUTE

pytestmark = pytest.mark.full_search

CANNOT = dict.fromkeys(("zero-offload", "torchao-offload"), "has no host_update_time")
CHAIN = Chain((Stage("one", 1.0, 2.0, 10, 30), Stage("two", 1.0, 2.0, 10, 30)), 10.0, 10.0, input_bytes=5)


WITH_PARAMETERS = chains(most=4).flatmap(groups).filter(lambda chain: chain.parameters)


@pytest.mark.parametrize("policy", [*POLICIES, *PLACEMENTS])
@given(st.data(), st.sampled_from([0.05, 0.3, 0.6, 0.9, 1.0]))
@pytest.mark.grid(every=2)
def test_within_the_limit_or_refused(policy: str, data: st.DataObject, share: float) -> None:
    chain, how = data.draw(chains() if policy in POLICIES else WITH_PARAMETERS), {}
    if policy in PLACEMENTS:
        how = {"effort": False, "updates": data.draw(st.sampled_from(["during", "after"]))}
    limit = max(1, round(share * simulate(chain, keep_all(chain)).peak_bytes))
    try:
        sequence = solve(chain, limit, policy=policy, **how)
    except OptionError as error:
        assert CANNOT[policy] in str(error)
        return
    except InfeasibleError as error:
        if not error.min_mem_limit:
            return
        assert error.min_mem_limit > limit
        limit = error.min_mem_limit
        sequence = solve(chain, limit, policy=policy, **how)
    trace = simulate(chain, sequence, limit, how.get("updates", "during"))
    assert (sequence.mode, sequence.mem_limit, sequence.meta["makespan"]) == (policy, limit, trace.makespan)
    assert policy in PLACEMENTS or trace.makespan >= lower_bound(chain, limit) * (1 - 1e-9)
    assert policy not in WITHOUT_RECOMPUTE or trace.recompute_time == 0


@pytest.mark.parametrize(("policy", "mode"), [("rotor", "remat"), ("pofo", "joint")])
@examples(30)
@given(chains(most=6), st.floats(0.3, 1.0))
def test_ours_is_never_slower(policy: str, mode: str, chain: Chain, share: float) -> None:
    limit = max(1, int(simulate(chain, keep_all(chain)).peak_bytes * share))
    try:
        theirs = solve(chain, limit, policy=policy)
    except InfeasibleError:
        return
    assert solve(chain, limit, mode).meta["makespan"] <= theirs.meta["makespan"] * (1 + 1e-12)


def test_an_unknown_policy_lists_the_known_ones() -> None:
    for name in ("rotors", 3, ""):
        with pytest.raises(OptionError, match="policies are greedy"):
            solve(CHAIN, 100, policy=name)


def test_options_of_another_kind_are_refused() -> None:
    with pytest.raises(OptionError, match="policy 'greedy' has no option 'speed'; it has no options"):
        solve(CHAIN, 100, policy="greedy", speed=3)
    for name, value in {"mode": "remat", "mem_slots": 20, "refine": False, "host_limit": 10}.items():
        with pytest.raises(OptionError, match=f"{name} is .* does not use it"):
            solve(CHAIN, 100, policy="greedy", **{name: value})
    with pytest.raises(OptionError, match="speed is not an argument of solve"):
        solve(CHAIN, 100, speed=3)
