"""The linear program of the lower bound. `docs/bound.md` says of every row why it holds for every plan."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from ..core.chain import Chain
from .arrays import Arrays
from .linear_program import Program, Term

MOST_RATE = 1e7  # of units of time that a copy of the whole limit takes: a slower link is taken for one so slow


class Leaving:
    """Bytes on the device that are on their way out: `level` of them at each cut, `out` in each interval.

    made: terms that an interval makes, which the first part does not copy. ready: terms that join at an interval's
    start. due: what leaves after the cut of one position on a line of several steps and before that of another.
    share: of the steps in which the copies run. stays: the bytes are held elsewhere, and after the copy too.
    """

    def __init__(self, program: Program, N: int, most: float, share: float = 1.0, stays: bool = False) -> None:
        self.share, self.stays = share, stays
        self.level, self.out, self.new = (program.variables(N, most) for _ in range(3))
        self.made: dict[int, list[Term]] = defaultdict(list)
        self.ready: dict[int, list[Term]] = defaultdict(list)
        self.due: list[tuple[int, int, Term]] = []

    def rows(self, program: Program, empty: int | None) -> None:
        N = len(self.level)
        if empty is not None:
            program.row([(self.level[empty], -1.0)])
        for k in range(N):
            here = [(self.level[k], 1.0), *self.ready[k], (self.out[k], -1.0)]
            program.row([*here, *self.made[k], (self.level[(k + 1) % N], -1.0)], equal=True)
            program.row([*here, (self.new[k], 1.0)])
        for k in sorted({due % N for _, due, _ in self.due}):
            left = [term for made, due, term in self.due if any(made < k + n * N < due for n in range(3))]
            program.row([(self.level[k], -1.0), *left])


class Coming:
    """Bytes that are held for a later use: `level` of them at each cut, `come` in each interval.

    used: terms, by the interval after which they are part of what an operation needs itself.
    """

    def __init__(self, program: Program, N: int, most: float) -> None:
        self.level, self.come = program.variables(N, most), program.variables(N, most)
        self.used: dict[int, list[Term]] = defaultdict(list)

    def rows(self, program: Program, empty: int | None) -> None:
        N = len(self.level)
        if empty is not None:
            program.row([(self.level[empty], -1.0)])
        for k in range(N):
            used = [(x, -size) for x, size in self.used[k]]
            here = [(self.level[k], 1.0), (self.come[k], 1.0), *used]
            program.row([*here, (self.level[(k + 1) % N], -1.0)], equal=True)


class StepProgram:
    """The program of a chain's activations at one limit; `GroupProgram` adds the parameters.

    Cut and interval k of 0..N-1: k < L begins with F_{k+1}, k < 2L with B_{2L-k}, and 2L with the step's end. Bytes
    are in units of the limit, seconds in units of `unit`.
    """

    def __init__(self, chain: Chain, c: Arrays, limit: int, alone: tuple[np.ndarray, np.ndarray]) -> None:
        self.chain, self.c, self.limit, self.size = chain, c, limit, float(max(limit, 1))
        L, _, N = self.L, self.end, self.N = len(chain), 2 * len(chain), 2 * len(chain) + 1
        at_end = int(c.out[0] + c.out[L] + c.grad[0])
        self.needs = [*alone[0].tolist(), *alone[1][::-1].tolist(), at_end]
        self.apart = c.apart(limit, *alone)
        work = [*c.u_F[1:].tolist(), *c.fastest[:0:-1].tolist(), 0.0]
        self.unit = self._unit(math.fsum(work))
        self.work = [seconds / self.unit for seconds in work]
        copies = self.size / chain.d2h_bandwidth, self.size / chain.h2d_bandwidth
        self.rates = [min(seconds / self.unit, MOST_RATE) for seconds in copies]
        values = sum(g.bytes + g.grad_bytes + g.state_bytes for g in chain.parameters)
        # No value is held or copied more than twice in an interval.
        self.most = 2 * (float(c.saved.max(axis=1).sum()) + values) / self.size
        self.program = Program()
        self.at: dict[tuple[str, int], list[Term]] = defaultdict(list)  # terms by what they are and the interval or cut
        self.leaving: list[Leaving] = []
        self.coming: list[Coming] = []
        self.turn_out, self.turn = self.leaves(), self.comes()
        self.time = {(k, j): self.program.length() for k in range(N) for j in self.parts(k)}

    def _unit(self, work: float) -> float:
        groups, rates = self.chain.parameters, (self.chain.d2h_bandwidth, self.chain.h2d_bandwidth)
        updates = sum(g.update_time + (g.host_update_time or 0.0) for g in groups)
        copies = sum(g.bytes + g.grad_bytes + g.state_bytes for g in groups) * sum(1 / rate for rate in rates)
        return work or updates or copies or 1.0

    def parts(self, k: int) -> tuple[int, ...]:
        """While the operation runs, after that, and once the stage whose backward comes next is made again."""
        if k == self.end:
            return (1,)
        return (0, 1, 2) if self.L <= k <= self.end - 2 else (0, 1)

    def sum_of(self, terms: list[Term], most: float = 1.0) -> int:
        """A variable that is the sum of the terms."""
        x = self.program.variable(most)
        self.program.row([(x, -1.0), *terms], equal=True)
        return x

    def leaves(self, share: float = 1.0, stays: bool = False) -> Leaving:
        self.leaving.append(Leaving(self.program, self.N, self.most, share, stays))
        return self.leaving[-1]

    def comes(self) -> Coming:
        self.coming.append(Coming(self.program, self.N, self.most))
        return self.coming[-1]

    def hold(self, x: int, size: float, first: int, last: int) -> None:
        """`size` bytes of x at the cuts `first` to `last` of a line of several steps."""
        if first > last:
            return
        N = self.N
        self.at["base", 0].extend([(x, size)] * (last // N - (first - 1) // N))
        if first % N:
            self.at["change", first % N].append((x, size))
        if (last + 1) % N:
            self.at["change", (last + 1) % N].append((x, -size))

    # -- activations

    def activations(self) -> None:
        L, c, program = self.L, self.c, self.program
        before: list[Term] = []
        seconds = (c.u_again / self.unit).tolist()
        for q in range(L - 1, 0, -1):
            everything: list[int] = []
            soon, twice = program.variable(self.most), []  # bytes that leave right after F_q and are at cut q yet
            self.at["held", q].append((soon, 1.0))
            at_cut = [(self.turn_out.level[q], 1.0), (soon, 1.0)]
            for form in range(int(c.n_forms[q])):
                ways, again = self._ways(q, form, seconds[q], at_cut)
                everything += ways
                twice.append((again, -seconds[q]))
                slower = float(c.u_B[q, form] - c.fastest[q]) / self.unit
                self.at["slower", 2 * L - q].extend((x, slower) for x in ways if slower)
            program.row([(x, 1.0) for x in everything], 1.0, equal=True)
            program.row(at_cut)
            left = program.variable(float(c.u_again.sum()) / self.unit)
            runs = program.variables(2, float(c.u_again.sum()) / self.unit)
            for k, x in zip((q - 1, 2 * L - q - 2), runs, strict=True):
                self.at["again", k].append((x, 1.0))
            program.row([*((x, 1.0) for x in runs), *before, *twice, (left, -1.0)], equal=True)
            before = [(left, 1.0)]
            if q > 1:
                self._input(q, seconds)

    def _ways(self, q: int, form: int, seconds: float, at_cut: list[Term]) -> tuple[list[int], int]:
        """What may become of ā_q, made in `form`: variables whose sum is its share; and that of F_q running twice."""
        program, first, last = self.program, q, 2 * self.L - q - 1
        size, entry = float(self.c.saved[q, form]) / self.size, float(self.c.entry[q]) / self.size
        more = float(self.c.saved[q, form] - self.c.entry[q]) / self.size
        apart = int(self.apart[q, form])
        moved, stays, again = [program.variable()], [], []
        self.turn_out.made[first - 1].append((moved[0], size))
        if not apart & 1:
            moved.append(program.variable())
            self.turn_out.made[first - 1].append((moved[1], size))
            at_cut.append((moved[1], -size))
            self.at["held", first].append((moved[1], -entry))
        if not apart:
            stays.append(program.variable())
            self.hold(stays[0], size, first, last)
            self.at["held", first].append((stays[0], -entry))
        for k in range(first - 1, last):
            here = [program.variable()]
            again.append(here[0])
            self.turn_out.made[k].append((here[0], size))
            if not apart & (3 if k < first else 2):
                here.append(program.variable())
                stays.append(here[1])
                self.hold(here[1], size, k + 1, last)
            self.at["again", k].extend((x, seconds) for x in here)
            if k < first:
                self.at["held", first].extend((x, -entry) for x in here)
        late, back_late, twice = program.variables(3)
        self.at["third", last].append((late, seconds))
        back = [back_late]
        if not apart & 2:
            back.append(program.variable())
            self.at["there", last].append((back[1], size))
        for x in (*stays, *back[1:]):
            self.at["held", last].append((x, -entry))
            self.at["own", last].append((x, more))
        self.turn.used[last].extend((x, size) for x in back)
        self.at["own in", last].append((back_late, size))
        moves = [*moved, *again]
        program.row([*((x, 1.0) for x in back), *((x, -1.0) for x in moves)], equal=True)
        program.row([(twice, 1.0), (moved[0], -1.0)])
        program.row([(twice, 1.0), (back_late, -1.0), *((x, 1.0) for x in again)])
        return [*moves, *stays, late], twice

    def _input(self, m: int, seconds: list[float]) -> None:
        """B m needs a_{m-1} or ā_{m-1}: from the nearest stage before it whose output is there, all run again."""
        program, k = self.program, 2 * self.L - m - 1
        found, runs, ways = [], [], []
        least, time = math.inf, 0.0
        for q in range(m - 1, -1, -1):
            size = float(self.c.out[q]) / self.size if q else 0.0
            if size < least:
                x, least = program.variable(), size
                ways.append((x, 1.0))
                found.append((x, -size))
                runs.append((x, -time))
            time += seconds[q]
        held, comes = program.variables(2, self.most)
        third = [(x, -time) for x, time in self.at["third", k]]
        program.row(ways, 1.0, equal=True)
        program.row([(held, 1.0), (comes, 1.0), *found])
        program.row([*((self.time[k, j], 1.0) for j in (1, 2)), *runs, *third])
        program.row([(held, -1.0), *((x, -size) for x, size in self.at["own", k])], -self.room(k))
        late = [(x, -size * self.rates[1]) for x, size in self.at["own in", k]]
        program.row([*((self.time[k, j], 1.0) for j in self.parts(k)), (comes, -self.rates[1]), *late])

    def room(self, k: int) -> float:
        return float(self.limit - self.needs[k]) / self.size

    # -- lanes and memory

    def least_time(self) -> float:
        """Seconds that no plan is below."""
        self.activations()
        self.rows()
        return self.program.value() * self.unit

    def rows(self) -> None:
        """The rows that are there once, for all that has been added."""
        self.turn_out.rows(self.program, self.end)
        self.turn.rows(self.program, self.end)
        changed = self.program.variables(self.N, self.most)
        self.program.row([(changed[0], 1.0), *((x, -size) for x, size in self.at["base", 0])], equal=True)
        for k in range(self.N):
            if k:
                change = [(x, -size) for x, size in self.at["change", k]]
                self.program.row([(changed[k], 1.0), (changed[k - 1], -1.0), *change], equal=True)
            beside = self._lanes(k)
            pools: list[Leaving | Coming] = [*self.coming, *(pool for pool in self.leaving if not pool.stays)]
            levels = [pool.level[k] for pool in pools]
            held = [*((x, 1.0) for x in (changed[k], *levels, *beside)), *self.at["held", k]]
            self.program.row([(x, -size) for x, size in held], -self.room(k))

    def _lanes(self, k: int) -> list[int]:
        """The rows of interval k; the bytes that come in beside its operation, and so are held at its cut."""
        program, time, parts = self.program, self.time, self.parts(k)
        if 0 in parts:
            slower = [(x, -seconds) for x, seconds in self.at["slower", k]]
            program.row([(time[k, 0], 1.0), *slower], self.work[k])
        third = [(x, -seconds) for x, seconds in self.at["third", k]]
        after = [(x, -seconds) for x, seconds in self.at["again", k]]
        program.row([*((time[k, j], 1.0) for j in parts if j), *third, *after])
        if third:
            program.row([(time[k, 2], 1.0), *third])
        host = [(x, -seconds) for x, seconds in self.at["host", k]]
        if host:
            program.row([*((time[k, j], 1.0) for j in parts), *host])
        out, into = ({j: program.variable(self.most) for j in parts} for _ in range(2))
        copied = [(pool.out[k], -pool.share) for pool in self.leaving] + [(x, -a) for x, a in self.at["out", k]]
        new = [(pool.new[k], -pool.share) for pool in self.leaving] + [(x, -a) for x, a in self.at["new", k]]
        program.row([*((x, 1.0) for x in out.values()), *copied], equal=True)
        program.row([*((x, 1.0) for j, x in out.items() if j), *new])
        come = [(pool.come[k], -1.0) for pool in self.coming] + [(x, -a) for x, a in self.at["in", k]]
        program.row([*((x, 1.0) for x in into.values()), *come], equal=True)
        if self.at["there", k]:
            program.row([(self.turn.level[k], 1.0), *((x, -size) for x, size in self.at["there", k])])
        if 2 in parts:
            early = program.variable(self.most)
            used = [(x, -size) for x, size in self.turn.used[k]]
            program.row([(self.turn.level[k], 1.0), (early, 1.0), *used])
            program.row([(self.turn.come[k], 1.0), (early, -1.0)])
            program.row([(into[0], 1.0), (into[1], 1.0), (early, -1.0)])
        beside, more = self.across(k)
        in_time = {j: [(into[j], self.rates[1]), *more.get(j, [])] for j in parts}
        self._link(k, {j: [(out[j], self.rates[0])] for j in parts}, in_time)
        return [*beside, into[0]] if 0 in parts else []

    def across(self, k: int) -> tuple[list[int], dict[int, list[Term]]]:
        """Bytes that come in across the step's end: beside the operation, and the link's seconds by part."""
        return [], {}

    def _link(self, k: int, out: dict[int, list[Term]], into: dict[int, list[Term]]) -> None:
        """What the link copies in a second: one way, or its share of that both ways at once."""
        shares = self.chain.bidirectional_shares
        of_out, of_in = (min(1.0, (1 - a) / b) for a, b in (shares[::-1], shares)) if self.chain.duplex else (1.0, 1.0)
        for j in self.parts(k):
            for a, b in {(1.0, of_in), (of_out, 1.0)}:
                terms = [*((x, -a * seconds) for x, seconds in out[j]), *((x, -b * seconds) for x, seconds in into[j])]
                self.program.row([(self.time[k, j], 1.0), *terms])
