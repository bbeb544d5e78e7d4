# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Search over plans: simulated annealing, each step of which decodes a whole plan.

A plan is one row of numbers: the codes of the stages (`rotoff.solver.plan_codes`), V for each from stage 0 on, then the
genes of each group of parameters (`kernels.cycle`).
"""

import numpy as np

from libc.math cimport log, pow, sqrt
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint64_t
from libc.string cimport memcmp, memcpy

from rotoff.solver.kernels.cycle cimport FLAGS, GENES, MASK, Cycle, Group, GroupPlaces, Groups, Use, cycle, mark
from rotoff.solver.kernels.decode cimport decode
from rotoff.solver.kernels.flow cimport ROUNDS, flow, host_peak, text, work
from rotoff.solver.kernels.lanes cimport BACK, E_HERE, E_U, PERIODS, Event, Job, Lanes, drained, reset, run
from rotoff.solver.kernels.moves cimport below, mutate, mutate_groups, unit
from rotoff.solver.kernels.work cimport Chain, Gap, Operation, Position, Value, Work

cdef double INF = float("inf")
cdef int64_t HUGE = 4611686018427387904
# What a second of a lane's work costs beside the step's seconds: of plans that take equally long, the one that moves
# less has more room for what is to come.
cdef double EASE = 0.06


cdef inline double _excess(Verdict *r) noexcept nogil:
    return r.over + r.spread + r.host_over


cdef class Evaluator:
    """Decodes plans of one chain at one limit.

    Args:
        chain, arrays: a chain and its `rotoff.solver.arrays.arrays`. limit, host_limit: bytes (None for no
            host_limit). visits: columns V of a plan. cap: the most compute operations a plan may decode to.
        groups, reads: of a chain with parameters, as `rotoff.solver.placed_search.group_arrays` returns them. after:
            whether updates come after ``B 1``.
    """

    def __init__(self, chain, arrays, int64_t limit, host_limit, Py_ssize_t visits, Py_ssize_t cap, groups=(),
                 reads=((0,), (), ()), bint after=False):
        self.keep = []
        self.V = visits
        self._chain(chain, arrays, limit, host_limit)
        cdef Work *w = &self.w
        cdef Groups *p = &self.p
        cdef Cycle *s = &self.s
        cdef Py_ssize_t L = self.c.L, k
        K = p.K = len(groups)
        p.after = after
        p.group = <Group *>self._input(groups)
        p.reads_from, p.reads = <int32_t *>self._input(reads[0]), <int32_t *>self._input(reads[1])
        p.slot = <int32_t *>self._input(reads[2])
        w.cap, s.base = cap, <int32_t>(cap + 2)
        n, uses = cap + K + 4, (cap + K + 4) * int(np.diff(reads[0]).max(initial=1)) + K
        values = s.base + 3 * K + 1
        gaps = 3 * values + uses  # a value is absent at most once before each of its uses
        w.op = <Operation *>self._room(n * sizeof(Operation))
        w.value = <Value *>self._room(values * sizeof(Value))
        w.use_op, w.use_next, w.live = self._ints(2 * n), self._ints(2 * n), self._ints(n)
        w.at = <Position *>self._room(n * sizeof(Position))
        w.room = <int64_t *>self._room(n * sizeof(int64_t))
        w.gap = <Gap *>self._room(gaps * sizeof(Gap))
        w.out_next, w.free_next = self._ints(gaps), self._ints(gaps)
        w.in_next, w.wait_next = self._ints(gaps), self._ints(gaps)
        w.have, w.stash, w.visits = self._ints(L + 2), self._ints(L + 2), self._ints(L + 2)
        w.event = <Event *>self._room((4 * gaps + 4 * n) * sizeof(Event))
        s.pos, s.order = self._ints(n), self._ints(K + 1)
        s.left = <int64_t *>self._room(n * sizeof(int64_t))
        s.before = <double *>self._room(2 * n * sizeof(double))
        s.group = <GroupPlaces *>self._room((K + 1) * sizeof(GroupPlaces))
        s.use, s.use_next = <Use *>self._room(uses * sizeof(Use)), self._ints(uses)
        for k in range(K):
            w.value[s.base + k].size = p.group[k].w
            w.value[s.base + K + k].size = p.group[k].g
            w.value[s.base + 2 * K + k].size = p.group[k].o
            if p.group[k].g > 0:
                s.order[s.n_order] = <int32_t>k
                s.n_order += 1
        self._lanes(chain, values + PERIODS * K, s.base, K)

    cdef void _chain(self, chain, arrays, int64_t limit, host_limit):
        cdef Chain *c = &self.c
        c.L = arrays.out.shape[0] - 1
        c.K = arrays.saved.shape[1]
        c.limit = limit
        c.host_limit = -1 if host_limit is None else min(host_limit, 2**63 - 1)  # more than a chain can have
        c.out_bandwidth = chain.d2h_bandwidth
        c.in_bandwidth = chain.h2d_bandwidth
        c.out = <int64_t *>self._input(arrays.out)
        c.grad = <int64_t *>self._input(arrays.grad)
        c.ck_transient = <int64_t *>self._input(arrays.ck_transient)
        c.saved = <int64_t *>self._input(arrays.saved)
        c.f_transient = <int64_t *>self._input(arrays.f_transient)
        c.b_transient = <int64_t *>self._input(arrays.b_transient)
        c.u_F = <double *>self._input(arrays.u_F)
        c.u_again = <double *>self._input(arrays.u_again)
        c.u_B = <double *>self._input(arrays.u_B)
        c.n_forms = <int32_t *>self._input(arrays.n_forms)

    cdef size_t _input(self, array):
        made = np.ascontiguousarray(array)
        self.keep.append(made)
        return <size_t>made.ctypes.data

    cdef size_t _room(self, n):
        return self._input(np.zeros(n, dtype=np.int8))

    cdef int32_t *_ints(self, n):
        return <int32_t *>self._room(n * sizeof(int32_t))

    cdef void _lanes(self, chain, n, base, K):
        cdef Lanes *l = &self.w.lanes
        l.share[0], l.share[1] = chain.bidirectional_shares
        l.back, l.base, l.K, l.apart = chain.duplex, base, K, l.share[0] == 1.0 and l.share[1] == 1.0
        l.job = <Job *>self._room(n * sizeof(Job))
        l.update = self._ints(K + 1)

    cdef void look(self, const int16_t *codes, double enough, double weight, Verdict *r) noexcept nogil:
        """Decode a plan; nothing need be exact where it costs more than `enough`. `r` has the verdict of another, and
        keeps it where both plans make the same step, as a third of all changes do to one with parameters."""
        cdef Chain *c = &self.c
        cdef Work *w = &self.w
        cdef Groups *p = &self.p
        cdef Cycle *s = &self.s
        cdef uint64_t made
        if not (cycle(c, w, p, s, codes, self.V) if p.K > 0 else decode(c, w, codes, self.V)):
            r[0] = Verdict(INF, HUGE, 0, 0.0, 0.0, 0, 0)
            return
        if p.K == 0:
            r[0] = Verdict(INF, w.over, 0, 0.0, 0.0, 0, 0)
            text(c, w, p, s)
            reset(&w.lanes)
            r.makespan = run(&w.lanes, w.event, NULL, w.n_events, 0.0, 0, NULL)
            r.makespan = max(r.makespan, drained(&w.lanes))
        else:
            made = mark(w, s)
            if made == r.mark:
                return
            r[0] = Verdict(INF, w.over, 0, <double>s.over_sum / (w.n + 1), 0.0, 0, made)
            work(c, w, p, s)
            r.work = EASE * s.work
            enough -= r.work + weight * (r.over + r.spread)
            r.makespan = flow(c, w, p, s, enough, ROUNDS, &r.rounds)
        if c.host_limit >= 0:
            r.host_over = max(0, host_peak(w, p, s) - c.host_limit)

    cdef void change(self, int16_t *codes, uint64_t *state) noexcept nogil:
        """Some random changes of the plan that was decoded last."""
        while True:
            if self.p.K == 0 or below(state, 3) == 0:
                mutate(&self.c, &self.w, codes, self.V, state)
            else:
                mutate_groups(&self.p, codes + (self.c.L + 1) * self.V, state)
            if below(state, 3):
                return

    cdef void confine(self, int16_t *codes, const int16_t *rules) noexcept nogil:
        """Codes are and-ed with the first rule, then or-ed with the second; masks and flags of groups are and-ed with
        the last two."""
        cdef Py_ssize_t x, k
        cdef int16_t *genes = codes + (self.c.L + 1) * self.V
        for x in range(self.V, (self.c.L + 1) * self.V):
            codes[x] = (codes[x] & rules[0]) | rules[1]
        for k in range(self.p.K):
            genes[k * GENES + MASK] &= rules[2]
            genes[k * GENES + FLAGS] &= rules[3]

    def text(self, const int16_t[::1] codes):
        """The operations of a plan as rows (kind, stage or group, form, of). of: -1 for a_i, 0 for ā_i, 1, 2, 3 for w,
        g and o."""
        cdef Work *w = &self.w
        cdef Py_ssize_t e
        cdef int32_t kind, v, K = w.lanes.K
        cdef Verdict r = Verdict(0.0, 0, 0, 0.0, 0.0, 0, 0)
        rows = []
        self.look(&codes[0], INF, 0.0, &r)
        if K > 0:  # the events of the best round
            cycle(&self.c, w, &self.p, &self.s, &codes[0], self.V)
            flow(&self.c, w, &self.p, &self.s, INF, r.rounds + 1, &r.rounds)
        for e in range(w.n_events):
            kind, v = w.event[e].kind, w.event[e].subject
            if kind == E_HERE:
                continue
            if kind >= E_U:
                rows.append((kind, v + 1, 0, -1))
            elif kind <= BACK:
                rows.append((kind, w.op[v].stage, w.op[v].form, -1))
            elif v < w.lanes.base:
                rows.append((kind, w.value[v].level, 0, 0 if w.value[v].form >= 0 else -1))
            else:
                rows.append((kind, (v - w.lanes.base) % K + 1, 0, 1 + (v - w.lanes.base) // K))
        return rows

    def judge(self, const int16_t[::1] codes):
        """(makespan in seconds, bytes over the limit, bytes over the host's) of a plan."""
        cdef Verdict r = Verdict(0.0, 0, 0, 0.0, 0.0, 0, 0)
        with nogil:
            self.look(&codes[0], INF, 0.0, &r)
        return r.makespan, r.over, r.host_over

    def anneal(self, int16_t[::1] codes, Py_ssize_t evaluations, uint64_t seed, double hot, double cold,
               const int16_t[::1] rules, double weight, int16_t[::1] best, const int8_t[::1] stop):
        """Search from `codes` (changed in place to the last plan); the best plan that fits goes to `best`.

        Simulated annealing: `evaluations` random changes, temperatures falling geometrically from `hot` to `cold`
        seconds; a plan over the limits costs `weight` seconds a byte more. rules: of a mode, for `confine`. stop: the
        search ends soon after stop[0] is set. Returns the best makespan, infinity if no plan fitted.
        """
        cdef uint64_t state = seed * <uint64_t>2654435769 + <uint64_t>88172645463325252
        cdef Py_ssize_t n = codes.shape[0], step
        cdef double found = INF, now, over, enough, temperature, heavy = weight
        cdef Verdict r = Verdict(0.0, 0, 0, 0.0, 0.0, 0, 0), kept
        cdef int16_t[::1] tried = np.zeros(n, dtype=np.int16)
        with nogil:
            self.look(&codes[0], INF, weight, &r)
            kept, now, over = r, r.makespan + r.work, _excess(&r)
            if r.over == 0 and r.host_over == 0:
                found = r.makespan
                memcpy(&best[0], &codes[0], n * sizeof(int16_t))
            for step in range(evaluations):
                if stop[0]:
                    break
                temperature = hot * pow(cold / hot, (<double>step) / evaluations)
                if self.p.K > 0:  # what is over at first shall fit at last
                    heavy = weight * sqrt(hot / temperature)
                memcpy(&tried[0], &codes[0], n * sizeof(int16_t))
                self.change(&tried[0], &state)
                self.confine(&tried[0], &rules[0])
                if memcmp(&tried[0], &codes[0], n * sizeof(int16_t)) == 0:
                    continue
                enough = now + heavy * over - temperature * log(unit(&state) + 1e-300)
                r = kept
                self.look(&tried[0], enough, heavy, &r)
                if r.makespan + r.work + heavy * _excess(&r) <= enough:
                    kept, now, over = r, r.makespan + r.work, _excess(&r)
                    memcpy(&codes[0], &tried[0], n * sizeof(int16_t))
                    if r.over == 0 and r.host_over == 0 and r.makespan < found:
                        found = r.makespan
                        memcpy(&best[0], &codes[0], n * sizeof(int16_t))
        return found
