"""The recurrences OC, C_A and Opt in plain Python, written from the papers' text; slow, recursive and literal.

Rounding follows the rule stated in `rotoff.solver.slots`; nothing else is shared with the product. Stages count from 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

from rotoff import Chain

INF = math.inf


ERROR = 1e-9  # of sums


def _round(x: float) -> int:
    return math.floor(x + 0.5 + ERROR)


def _up(x: float) -> int:
    return max(0, math.ceil(x - ERROR))


class Recurrences:
    """Both dynamic programs of one chain at N slots of a limit of `mem_limit` bytes."""

    def __init__(self, chain: Chain, mem_limit: int, N: int, rounding: str, bare: bool = True) -> None:
        self.bare = bare
        self.chain, self.N, self.L = chain, N, len(chain)
        self.room = mem_limit - chain.input_bytes
        self.beta_F = chain.d2h_bandwidth * N / self.room
        self.beta_B = chain.h2d_bandwidth * N / self.room
        stages = chain.stages
        self.u_F = [0.0] + [s.forward_time for s in stages]
        self.u_again = [0.0] + [s.forward_time - s.tail_time for s in stages[:-1]] + [self.u_F[-1]]
        self.forms = [[]] + [[s.form(k) for k in range(1 + len(s.forms))] for s in stages]
        self.a = self._sizes([s.output_bytes for s in stages], rounding)
        most = max(len(f) for f in self.forms)
        columns = [
            self._sizes([f[k].saved_bytes if k < len(f) else 0 for f in self.forms[1:]], rounding) for k in range(most)
        ]
        self.abar = [[column[i] for column in columns] for i in range(self.L + 1)]
        self.u_B = [0.0] + [s.backward_time for s in stages]
        self.C = lru_cache(maxsize=None)(self._C)
        self.OC = lru_cache(maxsize=None)(self._OC)
        self.opt = lru_cache(maxsize=None)(self._opt)
        self.opt_beside = lru_cache(maxsize=None)(self._opt_beside)
        self.opt_forward = lru_cache(maxsize=None)(self._opt_forward)

    def _sizes(self, sizes: list[int], rounding: str) -> list[int]:
        if rounding == "up":
            return [0] + [min(self.N + 1, -(-size * self.N // self.room)) for size in sizes]
        made, total, before = [0], 0, 0
        for size in sizes:
            total += size
            after = (2 * total * self.N + self.room) // (2 * self.room)
            made.append(min(self.N + 1, after - before))
            before = after
        return made

    @staticmethod
    def _copied(beta: float, start: float, seconds: float) -> int:
        """Whole slots copied from second `start` of a clock on."""
        return _round(beta * (start + seconds)) - _round(beta * start)

    def _need(self, size: int) -> int:
        return min(self.N + 1, -(-size * self.N // self.room))

    # -- needs in bytes, beyond what is held

    def _held(self, j: int) -> int:
        return self.chain.grad_bytes(j) + (self.chain.output_bytes(self.L) if j < self.L else 0)

    def _all(self, i: int, k: int) -> int:
        return self.forms[i][k].saved_bytes + self.forms[i][k].forward_transient_bytes

    def _b(self, i: int, k: int) -> int:
        form = self.forms[i][k]
        return form.saved_bytes + form.backward_transient_bytes + self._held(i) + self.chain.grad_bytes(i - 1)

    def _step(self, i: int, q: int) -> int:
        """F_ck i where q = i, else F_∅ q."""
        stage = self.chain.stage(q)
        before = self.chain.output_bytes(q - 1) if q > i else 0
        return stage.output_bytes + stage.checkpoint_transient_bytes + before

    # -- C_A

    def _drained(self, i: int, seconds: float) -> int:
        """Copied in while a segment from stage i on runs."""
        return self._copied(self.beta_B, sum(self.u_F[:i]) + sum(self.u_B[:i]), seconds)

    def _b_drained(self, i: int, k: int) -> int:
        return self._copied(self.beta_B, sum(self.u_B[:i]), self.forms[i][k].backward_time)

    def _C(self, i: int, j: int, A: int, D: int) -> float:
        N, best = self.N, INF
        if A + D > N:
            return INF
        for k in range(len(self.forms[i])):
            need_F, need_B = self._need(self._all(i, k) + self._held(j)), self._need(self._b(i, k))
            u_B = self.forms[i][k].backward_time
            if max(need_F, need_B) + A > N:
                continue
            if i == j:
                real_F = (self._all(i, k) + self._held(j)) * N / self.room
                idle = max(0, need_B + A + D - N, _up(real_F - self.beta_B * u_B + A + D - N))
                best = min(best, self.u_again[i] + u_B + idle / self.beta_B)
                continue
            idle_B = max(0, need_B + A + D - N)
            D1 = max(0, D - self._b_drained(i, k) - idle_B)
            c = self.C(i + 1, j, A + self.abar[i][k], D1)
            if c < INF:
                D2 = max(0, D1 - self._drained(i + 1, c))
                idle_F = max(0, need_F + A + D2 - N)
                best = min(best, self.u_F[i] + c + u_B + (idle_B + idle_F) / self.beta_B)
        for k in range(i, j):
            steps = range(i, k + 1)
            if any(self._need(self._step(i, q) + self._held(j)) + A > N for q in steps):
                continue
            c1 = self.C(i, k, A, D)
            if c1 == INF:
                continue
            D2 = max(0, D - self._drained(i, c1))
            c2 = self.C(k + 1, j, A + self.a[k], D2)
            if c2 == INF:
                continue
            D3 = max(0, D2 - self._drained(k + 1, c2))
            late = max(
                (self._step(i, q) + self._held(j)) * N / self.room - self.beta_B * sum(self.u_F[q + 1 : k + 1])
                for q in steps
            )
            idle = _up(late + A + D3 - N) / self.beta_B
            best = min(best, sum(self.u_F[i : k + 1]) + c1 + c2 + idle)
        return best

    # -- OC

    def _OC(self, i: int, x: int, A: int, A_F: int, A_B: int) -> float:
        N, L, best = self.N, self.L, INF
        size = 0 if i == 1 else self.a[i - 1] if x == 0 else self.abar[i - 1][x - 1]
        if A + size > N or A + A_F > N or A + A_B > N:
            return INF
        for k in range(len(self.forms[i])):
            need_F, need_B = self._need(self._all(i, k)), self._need(self._b(i, k))
            if max(need_F, need_B) + A + size > N:
                continue
            wait_F, wait_B = max(0, need_F + A + A_F + size - N), max(0, need_B + A + A_B + size - N)
            cost = self.u_F[i] + self.forms[i][k].backward_time + wait_F / self.beta_F + wait_B / self.beta_B
            D_F = self._copied(self.beta_F, sum(self.u_F[:i]), self.u_F[i]) + wait_F
            D_B = self._b_drained(i, k) + wait_B
            if i == L:
                best = min(best, cost + max(0, A_F - D_F) / self.beta_F + max(0, A_B - D_B) / self.beta_B)
                continue
            for v in (0, 1) if i > 1 else (0,):
                after = (A + (1 - v) * size, max(0, A_F + v * size - D_F), max(0, A_B - D_B) + v * size)
                best = min(best, cost + self.OC(i + 1, 1 + k, *after))
        for j in range(i, L):
            first, others = self._need(self._step(i, i)), [self._need(self._step(i, q)) for q in range(i + 1, j + 1)]
            segment = self.C(i, j, A + size, A_B)
            if first + A + size > N or segment == INF:
                continue
            early = max(self._step(i, q) * N / self.room - self.beta_F * sum(self.u_F[i:q]) for q in range(i, j + 1))
            wait = _up(early + A + A_F + size - N)
            D_F = self._copied(self.beta_F, sum(self.u_F[:i]), sum(self.u_F[i : j + 1])) + wait
            D_B = self._drained(i, segment)
            cost = sum(self.u_F[i : j + 1]) + wait / self.beta_F + segment
            for v in (0, 1) if i > 1 else (0,):
                if any(need + A + (1 - v) * size > N for need in others):
                    continue
                after = (A + (1 - v) * size, max(0, A_F + v * size - D_F), max(0, A_B - D_B) + v * size)
                best = min(best, cost + self.OC(j + 1, 0, *after))
        return best

    def joint(self) -> float:
        """OC_0(1, 0, 0, 0)."""
        return self.OC(1, 0, 0, 0, 0)

    # -- rotor's Opt, every need checked, and the ā after a swept segment kept in the place of its input

    def _opt(self, i: int, j: int, m: int) -> float:
        return self._best(i, j, m, self._held(j), self.opt, self.u_again)

    def _opt_forward(self, i: int, m: int) -> float:
        return self._best(i, self.L, m, 0, lambda first, _, left: self.opt_forward(first, left), self.u_F)

    def _best(
        self, i: int, j: int, m: int, held: int, after: Callable[[int, int, int], float], alone: list[float]
    ) -> float:
        def rest(first: int, size: int) -> float:
            return (0.0 if first > j else after(first, j, m - size)) if m >= size else INF

        best = INF
        for k, form in enumerate(self.forms[i]):
            if self._need(max(self._all(i, k) + held, self._b(i, k))) <= m:
                u_F = alone[i] if i == j else self.u_F[i]
                best = min(best, u_F + form.backward_time + rest(i + 1, 0 if i == j else self.abar[i][k]))
        for k in range(i, j):
            if all(self._need(self._step(i, q) + held) <= m for q in range(i, k + 1)):
                best = min(best, sum(self.u_F[i : k + 1]) + self.opt(i, k, m) + rest(k + 1, self.a[k]))
        if not self.bare:
            return best
        for k in range(i + 1, j):
            if any(self._need(self._step(i, q) + held) > m for q in range(i, k)):
                break
            for x, form in enumerate(self.forms[k]):
                size = self.abar[k][x]
                if self._need(self._all(k, x) + self.chain.output_bytes(k - 1) + held) <= m and size <= m:
                    seconds = sum(self.u_F[i : k + 1]) + form.backward_time
                    best = min(best, seconds + self.opt_beside(i, k, m - size) + rest(k + 1, size))
        return best

    def _opt_beside(self, i: int, j: int, m: int) -> float:
        """From the input of i, ā_j and δ_j to δ_{i-1}, in m slots beside ā_j, without the seconds of B j."""
        if i == j:
            return (
                0.0 if all(self._need(self._b(i, k)) - self.abar[i][k] <= m for k in range(len(self.forms[i]))) else INF
            )
        best = INF
        for k, form in enumerate(self.forms[i]):
            if self._need(max(self._all(i, k) + self._held(j), self._b(i, k))) <= m and self.abar[i][k] <= m:
                rest = self.opt_beside(i + 1, j, m - self.abar[i][k])
                best = min(best, self.u_F[i] + form.backward_time + rest)
        for k in range(i, j):
            if all(self._need(self._step(i, q) + self._held(j)) <= m for q in range(i, k + 1)) and self.a[k] <= m:
                rest = self.opt(i, k, m) + self.opt_beside(k + 1, j, m - self.a[k])
                best = min(best, sum(self.u_F[i : k + 1]) + rest)
        return best

    def remat(self) -> float:
        """Opt_BP with its first sweep free of δ_L."""
        return self.opt_forward(1, self.N)
