# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Search over plans: simulated annealing, each step of which decodes a whole plan (`kernels.decode`)."""

import numpy as np

from libc.math cimport log, pow, sqrt
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint64_t
from libc.string cimport memcmp, memcpy

from rotoff.solver.kernels.decode cimport Verdict, decode
from rotoff.solver.kernels.lanes cimport BACK, E_HERE, E_U, Event, Job
from rotoff.solver.kernels.moves cimport below, mutate, unit
from rotoff.solver.kernels.work cimport Chain, Gap, List, Operation, Value, Work

cdef double INF = float("inf")


cdef inline double _excess(Verdict *r) noexcept nogil:
    return r.over + r.spread + r.host_over


cdef class Evaluator:
    """Decodes plans of one chain at one limit. A plan is a row of codes, V for each stage from 0 on.

    Args:
        chain, arrays: a chain and its `rotoff.solver.arrays.arrays`. limit, host_limit: bytes (None for no
            host_limit). visits: columns V of a plan. cap: the most compute operations a plan may decode to.
    """

    def __init__(self, chain, arrays, int64_t limit, host_limit, Py_ssize_t visits, Py_ssize_t cap):
        self.keep = []
        self.V = visits
        self.link = (chain.duplex, *chain.bidirectional_shares)
        cdef Chain *c = &self.c
        cdef Work *w = &self.w
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
        w.cap = cap
        n = cap + 2
        w.op = <Operation *>self._room(n * sizeof(Operation))
        w.value = <Value *>self._room(n * sizeof(Value))
        self._lanes(n, 0, 0)
        w.use_op = self._ints(2 * n)
        w.use_next = self._ints(2 * n)
        # A value is absent at most once before each of its uses.
        w.gap = <Gap *>self._room(3 * n * sizeof(Gap))
        w.gap_next = self._ints(3 * n)
        w.reload = self._ints(3 * n)
        w.place = <List *>self._room(n * sizeof(List))
        w.have = self._ints(c.L + 2)
        w.stash = self._ints(c.L + 2)
        w.visits = self._ints(c.L + 2)
        w.live = self._ints(n)
        w.event = <Event *>self._room(12 * n * sizeof(Event))

    cdef size_t _input(self, array):
        made = np.ascontiguousarray(array)
        self.keep.append(made)
        return <size_t>made.ctypes.data

    cdef size_t _room(self, n):
        return self._input(np.zeros(n, dtype=np.int8))

    cdef int32_t *_ints(self, n):
        return <int32_t *>self._room(n * sizeof(int32_t))

    cdef void _lanes(self, n, base, K):
        cdef Lanes *l = &self.w.lanes
        duplex, l.share[0], l.share[1] = self.link
        l.back, l.base, l.K, l.apart = 1 if duplex else 0, base, K, l.share[0] == 1.0 and l.share[1] == 1.0
        l.job = <Job *>self._room(n * sizeof(Job))
        l.update = self._ints(K + 1)

    cdef void look(self, const int16_t *codes, double enough, double weight, Verdict *r) noexcept nogil:
        """Decode a plan; nothing need be exact where it costs more than `enough`. `r` has the verdict of another."""
        decode(&self.c, &self.w, codes, self.V, r)

    cdef void change(self, int16_t *codes, uint64_t *state) noexcept nogil:
        """Some random changes of the plan that was decoded last."""
        mutate(&self.c, &self.w, codes, self.V, state)
        while below(state, 3) == 0:
            mutate(&self.c, &self.w, codes, self.V, state)

    cdef void confine(self, int16_t *codes, const int16_t *rules) noexcept nogil:
        """Codes are and-ed with the first rule, then or-ed with the second."""
        cdef Py_ssize_t x
        for x in range(self.V, (self.c.L + 1) * self.V):
            codes[x] = (codes[x] & rules[0]) | rules[1]

    cdef void decode_again(self, const int16_t *codes) noexcept nogil:
        """Decode a plan so that the events are those of its best round."""
        cdef Verdict r = Verdict(0.0, 0, 0, 0.0, 0.0, 0, 0)
        self.look(codes, INF, 0.0, &r)

    def text(self, const int16_t[::1] codes):
        """The operations of a plan as rows (kind, stage or group, form, of). of: -1 for a_i, 0 for ā_i, 1, 2, 3 for w,
        g and o."""
        cdef Work *w = &self.w
        cdef Py_ssize_t e
        cdef int32_t kind, v, K = w.lanes.K
        rows = []
        self.decode_again(&codes[0])
        for e in range(w.n_events):
            kind, v = w.event[e].kind, w.event[e].subject
            if kind == E_HERE:
                continue
            if kind >= E_U:
                rows.append((kind, v + 1, 0, -1))
            elif kind <= BACK:
                rows.append((kind, w.op[v].stage, w.op[v].form, -1))
            elif K == 0 or v < w.lanes.base:
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
                if self.harder:  # what is over at first shall fit at last
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
