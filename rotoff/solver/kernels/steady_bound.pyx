# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The dual of `rotoff.solver.steady_bounds`: activations as in `kernels.bound`, and each group of parameters, around
the whole step.

Cut and interval k of 0..N-1, N = 2L + 1: k < L starts with F_{k+1}, k < 2L with B_{2L-k}, and 2L is the step's end. An
interval has two parts: while its operation runs, and from then on. What comes in during the first is held at the
interval's cut too. P_k and R_k are the prices of a byte's copies in the cheaper part, λ_k in the first part's R_k; only
the second part has updates and copies out of what the operation or an update in the interval has made (price Q_k). A
group's life goes from its update in interval u of one step to that in the next: positions u..u+N on a time line of two
steps, whose cut k and interval k are those of k mod N. With X_k = P_k + λ_0 + ... + λ_k and Y_k = R_k − (λ_0 + ... +
λ_k), a byte that leaves in interval x and is back in interval y pays X_x + Y_y more than λ from its start to its end.
"""

import numpy as np

from libc.math cimport INFINITY
from libc.stdint cimport int32_t

from rotoff.solver.kernels.bound cimport Problem, Second, Work, compute_price, dual_value, lower


cdef double MOST_PRICE = 1e6  # of memory: where rounding makes a limit too small by a hair, the dual rises without end


cdef struct Groups:
    Py_ssize_t K, N
    const double *w              # [k] bytes of the parameters, of the gradients (0: frozen), of the state
    const double *g
    const double *o
    const double *update         # [k] seconds of U
    const double *host_update    # [k] seconds of H; negative where it is not legal
    const int32_t *ends          # [k] where the cuts of group k end in `cuts`
    const int32_t *cuts          # of the forwards and backwards that need w, ascending
    const int32_t *begun         # [k] cut of the backward that takes the bytes of g
    Py_ssize_t earliest          # no update before this interval
    double unpaid                # share of the lives whose copies across the step's end cost nothing


cdef struct Lines:
    double *cum        # over two steps: sums of λ, X, Y, P
    double *X
    double *Y
    double *P
    double *Q
    double *alpha      # α of the second parts
    double *updates    # seconds by interval: on the device, on the host
    double *host_updates
    double *ends_1     # [u] from the cut of the last backward to the update, with and without a valid copy on the host
    double *ends_0
    double *ends_g     # the same of a gradient, which the interval has made
    # [u] a byte of the optimizer's state, updated in u; the same with copies across the end for nothing
    double *state
    double *state_free
    double *held
    double *out        # copies' bytes by interval; those at Q
    double *made
    double *back
    # of the intervals themselves: prices of the cheaper parts, α of the first, whether the first is cheaper, and
    # gradients
    double *p
    double *r
    double *host
    double *own
    double *first_out
    double *first_back
    double *first_host
    double *g_p
    double *g_r
    double[2] *by      # of both parts: what a price of copies out, and in, takes of α


cdef inline double _min(double x, double y) noexcept nogil:
    return x if x < y else y


cdef inline void _hold(Lines *t, Py_ssize_t a, Py_ssize_t b, double size) noexcept nogil:
    """`size` bytes at the cuts after a, up to b."""
    t.held[a + 1] += size
    t.held[b + 1] -= size


# -- between two positions a and b with the value on the device at both; copies in intervals a to `last`


cdef double _valid(Lines *t, Py_ssize_t a, Py_ssize_t b, Py_ssize_t last, double size) noexcept nogil:
    """A byte of which the host has a valid copy: it stays, or comes back. With size > 0 the way is written down."""
    cdef double best = INFINITY
    cdef Py_ssize_t y, at = a
    for y in range(a, last + 1):
        if t.Y[y] < best:
            best = t.Y[y]
            at = y
    if best + t.cum[b] < t.cum[b] - t.cum[a]:
        if size > 0.0:
            t.back[at] += size
            _hold(t, at, b, size)
        return best + t.cum[b]
    if size > 0.0:
        _hold(t, a, b, size)
    return t.cum[b] - t.cum[a]


cdef inline void _leaves(Lines *t, Py_ssize_t k, Py_ssize_t made, double size) noexcept nogil:
    """`size` bytes are copied out in interval k, made in interval `made` (-1: before)."""
    if k == made:
        t.made[k] += size
    else:
        t.out[k] += size


cdef double _made_valid(Lines *t, Py_ssize_t a, Py_ssize_t b, Py_ssize_t last, Py_ssize_t made,
                        double size) noexcept nogil:
    """A byte that the host does not have, and has at the end; made in interval `made`, or -1."""
    cdef double lowest_P = INFINITY, lowest_X = INFINITY, pair = INFINITY, out
    cdef Py_ssize_t k, x_at = a, out_at = a, back_at = a, P_at = a
    for k in range(a, last + 1):
        out = t.Q[k] if k == made else t.P[k]
        if out < lowest_P:
            lowest_P = out
            P_at = k
        if out + t.cum[k] < lowest_X:
            lowest_X = out + t.cum[k]
            x_at = k
        if lowest_X + t.Y[k] < pair:
            pair = lowest_X + t.Y[k]
            out_at = x_at
            back_at = k
    if lowest_P + t.cum[b] - t.cum[a] <= pair - t.cum[a] + t.cum[b]:
        if size > 0.0:
            _leaves(t, P_at, made, size)
            _hold(t, a, b, size)
        return lowest_P + t.cum[b] - t.cum[a]
    if size > 0.0:
        _leaves(t, out_at, made, size)
        t.back[back_at] += size
        _hold(t, a, out_at, size)
        _hold(t, back_at, b, size)
    return pair - t.cum[a] + t.cum[b]


cdef double _fresh(Lines *t, Py_ssize_t a, Py_ssize_t b, Py_ssize_t last, Py_ssize_t made, double size) noexcept nogil:
    """A byte that the host does not have: it stays, or leaves and comes back."""
    cdef double stays = t.cum[b] - t.cum[a]
    if _made_valid(t, a, b, last, made, 0.0) < stays:
        return _made_valid(t, a, b, last, made, size)
    if size > 0.0:
        _hold(t, a, b, size)
    return stays


cdef double _to_the_end(Lines *t, Py_ssize_t a, Py_ssize_t end, double size) noexcept nogil:
    """A byte made in interval a, whose copy across the step's end (out, or back in) costs nothing."""
    cdef double lowest = INFINITY, stays = t.cum[end] - t.cum[a], out
    cdef Py_ssize_t k, at = a
    for k in range(a, end):
        out = (t.Q[k] if k == a else t.P[k]) + t.cum[k]
        if out < lowest:
            lowest = out
            at = k
    lowest += t.cum[end] - t.cum[end - 1] - t.cum[a]
    if lowest < stays:
        if size > 0.0:
            _leaves(t, at, a, size)
            _hold(t, a, at, size)
            _hold(t, end - 1, end, size)
        return lowest
    if size > 0.0:
        _hold(t, a, end, size)
    return stays


cdef double _uses(Lines *t, const int32_t *cuts, Py_ssize_t n, Py_ssize_t N, bint valid, double size,
                  double *fresh) noexcept nogil:
    """A byte of w from its first use to its last, the host's copy valid at the end; valid: at the start too.

    fresh[0]: what it costs where the host has no copy at the end either.
    """
    cdef double has = 0.0 if valid else INFINITY, none = INFINITY if valid else 0.0, made
    cdef Py_ssize_t i, made_in = -1
    for i in range(n - 1):
        made = none + _made_valid(t, N + cuts[i], N + cuts[i + 1], N + cuts[i + 1] - 1, -1, 0.0)
        has += _valid(t, N + cuts[i], N + cuts[i + 1], N + cuts[i + 1] - 1, 0.0)
        if made < has:
            has = made
            made_in = i
        none += t.cum[N + cuts[i + 1]] - t.cum[N + cuts[i]]
    fresh[0] = none
    if size > 0.0:
        for i in range(n - 1):
            if i < made_in:
                _hold(t, N + cuts[i], N + cuts[i + 1], size)
            elif i == made_in:
                _made_valid(t, N + cuts[i], N + cuts[i + 1], N + cuts[i + 1] - 1, -1, size)
            else:
                _valid(t, N + cuts[i], N + cuts[i + 1], N + cuts[i + 1] - 1, size)
    return has


# -- a group that the device updates


cdef void _states(Groups *c, Lines *t) noexcept nogil:
    """A byte of optimizer state for each interval of the update."""
    cdef Py_ssize_t u, N = c.N, end = N - 1
    cdef double whole = t.cum[N - 1], free
    for u in range(c.earliest, end):
        t.state[u] = _fresh(t, u, u + N, u + N, u, 0.0)
        free = _to_the_end(t, u, end, 0.0) + _valid(t, end, u + N, u + N, 0.0)
        t.state_free[u] = _min(t.state[u], free)


cdef double _update(Groups *c, Lines *t, Py_ssize_t k, bint unpaid, Py_ssize_t *chosen) noexcept nogil:
    """Group k updated on the device in the best interval."""
    cdef Py_ssize_t N = c.N, first = c.ends[k - 1] if k > 0 else 0, n = c.ends[k] - first, u, x
    cdef const int32_t *cuts = c.cuts + first
    cdef Py_ssize_t whole = cuts[n - 1], use = N + cuts[0], low = whole if whole > c.earliest else c.earliest
    cdef double q_00, q_01, q_11, q_ignored, best = INFINITY, cost, w_cost, across, kept
    cdef double lowest_X = INFINITY, lowest_Y = INFINITY, pair = INFINITY, lowest_P = INFINITY, made = INFINITY
    cdef double pair_g = INFINITY
    q_01 = _uses(t, cuts, n, N, False, 0.0, &q_00)
    q_11 = _uses(t, cuts, n, N, True, 0.0, &q_ignored)
    for u in range(whole, N - 1):
        lowest_X = _min(lowest_X, t.X[u])
        made = _min(made, (t.Q[u] if u == whole else t.P[u]) + t.cum[u])
        lowest_Y = _min(lowest_Y, t.Y[u])
        pair = _min(pair, lowest_X + t.Y[u])
        pair_g = _min(pair_g, made + t.Y[u])
        kept = t.cum[u] - t.cum[whole]
        t.ends_1[u] = _min(kept, lowest_Y + t.cum[u])
        t.ends_0[u] = _min(kept, pair + kept)
        t.ends_g[u] = _min(kept, pair_g + kept)
    lowest_Y = INFINITY
    pair = INFINITY
    lowest_X = INFINITY
    across = INFINITY
    if unpaid and c.w[k] > 0.0:
        across = _valid(t, N - 1, use, use - 1, 0.0)
    for u in range(use - 1, low - 1, -1):
        lowest_Y = _min(lowest_Y, t.Y[u])
        if u < N - 1:
            # What U makes is copied out in the second part of u, or later.
            made = t.Q[u] + t.cum[u]
            cost = t.alpha[u] * c.update[k] + c.g[k] * (t.ends_g[u] + t.cum[whole] - t.cum[c.begun[k] - 1])
            if c.o[k] > 0.0:
                cost += c.o[k] * (t.state_free[u] if unpaid else t.state[u])
            if c.w[k] > 0.0:
                kept = t.cum[use] - t.cum[u]
                w_cost = kept + _min(_min(lowest_P, t.Q[u]), _min(pair, made + lowest_Y))
                if unpaid:
                    w_cost = _min(w_cost, _min(t.cum[N - 2], _min(lowest_X, made)) - t.cum[u] +
                                  t.cum[N - 1] - t.cum[N - 2] + across)
                w_cost = _min(w_cost + q_11 + t.ends_1[u], kept + _min(q_00 + t.ends_0[u], q_01 + t.ends_1[u]))
                cost += c.w[k] * w_cost
            if cost < best:
                best = cost
                chosen[0] = u
            lowest_X = _min(lowest_X, t.X[u])
        lowest_P = _min(lowest_P, t.P[u])
        pair = _min(pair, t.X[u] + lowest_Y)
    return best


cdef void _write_update(Groups *c, Lines *t, Py_ssize_t k, bint unpaid, Py_ssize_t u, double weight) noexcept nogil:
    """The copies and bytes of that."""
    cdef Py_ssize_t N = c.N, first = c.ends[k - 1] if k > 0 else 0, n = c.ends[k] - first, end = N - 1
    cdef const int32_t *cuts = c.cuts + first
    cdef Py_ssize_t whole = cuts[n - 1], use = N + cuts[0]
    cdef double size, q_00, q_01, q_11, q_ignored, fresh, made, free, ends_1, ends_0
    t.updates[u] += weight * c.update[k]
    size = weight * c.g[k]
    _hold(t, c.begun[k] - 1, whole, size)
    _fresh(t, whole, u, u, whole, size)
    size = weight * c.o[k]
    if size > 0.0:
        if unpaid and t.state_free[u] < t.state[u]:
            _to_the_end(t, u, end, size)
            _valid(t, end, u + N, u + N, size)
        else:
            _fresh(t, u, u + N, u + N, u, size)
    size = weight * c.w[k]
    if size <= 0.0:
        return
    q_01 = _uses(t, cuts, n, N, False, 0.0, &q_00)
    q_11 = _uses(t, cuts, n, N, True, 0.0, &q_ignored)
    ends_1 = _valid(t, whole, u, u, 0.0)
    ends_0 = _fresh(t, whole, u, u, -1, 0.0)
    made = _made_valid(t, u, use, use - 1, u, 0.0)
    free = INFINITY
    if unpaid:
        free = _to_the_end(t, u, end, 0.0) + _valid(t, end, use, use - 1, 0.0)
    fresh = t.cum[use] - t.cum[u]
    if _min(made, free) + q_11 + ends_1 < fresh + _min(q_00 + ends_0, q_01 + ends_1):
        if free < made:
            _to_the_end(t, u, end, size)
            _valid(t, end, use, use - 1, size)
        else:
            _made_valid(t, u, use, use - 1, u, size)
        _uses(t, cuts, n, N, True, size, &q_ignored)
        _valid(t, N + whole, N + u, N + u, size)
        return
    _hold(t, u, use, size)
    if q_00 + ends_0 < q_01 + ends_1:
        _hold(t, use, N + whole, size)
        _fresh(t, N + whole, N + u, N + u, -1, size)
    else:
        _uses(t, cuts, n, N, False, size, &q_ignored)
        _valid(t, N + whole, N + u, N + u, size)


# -- a group that the host updates, or nobody


cdef double _host_update(Groups *c, Lines *t, Py_ssize_t k, bint unpaid, double weight) noexcept nogil:
    """Group k updated on the host; with weight > 0 the way is written down."""
    cdef Py_ssize_t N = c.N, first = c.ends[k - 1] if k > 0 else 0, n = c.ends[k] - first, end = N - 1
    cdef const int32_t *cuts = c.cuts + first
    cdef Py_ssize_t whole = cuts[n - 1], use = N + cuts[0], j, x_at = whole, h_at = -1, y_at = -1, back_at = -1
    cdef Py_ssize_t run_at = -1, from_at = -1
    cdef double best = INFINITY, back = INFINITY, run = INFINITY, ignored, w = c.w[k], g = c.g[k], out
    if w <= 0.0 or unpaid:  # a host's update that nobody waits for costs nothing
        for j in range(whole, N - 1):
            out = (t.Q[j] if j == whole else t.P[j]) + t.cum[j]
            if out < best:
                best = out
                x_at = j
        best = g * (best - t.cum[c.begun[k] - 1])
        if w > 0.0:
            back = t.cum[use] - t.cum[N - 2]  # in flight at the step's end
            for j in range(end, use):
                if t.Y[j] + t.cum[use] < back:
                    back = t.Y[j] + t.cum[use]
                    y_at = j
            best += w * back
    else:
        for j in range(use - 1, whole - 1, -1):
            if w * (t.Y[j] + t.cum[use]) < back:
                back = w * (t.Y[j] + t.cum[use])
                back_at = j
            if j >= c.earliest and t.host[j % N] * c.host_update[k] + back < run:
                run = t.host[j % N] * c.host_update[k] + back
                run_at = j
                from_at = back_at
            out = (t.Q[j] if j == whole else t.P[j]) + t.cum[j]
            if j < end and g * (out - t.cum[c.begun[k] - 1]) + run < best:
                best = g * (out - t.cum[c.begun[k] - 1]) + run
                x_at = j
                h_at = run_at
                y_at = from_at
    if w > 0.0:
        best += w * _uses(t, cuts, n, N, True, weight * w, &ignored)
    if weight > 0.0:
        _hold(t, c.begun[k] - 1, x_at, weight * g)
        _leaves(t, x_at, whole, weight * g)
        if h_at >= 0:
            t.host_updates[h_at % N] += weight * c.host_update[k]
        if w > 0.0 and y_at >= 0:
            t.back[y_at] += weight * w
            _hold(t, y_at, use, weight * w)
        elif w > 0.0:
            _hold(t, N - 2, use, weight * w)
    return best


cdef double _frozen(Groups *c, Lines *t, Py_ssize_t k, bint unpaid, double weight) noexcept nogil:
    """Group k, which nobody updates."""
    cdef Py_ssize_t N = c.N, first = c.ends[k - 1] if k > 0 else 0, n = c.ends[k] - first
    cdef const int32_t *cuts = c.cuts + first
    cdef Py_ssize_t use = N + cuts[0]
    cdef double ignored, best, flying = t.cum[use] - t.cum[N - 2], size = weight * c.w[k]
    if c.w[k] <= 0.0:
        return 0.0
    best = _valid(t, cuts[n - 1], use, use - 1, 0.0)
    if unpaid and flying < best:
        best = flying
        if size > 0.0:
            _hold(t, N - 2, use, size)
    elif size > 0.0:
        _valid(t, cuts[n - 1], use, use - 1, size)
    return c.w[k] * (best + _uses(t, cuts, n, N, True, size, &ignored))


cdef double _groups(Groups *c, Problem *a, const double *lam, double *g_lam, Lines *t) noexcept nogil:
    """What the groups add to the dual, and to its supergradient."""
    cdef Py_ssize_t N = c.N, k, j, s
    cdef Py_ssize_t[2] u
    cdef double value = 0.0, on_device, on_host, weight, used
    for j in range(2 * N):
        k = j % N
        t.cum[j] = lam[k] + (t.cum[j - 1] if j > 0 else 0.0)
        t.P[j] = t.p[k] * a.out_rate
        t.Q[j] = a.p_made[k] * a.out_rate
        t.X[j] = t.P[j] + t.cum[j]
        t.Y[j] = t.r[k] * a.in_rate - t.cum[j]
        t.held[j] = t.out[j] = t.made[j] = t.back[j] = 0.0
    t.held[2 * N] = 0.0
    for j in range(N):
        t.updates[j] = t.host_updates[j] = 0.0
    _states(c, t)
    for k in range(c.K):
        if c.g[k] <= 0.0:
            for s in range(2):
                weight = c.unpaid if s else 1.0 - c.unpaid
                if weight > 0.0:
                    value += weight * _frozen(c, t, k, s, weight)
            continue
        on_device = on_host = 0.0
        for s in range(2):
            weight = c.unpaid if s else 1.0 - c.unpaid
            if weight > 0.0:
                on_device += weight * _update(c, t, k, s, &u[s])
                on_host += weight * (_host_update(c, t, k, s, 0.0) if c.host_update[k] >= 0.0 else INFINITY)
        value += _min(on_device, on_host)
        for s in range(2):
            weight = c.unpaid if s else 1.0 - c.unpaid
            if weight <= 0.0:
                continue
            if on_device <= on_host:
                _write_update(c, t, k, s, u[s], weight)
            else:
                _host_update(c, t, k, s, weight)
    used = 0.0
    for j in range(2 * N):
        k = j % N
        used += t.held[j]
        g_lam[k] += used
    return value


cdef struct Inputs:  # what is made again pays for them; nothing here
    Second prices
    Second gradient


cdef void _parts(Problem *a, const double *x, Py_ssize_t N, Lines *t) noexcept nogil:
    """Prices of the cheaper part of each interval. The step's end is one part."""
    cdef Py_ssize_t k
    cdef const double *first = x + N
    cdef const double *second = x + 4 * N
    cdef double back
    a.p_made = second
    for k in range(N):
        t.own[k] = compute_price(a, first[k], first[N + k], 0.0, first[2 * N + k], &t.by[k][0], &t.by[k][1])
        t.alpha[k] = compute_price(a, second[k], second[N + k], 0.0, second[2 * N + k], &t.by[N + k][0],
                                   &t.by[N + k][1])
        t.p[k], t.r[k], t.host[k] = second[k], (second[N + k] if a.duplex else second[k]), second[2 * N + k]
        t.first_out[k] = t.first_back[k] = t.first_host[k] = 0.0
        if k == N - 1:
            break
        if first[k] < t.p[k]:
            t.p[k], t.first_out[k] = first[k], 1.0
        if first[2 * N + k] < t.host[k]:
            t.host[k], t.first_host[k] = first[2 * N + k], 1.0
        back = first[N + k] if a.duplex else first[k]
        if back * a.in_rate + x[k] < t.r[k] * a.in_rate:
            t.r[k], t.first_back[k] = back + x[k] / a.in_rate, 1.0


cdef double _dual(Problem *a, Groups *c, const double *x, double *g, Work *work, Lines *t,
                  Inputs *inputs) noexcept nogil:
    """The dual at prices x = (λ, then p, r, η of the first parts, then of the second ones), each of N; g: its
    supergradient."""
    cdef Py_ssize_t N = c.N, k, i, back = 1 if a.duplex else 0
    cdef double value, size
    cdef double *first = g + N
    cdef double *second = g + 4 * N
    cdef double *part
    _parts(a, x, N, t)
    a.own, a.again = t.own, t.alpha
    value = dual_value(a, x, t.p, t.r, &inputs.prices, g, t.g_p, t.g_r, &inputs.gradient, work)
    t.g_p[N - 1] = t.g_r[N - 1] = work.spent[N - 1] = work.redone[N - 1] = work.left[N - 1] = 0.0
    g[N - 1] = -a.room[N - 1]
    value -= x[N - 1] * a.room[N - 1]
    value += _groups(c, a, x, g, t)
    for k in range(N):
        for i in range(3):
            first[i * N + k] = second[i * N + k] = 0.0
        size = work.redone[k] + t.updates[k]
        first[k] -= t.by[k][0] * work.spent[k]
        first[2 * N + k] -= work.spent[k]
        second[k] -= t.by[N + k][0] * size
        second[2 * N + k] -= size
        if a.duplex:
            first[N + k] -= t.by[k][1] * work.spent[k]
            second[N + k] -= t.by[N + k][1] * size
        second[k] += work.left[k] + (t.made[k] + t.made[N + k]) * a.out_rate
        part = first if t.first_out[k] > 0.0 else second
        part[k] += t.g_p[k] + (t.out[k] + t.out[N + k]) * a.out_rate
        size = t.g_r[k] + (t.back[k] + t.back[N + k]) * a.in_rate
        part = first if t.first_back[k] > 0.0 else second
        part[back * N + k] += size
        if t.first_back[k] > 0.0:
            g[k] += size / a.in_rate
        part = first if t.first_host[k] > 0.0 else second
        part[2 * N + k] += t.host_updates[k]
    return value


cdef void _project(Problem *a, double *x, Py_ssize_t N) noexcept nogil:
    """The nearest prices with MOST_PRICE ≥ λ ≥ 0, p, r, η ≥ 0 and no α below 0 in both parts; where the directions of
    the link slow each other down, near ones, and further from none of them."""
    cdef Py_ssize_t k, i, part
    cdef double[4] v
    cdef double[4] both = [a.out_share, a.in_share, 1.0, 0.0]
    cdef double[4] out = [1.0, 0.0, 1.0, 0.0]
    cdef double[4] back = [0.0, 1.0, 1.0, 0.0]
    v[3] = 0.0
    for k in range(N):
        x[k] = 0.0 if x[k] < 0.0 else _min(x[k], MOST_PRICE)
    for part in range(2):
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
            for k in range(7 * N):
                kept[k] = x[k]
        stale += 1
        if stale > patience:
            # No progress towards the target: aim lower, from the best prices.
            stale = 0
            ahead *= shrink
            for k in range(7 * N):
                x[k] = kept[k]
            if ahead < least_goal:
                break
            continue
        norm = 0.0
        for k in range(7 * N):
            # A price at its bound that is pushed further does not count.
            if x[k] > 0.0 or g[k] > 0.0:
                norm += (scale if k < N else 1.0) * g[k] * g[k]
        if norm <= 0.0:
            break
        length = (best + ahead - value) / norm
        for k in range(7 * N):
            x[k] += length * (scale if k < N else 1.0) * g[k]
        _project(a, x, N)
    for k in range(7 * N):
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
                 const double[::1] entry, const int32_t[::1] n_forms, const double[:, ::1] sizes,
                 const double[:, ::1] times, const int32_t[::1] ends, const int32_t[::1] cuts,
                 const int32_t[::1] begun, Py_ssize_t earliest, double unpaid, shares):
        cdef Py_ssize_t L = u_F.shape[0] - 1, N = 2 * L + 1
        at = np.zeros(N, dtype=np.int32)
        of = np.zeros((43, 2 * N + 1))
        cdef int32_t[::1] leave_at = at
        cdef double[:, ::1] rows = of
        self.keep = (room, work, u_F, saved, slower, entry, n_forms, sizes, times, ends, cuts, begun, at, of)
        self.a.L, self.a.K, self.a.duplex = L, saved.shape[1], duplex
        self.a.out_rate, self.a.in_rate = out_rate, in_rate
        self.a.out_share, self.a.in_share = shares
        self.a.room, self.a.work, self.a.u_F, self.a.saved = &room[0], &work[0], &u_F[0], &saved[0, 0]
        self.a.slower, self.a.entry, self.a.n_forms = &slower[0, 0], &entry[0], &n_forms[0]
        self.c.K, self.c.N, self.c.earliest, self.c.unpaid = ends.shape[0], N, earliest, unpaid
        self.c.w, self.c.g, self.c.o = &sizes[0, 0], &sizes[1, 0], &sizes[2, 0]
        self.c.update, self.c.host_update = &times[0, 0], &times[1, 0]
        self.c.ends, self.c.cuts, self.c.begun = &ends[0], &cuts[0], &begun[0]
        self.work.total, self.work.minus, self.work.alpha = &rows[0, 0], &rows[1, 0], &rows[2, 0]
        self.work.arrive, self.work.leave, self.work.away = &rows[3, 0], &rows[4, 0], &rows[5, 0]
        self.work.held, self.work.leave_at = &rows[6, 0], &leave_at[0]
        self.work.whole = &rows[21, 0]
        self.i.prices.lam = self.i.prices.r = self.i.prices.alpha = &rows[22, 0]
        self.i.gradient.lam, self.i.gradient.r, self.i.gradient.alpha = &rows[23, 0], &rows[24, 0], &rows[25, 0]
        self.a.out = NULL
        self.work.spent, self.work.redone, self.work.left = &rows[26, 0], &rows[27, 0], &rows[28, 0]
        self.t.Q, self.t.ends_g, self.t.made = &rows[29, 0], &rows[30, 0], &rows[31, 0]
        self.t.p, self.t.r, self.t.host, self.t.own = &rows[32, 0], &rows[33, 0], &rows[34, 0], &rows[35, 0]
        self.t.first_out, self.t.first_back, self.t.first_host = &rows[36, 0], &rows[37, 0], &rows[38, 0]
        self.t.g_p, self.t.g_r = &rows[39, 0], &rows[40, 0]
        self.t.by = <double[2] *>&rows[41, 0]
        self.t.cum, self.t.X, self.t.Y, self.t.P = &rows[7, 0], &rows[8, 0], &rows[9, 0], &rows[10, 0]
        self.t.alpha, self.t.updates, self.t.host_updates = &rows[11, 0], &rows[12, 0], &rows[20, 0]
        self.t.ends_1, self.t.ends_0 = &rows[13, 0], &rows[14, 0]
        self.t.state, self.t.state_free = &rows[15, 0], &rows[16, 0]
        self.t.held, self.t.out, self.t.back = &rows[17, 0], &rows[18, 0], &rows[19, 0]

    @property
    def rate(self):
        """Units of time for which a unit of bytes keeps both directions of the link."""
        return self.a.out_rate + self.a.in_rate

    def at(self, double[:, ::1] prices):
        """(value, supergradient) at prices λ, and p, r, η of each part, rows of 2L + 1."""
        made = np.zeros((7, self.c.N))
        cdef double[:, ::1] g = made
        return _dual(&self.a, &self.c, &prices[0, 0], &g[0, 0], &self.work, &self.t, &self.i), made

    def ascend(self, double[:, ::1] prices, Py_ssize_t steps, double goal, Py_ssize_t patience, double shrink,
               double least_goal, double scale):
        """The best value found from `prices` on, which become those of that value.

        goal: a first guess of the rise; it shrinks by `shrink` after `patience` steps without progress, down to
        `least_goal`. scale: of a step in λ beside one in the other prices.
        """
        cdef double[:, ::1] g = np.zeros((7, self.c.N))
        cdef double[:, ::1] kept = np.zeros((7, self.c.N))
        cdef double best
        with nogil:
            best = _ascend(&self.a, &self.c, &prices[0, 0], &g[0, 0], &kept[0, 0], steps, goal, patience, shrink,
                           least_goal, scale, &self.work, &self.t, &self.i)
        return best
