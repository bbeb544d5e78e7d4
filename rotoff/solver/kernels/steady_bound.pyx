# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The dual of `rotoff.solver.steady_bounds`: activations as in `kernels.bound`, and each group of parameters, around
the whole step.

Cut and interval k of 0..N-1, N = 2L + 1: k < L starts with F_{k+1}, k < 2L with B_{2L-k}, and 2L is the step's end. An
interval has parts: while its operation runs; then, between B_{q+1} and B_q, until the last forward of stage q in it
begins; and the rest. What comes in during the first is held at the interval's cut too. P_k and R_k are the prices of a
byte's copies in the cheapest part, λ_k in the first part's R_k; not in the first part are updates and copies out of
what the operation or an update in the interval has made (price Q_k). Parameters that B_q needs next have come in before
the last part (Z_k in place of Y_k).
"""

import numpy as np

from libc.math cimport INFINITY
from libc.stdint cimport int8_t, int32_t

from rotoff.solver.kernels.bound cimport Problem, Second, Work, compute_price, dual_value, lower
from rotoff.solver.kernels.lives cimport Groups, Interval, Lines, Price, group_value


cdef double MOST_PRICE = 1e6  # of memory: where rounding makes a limit too small by a hair, the dual rises without end

cdef enum:
    PARTS = 3
    ROWS = 1 + 3 * PARTS  # of prices: λ, and p, r, η of each part


cdef struct Inputs:  # what is made again pays for them; nothing here
    Second prices
    Second gradient


cdef inline void _lower(Price *of, double cost, int part) noexcept nogil:
    if cost < of.cost:
        of.cost = cost
        of.part = part


cdef void _prices(Problem *a, const double *x, Py_ssize_t N, Lines *t) noexcept nogil:
    """The cheapest prices of each interval. The step's end has one part; only those between two backwards have three.
    """
    cdef Py_ssize_t k, m, L = (N - 1) // 2
    cdef int part
    cdef Interval *i
    cdef const double *of
    cdef double alpha, back, lam
    for k in range(N):
        i = &t.interval[k]
        i.out.cost = i.made.cost = i.back.cost = i.crossing.cost = i.late.cost = INFINITY
        i.before.cost = i.host.cost = i.again.cost = INFINITY
        for part in range(PARTS):
            of, m = x + (1 + 3 * part) * N + k, part * N + k
            alpha = compute_price(a, of[0], of[N], 0.0, of[2 * N], &t.by[m][0], &t.by[m][1])
            if part == 0:
                t.own[k] = alpha
            if part == 0 and k == N - 1 or part == 2 and not L <= k <= N - 3:
                continue
            back, lam = (of[N] if a.duplex else of[0]) * a.in_rate, 0.0 if part else x[k]
            _lower(&i.out, of[0], part)
            _lower(&i.back, back + lam, part)
            _lower(&i.crossing, t.paid * back + lam, part)
            _lower(&i.late, t.paid * back, part)
            _lower(&i.host, of[2 * N], part)
            if part:
                _lower(&i.made, of[0], part)
                _lower(&i.again, alpha, part)
                t.last[k] = alpha
            if part < 2:
                _lower(&i.before, back + lam, part)
        t.p[k], t.made_p[k], t.alpha[k] = i.out.cost, i.made.cost, i.again.cost
        t.r[k], t.before_r[k] = i.back.cost / a.in_rate, i.before.cost


cdef inline void _spend(Problem *a, double *g, Lines *t, Py_ssize_t N, Py_ssize_t k, int part,
                        double seconds) noexcept nogil:
    """Compute in a part of interval k."""
    cdef double *of = g + (1 + 3 * part) * N + k
    of[0] -= t.by[part * N + k][0] * seconds
    if a.duplex:
        of[N] -= t.by[part * N + k][1] * seconds
    of[2 * N] -= seconds


cdef inline void _move(Problem *a, double *g, Py_ssize_t N, Py_ssize_t k, Price *of, double size, double runs,
                       bint holds) noexcept nogil:
    """Bytes that come in during interval k in a share `runs` of the steps; holds: in the first part, at the cut too."""
    g[(1 + 3 * of.part + (1 if a.duplex else 0)) * N + k] += runs * size * a.in_rate
    if holds and of.part == 0:
        g[k] += size


cdef double _dual(Problem *a, Groups *c, const double *x, double *g, Work *work, Lines *t,
                  Inputs *inputs) noexcept nogil:
    """The dual at prices x, `ROWS` of N (λ, then p, r, η of each part); g: its supergradient."""
    cdef Py_ssize_t N = c.N, k
    cdef double value
    cdef Interval *i
    _prices(a, x, N, t)
    a.own, a.again, a.late, a.p_made, a.before = t.own, t.alpha, t.last, t.made_p, t.before_r
    for k in range(N, ROWS * N):
        g[k] = 0.0
    value = dual_value(a, x, t.p, t.r, &inputs.prices, g, t.g_p, t.g_r, &inputs.gradient, work)
    t.g_p[N - 1] = t.g_r[N - 1] = 0.0
    work.spent[N - 1] = work.redone[N - 1] = work.redone_late[N - 1] = 0.0
    work.left[N - 1] = work.before[N - 1] = 0.0
    g[N - 1] = -a.room[N - 1]
    value -= x[N - 1] * a.room[N - 1]
    value += group_value(c, a, x, g, t)
    for k in range(N):
        i = &t.interval[k]
        _spend(a, g, t, N, k, 0, work.spent[k])
        _spend(a, g, t, N, k, i.again.part, work.redone[k] + t.updates[k])
        _spend(a, g, t, N, k, 2, work.redone_late[k])
        g[(1 + 3 * i.out.part) * N + k] += t.g_p[k] + (t.out[k] + t.out[N + k]) * a.out_rate
        g[(1 + 3 * i.made.part) * N + k] += work.left[k] + (t.made[k] + t.made[N + k]) * a.out_rate
        _move(a, g, N, k, &i.back, t.g_r[k] / a.in_rate + t.back[k] + t.back[N + k], 1.0, True)
        _move(a, g, N, k, &i.before, work.before[k] + t.before[k] + t.before[N + k], 1.0, True)
        _move(a, g, N, k, &i.crossing, t.crossed[k] + t.crossed[N + k], t.paid, True)
        _move(a, g, N, k, &i.late, t.came[k] + t.came[N + k], t.paid, False)
        g[(3 + 3 * i.host.part) * N + k] += t.host_updates[k]
    return value


cdef void _project(Problem *a, double *x, Py_ssize_t N) noexcept nogil:
    """The nearest prices with MOST_PRICE ≥ λ ≥ 0, p, r, η ≥ 0 and no α below 0 in all parts; where the directions of
    the link slow each other down, near ones, and further from none of them."""
    cdef Py_ssize_t k, i, part
    cdef double[4] v
    cdef double[4] both = [a.out_share, a.in_share, 1.0, 0.0]
    cdef double[4] out = [1.0, 0.0, 1.0, 0.0]
    cdef double[4] back = [0.0, 1.0, 1.0, 0.0]
    v[3] = 0.0
    for k in range(N):
        x[k] = 0.0 if x[k] < 0.0 else min(x[k], MOST_PRICE)
    for part in range(PARTS):
        for k in range(N + 3 * part * N, 2 * N + 3 * part * N):
            for i in range(3):
                v[i] = 0.0 if i == 1 and not a.duplex else x[i * N + k]
            lower(v, both)
            lower(v, out)
            lower(v, back)
            for i in range(3):
                x[i * N + k] = v[i]


cdef double _ascend(Problem *a, Groups *c, double *x, double *g, double *kept, Py_ssize_t steps, double goal,
                    Py_ssize_t patience, double shrink, double least_goal, double scale, Work *work, Lines *t,
                    Inputs *inputs) noexcept nogil:
    """Polyak's supergradient steps towards a target above the best value so far; the best value found."""
    cdef Py_ssize_t N = c.N, k, step, stale = 0
    cdef double value, best = -INFINITY, norm, length, ahead = goal
    for step in range(steps):
        value = _dual(a, c, x, g, work, t, inputs)
        if value > best:
            if value > best + 0.05 * ahead:
                stale = 0
            if step > 0 and value > best + 0.5 * ahead:
                ahead *= 2.0
            best = value
            for k in range(ROWS * N):
                kept[k] = x[k]
        stale += 1
        if stale > patience:
            # No progress towards the target: aim lower, from the best prices.
            stale = 0
            ahead *= shrink
            for k in range(ROWS * N):
                x[k] = kept[k]
            if ahead < least_goal:
                break
            continue
        norm = 0.0
        for k in range(ROWS * N):
            # A price at its bound that is pushed further does not count.
            if x[k] > 0.0 or g[k] > 0.0:
                norm += (scale if k < N else 1.0) * g[k] * g[k]
        if norm <= 0.0:
            break
        length = (best + ahead - value) / norm
        for k in range(ROWS * N):
            x[k] += length * (scale if k < N else 1.0) * g[k]
        _project(a, x, N)
    for k in range(ROWS * N):
        x[k] = kept[k]
    return best


cdef class Dual:
    """The dual of one chain with parameters at one limit."""

    cdef Problem a
    cdef Groups c
    cdef Work work
    cdef Lines t
    cdef Inputs i
    cdef object keep

    def __init__(self, bint duplex, double out_rate, double in_rate, const double[::1] room, const double[::1] work,
                 const double[::1] u_F, const double[:, ::1] saved, const double[:, ::1] slower,
                 const double[::1] entry, const int32_t[::1] n_forms, const int8_t[:, ::1] apart,
                 const double[:, ::1] sizes, const double[:, ::1] times, const int32_t[::1] ends,
                 const int32_t[::1] cuts, const int32_t[::1] begun, Py_ssize_t earliest, bint after, double unpaid,
                 shares):
        cdef Py_ssize_t L = u_F.shape[0] - 1, N = 2 * L + 1
        at = np.zeros(N, dtype=np.int32)
        of = np.zeros((50, 2 * N + 1))
        intervals = np.zeros(N * sizeof(Interval), dtype=np.int8)
        cdef int32_t[::1] leave_at = at
        cdef double[:, ::1] rows = of
        cdef int8_t[::1] room_of = intervals
        cdef Work *v = &self.work
        cdef Lines *t = &self.t
        self.keep = (room, work, u_F, saved, slower, entry, n_forms, apart, sizes, times)
        self.keep += (ends, cuts, begun, at, of, intervals)
        self.a.L, self.a.K, self.a.duplex = L, saved.shape[1], duplex
        self.a.out_rate, self.a.in_rate = out_rate, in_rate
        self.a.out_share, self.a.in_share = shares
        self.a.room, self.a.work, self.a.u_F, self.a.saved = &room[0], &work[0], &u_F[0], &saved[0, 0]
        self.a.slower, self.a.entry, self.a.n_forms = &slower[0, 0], &entry[0], &n_forms[0]
        self.a.apart, self.a.out = &apart[0, 0], NULL
        self.c.K, self.c.N, self.c.earliest, self.c.after = ends.shape[0], N, earliest, after
        self.c.w, self.c.g, self.c.o = &sizes[0, 0], &sizes[1, 0], &sizes[2, 0]
        self.c.update, self.c.host_update = &times[0, 0], &times[1, 0]
        self.c.ends, self.c.cuts, self.c.begun = &ends[0], &cuts[0], &begun[0]
        v.leave_at = &leave_at[0]
        v.total, v.minus, v.alpha, v.arrive = &rows[0, 0], &rows[1, 0], &rows[2, 0], &rows[3, 0]
        v.leave, v.away, v.held, v.whole = &rows[4, 0], &rows[5, 0], &rows[6, 0], &rows[7, 0]
        v.spent, v.redone, v.redone_late, v.left = &rows[8, 0], &rows[9, 0], &rows[10, 0], &rows[11, 0]
        self.i.prices.lam = self.i.prices.r = self.i.prices.alpha = &rows[12, 0]
        self.i.gradient.lam, self.i.gradient.r, self.i.gradient.alpha = &rows[13, 0], &rows[14, 0], &rows[15, 0]
        t.paid, t.interval = 1.0 - unpaid, <Interval *>&room_of[0]
        t.cum, t.X, t.Y, t.Z = &rows[16, 0], &rows[17, 0], &rows[18, 0], &rows[19, 0]
        t.crossing, t.late, t.P, t.Q = &rows[20, 0], &rows[21, 0], &rows[22, 0], &rows[23, 0]
        t.updates, t.host_updates, t.state = &rows[24, 0], &rows[25, 0], &rows[26, 0]
        t.ends_1, t.ends_0, t.ends_g, t.held = &rows[27, 0], &rows[28, 0], &rows[29, 0], &rows[30, 0]
        t.out, t.made, t.back, t.crossed = &rows[31, 0], &rows[32, 0], &rows[33, 0], &rows[34, 0]
        t.came, t.before, t.p, t.r = &rows[35, 0], &rows[36, 0], &rows[37, 0], &rows[38, 0]
        t.own, t.alpha, t.last, t.made_p = &rows[39, 0], &rows[40, 0], &rows[41, 0], &rows[42, 0]
        t.g_p, t.g_r, t.before_r, v.before = &rows[43, 0], &rows[44, 0], &rows[45, 0], &rows[46, 0]
        t.by = <double[2] *>&rows[47, 0]

    @property
    def duplex(self):
        return self.a.duplex

    @property
    def rates(self):
        """Units of time for which a unit of bytes keeps the link out, and in, busy."""
        return self.a.out_rate, self.a.in_rate

    def at(self, double[:, ::1] prices):
        """(value, supergradient) at prices λ, and p, r, η of each part, rows of 2L + 1."""
        made = np.zeros((ROWS, self.c.N))
        cdef double[:, ::1] g = made
        return _dual(&self.a, &self.c, &prices[0, 0], &g[0, 0], &self.work, &self.t, &self.i), made

    def ascend(self, double[:, ::1] prices, Py_ssize_t steps, double goal, Py_ssize_t patience, double shrink,
               double least_goal, double scale):
        """The best value found from `prices` on, which become those of that value.

        goal: a first guess of the rise; it shrinks by `shrink` after `patience` steps without progress, down to
        `least_goal`. scale: of a step in λ beside one in the other prices.
        """
        cdef double[:, ::1] g = np.zeros((ROWS, self.c.N))
        cdef double[:, ::1] kept = np.zeros((ROWS, self.c.N))
        cdef double best
        with nogil:
            best = _ascend(&self.a, &self.c, &prices[0, 0], &g[0, 0], &kept[0, 0], steps, goal, patience, shrink,
                           least_goal, scale, &self.work, &self.t, &self.i)
        return best
