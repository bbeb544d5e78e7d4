"""The bound of a step with parameters: its dual with every way written out, the linear program, sequences, values by
hand."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.chains import busy, chains, groups
from oracles.every_step import fastest
from oracles.link_price import link_price
from random_placements import mutants, placed

from rotoff import (
    Chain,
    InfeasibleError,
    InvalidSequenceError,
    Op,
    OpKind,
    OptionError,
    ParameterGroup,
    Sequence,
    SequenceFormatError,
    Stage,
    keep_all,
    lower_bound,
    min_mem_limit,
    simulate,
    solve,
)
from rotoff.core.sequence import drop, prefetch, w, wait
from rotoff.solver.arrays import arrays
from rotoff.solver.bounds import _needs_alone
from rotoff.solver.kernels.steady_bound import Dual
from rotoff.solver.steady_bounds import problem

pytestmark = pytest.mark.full_timing

WITH_PARAMETERS = chains(most=4).flatmap(groups).filter(lambda chain: chain.parameters)


def dual_of(chain: Chain, limit: int, updates: str, unpaid: float) -> tuple[Dual, float, float] | None:
    activations = chain.without_parameters()
    return problem(chain, limit, updates, arrays(activations), _needs_alone(activations), unpaid)


# -- the dual, every way written out


class Prices:
    """Costs of one byte on a time line of two steps, by position modulo 2L + 1: of copies in the cheaper of an
    interval's two parts, and in the second part of what was made in the interval. The step's end has one part."""

    def __init__(
        self, prices: np.ndarray, duplex: bool, shares: tuple[float, float], out_rate: float, in_rate: float
    ) -> None:
        self.lam, self.N = prices[0], prices.shape[1]
        (p1, r1, h1), (p2, r2, h2) = prices[1:4].copy(), prices[4:]
        self.own, self.alpha = (
            1 - (link_price(p, r, shares) if duplex else p) - h for p, r, h in ((p1, r1, h1), (p2, r2, h2))
        )
        p1[-1] = r1[-1] = h1[-1] = math.inf
        self.made, self.out, self.host = p2 * out_rate, np.minimum(p1, p2) * out_rate, np.minimum(h1, h2)
        first, second = (r1, r2) if duplex else (p1, p2)
        self.back = np.minimum(first * in_rate + self.lam, second * in_rate)

    def cheapest(self, start: int, end: int, state: str, ends: str, needed: set[int], unpaid: bool) -> float:
        """From interval `start`, in which a D is made, to interval `end`. States: D alone on the device, V with a valid
        copy on the host, H there alone; lower case once a copy across the step's end has cost nothing."""
        costs = {state: 0.0}
        for c in range(start, end + 1):
            if c > start:
                at_end, passed = c % self.N == self.N - 1, {}
                for s, cost in costs.items():
                    ways = [s] + (["v"] if unpaid and at_end and s in "DH" else [])
                    for t in ways:
                        held = self.lam[c % self.N] if t in "DVdv" else math.inf if c in needed else 0.0
                        passed[t] = min(passed.get(t, math.inf), cost + held)
                costs = passed
            out, back = (self.out if c > start else self.made)[c % self.N], self.back[c % self.N]
            for a, b, cost in (*"DV", out), (*"VH", 0.0), (*"vh", 0.0), (*"HV", back), (*"hv", back):
                if a in costs:
                    costs[b] = min(costs.get(b, math.inf), costs[a] + cost)
        return min((cost for s, cost in costs.items() if s in ends), default=math.inf)


def group_written_out(
    g: ParameterGroup, L: int, costs: Prices, updates: str, unpaid: bool, scale: tuple[float, float]
) -> np.ndarray:
    """The cheapest life of a group that the device updates, and of one that the host does; twice the same for a frozen
    one."""
    size, seconds = scale
    N, first = 2 * L + 1, min(g.stages)
    whole, begun, use = 2 * L - first, 2 * L - max(g.stages), N + first - 1
    needed = {c for i in g.stages for c in (i - 1, 2 * L - i)} if g.bytes else set()
    needed |= {c + N for c in needed}
    earliest = max(whole, 2 * L - 1 if updates == "after" else 0)
    if not g.grad_bytes:
        life = costs.cheapest(use - N, use, "V", "Vv", needed, unpaid)
        return np.full(2, g.bytes / size * life if g.bytes else 0.0)
    always = costs.lam[begun : whole + 1].sum() * g.grad_bytes / size
    ways: list[float] = []
    for u in range(earliest, 2 * L):
        cost = costs.alpha[u] * g.update_time / seconds + always
        cost += g.bytes / size * costs.cheapest(u, u + N, "D", "DVdv", needed, unpaid)
        cost += g.grad_bytes / size * costs.cheapest(whole, u, "D", "DV", set(), False)
        cost += g.state_bytes / size * costs.cheapest(u, u + N, "D", "DVdv", set(), unpaid)
        ways.append(cost)
    on_device, ways = min(ways), [1e300]
    if g.host_update_time is not None:
        lasts = g.host_update_time / seconds
        rest = g.bytes and g.bytes / size * costs.cheapest(use, N + whole, "V", "V", needed, False)
        for x in range(whole, 2 * L):
            copied = costs.out[x] if x > whole else costs.made[x]
            out = always + g.grad_bytes / size * (copied + costs.lam[whole + 1 : x + 1].sum()) + rest
            if not g.bytes:
                ways.append(out)
            elif unpaid:
                ways.append(out + g.bytes / size * costs.cheapest(2 * L - 1, use, "H", "Vv", {use}, True))
                later = costs.cheapest(2 * L, use, "H", "V", {use}, False)
                ways[-1] = min(ways[-1], out + g.bytes / size * later)
            else:
                for h in range(max(x, earliest), use):
                    back = costs.cheapest(h, use, "H", "V", {use}, False)
                    ways.append(out + costs.host[h % N] * lasts + g.bytes / size * back)
    return np.array([on_device, min(ways)])


@given(
    chains(most=4, forms=False).flatmap(groups).flatmap(busy).filter(lambda chain: chain.parameters),
    st.integers(0, 10**6),
    st.sampled_from(["during", "after"]),
    st.sampled_from([0.0, 0.25]),
)
@settings(deadline=None, max_examples=80)
def test_the_dual_is_that_of_every_way_written_out(chain: Chain, seed: int, updates: str, unpaid: float) -> None:
    # Activations of no bytes stay where they are, so that the groups are all there is besides the operations.
    chain = replace(
        chain, stages=tuple(Stage("", s.forward_time + 1, s.backward_time) for s in chain.stages), input_bytes=0
    )
    L, limit = len(chain), 100
    dual, seconds, _ = dual_of(chain, limit, updates, unpaid)
    rng = np.random.default_rng(seed)
    work = [s.forward_time for s in chain.stages] + [s.backward_time for s in chain.stages][::-1]
    room = np.full(2 * L + 1, float(limit)) - chain.input_grad_bytes * (np.arange(2 * L + 1) >= 2 * L - 1)
    rates = limit / chain.d2h_bandwidth / seconds, limit / chain.h2d_bandwidth / seconds
    seen = []
    for _ in range(6):
        prices = rng.random((7, 2 * L + 1)) * rng.choice([0.01, 0.1, 0.33], (7, 1)) * (rng.random((7, 2 * L + 1)) < 0.7)
        prices[[2, 5]] *= chain.duplex
        costs = Prices(prices, chain.duplex, chain.bidirectional_shares, *rates)
        expected = float(costs.own[:-1] @ np.array(work)) / seconds - float(prices[0] @ room) / limit
        for group in chain.parameters:
            paid, free = (group_written_out(group, L, costs, updates, way, (limit, seconds)) for way in (False, True))
            expected += min((1 - unpaid) * paid + unpaid * free)
        value, gradient = dual.at(prices)
        assert value == pytest.approx(expected, rel=1e-9, abs=1e-9)
        seen.append((prices, value, gradient))
    for prices, value, gradient in seen:  # a supergradient: above the dual everywhere
        for other, at_other, _ in seen:
            near = prices + 1e-3 * (other - prices)
            assert at_other <= value + float((gradient * (other - prices)).sum()) + 1e-9
            assert dual.at(near)[0] <= value + float((gradient * (near - prices)).sum()) + 1e-9


def linear_program(dual: Dual, N: int, duplex: bool) -> float:
    """Nearly the dual's highest value, by cutting planes: each supergradient is a line that it lies below."""
    optimize = pytest.importorskip("scipy.optimize")
    lines, right, best, x = [], [], -math.inf, np.zeros((7, N))
    part = np.hstack([np.eye(N)] * 3)
    lanes = np.block(
        [[np.zeros((N, N)), part, 0 * part, np.zeros((N, 1))], [np.zeros((N, N)), 0 * part, part, np.zeros((N, 1))]]
    )
    bounds = [(0, 1e4)] * N + ([(0, 1)] * N + [(0, 1 if duplex else 0)] * N + [(0, 1)] * N) * 2 + [(None, 1e6)]
    for count in range(150):
        value, gradient = dual.at(x)
        if value > best:
            best, best_x = value, x
        lines.append(np.append(-gradient.ravel(), 1.0))
        right.append(value - float((gradient * x).sum()))
        limits = np.array(right + [1.0] * (2 * N))
        found = optimize.linprog(
            [0.0] * (7 * N) + [-1.0], np.vstack([*lines, lanes]), limits, bounds=bounds, method="highs"
        )
        if not found.success or -found.fun - best < 1e-3 * best:
            break
        highest = found.x[:-1].reshape(7, N)
        x = np.ascontiguousarray(highest if count % 3 == 0 else 0.3 * highest + 0.7 * best_x)
    return best


@given(WITH_PARAMETERS, st.floats(0, 0.6), st.sampled_from(["during", "after"]))
@settings(deadline=None, max_examples=12)
def test_the_ascent_nearly_reaches_the_linear_program(chain: Chain, share: float, updates: str) -> None:
    least = max(1, min_mem_limit(chain, "joint", updates))
    limit = round(least + share * max(0, simulate(chain, keep_all(chain)).peak_bytes - least))
    made = dual_of(chain, limit, updates, 1 / 4)
    if made is None:
        return
    dual, seconds, _ = made
    program = linear_program(dual, 2 * len(chain) + 1, chain.duplex)
    assert lower_bound(chain, limit, updates=updates) >= program * seconds * 0.95 - 1e-9


# -- sequences


@given(WITH_PARAMETERS.flatmap(busy), st.integers(0, 10**9), st.sampled_from(["during", "after"]))
@settings(deadline=None, max_examples=40)
def test_no_sequence_beats_the_bound(chain: Chain, seed: int, updates: str) -> None:
    rng = random.Random(seed)
    made = placed(chain, rng, updates)
    trace = simulate(chain, made, updates=updates)
    limit = max(1, trace.peak_bytes)
    bound, best = lower_bound(chain, limit, updates=updates), trace.makespan
    others = mutants(made.to_dict() | {"resident": made.resident}, len(chain.parameters), rng)
    mutant = next(others)
    for _ in range(60):
        try:
            found = simulate(chain, Sequence.from_dict(mutant), limit, updates).makespan
        except (InvalidSequenceError, SequenceFormatError):
            found = math.inf
        best = min(best, found)
        mutant = others.send(found <= best)
    assert bound <= best * (1 + 1e-9)


@pytest.mark.parametrize(("bandwidth", "update"), [(4.0, 4.0), (40.0, 0.25)])
@pytest.mark.parametrize("stages", [(1,), (1, 2)])
def test_no_text_of_all_beats_the_bound(stages: tuple[int, ...], bandwidth: float, update: float) -> None:
    costs = (Stage("", 1.0, 1.0, 2, 8), Stage("", 1.0, 2.0, 0, 6))[: max(stages)]
    chain = Chain(costs, bandwidth, bandwidth, parameters=(ParameterGroup(stages, 10, 10, 0, update, 0.5),))
    least = min_mem_limit(chain, "offload")
    for limit in (least, least + 6):
        during, after = (fastest(chain, limit, when) for when in ("during", "after"))
        assert during <= after < math.inf
        assert lower_bound(chain, limit) <= during * (1 + 1e-9)
        assert lower_bound(chain, limit, updates="after") <= after * (1 + 1e-9)


def in_flight(stages: int, ahead: int, copy: float) -> tuple[Chain, Sequence]:
    """A chain of frozen groups, and a sequence in which their parameters come in `ahead` operations before their use,
    around the step's end."""
    frozen = tuple(ParameterGroup((i,), round(copy * 100)) for i in range(1, stages + 1))
    chain = Chain((Stage("", 1.0, 1.0),) * stages, 1.0, 100.0, parameters=frozen)
    uses = [*range(1, stages + 1), *range(stages, 0, -1)]
    arriving: set[int] = set()
    for _ in range(2):  # the second time from the state in which the first ends
        device, ops = set(uses[:ahead]), []
        for t, k in enumerate(uses):
            if k in arriving:
                ops.append(wait(w(k)))
                arriving.remove(k)
            ops.append(Op(OpKind.F_ALL if t < stages else OpKind.B, k))
            soon = [uses[(t + n) % len(uses)] for n in range(1, ahead + 1)]
            if k not in soon:
                ops.append(drop(w(k)))
                device.remove(k)
            if soon[-1] not in device:
                ops.append(prefetch(w(soon[-1])))
                device.add(soon[-1])
                arriving.add(soon[-1])
    return chain, Sequence(tuple(ops), resident=[f"w {k}" for k in sorted(device)])


def test_copies_that_fall_behind_for_four_steps_are_below_the_link_but_not_below_the_bound() -> None:
    chain, sequence = in_flight(20, 8, 1.28)
    trace = simulate(chain, sequence)
    link = trace.h2d_bytes / chain.h2d_bandwidth
    assert trace.makespan == pytest.approx(40.68)
    assert link == pytest.approx(40.96)
    assert lower_bound(chain, trace.peak_bytes) <= trace.makespan
    assert lower_bound(chain, trace.peak_bytes, steps=math.inf) <= link
    with pytest.raises(OptionError, match="steps is 3; give a number of at least 4"):
        lower_bound(chain, trace.peak_bytes, steps=3)


# -- by hand


def test_what_fits_costs_the_updates_that_the_host_cannot_do() -> None:
    stages = (Stage("", 1.0, 2.0, 10, 100),) * 2
    updated = ParameterGroup((1,), 50, 50, 100, update_time=0.5)
    chain = Chain(stages, 1000.0, 1000.0, 10, parameters=(updated, replace(updated, stages=(2,))))
    peak = simulate(chain, keep_all(chain)).peak_bytes
    for when in ("during", "after"):
        assert lower_bound(chain, 10 * peak, updates=when) == pytest.approx(7.0)
    assert lower_bound(chain, 10 * peak, mode="remat") == pytest.approx(7.0)
    on_host = replace(chain, parameters=tuple(replace(g, host_update_time=0.1) for g in chain.parameters))
    # After B 1, g 1 leaves (0.05 s), is used on the host (0.1 s), and w 1 comes back (0.05 s), before F 1.
    assert 6.04 <= lower_bound(on_host, 10 * peak) <= solve(on_host, 10 * peak).meta["makespan"] == pytest.approx(6.2)


def test_a_link_that_hardly_moves_leaves_what_compute_takes() -> None:
    group = ParameterGroup((1,), 10**9, 10**9, 10**9, update_time=0.5)
    chain = Chain((Stage("", 1.0, 2.0, 10**6, 10**8),) * 2, 1e-9, 1e-9, parameters=(group,))
    assert lower_bound(chain, min_mem_limit(chain, "joint")) >= 6.5 * (1 - 1e-9)


def test_one_of_two_weights_at_a_time() -> None:
    # w 2 comes in between the end of F 1 and F 2, w 1 between that of B 2 and B 1; it stays from B 1 to F 1.
    frozen = (ParameterGroup((1,), 100), ParameterGroup((2,), 100))
    chain = Chain((Stage("", 1.0, 1.0),) * 2, 1.0, 100 / 3, parameters=frozen)
    assert lower_bound(chain, 100) == pytest.approx(1 + 3 + 1 + 1 + 3 + 1)
    assert lower_bound(chain, 200) == pytest.approx(4.0)
    assert min_mem_limit(chain, "joint") == 100


def test_updates_after_the_step_stream_through_its_end() -> None:
    # At F 1 and B 1 there is room for w and what they need, not for o: it comes in after B 1 has ended, and goes out
    # before F 1.
    group = ParameterGroup((1,), 10, 10, 20, update_time=0.5)
    chain = Chain((Stage("", 1.0, 1.0, 0, 30, grad_bytes=0),), 10.0, 10.0, parameters=(group,))
    assert min_mem_limit(chain, "joint") == 50  # B 1: abar 1, w 1 and g 1
    # Each direction takes 2 s a step, both at once, from the end of B 1 to the start of F 1.
    dual, seconds, _ = dual_of(chain, 50, "after", 0.0)
    assert linear_program(dual, 3, True) * seconds == pytest.approx(1 + 1 + 2, rel=2e-3)
    # A step in four need not wait for a copy out across its end, of o or of w.
    assert 3.5 <= lower_bound(chain, 50, updates="after") <= 4.0
    assert lower_bound(chain, 50, updates="after", steps=math.inf) == pytest.approx(4.0, rel=2e-3)
    free = ParameterGroup((1,), 10, 10, 0, update_time=0.5)
    assert lower_bound(replace(chain, parameters=(free,)), 50, updates="after") == pytest.approx(2.5)


def test_smallest_limits_by_hand() -> None:
    stages = (Stage("", 1.0, 1.0, 10, 30, grad_bytes=4), Stage("", 1.0, 1.0, 2, 20, grad_bytes=3))
    group = ParameterGroup((1, 2), 100, 50, 200, host_update_time=1.0)
    chain = Chain(stages, 1.0, 1.0, input_bytes=5, input_grad_bytes=1, parameters=(group,))
    # B 1: abar 1, a_0, a_2, δ_1, δ_0, w and g. B 2: abar 2, a 1, a_0, δ_2, δ_1, w and g.
    assert min_mem_limit(chain, "joint") == max(30 + 5 + 2 + 4 + 1, 20 + 10 + 5 + 3 + 4) + 150
    on_device = replace(chain, parameters=(replace(group, host_update_time=None, update_transient_bytes=7),))
    assert min_mem_limit(on_device, "joint") == 5 + 2 + 1 + 100 + 50 + 200 + 7
    assert min_mem_limit(on_device, "remat") >= min_mem_limit(chain.without_parameters(), "remat") + 300
    with pytest.raises(InfeasibleError, match=r"365 bytes\) in mode joint; the limit is 364 B") as caught:
        lower_bound(on_device, 364)
    assert caught.value.min_mem_limit == 365
    assert 0 < lower_bound(on_device, 365) < math.inf
    with pytest.raises(OptionError, match="updates is 'later'"):
        lower_bound(chain, 1000, updates="later")
    with pytest.raises(OptionError, match="modes are"):
        lower_bound(chain, 1000, mode="both")


@given(chains(most=6))
@settings(max_examples=15)
def test_without_parameters_nothing_has_changed(chain: Chain) -> None:
    limit = max(1, min_mem_limit(chain, "offload"), min_mem_limit(chain, "remat"))
    asked = itertools.product(("joint", "remat", "offload"), ("during", "after"))
    assert {lower_bound(chain, limit, *one) for one in asked} == {lower_bound(chain, limit)}
