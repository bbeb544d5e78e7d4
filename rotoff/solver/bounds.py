"""Certified lower bounds on the step time, and the smallest limits that work.

Symbols: L stages; |a_i| output bytes, |ā_i^k| saved bytes of form k, |δ_i| gradient bytes, o_F, o_B transients
(`chain`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from .._dp import remat_need
from ..core.chain import Chain, check_chain
from ..core.modes import check_mode
from ..core.sizes import format_bytes, parse_bytes
from ..core.steady_step import PERIODS, check_when
from ..errors import InfeasibleError, OptionError
from .anneal import least_compute
from .arrays import MOST_LIMIT, Arrays, arrays, own_needs
from .group_program import GroupProgram, drift_time
from .plan_codes import EARLY, MOVE, empty, select

# -- the smallest limits


def min_mem_limit(chain: Chain, mode: str = "joint", updates: str = "during") -> int:
    """The smallest limit in bytes in which `solve` finds a sequence of `mode`; one byte less is refused.

    offload: the largest need of one operation with its own operands. Every stage runs forward once (``F_all``), and
        everything else may be on the host.
    joint: the same with the cheapest operands that can be made, since any value may be made early and wait on the host.
    remat: the smallest peak over recompute trees, in which a saved set may also outlive its input. With large
        `checkpoint_transient_bytes`, or forms whose transients differ, sequences may exist that fit a few percent less.

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
    return refusal(f"in mode {mode}", mem_limit, min_mem_limit(chain, mode, updates))


def refusal(how: str, mem_limit: int, least: int, known: str = "at least") -> InfeasibleError:
    """The error that names `least`, in bytes. known: how well that is known."""
    return InfeasibleError(
        f"needs {known} {format_bytes(least)} ({least} bytes) {how}; the limit is {format_bytes(mem_limit)}"
        f" ({mem_limit} bytes)",
        least,
    )


def _offload_minimum(chain: Chain, updates: str) -> int:
    c, (read, trained, update) = arrays(chain), own_needs(chain, updates)
    entering = c.out[0] + np.concatenate([[0], c.saved[:-1, 0]])
    return int(max(update, *(entering + c.M_all[:, 0] + read)[1:], *(entering + c.M_B[:, 0] + trained)[1:]))


def _remat_minimum(chain: Chain, updates: str = "during") -> int:
    c = remat_arrays(chain, updates)
    least = int(c.out[0] + remat_needs(chain, updates)[1, -2])
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
def remat_needs(chain: Chain, updates: str = "during") -> np.ndarray:
    """[i, j]: exact bytes that persistent recompute of i..j needs beyond the input of i (`_dp.remat_need`)."""
    c = remat_arrays(chain, updates)
    return remat_need(c.out, c.delta, c.n_forms, c.saved, c.M_all, c.M_B, c.M_ck)


def host_plan(chain: Chain, mem_limit: int, updates: str = "during") -> np.ndarray | None:
    """The plan with the forms and inputs with which every single operation fits `mem_limit`, and all else may be on the
    host; None if there is none."""
    least, codes = _on_host(chain, updates, mem_limit)
    return codes if least <= mem_limit else None


def _on_host(chain: Chain, updates: str, enough: int = 0) -> tuple[int, np.ndarray]:
    """The bytes that every single operation fits, as few as can be but at least `enough`, and the plan.

    Each ā_i^k, and a_i if it is used, is made in the forward phase and offloaded; ``B i`` then needs ā_i^k, one form of
    its input, δ_i, δ_{i-1}, a_0 and (before the last stage) a_L. State of the search over i: (form of ā_i, whether a_i
    can be made). The smallest possible input is always the best one, because needs add up; a_i is no larger than ā_i.
    """
    c, (read, trained, update) = arrays(chain), own_needs(chain, updates)
    alone = np.maximum(c.M_all + read[:, None], c.M_B + trained[:, None]).tolist()
    making = (c.out + c.ck_transient + read).tolist()
    State = tuple[int, bool]
    # state -> its bytes beside a_0, and the state before it
    levels: list[dict[State, tuple[int, State]]] = [{(0, True): (max(enough, update) - int(c.out[0]), (0, True))}]
    for i in range(1, len(chain) + 1):
        level: dict[State, tuple[int, State]] = {}
        for before, (need, _) in levels[-1].items():
            form, usable = before
            entering = 0 if i == 1 else int(c.out[i - 1] if usable else c.saved[i - 1, form])
            for k in range(int(c.n_forms[i])):
                most = max(need, entering + alone[i][k])
                for state, least in (((k, True), max(most, entering + making[i])), ((k, False), most)):
                    if state not in level or least < level[state][0]:
                        level[state] = least, before
        levels.append(level)
    state = min(levels[-1], key=lambda state: levels[-1][state][0])
    least, codes = levels[-1][state][0], empty(chain)
    for i in range(len(chain), 0, -1):
        form, usable = state
        codes[i] = select(form) | MOVE | (EARLY if usable and i < len(chain) else 0)
        state = levels[i][state][1]
    return int(c.out[0]) + least, codes


def _joint_minimum(chain: Chain, updates: str) -> int:
    least, _ = _on_host(chain, updates)
    return least if chain.parameters else min(least, _remat_minimum(chain))


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
    most = np.iinfo(np.int64).max
    ck = np.where(np.arange(L + 1) < L, c.out + c.ck_transient, most)
    forward = np.minimum(np.where(c.real, c.M_all, most).min(axis=1), ck)
    backward = np.where(c.real, c.M_B, most).min(axis=1)
    held = c.out[0] + c.entry[:-1]
    forward, backward = held + forward[1:], held + backward[1:]
    return forward, backward


# -- the bound on time

SUM_ERROR = 1e-12  # share by which the bound is lowered: the machine's times are sums of floats too


def lower_bound(
    chain: Chain, mem_limit: int | str, mode: str = "joint", updates: str = "during", steps: float = PERIODS
) -> float:
    """A certified bound: seconds that no sequence within `mem_limit` can beat, in any mode (docs/bound.md has the
    proof). It takes scipy.

    With parameters it bounds the time of a steady step. Mode "remat", in which parameters stay on the device, then has
    its own bound. updates: "after" ``B 1`` only, or "during" the step. steps: 4 bounds the machine's makespan; more,
    the mean of this many consecutive steps. ``math.inf`` bounds the mean step of endless training, which may be longer:
    copies can fall behind a little more with every step. If the directions of the link slow each other down, the bound
    takes that into account.

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
    if mode == "remat":
        updating = sum(group.update_time for group in chain.parameters if group.grad_bytes)
        least = steady_bound(chain.without_parameters(), limit - at_rest_bytes(chain), "during")
        return (least + updating) * (1 - SUM_ERROR)
    return steady_bound(chain, limit, updates, steps)


@lru_cache(maxsize=256)
def steady_bound(chain: Chain, limit: int, updates: str, steps: float = PERIODS) -> float:
    """The bound in mode joint, in which something fits `limit`."""
    activations, limit = chain.without_parameters(), min(limit, MOST_LIMIT)
    (forward, backward), (read, trained, _) = _needs_alone(activations), own_needs(chain, updates)
    needs = forward + read[1:], backward + trained[1:]

    def least(paid: float) -> float:
        return GroupProgram(chain, arrays(activations), limit, needs, updates, paid).least_time()

    if steps > PERIODS or not chain.parameters:
        found = least(1 - 1 / steps)
    elif min(chain.bidirectional_shares) < 1:  # the makespan is the mean of the last two of four steps
        found = least(1 - 2 / PERIODS)
    else:
        found, drift = least(1 - 1 / PERIODS), drift_time(chain, limit, updates)
        # Four steps pay three quarters of most copies, so the endless bound is hardly above 4/3 of theirs.
        found = max(found, least(1.0) - drift) if 3 * drift < found else found
    if chain.parameters:
        return max(found, least_compute(chain)) * (1 - SUM_ERROR)
    c = arrays(chain)  # summed from the left, as the machine does, so that rounding puts no sequence below
    return max(found * (1 - SUM_ERROR), float(np.cumsum(np.concatenate([c.u_F[1:], c.fastest[:0:-1]]))[-1]))
