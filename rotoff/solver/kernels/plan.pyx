# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Search over plans: simulated annealing, each step of which decodes a whole plan (`kernels.decode`)."""

import numpy as np

from libc.math cimport exp, pow
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint64_t
from libc.string cimport memcmp, memcpy

from rotoff.solver.kernels.decode cimport Result, judge, write
from rotoff.solver.kernels.lanes cimport Job, Lanes
from rotoff.solver.kernels.moves cimport below, mutate, unit
from rotoff.solver.kernels.work cimport Chain, Gap, List, Operation, Value, Work

cdef double INF = float("inf")


cdef double _anneal(Chain *c, Work *w, int16_t *codes, Py_ssize_t n, Py_ssize_t V, Py_ssize_t evaluations,
                    uint64_t seed, double hot, double cold, int16_t keep, int16_t force, double weight, int16_t *best,
                    int16_t *tried, const int8_t *stop) noexcept nogil:
    cdef uint64_t state = seed * <uint64_t>2654435769 + <uint64_t>88172645463325252
    cdef Result r
    cdef double cost, now, temperature, found = INF
    cdef Py_ssize_t step, x
    judge(c, w, codes, V, &r)
    now = r.makespan + weight * r.over
    if r.over == 0:
        found = r.makespan
        memcpy(best, codes, n * sizeof(int16_t))
    for step in range(evaluations):
        if stop[0]:
            break
        temperature = hot * pow(cold / hot, (<double>step) / evaluations)
        memcpy(tried, codes, n * sizeof(int16_t))
        mutate(c, w, tried, V, &state)
        while below(&state, 3) == 0:
            mutate(c, w, tried, V, &state)
        for x in range(V, n):
            tried[x] = (tried[x] & keep) | force
        if memcmp(tried, codes, n * sizeof(int16_t)) == 0:
            continue
        judge(c, w, tried, V, &r)
        cost = r.makespan + weight * r.over
        if cost <= now or unit(&state) < exp((now - cost) / temperature):
            now = cost
            memcpy(codes, tried, n * sizeof(int16_t))
            if r.over == 0 and cost < found:
                found = cost
                memcpy(best, codes, n * sizeof(int16_t))
    return found


cdef class Evaluator:
    """Decodes plans of one chain at one limit.

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
        self._lanes(&w.lanes, n, 0, 0)
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
        self.emitted = np.zeros(4 * 12 * n, dtype=np.int32)

    cdef size_t _input(self, array):
        made = np.ascontiguousarray(array)
        self.keep.append(made)
        return <size_t>made.ctypes.data

    cdef size_t _room(self, n):
        return self._input(np.zeros(n, dtype=np.int8))

    cdef int32_t *_ints(self, n):
        return <int32_t *>self._room(n * sizeof(int32_t))

    cdef void _lanes(self, Lanes *l, n, base, K):
        duplex, l.share[0], l.share[1] = self.link
        l.back, l.base, l.K, l.apart = 1 if duplex else 0, base, K, l.share[0] == 1.0 and l.share[1] == 1.0
        l.job = <Job *>self._room(n * sizeof(Job))
        l.update = self._ints(K + 1)

    def evaluate(self, const int16_t[:, ::1] codes):
        """(makespan in seconds, peak bytes, host peak bytes, bytes over the limits: 0 if the plan fits)."""
        cdef Result r
        with nogil:
            judge(&self.c, &self.w, &codes[0, 0], self.V, &r)
        return r.makespan, r.peak, r.host_peak, r.over

    def operations(self, const int16_t[:, ::1] codes):
        """The plan's operations as rows (kind, stage, form, of); None if it has too many."""
        cdef Result r
        with nogil:
            write(&self.c, &self.w, &codes[0, 0], self.V, &self.emitted[0], &r)
        if r.n_ops < 0:
            return None
        return np.asarray(self.emitted)[: 4 * r.n_emitted].reshape(-1, 4).tolist()

    def anneal(self, int16_t[:, ::1] codes, Py_ssize_t evaluations, uint64_t seed, double hot, double cold,
               const int16_t[::1] masks, double weight, int16_t[:, ::1] best, const int8_t[::1] stop):
        """Search from `codes` (changed in place to the last plan); the best plan that fits goes to `best`.

        Simulated annealing: `evaluations` random changes, temperatures falling geometrically from `hot` to `cold`
        seconds; a plan over the limits costs `weight` seconds a byte more. masks: each code is and-ed with the first,
        then or-ed with the second (a mode's rules). stop: the search ends soon after stop[0] is set. Returns the best
        makespan, infinity if no plan fitted.
        """
        cdef double found
        cdef Py_ssize_t n = codes.shape[0] * codes.shape[1]
        cdef int16_t[::1] room = np.zeros(n, dtype=np.int16)
        with nogil:
            found = _anneal(&self.c, &self.w, &codes[0, 0], n, self.V, evaluations, seed, hot, cold, masks[0], masks[1],
                            weight, &best[0, 0], &room[0], &stop[0])
        return found
