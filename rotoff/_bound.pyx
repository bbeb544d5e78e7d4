# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The dual of `rotoff.bounds.lower_bound`: its value at given prices, a supergradient, and an ascent.

Interval k of 0..2L-1 starts with F_{k+1} (k < L) or B_{2L-k}. Prices: λ_k of memory when interval k starts, p_k and r_k of the
link out and in during it; α_k = 1 − p_k − r_k is left for compute (with one lane for both directions p_k = r_k and
α_k = 1 − p_k). Seconds are in units of the keep-all time, bytes in units of the limit.
"""

import numpy as np

from libc.math cimport INFINITY
from libc.stdint cimport int32_t


cdef inline double _least(double x, double y) noexcept nogil:
    return x if x < y else y


cdef inline void _hold(Work *w, Py_ssize_t first, Py_ssize_t last, double size) noexcept nogil:
    """`size` bytes at the cuts first to last; none where last < first."""
    if first <= last:
        w.held[first] += size
        w.held[last + 1] -= size


cdef inline double _least_sum(const double *x, const double *y, double u, double s, Py_ssize_t n) noexcept nogil:
    """Least over k of u x_k + s y_k; four at a time, so that no comparison waits for the one before."""
    cdef double m0 = INFINITY, m1 = INFINITY, m2 = INFINITY, m3 = INFINITY, v0, v1, v2, v3
    cdef Py_ssize_t k = 0
    while k + 4 <= n:
        v0 = u * x[k] + s * y[k]
        v1 = u * x[k + 1] + s * y[k + 1]
        v2 = u * x[k + 2] + s * y[k + 2]
        v3 = u * x[k + 3] + s * y[k + 3]
        m0 = v0 if v0 < m0 else m0
        m1 = v1 if v1 < m1 else m1
        m2 = v2 if v2 < m2 else m2
        m3 = v3 if v3 < m3 else m3
        k += 4
    while k < n:
        v0 = u * x[k] + s * y[k]
        m0 = v0 if v0 < m0 else m0
        k += 1
    m0 = m1 if m1 < m0 else m0
    m2 = m3 if m3 < m2 else m2
    return m2 if m2 < m0 else m0


cdef inline Py_ssize_t _least_sum_at(const double *x, const double *y, double u, double s, Py_ssize_t n) noexcept nogil:
    """The first k of that."""
    cdef double best = INFINITY
    cdef Py_ssize_t k, at = 0
    for k in range(n):
        if u * x[k] + s * y[k] < best:
            best = u * x[k] + s * y[k]
            at = k
    return at


cdef enum Way:
    STAYS
    MOVES        # leaves and returns
    AGAIN        # made again, and stays
    AGAIN_LATE   # made again when B_{q+1} has begun
    AGAIN_MOVES  # made again, leaves and returns


cdef double dual_value(Problem *c, const double *lam, const double *p, const double *r, double *g_lam, double *g_p, double *g_r,
                       double *g_host, Work *w) noexcept nogil:
    """The dual at these prices; its supergradient."""
    cdef Py_ssize_t n = 2 * c.L, k, q, f, x, first, last, made_at, left_at, back_at, in_at, at
    cdef Way way, best_way
    cdef Py_ssize_t best_form
    cdef double value = 0.0, size, u, ends, late, slower, out, returned, cost, least, best, back, lowest
    cdef double *total = w.total
    for k in range(n):
        total[k] = lam[k] + (total[k - 1] if k > 0 else 0.0)
        w.alpha[k] = 1.0 - p[k] - (r[k] if c.duplex else 0.0)
        w.minus[k] = -total[k]
        w.arrive[k] = (r[k] if c.duplex else p[k]) * c.in_rate - total[k]
        w.held[k] = 0.0
        if c.host != NULL:
            w.alpha[k] -= c.host[k]
            g_host[k] = -c.work[k]
        value += w.alpha[k] * c.work[k] - lam[k] * c.room[k]
        g_lam[k] = 0.0
        g_p[k] = -c.work[k]
        g_r[k] = -c.work[k] if c.duplex else 0.0
    w.held[n] = 0.0
    for k in range(n - 1, -1, -1):
        cost = p[k] * c.out_rate + total[k]
        if k == n - 1 or cost <= w.leave[k + 1]:
            w.leave[k] = cost
            w.leave_at[k] = <int32_t>k
        else:
            w.leave[k] = w.leave[k + 1]
            w.leave_at[k] = w.leave_at[k + 1]
        w.away[k] = w.leave[k] - total[k]
    # Arrival in an interval before B_{q+1}: the intervals from F_q on, which are more for each smaller q.
    in_at = c.L - 1
    lowest = w.alpha[c.L]
    for q in range(c.L - 1, 0, -1):
        first = q        # F_{q+1}
        last = n - q - 1  # B_{q+1}
        if w.arrive[first - 1] <= w.arrive[in_at]:
            in_at = first - 1
        if w.arrive[last - 1] < w.arrive[in_at]:
            in_at = last - 1
        lowest = _least(lowest, _least(w.alpha[first - 1], w.alpha[first]))
        lowest = _least(lowest, _least(w.alpha[last - 1], w.alpha[last]))
        best = INFINITY
        best_way = STAYS
        best_form = 0
        u = c.u_F[q]
        # At F_{q+1} and B_{q+1} the smallest input is in that operation's need already.
        ends = c.entry[q] * lam[first]
        late = c.entry[q] * lam[last]
        for f in range(c.n_forms[q]):
            x = q * c.K + f
            size = c.saved[x]
            slower = w.alpha[n - q] * c.slower[x]
            least = size * (total[last] - total[first - 1]) - ends - late
            way = STAYS
            # Leaving in the interval of F_q itself passes no cut.
            out = _least(size * p[first - 1] * c.out_rate, size * (w.leave[first] - total[first - 1]) - ends)
            back = size * (w.arrive[in_at] + total[last]) - late
            cost = size * (w.arrive[last] + total[last])
            returned = _least(back, cost)
            if out + returned < least:
                least = out + returned
                way = MOVES
            # Made again, whenever it is, costs no less than this; most ways are out by it.
            if lowest * u - late - ends < least:
                cost = _least(_least_sum(w.alpha + first, w.minus + first, u, size, last - first),
                              w.alpha[first - 1] * u + size * w.minus[first - 1] - ends) + size * total[last] - late
                if cost < least:
                    least = cost
                    way = AGAIN
            if w.alpha[last] * u < least:
                least = w.alpha[last] * u
                way = AGAIN_LATE
            # All that it pays in the cuts between is left out but for leaving.
            cost = returned - late - ends
            if lowest * u + cost < least:
                cost += _least_sum(w.alpha + first - 1, w.away + first - 1, u, size, last - first + 2)
                if cost < least:
                    least = cost
                    way = AGAIN_MOVES
            if least + slower < best:
                best = least + slower
                best_way = way
                best_form = f
        value += best
        # The supergradient of the way that won.
        x = q * c.K + best_form
        size = c.saved[x]
        g_p[n - q] -= c.slower[x]
        if c.duplex:
            g_r[n - q] -= c.slower[x]
        if c.host != NULL:
            g_host[n - q] -= c.slower[x]
        made_at = first - 1
        if best_way == STAYS:
            _hold(w, first, last, size)
            g_lam[first] -= c.entry[q]
            g_lam[last] -= c.entry[q]
            continue
        if best_way != MOVES:
            if best_way == AGAIN_LATE:
                made_at = last
            elif best_way == AGAIN_MOVES:
                made_at = first - 1 + _least_sum_at(w.alpha + first - 1, w.away + first - 1, u, size, last - first + 2)
            else:
                at = first + _least_sum_at(w.alpha + first, w.minus + first, u, size, last - first)
                if u * w.alpha[at] + size * w.minus[at] < w.alpha[first - 1] * u + size * w.minus[first - 1] - ends:
                    made_at = at
            g_p[made_at] -= u
            if c.duplex:
                g_r[made_at] -= u
            if c.host != NULL:
                g_host[made_at] -= u
            if best_way != AGAIN_MOVES:
                _hold(w, made_at + 1, last, size)
                if made_at < last:
                    g_lam[last] -= c.entry[q]
                    if made_at < first:
                        g_lam[first] -= c.entry[q]
                continue
            left_at = w.leave_at[made_at]
            _hold(w, made_at + 1, left_at, size)
            g_lam[first] -= c.entry[q]
            g_lam[last] -= c.entry[q]
        else:
            left_at = first - 1
            if size * (w.leave[first] - total[first - 1]) - ends < size * p[first - 1] * c.out_rate:
                left_at = w.leave_at[first]
                g_lam[first] -= c.entry[q]
            _hold(w, first, left_at, size)
        g_p[left_at] += size * c.out_rate
        back_at = last
        if size * (w.arrive[in_at] + total[last]) - late <= size * (w.arrive[last] + total[last]):
            back_at = in_at
            g_lam[last] -= c.entry[q]
        if c.duplex:
            g_r[back_at] += size * c.in_rate
        else:
            g_p[back_at] += size * c.in_rate
        _hold(w, back_at + 1, last, size)
    size = 0.0
    for k in range(n):
        size += w.held[k]
        g_lam[k] += size - c.room[k]
    return value


cdef double _ascend(Problem *c, double *lam, double *p, double *r, Py_ssize_t steps, double goal, Py_ssize_t patience, double shrink, double *g_lam, double *g_p,
                    double *g_r, Work *w, double *kept) noexcept nogil:
    """Polyak's supergradient steps towards a target above the best value so far; the best value found."""
    cdef Py_ssize_t n = 2 * c.L, k, step, stale = 0
    cdef double value, best = -INFINITY, gap, norm, length, scale = 1.0 / n, s2 = scale * scale, over
    cdef double ahead = goal
    for step in range(steps):
        value = dual_value(c, lam, p, r, g_lam, g_p, g_r, NULL, w)
        if value > best:
            if value > best + 0.05 * ahead:
                stale = 0
            best = value
            for k in range(n):
                kept[k] = lam[k]
                kept[n + k] = p[k]
                kept[2 * n + k] = r[k]
        stale += 1
        if stale > patience:
            # No progress towards the target: aim lower, from the best prices.
            stale = 0
            ahead *= shrink
            for k in range(n):
                lam[k] = kept[k]
                p[k] = kept[n + k]
                r[k] = kept[2 * n + k]
            if ahead < 1e-6:
                break
            continue
        norm = 0.0
        for k in range(n):
            # A price at its bound that is pushed further does not count.
            if lam[k] > 0.0 or g_lam[k] > 0.0:
                norm += s2 * g_lam[k] * g_lam[k]
            norm += g_p[k] * g_p[k] + g_r[k] * g_r[k]
        if norm <= 0.0:
            break
        length = (best + ahead - value) / norm
        for k in range(n):
            lam[k] += length * s2 * g_lam[k]
            if lam[k] < 0.0:
                lam[k] = 0.0
            p[k] += length * g_p[k]
            r[k] += length * g_r[k]
            if p[k] < 0.0:
                p[k] = 0.0
            if r[k] < 0.0:
                r[k] = 0.0
            if p[k] + r[k] > 1.0:
                over = (p[k] + r[k] - 1.0) / 2
                p[k] -= over
                r[k] -= over
                if p[k] < 0.0:
                    p[k] = 0.0
                    r[k] = 1.0
                elif r[k] < 0.0:
                    r[k] = 0.0
                    p[k] = 1.0
    for k in range(n):
        lam[k] = kept[k]
        p[k] = kept[n + k]
        r[k] = kept[2 * n + k]
    return best


def ascend(double[::1] lam, double[::1] p, double[::1] r, Py_ssize_t steps, double goal, Py_ssize_t patience, double shrink, bint duplex, double out_rate,
           double in_rate, const double[::1] room, const double[::1] work, const double[::1] u_F, const double[:, ::1] saved,
           const double[:, ::1] slower, const double[::1] entry, const int32_t[::1] n_forms):
    """The best dual value within `steps` steps from the prices given, which become those of that value.

    goal: a first guess of the rise; it shrinks by `shrink` after `patience` steps without progress towards it.
    """
    cdef Problem c
    cdef double best
    cdef Py_ssize_t n = lam.shape[0]
    cdef Work w
    room_of = np.zeros((13, n + 1))
    cdef double[:, ::1] rows = room_of
    at = np.zeros(n, dtype=np.int32)
    cdef int32_t[::1] leave_at = at
    c.L = n // 2
    c.K = saved.shape[1]
    c.duplex = duplex
    c.out_rate = out_rate
    c.in_rate = in_rate
    c.room = &room[0]
    c.work = &work[0]
    c.u_F = &u_F[0]
    c.saved = &saved[0, 0]
    c.slower = &slower[0, 0]
    c.entry = &entry[0]
    c.n_forms = &n_forms[0]
    c.host = NULL
    w.total, w.minus, w.alpha, w.arrive = &rows[0, 0], &rows[1, 0], &rows[2, 0], &rows[3, 0]
    w.leave, w.away, w.held, w.leave_at = &rows[4, 0], &rows[5, 0], &rows[6, 0], &leave_at[0]
    with nogil:
        best = _ascend(&c, &lam[0], &p[0], &r[0], steps, goal, patience, shrink, &rows[7, 0], &rows[8, 0], &rows[9, 0], &w, &rows[10, 0])
    return best
