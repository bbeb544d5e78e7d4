# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The dual of `rotoff.solver.bounds.lower_bound`: its value at given prices, a supergradient, and an ascent.

Interval k of 0..2L-1 starts with F_{k+1} (k < L) or B_{2L-k}. Prices: λ_k of memory when interval k starts, p_k and r_k
of the link out and in during it; α_k = 1 − p_k − r_k is left for compute (with one lane for both directions p_k = r_k
and α_k = 1 − p_k; if the directions slow each other down, see `compute_price`). λ, the link in and α each have a second
part λ', r', α' (with α_k = 1 − p_k − r_k − r'_k in total), paid by the inputs of values made again: λ_k + λ'_k,
r_k + r'_k and α_k are the machine's prices. Seconds are in units of the keep-all time, bytes in units of the limit.
"""

import numpy as np

from libc.math cimport INFINITY
from libc.stdint cimport int8_t, int32_t
from libc.string cimport memcpy


cdef inline void _hold(Work *w, Py_ssize_t first, Py_ssize_t last, double size) noexcept nogil:
    """Add `size` bytes at the cuts first to last; none if last < first."""
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
    """The first k at which `_least_sum` is attained."""
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


cdef double _inputs(Problem *c, const Second *x, Second *g) noexcept nogil:
    """The inputs' part of the dual: the input of B m must be there when B m begins.

    It is made after the start of B m + 1, from the nearest level that was held then or has arrived since.
    """
    cdef Py_ssize_t m, q, k, best_q
    cdef double value = 0.0, seconds, cost, best, price, rate
    cdef bint held
    for m in range(2, c.L):
        k = 2 * c.L - m - 1
        rate = x.r[k] * c.in_rate
        held = x.lam[k] < rate
        price = x.lam[k] if held else rate
        seconds, best, best_q = 0.0, INFINITY, 0
        for q in range(m - 1, 0, -1):
            cost = x.alpha[k] * seconds + price * c.out[q]
            if cost < best:
                best, best_q = cost, q
            seconds += c.u_F[q]
        if x.alpha[k] * seconds <= best:
            value += x.alpha[k] * seconds
            g.alpha[k] += seconds
            continue
        value += best
        if held:
            g.lam[k] += c.out[best_q]
        else:
            g.r[k] += c.out[best_q] * c.in_rate
        for q in range(best_q + 1, m):
            g.alpha[k] += c.u_F[q]
    return value


cdef inline void _computes(Problem *c, Work *w, Py_ssize_t k, double seconds, double *g_p, double *g_r, Second *g,
                           double *part) noexcept nogil:
    """Add to the supergradient `seconds` more at the price α of interval k, or of one of its parts."""
    if c.own != NULL:
        part[k] += seconds
        return
    g_p[k] -= w.by_out[k] * seconds
    if c.duplex:
        g_r[k] -= w.by_in[k] * seconds
    g.r[k] -= w.by_in[k] * seconds


cdef double dual_value(Problem *c, const double *lam, const double *p, const double *r, const Second *s, double *g_lam,
                       double *g_p, double *g_r, Second *g, Work *w) noexcept nogil:
    """The dual at these prices; its supergradient."""
    cdef Py_ssize_t n = 2 * c.L, k, q, f, x, first, last, moves, made_at, left_at, back_at, in_at, twice_at, at
    cdef Way way, best_way
    cdef Py_ssize_t best_form
    cdef double value = 0.0, size, u, ends, late, slower, out, returned, cost, least, best, back, lowest, until
    cdef double early, soon, twice
    cdef double *total = w.total
    cdef bint parts = c.own != NULL, two = c.duplex or parts
    cdef const double *p_made = c.p_made if parts else p
    for k in range(n):
        total[k] = lam[k] + (total[k - 1] if k > 0 else 0.0)
        w.whole[k] = c.own[k] if parts else compute_price(c, p[k], r[k], s.r[k], 0.0, &w.by_out[k], &w.by_in[k])
        w.alpha[k] = c.again[k] if parts else w.whole[k] - s.alpha[k]
        w.minus[k] = -total[k]
        w.arrive[k] = (r[k] if two else p[k]) * c.in_rate - total[k]
        w.held[k] = 0.0
        value += w.whole[k] * c.work[k] - (lam[k] + s.lam[k]) * c.room[k]
        g_lam[k] = 0.0
        g_p[k] = 0.0 if parts else -c.work[k] * w.by_out[k]
        g_r[k] = -c.work[k] * w.by_in[k] if c.duplex and not parts else 0.0
        if parts:
            w.spent[k], w.redone[k], w.redone_late[k] = c.work[k], 0.0, 0.0
            w.left[k] = w.before[k] = 0.0
        g.lam[k], g.r[k], g.alpha[k] = -c.room[k], -c.work[k] * (1.0 if parts else w.by_in[k]), 0.0
    w.held[n] = 0.0
    if c.out != NULL:
        value += _inputs(c, s, g)
    for k in range(n - 1, -1, -1):
        cost = p[k] * c.out_rate + total[k]
        if k == n - 1 or cost <= w.leave[k + 1]:
            w.leave[k] = cost
            w.leave_at[k] = <int32_t>k
        else:
            w.leave[k] = w.leave[k + 1]
            w.leave_at[k] = w.leave_at[k + 1]
        w.away[k] = w.leave[k] - total[k]
    # Arrival in an interval before B_{q+1}: the intervals from F_q on; smaller q have more of them.
    in_at = twice_at = c.L - 1
    lowest = w.alpha[c.L]
    for q in range(c.L - 1, 0, -1):
        first = q        # F_{q+1}
        last = n - q - 1  # B_{q+1}
        moves = last - first + (1 if parts else 2)  # of parts, what is made again in the last interval is late
        if w.arrive[first - 1] <= w.arrive[in_at]:
            in_at = first - 1
        if w.arrive[last - 1] < w.arrive[in_at]:
            in_at = last - 1
        if w.alpha[first - 1] <= w.alpha[twice_at]:
            twice_at = first - 1
        if w.alpha[last - 1] < w.alpha[twice_at]:
            twice_at = last - 1
        lowest = min(lowest, w.alpha[first - 1], w.alpha[first], w.alpha[last - 1], w.alpha[last])
        best = INFINITY
        best_way = STAYS
        best_form = 0
        u = c.u_F[q]
        twice = w.alpha[twice_at] * u  # F_q has also made a_q, where F_{q+1} or B_{q+1} does not have ā_q
        # At F_{q+1} and B_{q+1} the operation's own need already contains the smallest input.
        ends = c.entry[q] * lam[first]
        late = c.entry[q] * (lam[last] + s.lam[last])
        for f in range(c.n_forms[q]):
            x = q * c.K + f
            size = c.saved[x]
            slower = w.whole[n - q] * c.slower[x]
            until = total[last] + s.lam[last]  # no input is held for B q+1 at the cut of ā_q's own
            least = INFINITY if c.apart[x] else size * (until - total[first - 1]) - ends - late
            way = STAYS
            # Leaving in the interval of F_q itself passes no cut.
            early = size * p_made[first - 1] * c.out_rate
            out = min(size * (w.leave[first] - total[first - 1]), early + size * lam[first]) - ends
            out = INFINITY if c.apart[x] & 1 else out
            back = INFINITY if c.apart[x] & 2 else size * (w.arrive[in_at] + until) - late
            cost = size * (c.before[last] if parts else w.arrive[last] + total[last] + s.r[last] * c.in_rate)
            returned = min(back, cost)
            cost = min(out + back, min(early, out) + returned + twice)
            if cost < least:
                least = cost
                way = MOVES
            # A lower bound of the cost of making it again, at any time; it excludes most ways.
            if lowest * u - late - ends < least and not c.apart[x] & 2:
                cost = min(_least_sum(w.alpha + first, w.minus + first, u, size, last - first),
                              INFINITY if c.apart[x] & 1 else
                              w.alpha[first - 1] * u + size * w.minus[first - 1] - ends) + size * until - late
                if cost < least:
                    least = cost
                    way = AGAIN
            cost = c.late[last] if parts else w.whole[last]
            if cost * u < least:
                least = cost * u
                way = AGAIN_LATE
            # A lower bound: of the costs at the cuts in between, only that of leaving counts.
            cost = returned - late - ends
            if lowest * u + cost < least:
                cost += _least_sum(w.alpha + first - 1, w.away + first - 1, u, size, moves)
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
        _computes(c, w, n - q, c.slower[x], g_p, g_r, g, w.spent)
        made_at = first - 1
        if best_way == STAYS:
            _hold(w, first, last, size)
            g_lam[first] -= c.entry[q]
            g_lam[last] -= c.entry[q]
            g.lam[last] += size - c.entry[q]
            continue
        if best_way != MOVES:
            if best_way == AGAIN_LATE:
                made_at = last
            elif best_way == AGAIN_MOVES:
                made_at = first - 1 + _least_sum_at(w.alpha + first - 1, w.away + first - 1, u, size, moves)
            else:
                at = first + _least_sum_at(w.alpha + first, w.minus + first, u, size, last - first)
                if (c.apart[x] & 1 or u * w.alpha[at] + size * w.minus[at]
                        < w.alpha[first - 1] * u + size * w.minus[first - 1] - ends):
                    made_at = at
            _computes(c, w, made_at, u, g_p, g_r, g, w.redone_late if best_way == AGAIN_LATE else w.redone)
            if best_way != AGAIN_LATE:
                g.alpha[made_at] -= u
            if best_way != AGAIN_MOVES:
                _hold(w, made_at + 1, last, size)
                if made_at < last:
                    g.lam[last] += size - c.entry[q]
                    g_lam[last] -= c.entry[q]
                    if made_at < first:
                        g_lam[first] -= c.entry[q]
                continue
            left_at = w.leave_at[made_at]
            _hold(w, made_at + 1, left_at, size)
            g_lam[first] -= c.entry[q]
            g_lam[last] -= c.entry[q]
            g.lam[last] -= c.entry[q]
        else:
            left_at = first - 1
        back_at = last
        until = total[last] + s.lam[last]
        early = size * p_made[first - 1] * c.out_rate
        soon = early + size * lam[first] - c.entry[q] * lam[first]
        out = min(size * (w.leave[first] - total[first - 1]) - c.entry[q] * lam[first], soon)
        out = INFINITY if c.apart[x] & 1 else out
        back = INFINITY if c.apart[x] & 2 else size * (w.arrive[in_at] + until) - late
        cost = size * (c.before[last] if parts else w.arrive[last] + total[last] + s.r[last] * c.in_rate)
        if best_way == MOVES and out + back < min(early, out) + min(back, cost) + twice:
            early, cost = INFINITY, INFINITY
        elif best_way == MOVES:
            _computes(c, w, twice_at, u, g_p, g_r, g, w.redone)
            g.alpha[twice_at] -= u
        if best_way == MOVES:
            if out < early:
                left_at = first - 1 if soon <= out else w.leave_at[first]
                g_lam[first] -= c.entry[q]
                _hold(w, first, first if soon <= out else left_at, size)
        if parts and best_way == MOVES and left_at == first - 1:
            w.left[left_at] += size * c.out_rate
        else:
            g_p[left_at] += size * c.out_rate
        if back <= cost:
            back_at = in_at
            g_lam[last] -= c.entry[q]
            g.lam[last] += size - c.entry[q]
        elif parts:
            w.before[last] += size
            continue
        else:
            g.r[last] += size * c.in_rate
        if two:
            g_r[back_at] += size * c.in_rate
        else:
            g_p[back_at] += size * c.in_rate
        _hold(w, back_at + 1, last, size)
    size = 0.0
    for k in range(n):
        size += w.held[k]
        g_lam[k] += size - c.room[k]
    return value


cdef double _ascend(Problem *c, double **x, double **g, Py_ssize_t steps, double goal, Py_ssize_t patience,
                    double shrink, Work *w, double *kept) noexcept nogil:
    """Polyak's supergradient steps towards a target above the best value so far; the best value found.

    x: λ, p, r, λ', r', α'; only the first three if inputs pay nothing. g: buffers for their supergradient.
    """
    cdef Py_ssize_t n = 2 * c.L, k, v, step, stale = 0, count = 3 if c.out == NULL else 6
    cdef Py_ssize_t most
    cdef Py_ssize_t[4] of = [1, 2, 4, 5]  # the prices of a second
    cdef double[4] price
    cdef double[4] both = [1.0, 1.0, 1.0, 1.0]
    cdef double[4] out = [1.0, 0.0, 0.0, 1.0]
    cdef double[4] back = [0.0, 1.0, 1.0, 1.0]
    cdef double value, best = -INFINITY, norm, length, s2 = 1.0 / n * (1.0 / n), by
    cdef double ahead = goal
    cdef bint hinder = c.duplex and (c.out_share < 1.0 or c.in_share < 1.0)
    cdef double *lam = x[0]
    cdef double *p = x[1]
    cdef double *r = x[2]
    cdef Second second, second_g
    if hinder:
        both[0], both[1], both[2] = c.out_share, c.in_share, c.in_share
    second.lam, second.r, second.alpha = x[3], x[4], x[5]
    second_g.lam, second_g.r, second_g.alpha = g[3], g[4], g[5]
    for step in range(steps):
        value = dual_value(c, lam, p, r, &second, g[0], g[1], g[2], &second_g, w)
        if value > best:
            if value > best + 0.05 * ahead:
                stale = 0
            best = value
            for v in range(count):
                memcpy(kept + v * n, x[v], n * sizeof(double))
        stale += 1
        if stale > patience:
            # No progress towards the target: aim lower, from the best prices.
            stale = 0
            ahead *= shrink
            for v in range(count):
                memcpy(x[v], kept + v * n, n * sizeof(double))
            if ahead < 1e-6:
                break
            continue
        norm = 0.0
        for k in range(n):
            # Ignore a price at its bound if the step would push it further.
            if lam[k] > 0.0 or g[0][k] > 0.0:
                norm += s2 * g[0][k] * g[0][k]
            norm += g[1][k] * g[1][k] + g[2][k] * g[2][k]
        if count == 6:
            for k in range(c.L, n):
                for v in range(3, 6):
                    by = s2 if v == 3 else 1.0
                    if x[v][k] > 0.0 or g[v][k] > 0.0:
                        norm += by * g[v][k] * g[v][k]
        if norm <= 0.0:
            break
        length = (best + ahead - value) / norm
        for k in range(n):
            most = count if k >= c.L else 3  # inputs are paid for in the backward phase alone
            for v in range(0, most, 3):
                x[v][k] += length * s2 * g[v][k]
                if x[v][k] < 0.0:
                    x[v][k] = 0.0
            for v in range(4):
                price[v] = x[of[v]][k] + length * g[of[v]][k] if of[v] < most else 0.0
            lower(price, both)
            if hinder:  # each projection brings the prices nearer to all feasible ones
                lower(price, out)
                lower(price, back)
            for v in range(4):
                if of[v] < most:
                    x[of[v]][k] = price[v]
    for v in range(count):
        memcpy(x[v], kept + v * n, n * sizeof(double))
    return best


def ascend(double[:, ::1] prices, Py_ssize_t steps, double goal, Py_ssize_t patience, double shrink, bint duplex,
           double out_rate, double in_rate, const double[::1] room, const double[::1] work, const double[::1] u_F,
           const double[:, ::1] saved, const double[:, ::1] slower, const double[::1] entry, const int32_t[::1] n_forms,
           const int8_t[:, ::1] apart, const double[::1] out, double out_share=1.0, double in_share=1.0):
    """The best dual value within `steps` steps from `prices`, which become the prices of that value.

    prices: rows λ, p, r, λ', r', α'. goal: a first guess of the rise; it shrinks by `shrink` after `patience` steps
    without progress towards it. out: bytes of outputs, if inputs pay; None otherwise. out_share, in_share: as in
    `Problem`.
    """
    cdef Problem c
    cdef double best
    cdef Py_ssize_t n = prices.shape[1], v
    cdef Work w
    room_of = np.zeros((22, n + 1))
    cdef double[:, ::1] rows = room_of
    at = np.zeros(n, dtype=np.int32)
    cdef int32_t[::1] leave_at = at
    cdef double *x[6]
    cdef double *g[6]
    c.L = n // 2
    c.K = saved.shape[1]
    c.duplex = duplex
    c.out_rate = out_rate
    c.in_rate = in_rate
    c.out_share, c.in_share = out_share, in_share
    c.room = &room[0]
    c.work = &work[0]
    c.u_F = &u_F[0]
    c.saved = &saved[0, 0]
    c.slower = &slower[0, 0]
    c.entry = &entry[0]
    c.n_forms = &n_forms[0]
    c.apart = &apart[0, 0]
    c.out = NULL if out is None else &out[0]
    c.own = NULL
    w.total, w.minus, w.alpha, w.arrive = &rows[0, 0], &rows[1, 0], &rows[2, 0], &rows[3, 0]
    w.leave, w.away, w.held, w.leave_at, w.whole = &rows[4, 0], &rows[5, 0], &rows[6, 0], &leave_at[0], &rows[7, 0]
    w.by_out, w.by_in = &rows[20, 0], &rows[21, 0]
    for v in range(6):
        x[v], g[v] = &prices[v, 0], &rows[8 + v, 0]
    with nogil:
        best = _ascend(&c, x, g, steps, goal, patience, shrink, &w, &rows[14, 0])
    return best
