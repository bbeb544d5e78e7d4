# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The dual of `rotoff.bounds.lower_bound`: its value at given prices, a supergradient, and an ascent.

Interval k of 0..2L-1 starts with F_{k+1} (k < L) or B_{2L-k}. Prices: λ_k of memory when interval k starts, p_k and r_k of the
link out and in during it; α_k = 1 − p_k − r_k is left for compute (with one lane for both directions p_k = r_k and
α_k = 1 − p_k). Seconds are in units of the keep-all time, bytes in units of the limit.
"""

import numpy as np

from libc.math cimport INFINITY
from libc.stdint cimport int32_t


cdef struct Problem:
    Py_ssize_t L, K
    bint duplex
    double out_rate, in_rate     # 1 / β in these units
    const double *room           # [k] limit − what operation k needs itself
    const double *work           # [k] seconds of operation k, in its fastest form
    const double *u_F            # [q]
    const double *saved          # [q, form]
    const double *slower         # [q, form] backward time beyond the fastest form's
    const double *entry          # [q] bytes of the smallest form of a_q or ā_q: part of the next operation's own need
    const int32_t *n_forms


cdef double _value(Problem *c, const double *lam, const double *p, const double *r, double *g_lam, double *g_p, double *g_r,
                   double *total, double *leave, int32_t *leave_at) noexcept nogil:
    """The dual at these prices; its supergradient. total: running sums of λ. leave[k]: min over a ≥ k of p_a / β + λ_0..λ_a."""
    cdef Py_ssize_t n = 2 * c.L, k, q, f, w, first, last, best_b, best_in, best_a, b, option, best_option, best_form
    cdef Py_ssize_t best_back = 0, arrive_at
    cdef double value = 0.0, size, ends, kept, again, both, back, arrive, out, cost, best, at_b
    for k in range(n):
        total[k] = lam[k] + (total[k - 1] if k > 0 else 0.0)
        g_lam[k] = 0.0
        value += (1.0 - p[k] - (r[k] if c.duplex else 0.0)) * c.work[k] - lam[k] * c.room[k]
        g_p[k] = -c.work[k]
        g_r[k] = -c.work[k] if c.duplex else 0.0
    for k in range(n - 1, -1, -1):
        cost = p[k] * c.out_rate + total[k]
        if k == n - 1 or cost <= leave[k + 1]:
            leave[k] = cost
            leave_at[k] = <int32_t>k
        else:
            leave[k] = leave[k + 1]
            leave_at[k] = leave_at[k + 1]
    for q in range(1, c.L):
        first = q        # F_{q+1}
        last = n - q - 1  # B_{q+1}
        best = INFINITY
        best_option = 0
        best_form = 0
        best_a = best_b = best_in = 0
        # Arrival in interval b < B_{q+1}: r_b / β and λ of the cuts after b.
        back = INFINITY
        for b in range(first - 1, last):
            at_b = (r[b] if c.duplex else p[b]) * c.in_rate + total[last] - total[b]
            if at_b < back:
                back = at_b
                best_in = b
        for f in range(c.n_forms[q]):
            w = q * c.K + f
            size = c.saved[w]
            # At F_{q+1} and B_{q+1} the smallest input is in that operation's need already.
            ends = c.entry[q] * lam[first]
            cost = (1.0 - p[n - q] - (r[n - q] if c.duplex else 0.0)) * c.slower[w]
            kept = size * (total[last] - total[first - 1]) - ends - c.entry[q] * lam[last] + cost
            if kept < best:
                best = kept
                best_option = 0
                best_form = f
            # Leaving in the interval of F_q itself passes no cut.
            out = size * p[first - 1] * c.out_rate
            option = first - 1
            if size * (leave[first] - total[first - 1]) - ends < out:
                out = size * (leave[first] - total[first - 1]) - ends
                option = leave_at[first]
            arrive = size * back - c.entry[q] * lam[last]
            arrive_at = best_in
            if size * (r[last] if c.duplex else p[last]) * c.in_rate < arrive:
                arrive = size * (r[last] if c.duplex else p[last]) * c.in_rate
                arrive_at = last
            if out + arrive + cost < best:
                best = out + arrive + cost
                best_option = 1
                best_form = f
                best_a = option
                best_b = arrive_at
            for b in range(first - 1, last + 1):
                at_b = (1.0 - p[b] - (r[b] if c.duplex else 0.0)) * c.u_F[q] + cost
                again = at_b + size * (total[last] - total[b])
                if b < last:
                    again -= c.entry[q] * lam[last]
                    if b < first:
                        again -= ends
                if again < best:
                    best = again
                    best_option = 2
                    best_form = f
                    best_b = b
                # Made again, moved out, moved in: all that it pays in the cuts between is left out but for leaving.
                both = at_b + size * (leave[b] - total[b]) + arrive - c.entry[q] * lam[last] - ends
                if both < best:
                    best = both
                    best_option = 3
                    best_form = f
                    best_b = b
                    best_back = arrive_at
        value += best
        # The supergradient of the option that won.
        w = q * c.K + best_form
        size = c.saved[w]
        b = n - q
        g_p[b] -= c.slower[w]
        if c.duplex:
            g_r[b] -= c.slower[w]
        if best_option == 0:
            for k in range(first, last + 1):
                g_lam[k] += size
            g_lam[first] -= c.entry[q]
            g_lam[last] -= c.entry[q]
        elif best_option == 1:
            g_p[best_a] += size * c.out_rate
            for k in range(first, best_a + 1):
                g_lam[k] += size
            if best_a >= first:
                g_lam[first] -= c.entry[q]
            if c.duplex:
                g_r[best_b] += size * c.in_rate
            else:
                g_p[best_b] += size * c.in_rate
            for k in range(best_b + 1, last + 1):
                g_lam[k] += size
            if best_b < last:
                g_lam[last] -= c.entry[q]
        else:
            g_p[best_b] -= c.u_F[q]
            if c.duplex:
                g_r[best_b] -= c.u_F[q]
            if best_option == 2:
                for k in range(best_b + 1, last + 1):
                    g_lam[k] += size
                if best_b < last:
                    g_lam[last] -= c.entry[q]
                    if best_b < first:
                        g_lam[first] -= c.entry[q]
            else:
                best_a = leave_at[best_b]
                g_p[best_a] += size * c.out_rate
                for k in range(best_b + 1, best_a + 1):
                    g_lam[k] += size
                if c.duplex:
                    g_r[best_back] += size * c.in_rate
                else:
                    g_p[best_back] += size * c.in_rate
                for k in range(best_back + 1, last + 1):
                    g_lam[k] += size
                g_lam[last] -= 2 * c.entry[q]
                g_lam[first] -= c.entry[q]
    for k in range(n):
        g_lam[k] -= c.room[k]
    return value


cdef double _ascend(Problem *c, double *lam, double *p, double *r, Py_ssize_t steps, double goal, Py_ssize_t patience, double shrink, double *g_lam, double *g_p,
                    double *g_r, double *total, double *leave, int32_t *leave_at, double *kept) noexcept nogil:
    """Polyak's supergradient steps towards a target above the best value so far; the best value found."""
    cdef Py_ssize_t n = 2 * c.L, k, step, stale = 0
    cdef double value, best = -INFINITY, gap, norm, length, scale = 1.0 / n, s2 = scale * scale, over
    cdef double ahead = goal
    for step in range(steps):
        value = _value(c, lam, p, r, g_lam, g_p, g_r, total, leave, leave_at)
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
    return best


def ascend(double[::1] lam, double[::1] p, double[::1] r, Py_ssize_t steps, double goal, Py_ssize_t patience, double shrink, bint duplex, double out_rate,
           double in_rate, const double[::1] room, const double[::1] work, const double[::1] u_F, const double[:, ::1] saved,
           const double[:, ::1] slower, const double[::1] entry, const int32_t[::1] n_forms):
    """The best dual value within `steps` steps from the prices given (which are changed).

    goal: a first guess of the rise; it shrinks by `shrink` after `patience` steps without progress towards it.
    """
    cdef Problem c
    cdef double best
    cdef Py_ssize_t n = lam.shape[0]
    room_of = np.zeros(8 * n)
    cdef double[::1] w = room_of
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
    with nogil:
        best = _ascend(&c, &lam[0], &p[0], &r[0], steps, goal, patience, shrink, &w[0], &w[n], &w[2 * n], &w[3 * n], &w[4 * n], &leave_at[0],
                       &w[5 * n])
    return best
