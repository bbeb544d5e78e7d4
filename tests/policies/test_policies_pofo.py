"""POFO as published: its recurrences against a literal form of them, and what its plans do on the machine."""

from __future__ import annotations

import math
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.chains import chains
from thoroughness import examples

from rotoff import Chain, InfeasibleError, OptionError, Stage, keep_all, simulate, solve
from rotoff.solver.policies.pofo import costs, fill, predicted

pytestmark = pytest.mark.full_search

INF = math.inf


def published(chain: Chain, limit: int, N: int) -> float:
    """OC_0(1, 0, 0, 0), from the supplement's equations: sizes and backlogs rounded up, a tail left out where F meets B."""
    L = len(chain)
    beta = min(chain.d2h_bandwidth, chain.h2d_bandwidth) * N / limit

    def up(size: int) -> int:
        return min(N + 1, math.ceil(size * N / limit - 1e-12))

    def left(backlog: int, drained: float) -> int:
        return max(0, math.ceil(backlog - drained - 1e-9))

    s = [None, *chain.stages]
    a = [up(chain.output_bytes(i)) for i in range(L + 1)]
    bar = [0] + [up(x.saved_bytes) for x in chain.stages]
    delta = [up(chain.grad_bytes(i)) for i in range(L + 1)]
    o_F = [0] + [up(x.forward_transient_bytes) for x in chain.stages]
    o_ck = [0] + [up(x.checkpoint_transient_bytes) for x in chain.stages]
    o_B = [0] + [up(x.backward_transient_bytes) for x in chain.stages]
    grad = [delta[j] + (a[L] if j < L else 0) for j in range(L + 1)]
    need_B = [0] + [bar[i] + grad[i] + delta[i - 1] + o_B[i] for i in range(1, L + 1)]

    def need_F(i: int, q: int) -> int:
        return (a[q] if q == i else a[q - 1] + a[q]) + o_ck[q]

    @cache
    def C(i: int, j: int, A: int, D: int) -> float:
        if A + D > N:
            return INF
        best = INF
        whole = bar[i] + o_F[i] + grad[j]
        if whole <= N - A and need_B[i] <= N - A:
            if i == j:
                eps = max(need_B[i] - N + A + D, whole - beta * s[i].backward_time - N + A + D, 0) / beta
                best = s[i].forward_time - s[i].tail_time + s[i].backward_time + eps
            else:
                eps_B = max(need_B[i] - N + A + D, 0) / beta
                D1 = left(D, beta * (s[i].backward_time + eps_B))
                c = C(i + 1, j, A + bar[i], D1)
                if c < INF:
                    eps_F = max(whole - N + A + left(D1, beta * c), 0) / beta
                    best = s[i].forward_time + c + s[i].backward_time + eps_B + eps_F
        for k in range(i, j):
            if any(need_F(i, q) + grad[j] > N - A for q in range(i, k + 1)):
                continue
            c1 = C(i, k, A, D)
            D2 = left(D, beta * c1) if c1 < INF else 0
            c2 = C(k + 1, j, A + a[k], D2) if c1 < INF else INF
            if c2 == INF:
                continue
            held = A + left(D2, beta * c2) - N
            waits = [
                need_F(i, q) + grad[j] - beta * sum(s[r].forward_time for r in range(q + 1, k + 1)) + held
                for q in range(i, k + 1)
            ]
            sweep = sum(s[r].forward_time for r in range(i, k + 1))
            best = min(best, sweep + c1 + c2 + max(0, *waits) / beta)
        return best

    @cache
    def OC(i: int, x: int, A: int, A_F: int, A_B: int) -> float:
        if A + A_F > N or A + A_B > N:
            return INF
        best, I = INF, bar[i - 1] if x else a[i - 1]
        whole = bar[i] + o_F[i]
        if whole + I <= N - A and need_B[i] + I <= N - A:
            eps_F = max(whole - N + A + A_F + I, 0) / beta
            eps_B = max(need_B[i] - N + A + A_B + I, 0) / beta
            D_F, D_B = beta * (s[i].forward_time + eps_F), beta * (s[i].backward_time + eps_B)
            cost = s[i].forward_time + s[i].backward_time + eps_F + eps_B
            if i == L:
                return cost + (max(0, A_F - D_F) + max(0, A_B - D_B)) / beta
            for v in (0, 1) if i > 1 else (0,):
                state = (A + (1 - v) * I, left(A_F + v * I, D_F), left(A_B, D_B) + v * I)
                best = min(best, cost + OC(i + 1, 1, *state))
        for j in range(i, L):
            segment = C(i, j, A + I, A_B)
            if need_F(i, i) + I > N - A or segment == INF:
                continue
            time = sum(s[r].forward_time for r in range(i, j + 1))
            waits = [
                need_F(i, q) - beta * sum(s[r].forward_time for r in range(i, q)) - N + A + A_F + I
                for q in range(i, j + 1)
            ]
            eps = max(0, *waits) / beta
            D_F, D_B = beta * (time + eps), beta * segment
            for v in (0, 1) if i > 1 else (0,):
                if any(need_F(i, q) + (1 - v) * I > N - A for q in range(i + 1, j + 1)):
                    continue
                state = (A + (1 - v) * I, left(A_F + v * I, D_F), left(A_B, D_B) + v * I)
                best = min(best, time + eps + segment + OC(j + 1, 0, *state))
        return best

    return OC(1, 0, 0, 0, 0)


@examples(150)
@given(chains(most=6, forms=False), st.floats(0.2, 1.2), st.integers(1, 14))
def test_the_tables_are_the_published_recurrences(chain, part, N):
    limit = max(1, int(simulate(chain, keep_all(chain)).peak_bytes * part))
    table = costs(chain, limit, N)
    assert predicted(fill(table)) == pytest.approx(published(chain, limit, N), rel=1e-9, abs=1e-9)


@examples(20)
@given(chains(most=6), st.floats(0.3, 1.0))
def test_ours_is_never_slower(chain, part):
    limit = max(1, int(simulate(chain, keep_all(chain)).peak_bytes * part))
    try:
        theirs = solve(chain, limit, policy="pofo")
    except InfeasibleError:
        return
    assert solve(chain, limit).meta["makespan"] <= theirs.meta["makespan"] * (1 + 1e-12)


def test_golden():
    """Six equal stages at two thirds of the peak: a fast link moves the first saved sets, a slow one has them made
    again."""
    stages = tuple(Stage("", 1.0, 2.0, 10, 30, grad_bytes=10) for _ in range(6))

    def made(bandwidth: float) -> str:
        chain = Chain(stages, bandwidth, bandwidth, input_bytes=10)
        peak = simulate(chain, keep_all(chain)).peak_bytes
        return ", ".join(map(str, solve(chain, peak * 2 // 3, policy="pofo")))

    assert made(100.0) == (
        "F_all 1, offload abar 1, F_all 2, offload abar 2, F_all 3, offload abar 3, F_all 4, free abar 1, F_all 5, "
        "free abar 2, F_all 6, free abar 3, B 6, prefetch abar 3, B 5, prefetch abar 2, wait abar 3, B 4, prefetch abar"
        " 1, wait abar 2, B 3, wait abar 1, B 2, B 1"
    )
    assert made(0.01) == (
        "F_ck 1, F_none 2, F_none 3, F_all 4, F_all 5, F_all 6, B 6, B 5, B 4, F_all 1, F_all 2, F_all 3, B 3, B 2, B 1"
    )


def test_options():
    chain = Chain((Stage("", 1, 1, 1, 1),) * 2, 1, 1)
    with pytest.raises(OptionError, match="slots is 0"):
        solve(chain, 100, slots=0, policy="pofo")
    with pytest.raises(OptionError, match="8.00 GiB"):
        solve(chain, 100, slots=2000, policy="pofo")
