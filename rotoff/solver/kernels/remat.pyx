# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Kernel of pure recompute: tables of least seconds by slots, and the first choice at any of their states.

Three tables, in seconds with m slots beyond the input of stage i (U: running sums of u_F; f, g range over forms):

- ``C[i, j]``, rotor's Opt (C_A with Δ = 0, m = N − A): from the input of i and δ_j to δ_{i-1};
- ``W[i]``: from the input of i, nothing run past it yet, to δ_{i-1};
- ``D[i, k]``: as C, where ā_k is on the device, counted elsewhere, and without the seconds of B k.

Each is the least of

- *all*: u_F(i) + u_B(i, f) + rest(i+1, m − ā_i^f), in C(i, i) less the tail of i;
- *ck*: U(k) − U(i−1) + C(i, k, m) + rest(k+1, m − a_k), the sweep F_ck i, F_∅ i+1..k;
- *bare*, in C and W: U(k) − U(i−1) + u_B(k, f) + D(i, k, m − ā_k^f) + rest(k+1, m − ā_k^f), that sweep up to k − 1 and
  ā_k^f kept without its input, which the replay of i..k−1 makes for B k. So stage k itself runs once only.

Stages count from 1; row 0 of arrays by stage is unused. Infinity means that nothing fits.
"""

import numpy as np

from libc.math cimport INFINITY
from libc.stdint cimport int32_t, int64_t

cpdef enum Table:
    BACKWARD
    FORWARD
    WITHOUT

cdef enum Kind:
    ALL
    CK
    BARE


cdef struct Problem:
    Py_ssize_t L, N, K
    Py_ssize_t reach, bare     # the longest segments in C, in D
    int64_t room               # bytes of the N slots
    const int64_t *bytes_out   # [i] of a_i
    const double *U
    const double *u_again      # [i] u_F less the tail
    const double *u_B          # [i, form]
    const int32_t *n_forms
    const int32_t *out         # slots of a_i
    const int32_t *saved       # [i, form] slots of ā_i
    const int64_t *held        # [j] bytes of δ_j and a_L
    const int64_t *need_ck     # [i, k] bytes of F_ck i, F_∅ i+1..k
    const int64_t *need_all    # [i, form] bytes of ā_i and o_F
    const int64_t *need_B      # [i, form]
    const int64_t *base        # C and D of (i, j) are rows base[i] + j
    const double *zeros        # a row
    double *C
    double *D
    double *W
    int32_t *least_C           # by row, the fewest slots with which it is finite
    int32_t *least_D
    int32_t *least_W


cdef struct Option:
    Kind kind
    Py_ssize_t k, form
    double cost
    Py_ssize_t first           # fewest slots
    Py_ssize_t left_less, right_less
    const double *left
    const double *right


cdef inline int64_t _max(int64_t x, int64_t y) noexcept nogil:
    return x if x > y else y


cdef inline Py_ssize_t _slots(Problem *p, int64_t size) noexcept nogil:
    """Slots that hold `size` bytes, at most N + 1 (which fits nowhere)."""
    if size > p.room:
        return p.N + 1
    return (size * p.N + p.room - 1) // p.room if size > 0 else 0


cdef inline double *_row(Problem *p, Table table, Py_ssize_t i, Py_ssize_t j) noexcept nogil:
    if table == FORWARD:
        return p.W + i * (p.N + 1)
    return (p.C if table == BACKWARD else p.D) + (p.base[i] + j) * (p.N + 1)


cdef inline int32_t _least(Problem *p, Table table, Py_ssize_t i, Py_ssize_t j) noexcept nogil:
    if table == FORWARD:
        return p.least_W[i]
    return p.least_C[p.base[i] + j] if table == BACKWARD else p.least_D[p.base[i] + j]


cdef inline void _right(Problem *p, Table table, Py_ssize_t i, Py_ssize_t j, Py_ssize_t size, Option *o) noexcept nogil:
    """What follows is stages i..j, with `size` slots less; nothing where there are none."""
    o.right, o.right_less = p.zeros, 0
    if i <= j:
        o.right, o.right_less = _row(p, table, i, j), size
        o.first = _max(o.first, size + _least(p, table, i, j))


cdef bint _next(Problem *p, Table table, Py_ssize_t i, Py_ssize_t j, Option *o) noexcept nogil:
    """The option after `o` (whose kind is ALL and form −1 at the start); false where there is none."""
    cdef int64_t held = 0 if table == FORWARD else p.held[j]
    cdef Py_ssize_t w
    cdef double sweep
    if o.kind == ALL:
        o.form += 1
        if table == WITHOUT and i == j:
            # B j with the input just made: of its forms' needs beyond ā_j the largest, since which one it is is not
            # known here.
            o.cost, o.first = 0.0, 0
            for w in range(i * p.K, i * p.K + p.n_forms[i]):
                o.first = _max(o.first, _slots(p, p.need_B[w]) - p.saved[w])
            _right(p, table, 1, 0, 0, o)
            return o.form == 0
        if o.form < p.n_forms[i]:
            w = i * p.K + o.form
            o.cost = (p.u_again[i] if table == BACKWARD and i == j else p.U[i] - p.U[i - 1]) + p.u_B[w]
            o.first = _slots(p, _max(held + p.need_all[w], p.need_B[w]))
            _right(p, table, i + 1, j, p.saved[w], o)
            return True
        o.kind, o.k = CK, i - 1
    if o.kind == CK:
        o.k += 1
        if o.k < j and o.k - i < p.reach:
            o.cost = p.U[o.k] - p.U[i - 1]
            o.first = _max(_slots(p, held + p.need_ck[i * (p.L + 1) + o.k]), _least(p, BACKWARD, i, o.k))
            o.left, o.left_less = _row(p, BACKWARD, i, o.k), 0
            _right(p, table, o.k + 1, j, p.out[o.k], o)
            return True
        if table == WITHOUT:
            return False
        o.kind, o.k, o.form = BARE, i + 1, -1
    o.form += 1
    if o.form == p.n_forms[o.k]:
        o.k, o.form = o.k + 1, 0
    if o.k >= j or o.k - i >= p.bare:
        return False
    w = o.k * p.K + o.form
    sweep = p.U[o.k] - p.U[i - 1]
    o.cost = sweep + p.u_B[w]
    o.first = _slots(p, held + _max(p.need_ck[i * (p.L + 1) + o.k - 1],
                                    p.bytes_out[o.k - 1] + p.need_all[w]))
    o.first = _max(o.first, p.saved[w] + _least(p, WITHOUT, i, o.k))
    o.left, o.left_less = _row(p, WITHOUT, i, o.k), p.saved[w]
    _right(p, table, o.k + 1, j, p.saved[w], o)
    return True


cdef inline void _start(Problem *p, Option *o) noexcept nogil:
    o.kind, o.form, o.k = ALL, -1, 0
    o.left, o.left_less = p.zeros, 0


cdef void _fill(Problem *p, Table table, Py_ssize_t i, Py_ssize_t j) noexcept nogil:
    cdef Py_ssize_t m
    cdef double cost
    cdef double *row = _row(p, table, i, j)
    cdef const double *left
    cdef const double *right
    cdef Option o
    for m in range(p.N + 1):
        row[m] = INFINITY
    _start(p, &o)
    while _next(p, table, i, j, &o):
        left, right = o.left - o.left_less, o.right - o.right_less
        for m in range(o.first, p.N + 1):
            cost = o.cost + left[m] + right[m]
            row[m] = cost if cost < row[m] else row[m]
    m = 0
    while m <= p.N and row[m] == INFINITY:
        m += 1
    if table == FORWARD:
        p.least_W[i] = <int32_t>m
    elif table == BACKWARD:
        p.least_C[p.base[i] + j] = <int32_t>m
    else:
        p.least_D[p.base[i] + j] = <int32_t>m


cdef class Kernel:
    """The tables of one chain at one discretization; arrays as `rotoff.solver.remat` names them.

    base: rows of segments. reach: the most stages of a segment that is made again; bare: of one with a bare ā at its
    end.
    """

    cdef Problem p
    cdef list keep
    cdef readonly object C, W

    def __init__(self, costs, slots, need, const int64_t[::1] base, Py_ssize_t reach, Py_ssize_t bare):
        cdef Problem *p = &self.p
        self.keep = []
        p.L, p.N, p.K = costs.out.shape[0] - 1, slots.N, costs.saved.shape[1]
        p.reach, p.bare, p.room = reach, bare, slots.room
        p.bytes_out = <int64_t *>self._at(costs.out, np.int64)
        p.U = <double *>self._at(np.cumsum(costs.u_F), np.float64)
        p.u_again = <double *>self._at(costs.u_again, np.float64)
        p.u_B = <double *>self._at(costs.u_B, np.float64)
        p.n_forms = <int32_t *>self._at(costs.n_forms, np.int32)
        p.out = <int32_t *>self._at(slots.out, np.int32)
        p.saved = <int32_t *>self._at(slots.saved, np.int32)
        p.held = <int64_t *>self._at(need.held, np.int64)
        p.need_ck = <int64_t *>self._at(need.ck, np.int64)
        p.need_all = <int64_t *>self._at(need.all, np.int64)
        p.need_B = <int64_t *>self._at(need.b, np.int64)
        p.base = <int64_t *>self._at(base, np.int64)
        p.zeros = <double *>self._at(np.zeros(p.N + 1), np.float64)
        rows = max(1, base[p.L + 1] + p.L + 1)
        self.C = np.empty((rows, p.N + 1))
        self.W = np.full((p.L + 2, p.N + 1), INFINITY)
        p.C = <double *>self._at(self.C, np.float64)
        p.D = <double *>self._at(np.empty((rows if bare else 1, p.N + 1)), np.float64)
        p.W = <double *>self._at(self.W, np.float64)
        p.least_C = <int32_t *>self._at(np.zeros(rows, dtype=np.int32), np.int32)
        p.least_D = <int32_t *>self._at(np.zeros(rows, dtype=np.int32), np.int32)
        p.least_W = <int32_t *>self._at(np.zeros(p.L + 2, dtype=np.int32), np.int32)

    cdef size_t _at(self, array, dtype):
        made = np.ascontiguousarray(array, dtype=dtype)
        self.keep.append(made)
        return <size_t>made.ctypes.data

    def fill(self, Py_ssize_t d, Py_ssize_t low, Py_ssize_t high):
        """C and D of the segments (i, i + d), low <= i < high, from shorter ones."""
        cdef Py_ssize_t i
        with nogil:
            for i in range(low, high):
                _fill(&self.p, BACKWARD, i, i + d)
                if d < self.p.bare:
                    _fill(&self.p, WITHOUT, i, i + d)

    def fill_forward(self):
        """W, once C and D are filled."""
        cdef Py_ssize_t i
        with nogil:
            for i in range(self.p.L, 0, -1):
                _fill(&self.p, FORWARD, i, self.p.L)

    def choice(self, Table table, Py_ssize_t i, Py_ssize_t j, Py_ssize_t m):
        """(cost, kind, k, form) of the best option at a state: "all", "ck" or "bare"; infinity where nothing fits."""
        cdef Option o
        cdef double cost, best = INFINITY
        found = None
        _start(&self.p, &o)
        while _next(&self.p, table, i, j, &o):
            if o.first <= m:
                cost = o.cost + o.left[m - o.left_less] + o.right[m - o.right_less]
                if cost < best:
                    best, found = cost, (("all", "ck", "bare")[<int>o.kind], i if o.kind == ALL else o.k, o.form)
        return (best, *found) if found is not None else (best, "", 0, 0)
