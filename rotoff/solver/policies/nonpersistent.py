"""The non-persistent optimum of recompute on short chains: a checkpoint may be dropped before its backward and made again.

Source: the slides *Memory Saving Strategies for Deep Neural Network Training* (2021), where rotor's optimum is among the
persistent sequences; ``drop`` makes the others expressible. There is no dynamic program for these: this is a shortest path
through the machine's own states (which values are held, in which form, and the next backward), of which a chain of L stages
has about 3^L · L. It answers what persistence costs, on chains of up to `MOST_STAGES` stages.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from ...bounds import arrays, infeasible
from ...chain import Chain
from ...errors import OptionError
from ...sequence import B, F_all, F_ck, F_sel, Op, OpKind, Sequence
from .choose import fastest

MOST_STAGES = 10
OUTPUT, SAVED = 1, 2  # what is held of a stage: nothing (0), a_i, or ā_i^k (SAVED + k)

State = tuple[tuple[int, ...], int]  # held[i] for i = 0..L (0 unused), next backward


class States:
    """The machine without its link: what may follow each state within `mem_limit` bytes."""

    def __init__(self, chain: Chain, mem_limit: int) -> None:
        self.c, self.L, self.limit = arrays(chain), len(chain), mem_limit

    def size(self, i: int, what: int) -> int:
        if what == 0:
            return 0
        return int(self.c.out[i] if what == OUTPUT else self.c.saved[i, what - SAVED])

    def held_bytes(self, held: tuple[int, ...], next_B: int) -> int:
        """a_0, values, the gradient once a_L is made, and a_L once ā_L is gone."""
        c, L = self.c, self.L
        total = int(c.out[0]) + sum(self.size(i, what) for i, what in enumerate(held))
        if next_B < L:
            return total + int(c.grad[next_B] + c.out[L])
        return total + (int(c.grad[L]) if held[L] else 0)

    def after(self, held: tuple[int, ...], next_B: int) -> Iterator[tuple[Op, float, State]]:
        """(operation, seconds, state) of every operation that is legal and fits."""
        c, L = self.c, self.L
        now = self.held_bytes(held, next_B)
        for i in range(1, L + 1):
            if held[i] or i > next_B or not (i == 1 or held[i - 1]):
                continue
            for k in range(int(c.n_forms[i])):
                if now + int(c.saved[i, k] + c.f_transient[i, k]) <= self.limit:
                    yield F_sel(i, k) if k else F_all(i), float(c.u_F[i]), (_put(held, i, SAVED + k), next_B)
            if i < L and now + int(c.out[i] + c.ck_transient[i]) <= self.limit:
                yield F_ck(i), float(c.u_F[i]), (_put(held, i, OUTPUT), next_B)
        i = next_B
        if held[i] >= SAVED and (i == 1 or held[i - 1]):
            k = held[i] - SAVED
            if now + int(c.grad[i - 1] + c.b_transient[i, k]) <= self.limit:
                left = _put(held, i, 0)
                if i > 1 and left[i - 1] == OUTPUT:
                    left = _put(left, i - 1, 0)
                yield B(i), float(c.u_B[i, k]), (left, i - 1)
        if now <= self.limit:
            for i in range(1, L):
                if held[i]:
                    yield Op(OpKind.DROP, i, saved=held[i] >= SAVED), 0.0, (_put(held, i, 0), next_B)


def _put(held: tuple[int, ...], i: int, what: int) -> tuple[int, ...]:
    return (*held[:i], what, *held[i + 1 :])


def nonpersistent(chain: Chain, mem_limit: int) -> Sequence:
    """The fastest sequence without transfers, persistent or not.

    Raises:
        InfeasibleError: where nothing fits. OptionError: for a chain of more than `MOST_STAGES` stages.
    """
    L = len(chain)
    if L > MOST_STAGES:
        raise OptionError(
            f"the chain has {L} stages; policy nonpersistent searches all states of at most {MOST_STAGES}: use"
            " policy='rotor' or mode='remat'"
        )
    ops = shortest(States(chain, mem_limit))
    if ops is None:
        raise infeasible(chain, "remat", mem_limit)
    return fastest(chain, mem_limit, "nonpersistent", [("all states", ops)])


def shortest(states: States) -> tuple[Op, ...] | None:
    """The path of least seconds from nothing held to ``B 1``; None where there is none (A*, by what must still run)."""
    c, L = states.c, states.L
    fastest_B = [0.0] + [float(c.u_B[i, : c.n_forms[i]].min()) for i in range(1, L + 1)]

    def must_run(held: tuple[int, ...], next_B: int) -> float:
        rest = sum(fastest_B[1 : next_B + 1])
        reach = max((i for i in range(1, next_B + 1) if held[i]), default=0)
        return rest + float(c.u_F[reach + 1 : next_B + 1].sum())

    start: State = ((0,) * (L + 1), L)
    came: dict[State, tuple[State, Op]] = {}
    cost = {start: 0.0}
    heap = [(must_run(*start), 0, start)]
    done: set[State] = set()
    ticket = 0
    while heap:
        _, _, state = heapq.heappop(heap)
        if state in done:
            continue
        done.add(state)
        if state[1] == 0:
            if any(state[0]):
                continue
            ops = []
            while state in came:
                state, op = came[state]
                ops.append(op)
            return tuple(reversed(ops))
        for op, seconds, then in states.after(*state):
            total = cost[state] + seconds
            if then not in done and total < cost.get(then, float("inf")):
                cost[then] = total
                came[then] = (state, op)
                ticket += 1
                heapq.heappush(heap, (total + must_run(*then), -ticket, then))
    return None
