"""A certified lower bound on the steady time of a step whose parameters move too: a Lagrangian around the whole step.

What is bounded is the machine's ``makespan``, half of the time between the ends of the second and of the fourth of four
steps in a row, for every legal sequence. The proof, step by step:

1. *The four steps' mean is no more.* Every operation begins at the latest of some lanes' times and copies' ends, so a
   step that begins with later lanes or copies ends no sooner. The first step begins with all of them at 0; relative to
   its own start, so early at least does the third. Hence E_4 − E_2 ≥ E_2 (E_s: end of step s), and makespan = (E_4 −
   E_2) / 2 ≥ E_4 / 4: the mean of all four is bounded. Where the directions of the link slow each other down, a copy
   that begins later may let another one end sooner. There the mean of the last two is bounded itself: in what follows
   [E_2, E_4] stands for [0, E_4] and 2 for 4, and what the first of them finds is under way at E_2.
2. *Intervals.* Cut [0, E_4] where F_1, ..., F_L run first, where B_L, ..., B_1 run, and where a step ends. These come
   in this order in every step, so there are 2L + 1 intervals, each four times. An interval has two parts: while the
   operation at its cut runs, and from then on (the step's end has only the second). Between B_{q+1} and B_q there is a
   third: from the moment when the F_q begins that makes the ā_q of B_q, if that F_q lies in this interval, else from
   the interval's end, so that the third part is empty. The mean of the steps is the sum of the parts' mean lengths.
3. *Lanes.* A part's mean length is at least that of the compute in it, of the copies out, of the copies in (of both
   together on a link that is not duplex; `bounds.least_time_of` has what they are worth where they slow each other
   down), and of the host's updates. The compute of a first part is its operation; what is made again and the updates
   are compute of the others, and where ā_q is made again between B_{q+1} and B_q, of the third. What an interval's
   operation or an update in it has made is not copied out in its first part, but in the others or in a later interval.
4. *Memory.* Program order decides it, so that it is the same in all four steps. At each cut the device holds what that
   operation needs itself, the activations that it holds otherwise (see `bounds.least_time_of`), and of each group what
   its way says; together no more than the limit. At a step's end that is a_0, a_L, δ_0 and the groups'. An operation
   checks its bytes before it makes them, so this holds between two steps also. A copy in that runs in an interval's
   first part was issued before the interval's operation, since one issued after it begins when that has ended: its
   bytes are held at the interval's cut too. When a third part begins, F_q needs the w of its groups, and where the part
   is empty, B_q needs them and ā_q at once. So what of these is not held at the interval's cut has come in before the
   third part (ā_q: or is made in it).
5. *Lives.* A group's life goes from its update in one step to that in the next; that of a frozen one, from its first
   use. In it:

   - ``w`` is on the device at the forwards and backwards that read it, and at ``U``; ``o`` at ``U``; ``g`` from the
     first backward until it is whole, and at ``U``.
   - What ``U`` has made, no host has. Before it is off the device, it has been copied out once: the copy runs after the
     ``U``, and the bytes are held until it has ended. Back on the device it has been copied in: the bytes are held from
     before the copy on.
   - ``H`` runs after g has been copied out, which is after g is whole. It leaves valid copies of w and o on the host
     and runs before w comes in: the device's w is gone when it is issued, and next used in the life's first forward.
   - A frozen w is copied in alone. ``U`` takes `update_time` of compute, ``H`` `host_update_time` of the host, in the
     interval that it runs in.
   - With `updates` "after", ``U`` and ``H`` run after B_1 of the life's first step has begun.

   A copy that runs in several intervals is a mixture of copies in one: it uses the lanes alike, and holds the bytes for
   longer.
6. *Ends.* What the first step finds has arrived at 0. So in [0, E_4] a copy runs four times, or three times if it is
   under way at E_4. Then it crosses the step's end in the text, which is that of all steps: it is issued before the
   end and waited for after it, and its bytes are held all the while, at the end too. The three other times it has ended
   by E_4: each copy is waited for before its value is used, updated or let go, so before the end of the step after its
   own, and copies of g before the end of their own. So a copy that crosses costs a share 1 − 1/4 of what it costs where
   it runs, and all others the whole. One that goes out may run as long as the value stays; one that comes in, up to the
   first use. With `updates` "after" no o comes in across the end. ``H`` may be under way at E_4 where a w that comes in
   across the end or after it waits for it: three times g goes out, ``H`` runs and w comes in, in this order; the fourth
   time g goes out, and w comes in if that is after the end. This is not caution: where the link is a little slower than
   compute, in-flight copies fall behind for more than four steps, and the makespan is below what the link takes for a
   step. In n steps in a row the share is 1 − 1/n. So with 1, this bounds the mean of a training that goes on, and the
   makespan of every sequence whose later steps take no longer than that says (`steps`).
7. *The dual.* Each group has one of these ways (to relax, a mixture of them; w, g and o share the interval of their U),
   each ā_q one of `bounds.least_time_of`'s. At any prices λ_k ≥ 0 of memory at cut k, and p_k, r_k, η_k ≥ 0 with p_k +
   r_k + η_k ≤ 1 of link out, link in and host in each part of interval k, the rest α_k of compute, weak duality says:
   makespan ≥ Σ α_k work_k − Σ λ_k room_k + Σ the cheapest way of each ā_q + Σ the cheapest way of each group. The
   prices are found by an ascent; the bound holds whatever they are, and is lowered by what the sums may be off by.
8. *Where little fits*, more is known of the makespan itself than of the mean of four steps, if the directions of the
   link do not slow each other down. Let k be the cut of B_L, or with `updates` "after" that of any backward. No ``H``
   is under way there: none has been issued since the forwards, and these used the w of those before. So the jobs under
   way at k are copies, each of one value that the device holds, and each lane runs its own without a break. Let
   q_X(s) be the seconds of them that lane X has left at C_s, the time of cut k in step s, and θ ≥ 0 the most by which
   a q_X(2) exceeds q_X(4). Each step runs the same text after k, and an operation in it begins at the latest of some
   lanes' times and copies' ends, which are at most θ nearer to C_4 than to C_2. Hence E_4 − C_4 ≥ E_2 − C_2 − θ. From
   C_2 to C_4 each copy runs twice, but those of lane X under way at k run q_X(4) − q_X(2) seconds less. With as much
   time more at cut k they would run twice too, and 7 would hold with all copies paid for; so with V for what 7 says
   then, C_4 − C_2 + Σ max(0, q_X(4) − q_X(2)) ≥ 2 V. Together, makespan = (E_4 − E_2) / 2 ≥ V − Σ |q_X(4) − q_X(2)| / 2
   ≥ V − (what the copies under way at k take) / 2. While B_L runs, the device also holds the gradients, its transient,
   ā_L and the g that are not whole, of which none is under way; while another B runs, the same with a_L for ā_L.

Transients of updates, and the three values of a group at once at its ``U``, count in the smallest limit alone.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from ..core.chain import Chain
from ..core.steady_step import PERIODS
from .arrays import MOST_LIMIT, Arrays
from .kernels.steady_bound import Dual

ROWS = 10  # of prices: of memory, and of link out, link in and host in each of three parts of an interval

FIRST_RISE, LEAST_RISE, SHRINK, PATIENCE = 0.3, 2e-5, 0.4, 1800
MOST_RISE = 10.0  # where the bound is much above compute the ascent has farther to go
START_PRICES, MOST_START = (0.0, 0.25, 0.5, 1.0), 1e5  # the latter of λ, where a link hardly moves
PRICE_SCALES = (2.0, 1.0, 0.0, 1.0, 2.0)
PRICE_SCALE = 100.0  # of steps in λ, beside the share of one interval squared; from 30 to 300 the ascent ends alike
ASCENT_WORK = 150_000_000_000  # of evaluations and what one does: some seconds for 100 stages
QUICK = 16  # the first ascents, which show which bound is higher, have this part of the patience
SUM_ERROR = 1e-15  # of one sum, relative to what is summed
ROOM_ERROR = 1e-12  # share of the limit that is added, so that rounding leaves room for what just fits


def own_needs(chain: Chain, updates: str) -> tuple[np.ndarray, np.ndarray, int]:
    """Bytes of parameters that every forward and every backward (by stage, entry 0 is 0) needs, and the largest need of
    a ``U``.

    A gradient that is not whole stays. ``U`` counts where no ``H`` is possible, at the best moment that `updates`
    allows.
    """
    L = len(chain)
    forward, backward = np.zeros(L + 1, dtype=np.int64), np.zeros(L + 1, dtype=np.int64)
    for group in chain.parameters:
        for i in group.stages:
            forward[i] += group.bytes
            backward[i] += group.bytes
        backward[min(group.stages) : max(group.stages) + 1] += group.grad_bytes
    held, update = _held_between(chain), 0
    for k, stage in update_moments(chain, updates).items():
        group = chain.group(k)
        if group.host_update_time is None:
            values = group.bytes + group.grad_bytes + group.state_bytes + group.update_transient_bytes
            update = max(update, chain.input_bytes + chain.output_bytes(L) + int(held[stage - 1]) + values)
    return forward, backward, update


def update_moments(chain: Chain, updates: str) -> dict[int, int]:
    """The stage after whose B each group is updated, by its number, so that least is held beside it."""
    held = _held_between(chain)
    return {
        k: 1 + min(range(1 if updates == "after" else min(group.stages)), key=lambda j: int(held[j]))
        for k, group in enumerate(chain.parameters, start=1)
        if group.grad_bytes
    }


def _held_between(chain: Chain) -> np.ndarray:
    """[j]: bytes of δ_j and of the gradients that are not whole between B j+1 and B j."""
    held = np.array([chain.grad_bytes(j) for j in range(len(chain) + 1)])
    for group in chain.parameters:
        held[min(group.stages) : max(group.stages)] += group.grad_bytes
    return held


def steady_time(
    chain: Chain,
    limit: int,
    updates: str,
    costs: Arrays,
    needs: tuple[np.ndarray, np.ndarray],
    steps: float,
    patience: int,
) -> float:
    """Seconds that no sequence within `limit` beats in the mean of `steps` steps in a row; with `PERIODS`, in its
    makespan.

    costs: the activations'; needs: bytes of each forward and of each backward alone, from stage 1 on, without
    parameters. patience: as of `Dual.ascend`, at most; with less, the bound is weaker.
    """
    limit = min(limit, MOST_LIMIT)
    made = problem(chain, limit, updates, costs, needs, 1 / steps)
    if made is None:
        return 0.0
    dual, seconds, sums = made
    L = len(chain)
    N = 2 * L + 1
    patience = int(max(60, min(patience, ASCENT_WORK / (40 * N * (20 * N + 60 * len(chain.parameters))))))
    least, prices, drift = dual.at(np.zeros((ROWS, N)))[0], _start(dual, N, patience // QUICK), 0.0
    most = drift_time(chain, limit, updates, costs) / seconds if steps == PERIODS else np.inf
    # Four steps pay three quarters of most copies, so the endless bound is hardly above 4/3 of theirs.
    quick = _ascend(dual, prices.copy(), patience // QUICK) if most < np.inf else least
    if 3 * most < quick:
        endless = problem(chain, limit, updates, costs, needs, 0.0)
        assert endless is not None
        start = _start(endless[0], N, patience // QUICK)
        if _ascend(endless[0], start.copy(), patience // QUICK) - most > quick:
            dual, prices, drift = endless[0], start, most
    value = _ascend(dual, prices, patience)
    error = SUM_ERROR * 8 * N * sums
    return max(0.0, least - error, value - drift - error * (1 + drift + float(prices.sum()))) * seconds


def _start(dual: Dual, N: int, patience: int) -> np.ndarray:
    """Prices from which a quick ascent comes higher: none; or the highest of lanes that are busy all the time, with λ
    where the step turns (F_1, B_L, B_2) up to what copies cost, so that nothing gains by staying."""
    none = found = np.zeros((ROWS, N))
    best = dual.at(none)[0]
    for out, back, host, share in product(START_PRICES, START_PRICES, START_PRICES, START_PRICES[1:]):
        if out + back + host <= 1 and (dual.duplex or not back):
            prices = np.repeat([0.0, *(out, back, host) * 3], N).reshape(ROWS, N)
            copies = out * dual.rates[0] + (back if dual.duplex else out) * dual.rates[1]
            prices[0, [0, N // 2, max(0, N - 3)]] = min(share * copies, MOST_START)
            value = dual.at(prices)[0]
            if value > best:
                best, found = value, prices
    if found is none or _ascend(dual, found.copy(), patience) < _ascend(dual, none.copy(), patience):
        return none
    return found


def _ascend(dual: Dual, prices: np.ndarray, patience: int) -> float:
    """The highest value found from `prices` on, which become those of that value."""
    value, N = dual.at(prices)[0], prices.shape[1]
    # λ is about what a copy of the whole limit costs, which is much where the links are slow.
    slow = max(1.0, sum(dual.rates))
    for scale in PRICE_SCALES if slow > 2 else (1.0,):
        rise = FIRST_RISE * max(1.0, value * min(value, MOST_RISE))
        value = dual.ascend(
            prices, 40 * patience, rise, patience, SHRINK, LEAST_RISE * rise, PRICE_SCALE / N**2 * slow**scale
        )
    return value


def drift_time(chain: Chain, limit: int, updates: str, c: Arrays) -> float:
    """Seconds by which the makespan may be below the endless bound, by step 8: half of what copies under way at one
    cut may take. Infinite where some ``H`` may be under way at every cut, since no w waits for it."""
    if any(s.grad_bytes and not s.bytes and s.host_update_time is not None for s in chain.parameters):
        return np.inf
    read, trained, _ = own_needs(chain, updates)
    saved = np.zeros_like(c.saved)  # a B may run while its ā leaves, but ā_L is never moved
    saved[-1] = c.saved[-1]
    stays = np.where(c.real, saved + c.b_transient, np.iinfo(np.int64).max).min(axis=1)[1:]
    stays += c.out[0] + c.grad[1:] + c.grad[:-1] + (trained - read)[1:]
    stays[:-1] += c.out[-1]
    held = stays.max() if updates == "after" else stays[-1]
    return float(limit - held) / min(chain.d2h_bandwidth, chain.h2d_bandwidth) / 2


def problem(
    chain: Chain,
    limit: int,
    updates: str,
    c: Arrays,
    needs: tuple[np.ndarray, np.ndarray],
    unpaid: float,
) -> tuple[Dual, float, float] | None:
    """The dual, the seconds of its unit, and the sum of all that a price may multiply; None where nothing takes
    time.
    """
    L, groups = len(chain), chain.parameters
    read, trained, _ = own_needs(chain, updates)
    fastest = c.fastest
    work = np.concatenate([c.u_F[1:], fastest[:0:-1], [0.0]])
    sizes = np.array(
        [[s.bytes for s in groups], [s.grad_bytes for s in groups], [s.state_bytes for s in groups]], float
    )
    on_host = [-1.0 if s.host_update_time is None else s.host_update_time for s in groups]
    times = np.array([[s.update_time for s in groups], on_host])
    copies = float(sizes.sum()) * (1 / chain.d2h_bandwidth + 1 / chain.h2d_bandwidth)
    seconds = float(work.sum()) or float(np.abs(times).sum()) or copies
    if seconds == 0:
        return None
    size = float(max(limit, 1))
    at_end = c.out[0] + c.out[L] + c.grad[0]
    room = 1 + ROOM_ERROR - np.concatenate([needs[0], needs[1][::-1], [at_end]]) / size
    cuts = [sorted([i - 1 for i in s.stages] + [2 * L - i for i in s.stages]) for s in groups]
    rates = (size / chain.d2h_bandwidth / seconds, size / chain.h2d_bandwidth / seconds)
    slower = np.where(c.real, c.u_B - fastest[:, None], 0.0) / seconds
    dual = Dual(
        chain.duplex,
        *rates,
        room,
        work / seconds,
        c.u_again / seconds,
        c.saved / size,
        slower,
        c.entry / size,
        c.n_forms,
        c.apart(limit, needs[0] + read[1:], needs[1] + trained[1:]),
        sizes / size,
        times / seconds,
        np.cumsum([len(at) for at in cuts]).astype(np.int32),
        np.concatenate(cuts).astype(np.int32),
        np.array([2 * L - max(s.stages) for s in groups], np.int32),
        2 * L - 1 if updates == "after" else L,
        updates == "after",
        unpaid,
        chain.bidirectional_shares,
    )
    bytes_of_all = (float(sizes.sum()) + float(c.saved.sum())) / size
    sums = (
        float(np.abs(room).sum())
        + bytes_of_all * (1 + sum(rates))
        + (float(work.sum()) + float(np.abs(times).sum())) / seconds
    )
    return dual, seconds, sums
