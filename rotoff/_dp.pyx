# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The dynamic programs: pure recompute, and OC / C_A with offloading.

`Remat` has three tables, in seconds with m slots beyond the input of stage i (U: running sums of u_F; f, g range over
forms):

- ``C[i, j]``, rotor's Opt (C_A with Δ = 0, m = N − A): from the input of i and δ_j to δ_{i-1};
- ``W[i]``: from the input of i, nothing run past it yet, to δ_{i-1};
- ``D[i, k]``: as C, with ā_k on the device but charged elsewhere, and without the seconds of B k.

Each is the least of

- *all*: u_F(i) + u_B(i, f) + rest(i+1, m − ā_i^f), in C(i, i) less the tail of i;
- *ck*: U(k) − U(i−1) + C(i, k, m) + rest(k+1, m − a_k), the sweep F_ck i, F_∅ i+1..k;
- *bare*, in C and W: U(k) − U(i−1) + u_B(k, f) + D(i, k, m − ā_k^f) + rest(k+1, m − ā_k^f), the sweep up to k − 1, then
  ā_k^f kept without its input, which the replay of i..k−1 makes for B k. So stage k itself runs only once.

`Joint` has OC and C_A of the NeurIPS 2021 supplement (B.1 to B.3), filled bottom up. Symbols: A slots kept, A_F slots
still leaving, A_B and Δ slots that must be back; u_F, u_B seconds; β slots a second (β_F out, β_B in); I_i^x input of
stage i, x = 0 for a_{i-1}, 1 + k for ā_{i-1}^k; held_j = δ_j + a_L; ε idle seconds. Sizes and backlogs are whole slots,
needs and times real; how either is rounded is stated in `rotoff.solver.slots`.

Stages count from 1; row 0 of arrays by stage is unused. Infinity means that nothing fits.
"""

import numpy as np

from libc.math cimport INFINITY, floor
from libc.stdint cimport int8_t, int32_t, int64_t


cdef inline int32_t _slots(int64_t size, Py_ssize_t N, int64_t room) noexcept nogil:
    """`size` bytes in slots of room / N bytes, rounded up; at most N + 1, which never fits."""
    if size > room:
        return <int32_t>(N + 1)
    return <int32_t>((size * N + room - 1) // room) if size > 0 else 0


cdef size_t _at(list keep, array, dtype):
    """The address of a contiguous `array`, which `keep` holds."""
    made = np.ascontiguousarray(array, dtype=dtype)
    keep.append(made)
    return <size_t>made.ctypes.data


# -- pure recompute

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


cdef inline double *_row(Problem *p, Table table, Py_ssize_t i, Py_ssize_t j) noexcept nogil:
    if table == FORWARD:
        return p.W + i * (p.N + 1)
    return (p.C if table == BACKWARD else p.D) + (p.base[i] + j) * (p.N + 1)


cdef inline int32_t _least(Problem *p, Table table, Py_ssize_t i, Py_ssize_t j) noexcept nogil:
    if table == FORWARD:
        return p.least_W[i]
    return p.least_C[p.base[i] + j] if table == BACKWARD else p.least_D[p.base[i] + j]


cdef inline void _right(Problem *p, Table table, Py_ssize_t i, Py_ssize_t j, Py_ssize_t size, Option *o) noexcept nogil:
    """Set the option's rest to stages i..j with `size` slots less; no rest if there are none."""
    o.right, o.right_less = p.zeros, 0
    if i <= j:
        o.right, o.right_less = _row(p, table, i, j), size
        o.first = max(o.first, size + _least(p, table, i, j))


cdef bint _next(Problem *p, Table table, Py_ssize_t i, Py_ssize_t j, Option *o) noexcept nogil:
    """Advance `o` to the next option (at the start its kind is ALL and its form −1); false if there is none."""
    cdef int64_t held = 0 if table == FORWARD else p.held[j]
    cdef Py_ssize_t w
    cdef double sweep
    if o.kind == ALL:
        o.form += 1
        if table == WITHOUT and i == j:
            # B j with the input just made: the largest of its forms' needs beyond ā_j, since the form is not known
            # here.
            o.cost, o.first = 0.0, 0
            for w in range(i * p.K, i * p.K + p.n_forms[i]):
                o.first = max(o.first, _slots(p.need_B[w], p.N, p.room) - p.saved[w])
            _right(p, table, 1, 0, 0, o)
            return o.form == 0
        if o.form < p.n_forms[i]:
            w = i * p.K + o.form
            o.cost = (p.u_again[i] if table == BACKWARD and i == j else p.U[i] - p.U[i - 1]) + p.u_B[w]
            o.first = _slots(max(held + p.need_all[w], p.need_B[w]), p.N, p.room)
            _right(p, table, i + 1, j, p.saved[w], o)
            return True
        o.kind, o.k = CK, i - 1
    if o.kind == CK:
        o.k += 1
        if o.k < j and o.k - i < p.reach:
            o.cost = p.U[o.k] - p.U[i - 1]
            o.first = max(_slots(held + p.need_ck[i * (p.L + 1) + o.k], p.N, p.room), _least(p, BACKWARD, i, o.k))
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
    o.first = _slots(held + max(p.need_ck[i * (p.L + 1) + o.k - 1], p.bytes_out[o.k - 1] + p.need_all[w]),
                     p.N, p.room)
    o.first = max(o.first, p.saved[w] + _least(p, WITHOUT, i, o.k))
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


cdef class Remat:
    """The tables of one chain at one discretization; arrays as `rotoff.solver.remat` names them.

    base: rows of segments. reach: most stages of a segment that is made again; bare: the same for one that ends with a
    bare ā.
    """

    cdef Problem p
    cdef list keep
    cdef readonly object C, W

    def __init__(self, costs, slots, need, const int64_t[::1] base, Py_ssize_t reach, Py_ssize_t bare):
        cdef Problem *p = &self.p
        self.keep = []
        p.L, p.N, p.K = costs.out.shape[0] - 1, slots.N, costs.saved.shape[1]
        p.reach, p.bare, p.room = reach, bare, slots.room
        p.bytes_out = <int64_t *>_at(self.keep, costs.out, np.int64)
        p.U = <double *>_at(self.keep, np.cumsum(costs.u_F), np.float64)
        p.u_again = <double *>_at(self.keep, costs.u_again, np.float64)
        p.u_B = <double *>_at(self.keep, costs.u_B, np.float64)
        p.n_forms = <int32_t *>_at(self.keep, costs.n_forms, np.int32)
        p.out = <int32_t *>_at(self.keep, slots.out, np.int32)
        p.saved = <int32_t *>_at(self.keep, slots.saved, np.int32)
        p.held = <int64_t *>_at(self.keep, need.held, np.int64)
        p.need_ck = <int64_t *>_at(self.keep, need.ck, np.int64)
        p.need_all = <int64_t *>_at(self.keep, need.all, np.int64)
        p.need_B = <int64_t *>_at(self.keep, need.b, np.int64)
        p.base = <int64_t *>_at(self.keep, base, np.int64)
        p.zeros = <double *>_at(self.keep, np.zeros(p.N + 1), np.float64)
        rows = max(1, base[p.L + 1] + p.L + 1)
        self.C = np.empty((rows, p.N + 1))
        self.W = np.full((p.L + 2, p.N + 1), INFINITY)
        p.C = <double *>_at(self.keep, self.C, np.float64)
        p.D = <double *>_at(self.keep, np.empty((rows if bare else 1, p.N + 1)), np.float64)
        p.W = <double *>_at(self.keep, self.W, np.float64)
        p.least_C = <int32_t *>_at(self.keep, np.zeros(rows, dtype=np.int32), np.int32)
        p.least_D = <int32_t *>_at(self.keep, np.zeros(rows, dtype=np.int32), np.int32)
        p.least_W = <int32_t *>_at(self.keep, np.zeros(p.L + 2, dtype=np.int32), np.int32)

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
        """(cost, kind, k, form) of the best option at a state: "all", "ck" or "bare"; infinity if nothing fits."""
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


# -- recompute and offloading together

cdef struct Costs:
    Py_ssize_t L, N, K
    double beta_F, beta_B
    const double *U           # running sums of u_F
    const double *u_again     # [i] u_F less the tail
    const double *base        # running sums of u_F + u_B^0
    const double *least       # running sums of u_again + min_k u_B^k
    const double *u_B         # [i, k]
    const int32_t *n_forms
    const int32_t *out        # slots of a_i; 0 for a_0, which is charged separately
    const int32_t *saved      # [i, k] slots of ā_i^k
    const int32_t *clock_F    # running β_F u_F, rounded
    const int32_t *clock_B    # [i, k] slots that come in during B i, rounded on running sums
    const int32_t *clock      # running β_B (u_F + u_B^0), rounded
    const int32_t *need_all   # [i, k] slots of ā + o_F, forward phase
    const int32_t *need_B     # [i, k]
    const int32_t *need_ck    # [i, k] slots of F_ck i, F_∅ i+1..k, forward phase
    const int32_t *need_rest  # [i, k] the same without F_ck i
    const int64_t *bytes_held  # [j] δ_j and a_L, exact bytes
    const int64_t *bytes_all  # [i, k] ā + o_F, exact bytes
    const int64_t *bytes_ck   # [i, k] F_ck i, F_∅ i+1..k, exact bytes
    int64_t room              # bytes of the N slots
    const double *late        # [i, k] max_q need_q − β_B Σ_{q<r≤k} u_F(r), real slots
    const double *early       # [i, k] max_q need_q − β_F Σ_{i≤r<q} u_F(r), real slots
    const double *held        # held_j, real slots
    const int64_t *row        # C_A of (i, j) starts at (row[i] + j) (N + 1)²
    Py_ssize_t reach          # the longest segments in C
    double *C
    double *O                 # OC of (i, x, A, A_F, A_B)
    int8_t *R                 # whether OC_0(1, 0, 0, 0) can lead to that state


cdef struct Choice:
    double cost
    int32_t form, cut, moved     # form ≥ 0: F_all; else F_ck i, F_∅ up to `cut`
    int32_t A, A_F, A_B          # of the state that comes next; A_B is Δ in C_A


cdef inline double *_C(Costs *c, Py_ssize_t i, Py_ssize_t j) noexcept nogil:
    return c.C + (c.row[i] + j) * (c.N + 1) * (c.N + 1)


cdef inline double *_O(Costs *c, Py_ssize_t i, Py_ssize_t x) noexcept nogil:
    return c.O + (i * (c.K + 1) + x) * (c.N + 1) * (c.N + 1) * (c.N + 1)


cdef inline Py_ssize_t _input(Costs *c, Py_ssize_t i, Py_ssize_t x) noexcept nogil:
    """Slots of I_i^x; 0 for a_0, which is charged separately."""
    if i == 1:
        return 0
    return c.out[i - 1] if x == 0 else c.saved[(i - 1) * c.K + x - 1]


cdef inline Py_ssize_t _nearest(double x) noexcept nogil:
    """floor(x + 1/2), by a cast if that gives the same: a call of floor would take most of the time."""
    return <Py_ssize_t>(x + 0.5) if x >= 0.0 else <Py_ssize_t>floor(x + 0.5)


cdef inline Py_ssize_t _drained(Costs *c, Py_ssize_t i, Py_ssize_t j, double seconds) noexcept nogil:
    """Slots that arrive while segment i..j runs for `seconds`: those of its clock, and of the time beyond, rounded."""
    return c.clock[j] - c.clock[i - 1] + _nearest(c.beta_B * (seconds - (c.base[j] - c.base[i - 1])))


cdef inline Py_ssize_t _left(Py_ssize_t backlog, Py_ssize_t drained) noexcept nogil:
    if drained < 0:
        return backlog
    return backlog - drained if backlog > drained else 0


cdef inline double _excess(double slots) noexcept nogil:
    return slots if slots > 0.0 else 0.0


cdef inline int8_t *_R(Costs *c, Py_ssize_t i, Py_ssize_t x) noexcept nogil:
    return c.R + (i * (c.K + 1) + x) * (c.N + 1) * (c.N + 1) * (c.N + 1)


cdef void _backward_needs(Costs *c, Py_ssize_t i, Py_ssize_t j, int32_t *need) noexcept nogil:
    """Slots with held_j: need[k] of F_ck i, F_∅ i+1..k for i ≤ k < j; need[L + 1 + k] of F_all i in form k."""
    cdef Py_ssize_t k
    for k in range(i, j):
        need[k] = _slots(c.bytes_held[j] + c.bytes_ck[i * (c.L + 1) + k], c.N, c.room)
    for k in range(c.n_forms[i]):
        need[c.L + 1 + k] = _slots(c.bytes_held[j] + c.bytes_all[i * c.K + k], c.N, c.room)


cdef void _backward_state(Costs *c, Py_ssize_t i, Py_ssize_t j, Py_ssize_t A, Py_ssize_t D, const int32_t *needs,
                          Choice *best) noexcept nogil:
    """C_A(i, j, A, Δ = D), B.3."""
    cdef Py_ssize_t L1 = c.L + 1, N = c.N, k, w, D1 = 0, D2, D3, idle
    cdef double cost, c1, c2, need, other
    best[0] = Choice(INFINITY, -1, -1, 0, 0, 0, 0)
    for k in range(c.n_forms[i]):
        w = i * c.K + k
        need = needs[L1 + k]
        if need + A > N or c.need_B[w] + A > N:
            continue
        if i == j:
            cost = _excess(c.need_B[w] + A + D - N)
            other = need - c.beta_B * c.u_B[w] + A + D - N
            cost = c.u_again[i] + c.u_B[w] + (cost if cost > other else other) / c.beta_B
        else:
            if A + c.saved[w] > N:
                continue
            idle = max(0, c.need_B[w] + A + D - N)
            D1 = _left(D, c.clock_B[w] + idle)
            if A + c.saved[w] + D1 > N:
                continue
            c1 = _C(c, i + 1, j)[(A + c.saved[w]) * (N + 1) + D1]
            if c1 == INFINITY:
                continue
            D2 = _left(D1, _drained(c, i + 1, j, c1))
            cost = c.U[i] - c.U[i - 1] + c1 + c.u_B[w] + (idle + _excess(need + A + D2 - N)) / c.beta_B
        if cost < best.cost:
            best[0] = Choice(cost, <int32_t>k, -1, 0, <int32_t>(A + c.saved[w]), 0, <int32_t>D1)
    for k in range(i, j):
        if needs[k] + A > N:
            break  # longer sweeps need no less
        c1 = _C(c, i, k)[A * (N + 1) + D]  # infinite ones fail the next test too
        if c.U[k] - c.U[i - 1] + c1 + (c.least[j] - c.least[k]) >= best.cost or A + c.out[k] > N:
            continue
        D2 = _left(D, _drained(c, i, k, c1))
        if A + c.out[k] + D2 > N:
            continue
        c2 = _C(c, k + 1, j)[(A + c.out[k]) * (N + 1) + D2]
        if c2 == INFINITY:
            continue
        cost = c.U[k] - c.U[i - 1] + c1 + c2
        if cost >= best.cost:
            continue
        D3 = _left(D2, _drained(c, k + 1, j, c2))
        cost += _excess(c.held[j] + c.late[i * L1 + k] + A + D3 - N) / c.beta_B
        if cost < best.cost:
            best[0] = Choice(cost, -1, <int32_t>k, 0, <int32_t>(A + c.out[k]), 0, <int32_t>D2)


cdef void _forward_state(Costs *c, Py_ssize_t i, Py_ssize_t x, Py_ssize_t A, Py_ssize_t A_F, Py_ssize_t A_B,
                         bint mark, Choice *best) noexcept nogil:
    """OC_x(i, A, A_F, A_B), B.1 and B.2; with `mark`, only mark the states that it reads."""
    cdef Py_ssize_t L1 = c.L + 1, N = c.N, M = N + 1, size = _input(c, i, x), k, w, v, j, idle_F, idle_B, A1, F1, B1
    cdef Py_ssize_t drain, back
    cdef double cost, rest, segment, wait
    best[0] = Choice(INFINITY, -1, -1, 0, 0, 0, 0)
    if A + size > N:
        return
    for k in range(c.n_forms[i]):
        w = i * c.K + k
        if c.need_all[w] + A + size > N or c.need_B[w] + A + size > N:
            continue
        idle_F = max(0, c.need_all[w] + A + A_F + size - N)
        idle_B = max(0, c.need_B[w] + A + A_B + size - N)
        cost = c.U[i] - c.U[i - 1] + c.u_B[w] + idle_F / c.beta_F + idle_B / c.beta_B
        if i == c.L:
            F1 = _left(A_F, c.clock_F[i] - c.clock_F[i - 1] + idle_F)
            B1 = _left(A_B, c.clock_B[w] + idle_B)
            cost += F1 / c.beta_F + B1 / c.beta_B
            if cost < best.cost:
                best.cost, best.form = cost, <int32_t>k
            continue
        for v in range(2 if i > 1 else 1):
            A1 = A if v else A + size
            F1 = _left(A_F + (size if v else 0), c.clock_F[i] - c.clock_F[i - 1] + idle_F)
            B1 = _left(A_B, c.clock_B[w] + idle_B) + (size if v else 0)
            if A1 + F1 > N or A1 + B1 > N:
                continue
            if mark:
                _R(c, i + 1, 1 + k)[(A1 * M + F1) * M + B1] = 1
                continue
            rest = cost + _O(c, i + 1, 1 + k)[(A1 * M + F1) * M + B1]
            if rest < best.cost:
                best[0] = Choice(rest, <int32_t>k, -1, <int32_t>v, <int32_t>A1, <int32_t>F1, <int32_t>B1)
    if A + size + A_B > N:
        return
    for j in range(i, c.L if c.L < i + c.reach else i + c.reach):
        if c.need_ck[i * L1 + i] + A + size > N or c.need_rest[i * L1 + j] + A > N:
            break
        segment = _C(c, i, j)[(A + size) * M + A_B]
        if segment == INFINITY:
            continue
        wait = _excess(c.early[i * L1 + j] + A + A_F + size - N)
        cost = c.U[j] - c.U[i - 1] + wait / c.beta_F + segment
        if not mark and cost + (c.least[c.L] - c.least[j]) >= best.cost:
            continue
        drain = c.clock_F[j] - c.clock_F[i - 1] + _nearest(wait)
        back = _left(A_B, _drained(c, i, j, segment))
        for v in range(2 if i > 1 else 1):
            if not v and c.need_ck[i * L1 + j] + A + size > N:
                continue
            A1 = A if v else A + size
            F1 = _left(A_F + (size if v else 0), drain)
            B1 = back + (size if v else 0)
            if A1 + F1 > N or A1 + B1 > N:
                continue
            if mark:
                _R(c, j + 1, 0)[(A1 * M + F1) * M + B1] = 1
                continue
            rest = cost + _O(c, j + 1, 0)[(A1 * M + F1) * M + B1]
            if rest < best.cost:
                best[0] = Choice(rest, -1, <int32_t>j, <int32_t>v, <int32_t>A1, <int32_t>F1, <int32_t>B1)


cdef class Joint:
    """The tables of one chain at one discretization; `rotoff.solver.joint.costs` makes the arrays, by name."""

    cdef Costs c
    cdef list keep

    def __init__(self, costs, double[:, :, ::1] C, double[:, :, :, :, ::1] O, int8_t[:, :, :, :, ::1] R):
        self.keep = [C, O, R]
        cdef Costs *c = &self.c
        c.L = costs.L
        c.N = costs.N
        c.reach = costs.reach
        c.K = costs.K
        c.beta_F = costs.beta_F
        c.beta_B = costs.beta_B
        c.U = <double *>_at(self.keep, costs.U, np.float64)
        c.u_again = <double *>_at(self.keep, costs.u_again, np.float64)
        c.base = <double *>_at(self.keep, costs.base, np.float64)
        c.least = <double *>_at(self.keep, costs.least, np.float64)
        c.u_B = <double *>_at(self.keep, costs.u_B, np.float64)
        c.n_forms = <int32_t *>_at(self.keep, costs.n_forms, np.int32)
        c.out = <int32_t *>_at(self.keep, costs.out, np.int32)
        c.saved = <int32_t *>_at(self.keep, costs.saved, np.int32)
        c.clock_F = <int32_t *>_at(self.keep, costs.clock_F, np.int32)
        c.clock_B = <int32_t *>_at(self.keep, costs.clock_B, np.int32)
        c.clock = <int32_t *>_at(self.keep, costs.clock, np.int32)
        c.need_all = <int32_t *>_at(self.keep, costs.need_all, np.int32)
        c.need_B = <int32_t *>_at(self.keep, costs.need_B, np.int32)
        c.need_ck = <int32_t *>_at(self.keep, costs.need_ck, np.int32)
        c.need_rest = <int32_t *>_at(self.keep, costs.need_rest, np.int32)
        c.bytes_held = <int64_t *>_at(self.keep, costs.bytes_held, np.int64)
        c.bytes_all = <int64_t *>_at(self.keep, costs.bytes_all, np.int64)
        c.bytes_ck = <int64_t *>_at(self.keep, costs.bytes_ck, np.int64)
        c.room = costs.room
        c.late = <double *>_at(self.keep, costs.late, np.float64)
        c.early = <double *>_at(self.keep, costs.early, np.float64)
        c.held = <double *>_at(self.keep, costs.held, np.float64)
        c.row = <int64_t *>_at(self.keep, costs.row, np.int64)
        c.C = &C[0, 0, 0]
        c.O = &O[0, 0, 0, 0, 0]
        c.R = &R[0, 0, 0, 0, 0]

    def fill_backward(self, Py_ssize_t d, Py_ssize_t low, Py_ssize_t high):
        """C_A of the segments (i, i + d), low <= i < high; shorter segments are filled already."""
        cdef Py_ssize_t i, A, D, N = self.c.N
        cdef double *row
        cdef Choice best
        cdef int32_t[::1] needs = np.zeros(self.c.L + 1 + self.c.K, dtype=np.int32)
        with nogil:
            for i in range(low, high):
                _backward_needs(&self.c, i, i + d, &needs[0])
                row = _C(&self.c, i, i + d)
                for A in range(N + 1):
                    for D in range(N + 1 - A):
                        _backward_state(&self.c, i, i + d, A, D, &needs[0], &best)
                        row[A * (N + 1) + D] = best.cost

    def fill_forward(self, Py_ssize_t i, Py_ssize_t part, Py_ssize_t parts, bint mark):
        """OC_x(i, ...) for all x at the marked states of every `parts`-th A from `part` on; later stages are filled
        already. With `mark`, mark the states that these read instead; two threads may write the same 1."""
        cdef Py_ssize_t x, A, F, B, N = self.c.N, M = self.c.N + 1
        cdef double *row
        cdef int8_t *marked
        cdef Choice best
        with nogil:
            for x in range(1 if i == 1 else 1 + self.c.n_forms[i - 1]):
                row, marked = _O(&self.c, i, x), _R(&self.c, i, x)
                A = part
                while A <= N:
                    for F in range(N + 1 - A):
                        for B in range(N + 1 - A):
                            if marked[(A * M + F) * M + B]:
                                _forward_state(&self.c, i, x, A, F, B, mark, &best)
                                if not mark:
                                    row[(A * M + F) * M + B] = best.cost
                    A += parts

    def backward(self, Py_ssize_t i, Py_ssize_t j, Py_ssize_t A, Py_ssize_t D):
        """(cost, form or -1, cut, A and Δ of the part that runs first) of C_A(i, j, A, Δ)."""
        cdef Choice best
        cdef int32_t[::1] needs = np.zeros(self.c.L + 1 + self.c.K, dtype=np.int32)
        _backward_needs(&self.c, i, j, &needs[0])
        _backward_state(&self.c, i, j, A, D, &needs[0], &best)
        return best.cost, best.form, best.cut, best.A, best.A_B

    def forward(self, Py_ssize_t i, Py_ssize_t x, Py_ssize_t A, Py_ssize_t A_F, Py_ssize_t A_B):
        """(cost, form or -1, cut, whether the input moves, A with the input, A', A_F', A_B') of OC_x(i, A, A_F, A_B).
        """
        cdef Choice best
        _forward_state(&self.c, i, x, A, A_F, A_B, False, &best)
        kept = A + _input(&self.c, i, x)
        return best.cost, best.form, best.cut, bool(best.moved), kept, best.A, best.A_F, best.A_B
