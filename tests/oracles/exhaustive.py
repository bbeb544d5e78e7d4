"""The true optimum of a short chain, by search over the machine's own states; no recurrence, no plan, no lowering.

A state is what the device and the host hold and what is still arriving; a label adds the times of the lanes and of
every copy. Labels of one state are kept while no other is at least as early everywhere. Waits are taken where a value
is first needed, which loses nothing. An upper bound prunes labels that cannot beat it.
"""

from __future__ import annotations

import heapq
import math
from itertools import count
from typing import NamedTuple

from rotoff import Chain


class State(NamedTuple):
    """device, host: sets of values (saved, stage), with the form of a saved one; arriving: those on the device not
    usable."""

    device: frozenset[tuple[bool, int]]
    host: frozenset[tuple[bool, int]]
    arriving: frozenset[tuple[bool, int]]
    forms: tuple[int, ...]
    next_B: int
    started: bool  # the backward phase has begun
    early: bool = False  # the last forward stopped early, so that B is the next operation on the compute lane


class Times(NamedTuple):
    compute: float
    out: float
    back: float
    copies: tuple[tuple[tuple[bool, int], float, float], ...]  # value, end of its last copy, end of its offload


class Search:
    """Labels of one chain at one limit; `modes` may forbid moves."""

    def __init__(self, chain: Chain, mem_limit: int, moves: bool = True) -> None:
        self.chain, self.limit, self.moves, self.L = chain, mem_limit, moves, len(chain)

    def size(self, v: tuple[bool, int], forms: tuple[int, ...]) -> int:
        saved, i = v
        return self.chain.stage(i).form(forms[i]).saved_bytes if saved else self.chain.output_bytes(i)

    def held(self, s: State) -> int:
        gradient = self.chain.grad_bytes(s.next_B) if s.started else 0
        a_L = self.chain.output_bytes(self.L) if s.next_B < self.L else 0
        return self.chain.input_bytes + a_L + gradient + sum(self.size(v, s.forms) for v in s.device)

    def optimum(self, upper: float = math.inf, most_labels: int = 200_000) -> float | None:
        """Seconds of the fastest sequence that is faster than `upper`, else `upper`; None where the search gives up."""
        L = self.L
        start = State(frozenset(), frozenset(), frozenset(), (0,) * (L + 1), L, False)
        times = Times(0.0, 0.0, 0.0, ())
        ticket = count()
        heap = [(0.0, next(ticket), start, times)]
        front: dict[State, list[tuple[float, ...]]] = {}
        best, labels = upper, 0
        self.rest_B = [0.0] * (L + 1)
        for i in range(1, L + 1):
            stage = self.chain.stage(i)
            fastest = min(stage.form(k).backward_time for k in range(1 + len(stage.forms)))
            self.rest_B[i] = self.rest_B[i - 1] + fastest
        self.all_F = [sum(self.chain.stage(q).forward_time for q in range(i + 1, L + 1)) for i in range(L + 1)]
        while heap:
            bound, _, s, t = heapq.heappop(heap)
            if bound >= best - 1e-9 * max(1.0, best):
                continue
            if s.next_B == 0:
                best = min(best, max(t.compute, t.out, t.back))
                continue
            labels += 1
            if labels > most_labels:
                return None
            for state, after in self.moves_from(s, t):
                ahead = after.compute + self.rest_B[state.next_B]
                if not state.started:
                    reach = max([0] + [i for _, i in state.device | state.host])
                    ahead += self.all_F[reach]
                if ahead >= best - 1e-9 * max(1.0, best) or not self.new(front, state, after):
                    continue
                heapq.heappush(heap, (ahead, next(ticket), state, after))
        return best

    @staticmethod
    def new(front: dict[State, list[tuple[float, ...]]], state: State, t: Times) -> bool:
        """Whether no kept label of `state` is as early everywhere; keeps it if so."""
        flat = (t.compute, max(t.out, t.compute), max(t.back, t.compute))
        ends = {v: (end, off) for v, end, off in t.copies}
        for v in sorted(state.device | state.host):
            flat += tuple(max(x, t.compute) for x in ends.get(v, (0.0, 0.0)))
        kept = front.setdefault(state, [])
        if any(all(x <= y for x, y in zip(other, flat, strict=True)) for other in kept):
            return False
        kept[:] = [other for other in kept if not all(x <= y for x, y in zip(flat, other, strict=True))]
        kept.append(flat)
        return True

    # -- the machine's operations

    def moves_from(self, s: State, t: Times):
        L, chain = self.L, self.chain
        held = self.held(s)
        ends = {v: (end, off) for v, end, off in t.copies}
        for i in range(1, 0 if s.early else L + 1):
            for source in self.inputs(s, i):
                waited = self.wait(s, t, ends, [source])
                stage = chain.stage(i)
                if (False, i) not in s.device and (True, i) not in s.device:
                    if (True, i) not in s.host:
                        for k in range(1 + len(stage.forms)):
                            form = stage.form(k)
                            if held + form.saved_bytes + form.forward_transient_bytes <= self.limit:
                                yield self.made(s, t, waited, (True, i), k, stage.forward_time)
                                if i == s.next_B < L:
                                    seconds = stage.forward_time - stage.tail_time
                                    state, after = self.made(s, t, waited, (True, i), k, seconds)
                                    yield state._replace(early=True), after
                    if i < L:
                        over = held + stage.output_bytes + stage.checkpoint_transient_bytes
                        if over <= self.limit:
                            yield self.made(s, t, waited, (False, i), None, stage.forward_time)
        i = s.next_B
        if s.started and (True, i) in s.device:
            form = chain.stage(i).form(s.forms[i])
            if held + chain.grad_bytes(i - 1) + form.backward_transient_bytes <= self.limit:
                for source in self.inputs(s, i):
                    yield self.backward(s, t, ends, i, source, form.backward_time)
        if held > self.limit:
            return
        for v in s.device:
            if v == (True, L):
                continue
            if v not in s.arriving:
                yield self.gone(s, t, ends, v)  # free where the host has it, else drop
                if v in s.host:
                    continue
                if self.moves:
                    yield self.offload(s, t, ends, v)
        for v in s.host - s.device:
            if held + self.size(v, s.forms) <= self.limit:
                yield self.prefetch(s, t, ends, v)

    @staticmethod
    def inputs(s: State, i: int) -> list[tuple[bool, int] | None]:
        if i == 1:
            return [None]
        return [v for v in ((False, i - 1), (True, i - 1)) if v in s.device]

    def wait(self, s: State, t: Times, ends: dict, values: list) -> tuple[float, frozenset]:
        """Compute's clock and what still arrives, once `values` are usable."""
        compute, arriving = t.compute, set(s.arriving)
        for v in values:
            if v in arriving:
                compute = max(compute, ends[v][0])
                arriving.discard(v)
        return compute, frozenset(arriving)

    def made(self, s, t, waited, v, k, seconds):
        compute, arriving = waited
        forms = s.forms if k is None else (*s.forms[: v[1]], k, *s.forms[v[1] + 1 :])
        started = s.started or v[1] == self.L
        state = State(s.device | {v}, s.host, arriving, forms, s.next_B, started)
        return state, Times(compute + seconds, t.out, t.back, t.copies)

    def backward(self, s, t, ends, i, source, seconds):
        needed = [(True, i)] + ([source] if source is not None else [])
        compute, arriving = self.wait(s, t, ends, needed)
        compute += seconds
        gone = {(True, i), (False, i), (False, i - 1)} if (False, i - 1) in s.device else {(True, i), (False, i)}
        for v in gone & s.device:
            compute = max(compute, ends.get(v, (0.0, 0.0))[0])
        copies = tuple(c for c in t.copies if c[0] not in gone)
        state = State(s.device - gone, s.host - gone, arriving - gone, s.forms, i - 1, True)
        return state, Times(compute, t.out, t.back, copies)

    def gone(self, s, t, ends, v):
        end, off = ends.get(v, (0.0, 0.0))
        copies = tuple((u, 0.0, o) if u == v else (u, e, o) for u, e, o in t.copies)
        return s._replace(device=s.device - {v}), Times(max(t.compute, end), t.out, t.back, copies)

    def offload(self, s, t, ends, v):
        start = max(t.compute, t.out, 0.0 if self.chain.duplex else t.back)
        end = start + self.size(v, s.forms) / self.chain.d2h_bandwidth
        back = t.back if self.chain.duplex else end
        copies = tuple(c for c in t.copies if c[0] != v) + ((v, max(end, ends.get(v, (0.0, 0.0))[0]), end),)
        return s._replace(host=s.host | {v}), Times(t.compute, end, back, copies)

    def prefetch(self, s, t, ends, v):
        start = max(t.compute, t.back, ends[v][1], 0.0 if self.chain.duplex else t.out)
        end = start + self.size(v, s.forms) / self.chain.h2d_bandwidth
        out = t.out if self.chain.duplex else end
        copies = tuple(c for c in t.copies if c[0] != v) + ((v, end, ends[v][1]),)
        state = s._replace(device=s.device | {v}, arriving=s.arriving | {v})
        return state, Times(t.compute, out, end, copies)
