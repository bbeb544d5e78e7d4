"""Certified lower bounds on the step time, and the smallest limits that work.

Symbols: L stages; |a_i| output bytes, |ā_i^k| saved bytes of form k, |δ_i| gradient bytes, o_F, o_B transients
(`chain`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

from ..core.chain import Chain, check_chain
from ..core.modes import check_mode
from ..core.sizes import format_bytes, parse_bytes
from ..core.steady_step import PERIODS, check_when
from ..errors import InfeasibleError, OptionError
from .anneal import least_compute
from .arrays import MOST_LIMIT, Arrays, arrays
from .kernels.bound import ascend
from .kernels.least_limit import remat_need
from .steady_bounds import PATIENCE as STEADY_PATIENCE
from .steady_bounds import own_needs, steady_time

# -- the smallest limits


def min_mem_limit(chain: Chain, mode: str = "joint", updates: str = "during") -> int:
    """The smallest limit in bytes in which `solve` finds a sequence of `mode`; one byte less is refused.

    offload: the largest need of one operation with its own operands. Every stage runs forward once (``F_all``), and
        everything else may be on the host.
    joint: the same with the cheapest operands that can be made, since any value may be made early and wait on the host.
    remat: the smallest peak over recompute trees, in which a saved set may also outlive its input. With large
        `checkpoint_transient_bytes`, or forms whose transients differ, sequences may exist that fit a few percent less
        (``policy="nonpersistent"`` finds them on short chains).

    Parameters are on the host, except those that an operation reads or writes. In mode remat they stay on the device,
    so no limit below their sum works. updates: when the device updates groups that the host cannot, "during" the step
    or "after" ``B 1``.

    Raises:
        ChainError: if `chain` is not a chain. OptionError: if the mode is unknown.
    """
    check_chain(chain)
    check_mode(mode)
    check_when(updates)
    return _minimum(chain, mode, updates)


@lru_cache(maxsize=256)
def _minimum(chain: Chain, mode: str, updates: str) -> int:
    return {"joint": _joint_minimum, "remat": _remat_minimum, "offload": _offload_minimum}[mode](chain, updates)


def infeasible(chain: Chain, mode: str, mem_limit: int, updates: str = "during") -> InfeasibleError:
    """The error that names the smallest limit of `mode`."""
    least = min_mem_limit(chain, mode, updates)
    return InfeasibleError(
        f"needs at least {format_bytes(least)} ({least} bytes) in mode {mode}; the limit is {format_bytes(mem_limit)}"
        f" ({mem_limit} bytes)",
        least,
    )


def _offload_minimum(chain: Chain, updates: str) -> int:
    c, L = arrays(chain), len(chain)
    read, trained, least = own_needs(chain, updates)
    for i in range(1, L + 1):
        operands = int(c.out[0] + c.saved[i, 0] + (c.saved[i - 1, 0] if i > 1 else 0))
        gradients = int(c.grad[i] + c.grad[i - 1] + (c.out[L] if i < L else 0))
        forward, backward = operands + int(read[i]), operands + int(trained[i])
        least = max(least, forward + int(c.f_transient[i, 0]), backward + gradients + int(c.b_transient[i, 0]))
    return least


def _remat_minimum(chain: Chain, updates: str = "during") -> int:
    c = remat_arrays(chain, updates)
    _, W = need_tables(chain, updates)
    least = int(c.out[0] + W[1])
    if updates == "after" and chain.parameters:
        gradients = sum(group.grad_bytes for group in chain.parameters)
        transient = max(group.update_transient_bytes for group in chain.parameters if group.grad_bytes or not gradients)
        least = max(least, int(c.out[0] + c.out[-1]) + chain.grad_bytes(0) + gradients + transient)
    return least + at_rest_bytes(chain)


def at_rest_bytes(chain: Chain) -> int:
    """Bytes of all parameters and states, which stay on the device in mode remat."""
    return sum(group.bytes + group.state_bytes for group in chain.parameters)


@lru_cache(maxsize=32)
def remat_arrays(chain: Chain, updates: str = "during") -> Arrays:
    """`arrays` with parameter gradients added to those of activations, and updates to the transients of the backward
    before them.

    While δ_i is held, so are the parameter gradients allocated before B i and not updated yet: their bytes are added to
    δ_i. B i also counts δ_{i-1}, so bytes added to that which are not allocated yet are subtracted from its transients,
    which may then be negative.
    """
    c, L = arrays(chain), len(chain)
    if not chain.parameters:
        return c
    grad, transient = c.grad.copy(), c.b_transient.copy()
    held = 0
    for i in range(L, 0, -1):
        begun = sum(group.grad_bytes for group in chain.parameters if max(group.stages) == i)
        done = [
            group for group in chain.parameters if min(group.stages) == i and group.grad_bytes and updates == "during"
        ]
        extra = max((group.update_transient_bytes for group in done), default=0)
        gone = c.saved[i] + c.grad[i] - (c.out[L] if i == L else 0)  # after B i
        left = held + begun - sum(group.grad_bytes for group in done)
        transient[i] = np.maximum(transient[i], extra - gone) + begun - left
        grad[i] += held
        held = left
    grad[0] += held
    return replace(c, grad=grad, b_transient=transient)


@lru_cache(maxsize=4)
def need_tables(chain: Chain, updates: str = "during") -> tuple[np.ndarray, np.ndarray]:
    """P and W of `remat_need`: exact bytes that persistent recompute needs beyond the input of its first stage."""
    c = remat_arrays(chain, updates)
    P, W = remat_need(c.out, c.grad, c.ck_transient, c.n_forms, c.saved, c.f_transient, c.b_transient)
    return P, W


@dataclass(frozen=True)
class HostPlan:
    """A plan at the joint minimum: everything that is not in use is on the host.

    form[i]: form in which ā_i is made. output_input[i]: whether B i+1 (and what runs after stage i) takes a_i as its
    input rather than ā_i.
    """

    form: tuple[int, ...]
    output_input: tuple[bool, ...]


def host_plan(chain: Chain, mem_limit: int, updates: str = "during") -> HostPlan | None:
    """The forms and inputs with which every single operation fits `mem_limit`, or None.

    Each ā_i^k, and a_i if it is used, is made in the forward phase and offloaded; ``B i`` then needs ā_i^k, one form of
    its input, δ_i, δ_{i-1}, a_0 and (before the last stage) a_L. State of the search over i: (form of ā_i, whether a_i
    can be made). The smallest possible input is always the best one, because needs add up.
    """
    c, L = arrays(chain), len(chain)
    room = mem_limit - int(c.out[0])
    read, trained, update = own_needs(chain, updates)
    if update > mem_limit:
        return None
    # state -> its predecessor; a state is (k, a_i usable)
    levels: list[dict[tuple[int, bool], tuple[int, bool]]] = [{(0, True): (-1, True)}]
    for i in range(1, L + 1):
        level: dict[tuple[int, bool], tuple[int, bool]] = {}
        for k_before, a_before in levels[i - 1]:
            entering = _input_bytes(c, i, k_before, a_before)
            makes_a = i < L and entering + int(c.out[i] + c.ck_transient[i] + read[i]) <= room
            gradients = int(c.grad[i] + c.grad[i - 1] + (c.out[L] if i < L else 0))
            for k in range(int(c.n_forms[i])):
                kept = entering + int(c.saved[i, k])
                forward = kept + int(c.f_transient[i, k] + read[i])
                backward = kept + gradients + int(c.b_transient[i, k] + trained[i])
                if max(forward, backward) <= room:
                    level.setdefault((k, makes_a), (k_before, a_before))
        if not level:
            return None
        levels.append(level)
    states = [next(iter(levels[L]))]
    for level in reversed(levels[1:]):
        states.append(level[states[-1]])
    states.reverse()
    takes_output = [a_usable and bool(i == 0 or c.out[i] <= c.saved[i, k]) for i, (k, a_usable) in enumerate(states)]
    return HostPlan(tuple(k for k, _ in states), tuple(takes_output))


def _input_bytes(c: Arrays, i: int, form: int, output_usable: bool) -> int:
    """Bytes of the smallest usable input of stage i, a_0 not counted."""
    if i == 1:
        return 0
    saved = int(c.saved[i - 1, form])
    return min(saved, int(c.out[i - 1])) if output_usable else saved


def _joint_minimum(chain: Chain, updates: str) -> int:
    high = _offload_minimum(chain, updates)
    if not chain.parameters:
        high = min(high, _remat_minimum(chain))
    return bisect_left(range(high), True, key=lambda limit: host_plan(chain, limit, updates) is not None)


def largest_operation(chain: Chain) -> tuple[str, int, int]:
    """("forward" or "backward", stage, bytes) of the operation that needs most by itself: its operands in the smallest
    forms, gradients, transients, and what the caller holds. No sequence of any mode fits less."""
    forward, backward = _needs_alone(chain)
    F, B = int(forward.argmax()), int(backward.argmax())
    if forward[F] > backward[B]:
        return "forward", F + 1, int(forward[F])
    return "backward", B + 1, int(backward[B])


def _needs_alone(chain: Chain) -> tuple[np.ndarray, np.ndarray]:
    """Least bytes that the forward and the backward of stages 1 to L need while they run."""
    c, L = arrays(chain), len(chain)
    real, entry, most = c.real, c.entry, np.iinfo(np.int64).max
    ck = np.where(np.arange(L + 1) < L, c.out + c.ck_transient, most)
    forward = c.out[0] + np.minimum(np.where(real, c.saved + c.f_transient, most).min(axis=1)[1:], ck[1:]) + entry[:-1]
    gradients = c.grad[1:] + c.grad[:-1] + c.out[L] * (np.arange(1, L + 1) < L)
    backward = c.out[0] + np.where(real, c.saved + c.b_transient, most).min(axis=1)[1:] + gradients + entry[:-1]
    return forward, backward


# -- the bound on time

# With forms the dual has many more corners: a distant target and much patience gain up to a percentage point there,
# little elsewhere.
PATIENCE, SHRINK = 24000, 0.4
RISES = (0.3, 1.0)  # first targets of the ascent; the second is tried if the bound rose by more than the first
# for the ascent with inputs: on a slow link and in few bytes the bound can rise far above the best so far
INPUT_PATIENCE, INPUT_RISE = 10000, 2.0
SUM_ERROR = 1e-12  # relative error of the ascent's sums, by which the bound is lowered
ASCENT_WORK = 1_500_000_000  # most steps * intervals * stages: about a second
# of a quick ascent: a sixth of the time, and a few tenths of a percentage point less
QUICK_PATIENCE, QUICK_SHRINK = 80, 0.8


def lower_bound(
    chain: Chain, mem_limit: int | str, mode: str = "joint", updates: str = "during", steps: float = PERIODS
) -> float:
    """A certified bound: seconds that no sequence within `mem_limit` can beat, in any mode (`least_time_of` has the
    proof).

    With parameters it bounds the time of a steady step (`steady_bounds` has the proof). Mode "remat", in which
    parameters stay on the device, then has its own bound. updates: "after" ``B 1`` only, or "during" the step.
    steps: 4 bounds the machine's makespan; more, the mean of this many consecutive steps. ``math.inf`` bounds the mean
    step of endless training, which may be longer: copies can fall behind a little more with every step. If the
    directions of the link slow each other down, the bound takes that into account.

    Raises:
        LimitError: if `mem_limit` is not a number of bytes. OptionError: for an unknown mode or value of `updates`, or
            fewer than 4 `steps`.
        InfeasibleError: if no sequence of `mode` fits.
    """
    check_chain(chain)
    check_when(updates)
    if not isinstance(steps, (int, float)) or not steps >= PERIODS:
        raise OptionError(f"steps is {steps!r}; give a number of at least {PERIODS}, or math.inf")
    limit = parse_bytes(mem_limit)
    if limit < min_mem_limit(chain, mode, updates):
        raise infeasible(chain, mode, limit, updates)
    if not chain.parameters:
        return least_time_of(chain, limit)
    if mode == "remat":
        updating = sum(group.update_time for group in chain.parameters if group.grad_bytes)
        return (least_time_of(chain.without_parameters(), limit - at_rest_bytes(chain)) + updating) * (1 - SUM_ERROR)
    return steady_bound(chain, limit, updates, steps)


@lru_cache(maxsize=256)
def steady_bound(
    chain: Chain, limit: int, updates: str, steps: float = PERIODS, patience: int = STEADY_PATIENCE
) -> float:
    """The bound of a chain with parameters, in mode joint; patience: as of `steady_time`."""
    activations = chain.without_parameters()
    if steps == PERIODS and min(chain.bidirectional_shares) < 1:
        steps = PERIODS // 2  # the makespan is the mean of the last two
    found = steady_time(chain, limit, updates, arrays(activations), _needs_alone(activations), steps, patience)
    return max(found, least_compute(chain) * (1 - SUM_ERROR))


def least_time_of(chain: Chain, limit: int) -> float:
    """The lower bound for a chain's activations.

    Proof. Fix a sequence and cut its time at the first start of each of F_1, ..., F_L and at the start of each of B_L,
    ..., B_1; the starts are in this order, and interval k begins with cut k. Interval k lasts at least as long as the
    compute in it (the operation at its cut, and each forward run again in it), and as long as the link needs for the
    bytes copied in it, out and in. At cut k the device holds what that operation needs itself (operands, gradients,
    transients; at least the smallest form of each) and possibly more of ā_q, q = 1..L-1. Consider, for each q, the ā_q
    that B_q uses. Either F_q's first run made it and it stays; or that run made it, it leaves (its bytes are copied
    out, and held until then) and returns (they are copied in, and held from then on); or it is made again (at least
    u_F − `tail_time` more compute) and stays, or leaves and returns. A stage whose input the ā_q is not, at F_{q+1} or
    at B_{q+1}, takes a_q there, which another run of F_q has made, before the start of B_{q+1}: what the first run made
    is held at both cuts, and has come in before B_{q+1} if it has left, or F_q also runs again. No ā_q is held at a cut
    beside whose operation it does not fit (`Arrays.apart`). These are linear constraints on the intervals'
    lengths. Relax them so that each ā_q may mix these alternatives; then the linear program "least sum of lengths" is
    below the sequence's time. By weak duality so is its Lagrangian at any prices λ_k ≥ 0 of memory at cut k and p_k,
    r_k, α_k ≥ 0 with p_k + r_k + α_k = 1 of link out, link in and compute in interval k: Σ α_k work_k − Σ λ_k room_k +
    Σ_q (the cheapest alternative of ā_q).

    The link's prices: let a second of copying alone be worth P out and R in. At any moment the link copies out, or in,
    or both; a second of both copies as much as s_out seconds out alone and s_in seconds in alone
    (`Chain.bidirectional_shares`). So a second of the link is worth at most max(P, R, s_out P + s_in R), which is P + R
    if both shares are 1; α is 1 less this.

    Values that are made again need inputs. Take m = 2..L-1, and the interval from the start of B_{m+1} to that of B_m,
    which uses a_{m-1} or ā_{m-1}. Either that is held at the interval's cut, or it arrives in the interval, or F_{m-1}
    runs in it and so finds its own input there; and so on down to a_0. So for some q < m at least |a_q| bytes are held
    at the cut, beyond what B_{m+1} needs itself, or arrive in the interval (or q = 0), and F_{q+1}, ..., F_{m-1} run in
    it. These bytes and seconds may be the same as those of the alternatives of the ā, so each of the two gets a part of
    the price: λ = (λ − λ') + λ', likewise r and α. Only the bytes of ā_m itself in that interval and at its cut are
    never an input's, and pay the whole price.

    The prices are found by an ascent from those of the turn-around. Its quality affects how tight the bound is, never
    whether it holds.

    Raises:
        InfeasibleError: if no sequence fits `limit`.
    """
    if limit < min_mem_limit(chain, "joint"):
        raise infeasible(chain, "joint", limit)
    return _certified(chain, limit)


def least_time_of_any(limits: Mapping[Chain, int]) -> float:
    """The lowest of the bounds of chains with their limits. A quick bound above another's best spares the ascent."""
    one = len(limits) == 1
    quick = {chain: 0.0 if one else _certified(chain, limit, quick=True) for chain, limit in limits.items()}
    lowest = math.inf
    for chain in sorted(quick, key=quick.__getitem__):
        if quick[chain] >= lowest:
            break
        lowest = min(lowest, max(quick[chain], least_time_of(chain, limits[chain])))
    return lowest


@lru_cache(maxsize=256)
def _certified(chain: Chain, limit: int, quick: bool = False) -> float:
    c, L, limit = arrays(chain), len(chain), min(limit, MOST_LIMIT)
    fastest = c.fastest
    # Summed from the left, as the machine does, so that rounding puts no sequence's time below the bound.
    least = float(np.cumsum(np.concatenate([c.u_F[1:], fastest[:0:-1]]))[-1])
    if L == 1 or least == 0:
        return least
    seconds, size = least, float(limit)
    needs_F, needs_B = _needs_alone(chain)
    room = 1 - np.concatenate([needs_F, needs_B[::-1]]) / size
    work = np.concatenate([c.u_F[1:], fastest[:0:-1]]) / seconds
    # Cap the time of a copy over a very slow link: any finite rate is enough to keep all copies out.
    rates = tuple(min(size / bandwidth / seconds, 1e15) for bandwidth in (chain.d2h_bandwidth, chain.h2d_bandwidth))
    slower = np.where(c.real, c.u_B - fastest[:, None], 0.0) / seconds
    apart = c.apart(limit, needs_F, needs_B)
    stages = (c.u_again / seconds, c.saved / size, slower, c.entry / size, c.n_forms, apart)
    costs: tuple[Any, ...] = (chain.duplex, *rates, room, work, *stages)

    patience = max(20, min(PATIENCE, (480 if c.saved.shape[1] > 1 else 120) * L, ASCENT_WORK // (40 * L * L)))
    shrink = SHRINK
    if quick:
        patience, shrink = min(patience, QUICK_PATIENCE * L), QUICK_SHRINK
    best = 1.0
    for rise, (p0, r0, price) in product(RISES, _turn_around_prices(chain, room[L] * size)):
        if rise > RISES[0] and best < 1 + RISES[0]:
            break
        prices = np.zeros((6, 2 * L))  # λ, p, r, and the inputs' parts of λ, r and α
        prices[0, L] = price * size / seconds
        prices[1, :L], prices[2 if chain.duplex else 1, L:] = p0, r0
        ascent = (20 * patience, rise, patience, shrink)
        found = ascend(prices, *ascent, *costs, None, *chain.bidirectional_shares) * (1 - SUM_ERROR)
        if found > best:
            best, of_best = found, prices
    if best > 1 and not quick:
        patience = max(20, min(INPUT_PATIENCE, ASCENT_WORK // (100 * L * L)))
        found = ascend(
            of_best, 20 * patience, INPUT_RISE, patience, SHRINK, *costs, c.out / size, *chain.bidirectional_shares
        )
        found *= 1 - SUM_ERROR
        best = max(best, found)
    return best * seconds


def _turn_around_prices(chain: Chain, room: float) -> list[tuple[float, float, float]]:
    """Start prices (p before B L, r after it, λ at it): the best of a grid for the relaxation with only that cut."""
    c, L = arrays(chain), len(chain)
    u_F, saved = c.u_again[1:L], c.saved[1:L].min(axis=1, where=c.real[1:L], initial=1 << 62)
    forward, backward = float(c.u_F[1:].sum()), float(c.u_B[1:, 0].sum())
    most = np.finfo(np.float64).max / 1e20  # cap for seconds of a copy, so that products with bytes stay finite
    with np.errstate(over="ignore"):
        link_out, link_in = (
            np.minimum(saved / bandwidth, most) for bandwidth in (chain.d2h_bandwidth, chain.h2d_bandwidth)
        )
    top = np.array([1.0, 1.0, min(1 / chain.d2h_bandwidth + 1 / chain.h2d_bandwidth, most)])
    low, high = np.zeros(3), top
    best = np.zeros(3)
    for _ in range(6):  # refine the grid: the dual is concave, so its maximum is near the best grid point
        p, r, lam = np.meshgrid(*(np.linspace(low[x], high[x], 13) for x in range(3)), indexing="ij")
        value = (1 - p) * forward + (1 - r) * backward - lam * room
        for q in range(L - 1):
            move = p * link_out[q] + r * link_in[q]
            value += np.minimum(np.minimum(lam * saved[q], move), (1 - r) * u_F[q])
        x = np.unravel_index(int(value.argmax()), value.shape)
        best = np.array([p[x], r[x], lam[x]])
        reach = (high - low) / 4
        low, high = np.maximum(best - reach, 0), np.minimum(best + reach, top)
    return list(dict.fromkeys([(float(best[0]), float(best[1]), float(best[2])), (0.0, 0.0, 0.0)]))
