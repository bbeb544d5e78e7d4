"""The rows of the lower bound that parameters, gradients and optimizer states add. `docs/bound.md` has the proof."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import numpy as np

from ..core.chain import Chain, ParameterGroup
from .arrays import Arrays, arrays, own_needs
from .linear_program import Term
from .step_program import StepProgram


class GroupProgram(StepProgram):
    """The program of a steady step. alone: with parameters. paid: share of the steps in which a copy across the step's
    end runs."""

    def __init__(
        self, chain: Chain, c: Arrays, limit: int, alone: tuple[np.ndarray, np.ndarray], updates: str, paid: float
    ) -> None:
        super().__init__(chain, c, limit, alone)
        self.paid, self.after = paid, updates == "after"
        self.earliest = self.end - 1 if self.after else self.L
        # Made by an update or a gradient's last backward: what has left by the step's end, or leaves across it.
        self.early_out, self.late_out = self.leaves(), self.leaves(paid)
        self.kept_out = self.leaves(paid, stays=True)
        # Parameters that have been on the device alone since the step before.
        self.old_out, self.old_kept_out = self.leaves(paid), self.leaves(paid, stays=True)
        self.for_forward, self.for_update = self.comes(), self.comes()
        # In across the end: copied before it, or after it while the bytes have been held since.
        self.over = self.program.variables(self.N, self.most)
        self.over_early, self.over_late = (self.program.variables(self.N, self.most) for _ in range(2))
        self.late_states: list[Term] = []
        self.over_used: dict[int, list[Term]] = {k: [] for k in range(self.N)}

    def activations(self) -> None:
        super().activations()
        for group in in_one(self.chain.parameters):
            if group.grad_bytes:
                self._trained(group)
            elif group.bytes:
                self._frozen(group)

    def _sizes(self, group: ParameterGroup) -> tuple[float, float, float]:
        return group.bytes / self.size, group.grad_bytes / self.size, group.state_bytes / self.size

    def _window(self, group: ParameterGroup) -> tuple[int, int]:
        """The interval that makes the gradient whole, and the position of the next step's first forward."""
        return self.end - min(group.stages), self.N + min(group.stages) - 1

    def _trained(self, group: ParameterGroup) -> None:
        program, (w, g, o), (whole, _) = self.program, self._sizes(group), self._window(group)
        host = self._on_host(group)
        updates = {u: program.variable() for u in range(max(whole, self.earliest), self.end)}
        program.row([(x, 1.0) for x in (*updates.values(), *host)], 1.0, equal=True)
        for u, x in updates.items():
            self.at["again", u].append((x, group.update_time / self.unit))
            moved = program.variable()
            program.row([(x, 1.0), (moved, -1.0)])
            self.hold(x, g, whole + 1, u)
            self.hold(moved, -g, whole + 1, u)
            self.early_out.made[whole].append((moved, g))
            self.for_update.used[u].append((moved, g))
            if o:
                self._state(u, x, o)
        if w:
            self._weights(group, updates, host)

    def _state(self, u: int, x: int, size: float) -> None:
        early, late, over = self.program.variables(3)
        self.program.row([(x, 1.0), (early, -1.0), (late, -1.0)])
        self.program.row([(early, 0.0 if self.after else 1.0), (over, -1.0)])
        for value, sign in ((x, 1.0), (early, -1.0), (late, -1.0)):
            self.hold(value, sign * size, u, u + self.N - 1)
        self.early_out.made[u].append((early, size))
        self.late_out.made[u].append((late, size))
        self.late_states.append((late, size))
        self.over_used[u].append((over, size))
        self.for_forward.used[u].extend([(early, size), (late, size), (over, -size)])

    def _weights(self, group: ParameterGroup, updates: dict[int, int], host: list[int]) -> None:
        program, w, (whole, use) = self.program, group.bytes / self.size, self._window(group)
        # Never copied out before the use; copied out, but staying; leaving before the step's end, and across it; and
        # what is alone on the device up to its update.
        ways: tuple[list[Term], ...] = ([], [], [], [], [])
        for u, x in updates.items():
            stays, kept, early, late, unmoved, back, moved = program.variables(7)
            program.row([(x, -1.0), *((y, 1.0) for y in (stays, kept, early, late))], equal=True)
            for y in (stays, kept):
                self.hold(y, w, u + 1, use - 1)
            for pool, y in ((self.kept_out, kept), (self.early_out, early), (self.late_out, late)):
                pool.made[u].append((y, w))
            # From the last backward to this update: with a copy on the host, or alone on the device.
            program.row([(stays, 1.0), (unmoved, -1.0)])
            program.row([(x, 1.0), (unmoved, -1.0), (back, -1.0)])
            program.row([(unmoved, 1.0), (moved, -1.0)])
            self.hold(x, w, whole + 1, u)
            for y in (back, moved):
                self.hold(y, -w, whole + 1, u)
                self.for_update.used[u].append((y, w))
            self.old_out.ready[whole].append((moved, w))
            self.old_out.due.append((whole, u + 1, (moved, w)))
            for terms, y in zip(ways, (stays, kept, early, late, unmoved), strict=True):
                terms.append((y, 1.0))
        alone, kept, early, late, end = (self.sum_of(terms) for terms in ways)
        self.kept_out.due.append((whole, use, (kept, w)))
        self.late_out.due.append((whole, use, (late, w)))
        self._returns([early, late], w, use)
        every = self.sum_of([(x, 1.0) for x in (*updates.values(), *host)])
        copied = self._uses(group, [alone], every)
        program.row([*((x, 1.0) for x in (*copied, end)), (alone, -1.0)], equal=True)

    def _returns(self, left: list[int], w: float, use: int) -> None:
        """What has left before the step's end, or across it, comes in for the first forward."""
        k, over = use - 1 - self.N, self.program.variable()
        self.program.row([*((x, 1.0) for x in left), (over, -1.0)])
        self.over_used[k % self.N].append((over, w))
        self.for_forward.used[k % self.N].extend([*((x, w) for x in left), (over, -w)])

    def _uses(self, group: ParameterGroup, alone: list[int], every: int) -> list[int]:
        """w from its first use in a step to its last; `alone` of `every` begins on the device alone. The shares that
        are copied out."""
        program, w = self.program, group.bytes / self.size
        copied: list[int] = []
        cuts = sorted({k for i in group.stages for k in (i - 1, self.end - i)})
        for first, last in pairwise(cuts):
            back, moved, kept = program.variables(3)
            with_copy = [(every, 1.0), *((x, -1.0) for x in alone), *((x, 1.0) for x in copied)]
            program.row([*with_copy, (back, -1.0)])
            if not alone:
                program.row([(moved, -1.0), (kept, -1.0)])
            self.hold(every, w, first + 1, last - 1)
            for x in (back, moved):
                self.hold(x, -w, first + 1, last - 1)
                (self.turn if last >= self.L else self.for_forward).used[last - 1].append((x, w))
            for pool, x in ((self.old_out, moved), (self.old_kept_out, kept)):
                pool.ready[first].append((x, w))
                pool.due.append((first, last, (x, w)))
            copied += [moved, kept]
        return copied

    def _frozen(self, group: ParameterGroup) -> None:
        program, w, (whole, use) = self.program, group.bytes / self.size, self._window(group)
        stays, away = program.variables(2)
        program.row([(stays, 1.0), (away, 1.0)], 1.0, equal=True)
        self.hold(stays, w, whole + 1, use - 1)
        self._returns([away], w, use)
        self._uses(group, [], self.sum_of([(stays, 1.0), (away, 1.0)]))

    # -- a group that the host updates

    def _on_host(self, group: ParameterGroup) -> list[int]:
        if group.host_update_time is None:
            return []
        program, (w, g, _), (whole, use) = self.program, self._sizes(group), self._window(group)
        end, paid = self.end, self.paid
        if not w:  # nobody waits for the update
            x = program.variable()
            self.early_out.made[whole].append((x, g))
            return [x]
        after, over = program.variables(2)  # w comes in after the step's end, or is held from it on
        self.early_out.made[whole].extend((x, (1 - paid) * g) for x in (after, over))
        self.for_forward.used[(use - 1) % self.N].append((after, (1 - paid) * w))
        self.hold(over, w, end, use - 1)
        out = {k: program.variable() for k in range(whole, end)}
        run = {k: program.variable() for k in range(max(whole, self.earliest), use)}
        back = {k: program.variable() for k in range(whole, use)}
        late = {k: program.variable() for k in range(end, use)}  # of `over`
        program.row([*((x, -1.0) for x in out.values()), (after, paid), (over, paid)], equal=True)
        program.row([*((back[k], -1.0) for k in range(end, use)), (after, paid)], equal=True)
        before = [*((back[k], -1.0) for k in range(whole, end)), *((x, -1.0) for x in late.values())]
        program.row([*before, (over, paid)], equal=True)
        waits: list[Term] = []  # gradients on the host, and parameters made there
        ready: list[Term] = []
        for k in range(whole, use):
            left, made = program.variables(2)
            come = [(x[k], -1.0) for x in (back, late) if k in x]
            runs = [run[k]] if k in run else []
            gone = [(out[k], 1.0)] if k in out else []
            program.row([*waits, *gone, *((x, -1.0) for x in runs), (left, -1.0)], equal=True)
            program.row([*ready, *((x, 1.0) for x in runs), *come, (made, -1.0)], equal=True)
            waits, ready = [(left, 1.0)], [(made, 1.0)]
            self._serve(group, k, out.get(k), run.get(k), back[k], late.get(k))
        return [after, over]

    def _serve(
        self, group: ParameterGroup, k: int, out: int | None, run: int | None, back: int, late: int | None
    ) -> None:
        """The lanes and bytes of a gradient that leaves, an update on the host, and parameters that come in."""
        (w, g, _), (whole, use), here = self._sizes(group), self._window(group), k % self.N
        if out is not None:
            self.hold(out, g, whole + 1, k)
            self.at["out", here].append((out, g))
            if k == whole:
                self.at["new", here].append((out, g))
        if run is not None:
            self.at["host", here].append((run, (group.host_update_time or 0.0) / self.unit))
        if late is not None:
            self.at["raw", here].append((late, w))
        self.at["in", here].append((back, w))
        self.hold(back, w, k + 1, (self.end if k < self.end else use) - 1)

    # -- rows

    def rows(self) -> None:
        program, end = self.program, self.end
        states = self.sum_of(self.late_states, self.most)
        self.late_out.due.append((self.L, self.L + self.N, (states, 1.0)))
        self.early_out.rows(program, end)
        self.late_out.rows(program, None)
        self.kept_out.rows(program, self.L)
        self.old_out.rows(program, end)
        self.old_kept_out.rows(program, end)
        self.for_forward.rows(program, None)
        self.for_update.rows(program, end)
        self._over()
        # What crosses the end is held at it. What is there at cut L is left from the step before.
        before = program.variables(end - self.L, self.most)
        program.row([(self.late_out.level[self.L], 1.0), *((x, -1.0) for x in before)])
        for k, x in enumerate(before, start=self.L):
            self.hold(self.late_out.out[k], 1.0, k + 1, end)
            self.hold(x, -1.0, k + 1, end)
        super().rows()

    def _over(self) -> None:
        """Bytes that come in across the step's end: all are held at it, and what is not there then comes after it."""
        program, N, end = self.program, self.N, self.end
        used = [(x, -size) for terms in self.over_used.values() for x, size in terms]
        program.row([(self.over[end], 1.0), *used], equal=True)
        comes = program.variables(N, self.most)
        early = [(self.over_early[k], 1.0) for k in range(self.L, end)]
        program.row([(comes[end], 1.0), *early, (self.over[end], -1.0)], equal=True)
        for p in range(end, end + N - 1):
            k, after = p % N, (p + 1) % N
            used = [(x, -size) for x, size in self.over_used[k]]
            program.row([(self.over[k], 1.0), *used, (self.over[after], -1.0)], equal=True)
            program.row([(comes[k], 1.0), (self.over_late[k], -1.0), (comes[after], -1.0)], equal=True)
            program.row([(self.over[after], 1.0), (comes[after], -1.0)])
        k = end - 1
        program.row([(self.over[k], 1.0), *((x, -size) for x, size in self.over_used[k])], equal=True)
        program.row([(self.over_late[k], 1.0), (comes[k], -1.0)])
        for k in range(self.L, end):
            self.hold(self.over_early[k], 1.0, k + 1, end - 1)
        for k in range(N):
            self.at["held", k].append((self.over[k], 1.0))

    def across(self, k: int) -> tuple[list[int], dict[int, list[Term]]]:
        program, rate, parts = self.program, self.rates[1], self.parts(k)
        late = {j: program.variable(self.most) for j in parts}
        raw = [(x, -size) for x, size in self.at["raw", k]]
        program.row([*((x, 1.0) for x in late.values()), *raw, (self.over_late[k], -self.paid)], equal=True)
        seconds = {j: [(x, rate)] for j, x in late.items()}
        if not self.L <= k < self.end:
            return [], seconds
        early = {j: program.variable(self.most) for j in parts}
        program.row([*((x, 1.0) for x in early.values()), (self.over_early[k], -1.0)], equal=True)
        for j, x in early.items():
            seconds[j].append((x, self.paid * rate))
        return [early[0]], seconds


def in_one(groups: Iterable[ParameterGroup]) -> list[ParameterGroup]:
    """Groups of the same stages whose costs are in proportion, such as tensors of one layer, as one group: any plan for
    them is a mixture of plans for it."""
    alike: dict[object, list[tuple[int, ParameterGroup]]] = {}
    for group in groups:
        sizes = group.bytes, group.grad_bytes, group.state_bytes
        unit = math.gcd(*sizes) or 1
        rates = [None if t is None else f"{t / unit:.9e}" for t in (group.update_time, group.host_update_time)]
        alike.setdefault((frozenset(group.stages), *(n // unit for n in sizes), *rates), []).append((unit, group))
    found = []
    for parts in alike.values():
        (unit, one), total = parts[0], sum(unit for unit, _ in parts)
        updates, on_host = (
            [t / n for n, group in parts if (t := getattr(group, name)) is not None]
            for name in ("update_time", "host_update_time")
        )
        made = replace(
            one,
            bytes=one.bytes // unit * total,
            grad_bytes=one.grad_bytes // unit * total,
            state_bytes=one.state_bytes // unit * total,
            update_time=total * min(updates),
            host_update_time=total * min(on_host) if on_host else None,
        )
        found.append(made)
    return found


def drift_time(chain: Chain, limit: int, updates: str) -> float:
    """Seconds by which the makespan may be below the endless bound: half of what copies under way at one cut may take.
    Infinite where some ``H`` may be under way at every cut, since no w waits for it."""
    if any(s.grad_bytes and not s.bytes and s.host_update_time is not None for s in chain.parameters):
        return math.inf
    c = arrays(chain.without_parameters())
    read, trained, _ = own_needs(chain, updates)
    saved = np.zeros_like(c.saved)  # a B may run while its ā leaves, but ā_L is never moved
    saved[-1] = c.saved[-1]
    stays = np.where(c.real, saved + c.b_transient, np.iinfo(np.int64).max).min(axis=1)[1:]
    stays += c.out[0] + c.grad[1:] + c.grad[:-1] + (trained - read)[1:]
    stays[:-1] += c.out[-1]
    held = stays.max() if updates == "after" else stays[-1]
    return float(limit - held) / min(chain.d2h_bandwidth, chain.h2d_bandwidth) / 2
