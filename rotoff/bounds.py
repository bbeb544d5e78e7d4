"""Certified lower bounds on the step time, and the smallest limits that work.

Symbols: L stages; |a_i| output bytes, |ā_i^k| saved bytes of form k, |δ_i| gradient bytes, o_F, o_B transients (`chain`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from ._dp import remat_need
from .chain import Chain
from .errors import InfeasibleError, OptionError
from .sizes import format_bytes, parse_bytes

MODES = ("joint", "remat", "offload")


@dataclass(frozen=True)
class Arrays:
    """A chain as arrays for the kernels; row i is stage i, row 0 stands for a_0; bytes and seconds, exact.

    saved, f_transient, b_transient, u_B have a column for each form; `n_forms` says how many of them are real.
    """

    out: np.ndarray
    grad: np.ndarray
    u_F: np.ndarray
    ck_transient: np.ndarray
    n_forms: np.ndarray
    saved: np.ndarray
    f_transient: np.ndarray
    b_transient: np.ndarray
    u_B: np.ndarray


@lru_cache(maxsize=32)
def arrays(chain: Chain) -> Arrays:
    """The costs of `chain` as arrays."""
    L, K = len(chain), 1 + max(len(s.forms) for s in chain.stages)
    forms = [[stage.form(k) for k in range(1 + len(stage.forms))] for stage in chain.stages]

    def row(values: list[Any], dtype: Any) -> np.ndarray:
        return np.array(values, dtype=dtype)

    def table(name: str, dtype: Any) -> np.ndarray:
        made = np.zeros((L + 1, K), dtype=dtype)
        for i, stage_forms in enumerate(forms, start=1):
            for k, form in enumerate(stage_forms):
                made[i, k] = getattr(form, name)
        return made

    return Arrays(
        out=row([chain.output_bytes(i) for i in range(L + 1)], np.int64),
        grad=row([chain.grad_bytes(i) for i in range(L + 1)], np.int64),
        u_F=row([0.0] + [s.forward_time for s in chain.stages], np.float64),
        ck_transient=row([0] + [s.checkpoint_transient_bytes for s in chain.stages], np.int64),
        n_forms=row([1] + [len(f) for f in forms], np.int32),
        saved=table("saved_bytes", np.int64),
        f_transient=table("forward_transient_bytes", np.int64),
        b_transient=table("backward_transient_bytes", np.int64),
        u_B=table("backward_time", np.float64),
    )


# -- the smallest limits


def check_mode(mode: str) -> None:
    """Raise OptionError where `mode` is none of the three."""
    if mode not in MODES:
        raise OptionError(f"mode is {mode!r}; modes are {', '.join(map(repr, MODES))}")


def min_mem_limit(chain: Chain, mode: str) -> int:
    """The smallest limit in bytes at which a sequence of `mode` exists; one byte less is infeasible.

    offload: every stage runs forward once (``F_all``) and everything else may be on the host, so it is the largest need of
    one operation with its own operands. joint: the same with the cheapest operands that can be made: any value may be made
    ahead of time and wait on the host. remat: nothing moves; the smallest peak over all recompute trees.

    Raises:
        OptionError: where the mode is unknown.
    """
    check_mode(mode)
    return {"joint": _joint_minimum, "remat": _remat_minimum, "offload": _offload_minimum}[mode](chain)


def infeasible(chain: Chain, mode: str, mem_limit: int) -> InfeasibleError:
    """The error that names the smallest limit of `mode`."""
    least = min_mem_limit(chain, mode)
    return InfeasibleError(
        f"needs at least {format_bytes(least)} ({least} bytes) in mode {mode}; the limit is {format_bytes(mem_limit)}"
        f" ({mem_limit} bytes)",
        least,
    )


def _offload_minimum(chain: Chain) -> int:
    c, L = arrays(chain), len(chain)
    least = 0
    for i in range(1, L + 1):
        operands = int(c.out[0] + c.saved[i, 0] + (c.saved[i - 1, 0] if i > 1 else 0))
        gradients = int(c.grad[i] + c.grad[i - 1] + (c.out[L] if i < L else 0))
        least = max(least, operands + int(c.f_transient[i, 0]), operands + gradients + int(c.b_transient[i, 0]))
    return least


def _remat_minimum(chain: Chain) -> int:
    c = arrays(chain)
    _, W = need_tables(chain)
    return int(c.out[0] + W[1])


@lru_cache(maxsize=4)
def need_tables(chain: Chain) -> tuple[np.ndarray, np.ndarray]:
    """P and W of `_dp.remat_need` in exact bytes: what persistent recompute needs beyond the input of its first stage."""
    c = arrays(chain)
    P, W = remat_need(c.out, c.grad, c.ck_transient, c.n_forms, c.saved, c.f_transient, c.b_transient)
    return P, W


@dataclass(frozen=True)
class HostPlan:
    """How a step fits the joint minimum: with everything not in use on the host.

    form[i]: form in which ā_i is made. output_input[i]: whether B i+1 (and what runs after stage i) takes a_i as its input
    rather than ā_i.
    """

    form: tuple[int, ...]
    output_input: tuple[bool, ...]


def host_plan(chain: Chain, mem_limit: int) -> HostPlan | None:
    """The forms and inputs with which every single operation fits `mem_limit`, or None.

    Each ā_i^k, and a_i where it serves, is made in the forward phase and moved out; ``B i`` then needs ā_i^k, one form of
    its input, δ_i, δ_{i-1}, a_0 and (before the last stage) a_L. State of the search over i: (form of ā_i, whether a_i can
    be made); the smallest makeable input is always the best one, because needs add.
    """
    c, L = arrays(chain), len(chain)
    room = mem_limit - int(c.out[0])
    # state -> (input bytes left for stage i+1, predecessor); a state is (k, a_i usable)
    levels: list[dict[tuple[int, bool], tuple[int, bool]]] = [{(0, True): (-1, True)}]
    for i in range(1, L + 1):
        level: dict[tuple[int, bool], tuple[int, bool]] = {}
        for k_before, a_before in levels[i - 1]:
            entering = _input_bytes(c, i, k_before, a_before)
            makes_a = i < L and entering + int(c.out[i] + c.ck_transient[i]) <= room
            gradients = int(c.grad[i] + c.grad[i - 1] + (c.out[L] if i < L else 0))
            for k in range(int(c.n_forms[i])):
                kept = entering + int(c.saved[i, k])
                forward, backward = kept + int(c.f_transient[i, k]), kept + gradients + int(c.b_transient[i, k])
                if max(forward, backward) <= room:
                    level.setdefault((k, makes_a), (k_before, a_before))
        if not level:
            return None
        levels.append(level)
    state = next(iter(levels[L]))
    states = [state]
    for i in range(L, 0, -1):
        state = levels[i][state]
        states.append(state)
    states.reverse()
    takes_output = [a_usable and bool(i == 0 or c.out[i] <= c.saved[i, k]) for i, (k, a_usable) in enumerate(states)]
    return HostPlan(tuple(k for k, _ in states), tuple(takes_output))


def _input_bytes(c: Arrays, i: int, form: int, output_usable: bool) -> int:
    """Bytes of the smallest usable input of stage i, a_0 not counted."""
    if i == 1:
        return 0
    saved = int(c.saved[i - 1, form])
    return min(saved, int(c.out[i - 1])) if output_usable else saved


def _joint_minimum(chain: Chain) -> int:
    high = min(_offload_minimum(chain), _remat_minimum(chain))
    low = 0  # infeasible, and high is feasible: the smallest feasible limit lies in (low, high]
    if host_plan(chain, 0) is not None:
        return 0
    while high - low > 1:
        middle = (low + high) // 2
        if host_plan(chain, middle) is None:
            low = middle
        else:
            high = middle
    return high


# -- the bound on time


def lower_bound(chain: Chain, mem_limit: int | str) -> float:
    """Seconds that no sequence within `mem_limit` can beat, in any mode.

    Proof. Every stage runs forward at least once before ``B L`` starts, at T, and every backward after it, so the step
    lasts at least T1 + T2 with T1 ≥ Σ u_F and T2 ≥ Σ min_k u_B. Fix a sequence. At T each stage i < L is in one of three
    states: its ā_i (some form k) is on the device (charged, at least its bytes); it was moved out before T and is moved in
    after T (its bytes pass each direction of the link once); or it is made again after T (u_F of compute more). ``B L``
    holds a_0, ā_L, δ_L, δ_{L-1} and its transients besides, so what stages 1..L-1 keep is at most M₀ = limit − those. The
    smallest T1 + T2 under these constraints, each stage being allowed to split into fractions, is a linear program whose
    value is below every sequence's time; its Lagrangian dual at any multipliers (λ ≥ 0 seconds a byte for M₀; p, r in [0, 1]
    weighing link against compute before and after T) is below that again. The multipliers are searched; the value needs no
    trust in them.

    Raises:
        LimitError: where `mem_limit` is not a number of bytes.
        InfeasibleError: where no sequence fits it.
    """
    limit = parse_bytes(mem_limit)
    if limit < min_mem_limit(chain, "joint"):
        raise infeasible(chain, "joint", limit)
    return _turn_around_bound(chain, limit)


def _turn_around_bound(chain: Chain, limit: int) -> float:
    c, L = arrays(chain), len(chain)
    real = np.arange(c.saved.shape[1])[None, :] < c.n_forms[:, None]
    least_B = np.where(real, c.u_B, np.inf).min(axis=1)
    forward, backward = float(c.u_F[1:].sum()), float(least_B[1:].sum())
    at_turn = np.where(real[L], c.saved[L] + c.b_transient[L], np.iinfo(np.int64).max).min() + c.grad[L] + c.grad[L - 1]
    room = float(limit - c.out[0] - at_turn)
    if L == 1:
        return forward + backward
    saved, more_B = c.saved[1:L].astype(float), (c.u_B - least_B[:, None])[1:L]
    saved = np.where(real[1:L], saved, np.inf)
    u_F = c.u_F[1:L]

    def dual(p: float, r: float, lam: float) -> float:
        # A form's extra backward time is compute after T, weighed like the rest of it; an infinite form never wins.
        extra = (1 - r) * more_B
        move = p / chain.d2h_bandwidth + r / chain.h2d_bandwidth
        per_byte = min(lam, move)
        kept_or_moved = np.where(real[1:L], (saved * per_byte if per_byte > 0 else 0.0) + extra, np.inf).min(axis=1)
        again = (1 - r) * u_F
        return (1 - p) * forward + (1 - r) * backward - lam * room + float(np.minimum(kept_or_moved, again).sum())

    best = forward + backward
    link = 1 / chain.d2h_bandwidth + 1 / chain.h2d_bandwidth
    top = max(float((u_F / np.maximum(saved[:, 0], 1.0)).max(initial=0.0)), link)
    for p in np.linspace(0, 1, 11):
        for r in np.linspace(0, 1, 11):
            best = max(best, _peak(partial(dual, float(p), float(r)), top))
    return best


def _peak(f: Callable[[float], float], top: float) -> float:
    """The largest value of the concave f over [0, top], by golden section; any value it returns is a value of f."""
    ratio = 0.6180339887498949
    low, high = 0.0, top
    x, y = high - ratio * (high - low), low + ratio * (high - low)
    fx, fy = f(x), f(y)
    best = max(f(0.0), f(top), fx, fy)
    for _ in range(40):
        if fx < fy:
            low, x, fx = x, y, fy
            y = low + ratio * (high - low)
            fy = f(y)
            best = max(best, fy)
        else:
            high, y, fy = y, x, fx
            x = high - ratio * (high - low)
            fx = f(x)
            best = max(best, fx)
    return best
