"""The bound of a step with parameters: its dual with every way written out, the linear program, sequences, values by
hand."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.chains import busy, chains, groups
from oracles.every_step import fastest
from oracles.link_price import link_price
from random_programs import mutants, placed
from thoroughness import examples

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
from rotoff.solver.steady_bounds import drift_time, problem

pytestmark = pytest.mark.full_timing

WITH_PARAMETERS = chains(most=4).flatmap(groups).filter(lambda chain: chain.parameters)


def dual_of(chain: Chain, limit: int, updates: str, unpaid: float) -> tuple[Dual, float, float] | None:
    activations = chain.without_parameters()
    return problem(chain, limit, updates, arrays(activations), _needs_alone(activations), unpaid)


# -- the dual, every way written out


class Prices:
    """Costs of one byte on a time line of two steps, by position modulo 2L + 1, and of seconds: of the operation, of
    other compute, of the host. A copy runs in one of an interval's parts: while the operation runs, then, and, between
    two backwards, once a forward of the second one's stage has begun. The step's end has the second part alone."""

    def __init__(
        self,
        prices: np.ndarray,
        duplex: bool,
        shares: tuple[float, float],
        out_rate: float,
        in_rate: float,
        unpaid: float,
    ) -> None:
        self.lam, self.N, self.unpaid = prices[0], prices.shape[1], unpaid
        self.backward = range(self.N // 2, self.N - 2)  # intervals between two backwards
        parts = [rows.copy() for rows in np.split(prices[1:], 3)]
        alphas = [1 - (link_price(p, r, shares) if duplex else p) - h for p, r, h in parts]
        parts[0][:, -1] = math.inf
        for rows in (parts[2], alphas[2][None]):
            rows[:, : self.N // 2] = rows[:, self.N - 2 :] = math.inf
        (self.first, self.first_in, first_host), (p2, self.r2, h2), (p3, self.r3, h3) = parts
        if not duplex:
            self.first_in, self.r2, self.r3 = self.first, p2, p3
        self.in_rate = in_rate
        self.own, self.alpha = alphas[0], np.minimum(alphas[1], alphas[2])
        self.made = np.minimum(p2, p3) * out_rate
        self.out, self.host = np.minimum(self.made, self.first * out_rate), np.minimum(first_host, np.minimum(h2, h3))

    def arrival(self, c: int, needed: set[int], share: float = 1.0) -> float:
        """Of a copy in during interval c, whose bytes are held at the cut where it runs beside the operation."""
        k = c % self.N
        late = self.r3[k] if not (c + 1 in needed and k in self.backward) else math.inf
        return min(share * min(self.r2[k], late) * self.in_rate, share * self.first_in[k] * self.in_rate + self.lam[k])

    def cheapest(self, start: int, end: int, state: str, ends: str, needed: set[int], flies: bool = False) -> float:
        """From interval `start`, in which a D is made, to interval `end`. States: D alone on the device, V with a valid
        copy on the host, H there alone. A copy across the step's end costs a share 1 - `unpaid`: o and i before it has
        run, p and j until the end is over; `flies`: in, too."""
        costs, paid = {state: 0.0}, 1 - self.unpaid
        for c in range(start, end + 1):
            k = c % self.N
            if c > start:
                usable = "DVop" if c in needed else "DVHopij"
                costs = {s: cost + self.lam[k] * (s != "H") for s, cost in costs.items() if s in usable}
            out, before = (self.out if c > start else self.made)[k], c < self.N - 1
            moves = [(*"DV", out), (*"op", paid * out), (*"VH", 0.0), (*"HV", self.arrival(c, needed))]
            if before:
                moves += [(*"Do", 0.0), (*"Dp", paid * out)]
                # What is issued here runs beside the operation only where it is held at the cut.
                moves += [(*"Hi", 0.0), (*"Hj", self.arrival(c, set(), paid))] if flies else []
            else:
                beside = min(self.first_in[k], self.r2[k], self.r3[k])
                moves += [(*"pV", 0.0), (*"ij", paid * beside * self.in_rate), (*"jV", 0.0)]
            for a, b, cost in 2 * moves:
                if a in costs:
                    costs[b] = min(costs.get(b, math.inf), costs[a] + cost)
        return min((cost for s, cost in costs.items() if s in ends), default=math.inf)


def group_written_out(
    g: ParameterGroup, L: int, costs: Prices, updates: str, scale: tuple[float, float]
) -> tuple[float, float]:
    """The cheapest life of a group that the device updates, and of one that the host does; twice the same for a frozen
    one."""
    size, seconds = scale
    N, first = 2 * L + 1, min(g.stages)
    whole, begun, use = 2 * L - first, 2 * L - max(g.stages), N + first - 1
    needed = {c for i in g.stages for c in (i - 1, 2 * L - i)} if g.bytes else set()
    needed |= {c + N for c in needed}
    earliest = max(whole, 2 * L - 1 if updates == "after" else 0)
    w, o, grad = g.bytes / size, g.state_bytes / size, g.grad_bytes / size
    if not g.grad_bytes:
        # From the last use on, and from the next step's first use on.
        away = w * costs.cheapest(use - N + (whole - (first - 1)), use, "V", "V", {use}, True) if w else 0.0
        used = w * costs.cheapest(use, N + whole, "V", "V", needed) if w else 0.0
        return away + used, away + used
    always = costs.lam[begun : whole + 1].sum() * grad
    ways: list[float] = []
    for u in range(earliest, 2 * L):
        cost = costs.alpha[u] * g.update_time / seconds + always
        cost += w * costs.cheapest(u, u + N, "D", "DVp", needed, True)
        cost += grad * Prices.cheapest(Paid(costs), whole, u, "D", "DV", set())
        cost += o * costs.cheapest(u, u + N, "D", "DVp", set(), updates != "after")
        ways.append(cost)
    if g.host_update_time is None:
        return min(ways), math.inf
    return min(ways), always + served(g, costs, (whole, earliest, use), needed, scale)


class Paid(Prices):
    """The same prices where nothing crosses the step's end for less."""

    def __init__(self, costs: Prices) -> None:
        self.__dict__ |= costs.__dict__ | {"unpaid": 0.0}


def served(
    g: ParameterGroup, costs: Prices, at: tuple[int, int, int], needed: set[int], scale: tuple[float, float]
) -> float:
    """What a group costs that the host updates, beyond its gradient's bytes up to the last backward."""
    (size, seconds), (whole, earliest, use), N = scale, at, costs.N
    w, grad, paid, end = g.bytes / size, g.grad_bytes / size, 1 - costs.unpaid, N - 1
    leaves = [
        grad * ((costs.out[x] if x > whole else costs.made[x]) + costs.lam[whole + 1 : x + 1].sum())
        for x in range(whole, end)
    ]
    if not g.bytes:
        return min(leaves)
    lam = np.concatenate([costs.lam, costs.lam])
    held = lam[end : use + 1].sum()
    raw = [min(costs.first_in[k % N], costs.r2[k % N], costs.r3[k % N]) * costs.in_rate for k in range(2 * N)]
    ways = []
    for flies in (False, True):
        best = math.inf
        for x, h, y in itertools.product(range(whole, end), range(earliest, use), range(whole, use)):
            if not x <= h <= y or (y < end and not flies):
                continue
            late = flies and y >= end
            back = raw[y] + held if late else costs.arrival(y, {use}) + lam[y + 1 : use + 1].sum()
            served_so = leaves[x - whole] + costs.host[h % N] * g.host_update_time / seconds + w * back
            best = min(best, served_so)
        others = min(costs.arrival(y, {use}) + lam[y + 1 : use + 1].sum() for y in range(end, use))
        ways.append(paid * best + (1 - paid) * (min(leaves) + w * (held if flies else others)))
    return min(ways) + w * costs.cheapest(use, N + whole, "V", "V", needed)


@given(
    chains(most=4, forms=False).flatmap(groups).flatmap(busy).filter(lambda chain: chain.parameters),
    st.integers(0, 10**6),
    st.sampled_from(["during", "after"]),
    st.sampled_from([0.0, 0.25]),
)
@examples(80)
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
        prices = rng.random((10, 2 * L + 1)) * rng.choice([0.01, 0.1, 0.33], (10, 1))
        prices *= rng.random((10, 2 * L + 1)) < 0.7
        prices[[2, 5, 8]] *= chain.duplex
        prices[7:, [*range(L), 2 * L - 1, 2 * L]] = 0  # intervals with two parts
        costs = Prices(prices, chain.duplex, chain.bidirectional_shares, *rates, unpaid)
        expected = float(costs.own[:-1] @ np.array(work)) / seconds - float(prices[0] @ room) / limit
        for group in chain.parameters:
            expected += min(group_written_out(group, L, costs, updates, (limit, seconds)))
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
    lines, right, best, x = [], [], -math.inf, np.zeros((10, N))
    part = np.hstack([np.eye(N)] * 3)
    lanes = np.hstack([np.zeros((3 * N, N)), np.kron(np.eye(3), part), np.zeros((3 * N, 1))])
    bounds = [(0, 1e4)] * N + ([(0, 1)] * N + [(0, 1 if duplex else 0)] * N + [(0, 1)] * N) * 3 + [(None, 1e6)]
    for count in range(150):
        value, gradient = dual.at(x)
        if value > best:
            best, best_x = value, x
        lines.append(np.append(-gradient.ravel(), 1.0))
        right.append(value - float((gradient * x).sum()))
        limits = np.array(right + [1.0] * (3 * N))
        found = optimize.linprog(
            [0.0] * (10 * N) + [-1.0], np.vstack([*lines, lanes]), limits, bounds=bounds, method="highs"
        )
        if not found.success or -found.fun - best < 1e-3 * best:
            break
        highest = found.x[:-1].reshape(10, N)
        x = np.ascontiguousarray(highest if count % 3 == 0 else 0.3 * highest + 0.7 * best_x)
    return best


@given(WITH_PARAMETERS, st.floats(0, 0.6), st.sampled_from(["during", "after"]))
@examples(12)
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
@examples(40)
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
@pytest.mark.grid
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


@pytest.mark.parametrize("out", [1e-3, 100.0])
def test_a_stage_is_made_again_once_its_weights_are_there(out: float) -> None:
    # At B 2 there is room for nothing else. Then w 1 comes in (3 s), and F 1 runs again (1 s), or abar 1 comes in (3 s).
    # w 2 comes in during F 1 and after it.
    frozen = (ParameterGroup((1,), 100), ParameterGroup((2,), 100))
    chain = Chain((Stage("", 1.0, 1.0, 0, 100),) * 2, out, 100 / 3, parameters=frozen)
    assert lower_bound(chain, 200, steps=math.inf) == pytest.approx(3 + 1 + 1 + 3 + 1 + 1)
    assert solve(chain, 200, refine=0.05).meta["makespan"] == pytest.approx(10.0)


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


def test_where_little_fits_beside_a_backward_few_copies_cross_it() -> None:
    # Of 120 bytes B 2 needs 100 for abar 2 and 10 for g 2. Copies of the other 10 take 1 s, half of which two steps may
    # save on average. Copies across the end of the fourth step would save 1 s.
    stages = (Stage("", 1.0, 1.0, 0, 10, grad_bytes=0), Stage("", 1.0, 1.0, 0, 100, grad_bytes=0))
    groups = tuple(ParameterGroup((i,), 10, 10, 20, update_time=1.0) for i in (1, 2))
    chain = Chain(stages, 10.0, 10.0, parameters=groups)
    endless = lower_bound(chain, 120, updates="after", steps=math.inf)
    assert endless == pytest.approx(9.0, rel=1e-4)
    assert lower_bound(chain, 120, updates="after") == pytest.approx(endless - 0.5, rel=1e-4)
    # A backward of another stage counts only where no update comes before it: B 1 needs 103 bytes and 10 for g 1.
    turned = replace(chain, stages=(replace(stages[0], backward_transient_bytes=103), stages[1]))
    costs = arrays(turned.without_parameters())
    assert drift_time(turned, 125, "during", costs) == pytest.approx((125 - 110) / 10 / 2)
    assert drift_time(turned, 125, "after", costs) == pytest.approx((125 - 113) / 10 / 2)
    # Nobody waits for the update of parameters of no bytes, so that it may be under way at every cut.
    idle = replace(groups[0], bytes=0, host_update_time=1.0)
    assert drift_time(replace(turned, parameters=(*groups, idle)), 125, "after", costs) == math.inf


def test_steps_in_which_nothing_takes_time_on_the_device() -> None:
    # The unit of the dual is the time of all updates there, and no update of the only group need run there.
    group = ParameterGroup((1,), 10, 10, 0, update_time=1.0, host_update_time=0.0)
    chain = Chain((Stage("", 0.0, 0.0, 0, 0, grad_bytes=0),), 1e9, 1e9, parameters=(group,))
    assert lower_bound(chain, 20) <= solve(chain, 20, refine=0.05).meta["makespan"] <= 1e-6


@pytest.mark.slow
def test_the_ascent_reaches_far_above_compute() -> None:
    # In each step the link takes some 80 s and compute 5 s. From no prices at all the ascent stopped at 73 s.
    groups = tuple(ParameterGroup((i,), 10, 10, 20) for i in range(1, 17))
    chain = Chain((Stage("", 0.1, 0.2, 0, 1, grad_bytes=0),) * 16, 10.0, 10.0, parameters=groups)
    assert min_mem_limit(chain, "joint", "after") == 40
    more, least = (lower_bound(chain, limit, updates="after", steps=math.inf) for limit in (60, 40))
    assert 79 < more < least


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
@examples(15)
def test_without_parameters_nothing_has_changed(chain: Chain) -> None:
    limit = max(1, min_mem_limit(chain, "offload"), min_mem_limit(chain, "remat"))
    asked = itertools.product(("joint", "remat", "offload"), ("during", "after"))
    assert {lower_bound(chain, limit, *one) for one in asked} == {lower_bound(chain, limit)}
