"""The non-persistent optimum of recompute on short chains: a checkpoint may be dropped before its backward and made
again.

Source: the slides *Memory Saving Strategies for Deep Neural Network Training* (2021), where rotor's optimum is among
the persistent sequences; ``drop`` can express the others. There is no dynamic program for these, so this searches the
shortest path through the machine's states (which values are held, in which form, and the next backward). A chain of L
stages has about 3^L · L. It shows the cost of persistence, on chains of up to `MOST_STATES` states.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from ...core.chain import Chain
from ...core.sequence import B, F_all, F_ck, F_sel, Op, OpKind, Sequence
from ...errors import OptionError
from ..arrays import arrays
from ..bounds import infeasible
from .choose import fastest

MOST_STATES = 60_000  # eight stages of one form
OUTPUT, SAVED = 1, 2  # the value held of a stage: none (0), a_i, or ā_i^k (SAVED + k)

# held[i] for i = 0..L (0 unused), next backward, whether the last forward stopped early, so that this comes next
State = tuple[tuple[int, ...], int, bool]


class States:
    """The machine without its link: the operations that each state allows within `mem_limit` bytes."""

    def __init__(self, chain: Chain, mem_limit: int) -> None:
        c, L = arrays(chain), len(chain)
        self.L, self.limit = L, mem_limit
        self.size = [[0, int(c.out[i]), *c.saved[i].tolist()] for i in range(L + 1)]  # [i][value held of stage i]
        self.out, self.grad, self.delta = c.out.tolist(), c.grad.tolist(), c.delta.tolist()
        self.ck, self.saves, self.b = c.M_ck.diagonal().tolist(), c.M_all.tolist(), c.b_transient.tolist()
        self.u_F, self.u_again, self.u_B = c.u_F.tolist(), c.u_again.tolist(), c.u_B.tolist()
        self.n_forms = c.n_forms.tolist()

    def held_bytes(self, held: tuple[int, ...], next_B: int) -> int:
        """Bytes of a_0, of values, of the gradient once a_L is made, and of a_L once ā_L is dropped."""
        L = self.L
        total: int = self.out[0] + sum(size[what] for size, what in zip(self.size, held, strict=True))
        return total + (self.delta[next_B] if next_B < L or held[L] else 0)

    def after(self, held: tuple[int, ...], next_B: int, early: bool) -> Iterator[tuple[Op, float, State]]:
        """(operation, seconds, state) of every operation that is legal and fits."""
        L = self.L
        now = self.held_bytes(held, next_B)
        for i in range(1, 0 if early else L + 1):
            if held[i] or i > next_B or not (i == 1 or held[i - 1]):
                continue
            for k in range(self.n_forms[i]):
                if now + self.saves[i][k] <= self.limit:
                    op, made = F_sel(i, k) if k else F_all(i), _put(held, i, SAVED + k)
                    yield op, self.u_F[i], (made, next_B, False)
                    if i == next_B < L:
                        yield op, self.u_again[i], (made, next_B, True)
            if i < L and now + self.ck[i] <= self.limit:
                yield F_ck(i), self.u_F[i], (_put(held, i, OUTPUT), next_B, False)
        i = next_B
        if held[i] >= SAVED and (i == 1 or held[i - 1]):
            k = held[i] - SAVED
            if now + self.grad[i - 1] + self.b[i][k] <= self.limit:
                left = _put(held, i, 0)
                if i > 1 and left[i - 1] == OUTPUT:
                    left = _put(left, i - 1, 0)
                yield B(i), self.u_B[i][k], (left, i - 1, False)
        if now <= self.limit:
            for i in range(1, L):
                if held[i]:
                    yield Op(OpKind.DROP, i, saved=held[i] >= SAVED), 0.0, (_put(held, i, 0), next_B, early)


def _put(held: tuple[int, ...], i: int, what: int) -> tuple[int, ...]:
    return (*held[:i], what, *held[i + 1 :])


def states_of(chain: Chain) -> int:
    """The most states that a search of all has to look at."""
    return len(chain) * math.prod(3 + len(stage.forms) for stage in chain.stages)


def nonpersistent(chain: Chain, mem_limit: int) -> Sequence:
    """The fastest sequence without transfers, persistent or not.

    Raises:
        InfeasibleError: if nothing fits. OptionError: for a chain of more than `MOST_STATES` states.
    """
    if (count := states_of(chain)) > MOST_STATES:
        raise OptionError(
            f"the chain of {len(chain)} stages has up to {count} states; policy nonpersistent searches them all, at"
            f" most {MOST_STATES}: use policy='rotor' or mode='remat'"
        )
    ops = shortest(States(chain, mem_limit))
    if ops is None:
        raise infeasible(chain, "remat", mem_limit)
    return fastest(chain, mem_limit, "nonpersistent", [("all states", ops)])


def shortest(states: States) -> tuple[Op, ...] | None:
    """The fastest path from nothing held to ``B 1``; None if there is none (A* with the time that must still run)."""
    L = states.L
    rest_F, rest_B = [0.0], [0.0]
    for i in range(1, L + 1):
        rest_F.append(rest_F[-1] + states.u_F[i])
        rest_B.append(rest_B[-1] + min(states.u_B[i][: states.n_forms[i]]))

    def must_run(held: tuple[int, ...], next_B: int, _: bool) -> float:
        reach = next_B
        while reach and not held[reach]:
            reach -= 1
        tail = states.u_F[next_B] - states.u_again[next_B] if reach < next_B < L else 0.0
        return rest_B[next_B] + rest_F[next_B] - rest_F[reach] - tail

    start: State = ((0,) * (L + 1), L, False)
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
