# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The cheapest life of each group of parameters at given prices, for `kernels.steady_bound`, whose cuts and intervals
these are.

A group's life goes from its update in interval u of one step to that in the next: positions u..u+N on a time line of
two steps, whose cut k and interval k are those of k mod N. With X_k = P_k + λ_0 + ... + λ_k and Y_k = R_k − (λ_0 + ...
+ λ_k), a byte that leaves in interval x and is back in interval y pays X_x + Y_y more than λ from its start to its end.
A copy under way at the step's end runs in a share `paid` of the steps, whose price it pays: Y'_k up to the end, and
where its bytes are held from the end on, R'_k, without λ_k.
"""

from libc.math cimport INFINITY
from libc.stdint cimport int32_t

from rotoff.solver.kernels.bound cimport Problem


cdef inline void _hold(Lines *t, Py_ssize_t a, Py_ssize_t b, double size) noexcept nogil:
    """`size` bytes at the cuts after a, up to b."""
    t.held[a + 1] += size
    t.held[b + 1] -= size


# How a value that has left before the step's end comes in: before or after it; across it, in an interval before it, or
# after it. LEFT: it leaves across the end.
cdef enum:
    BACK
    EARLY
    LATE
    LEFT


cdef inline void _leaves(Lines *t, Py_ssize_t k, Py_ssize_t made, double size) noexcept nogil:
    """`size` bytes are copied out in interval k, made in interval `made` (-1: before)."""
    if k == made:
        t.made[k] += size
    else:
        t.out[k] += size


# -- between two positions a and b with the value on the device at both; copies in intervals a to `last`. With size > 0
# -- the way is written down.


cdef inline double _back(Lines *t, Py_ssize_t y, Py_ssize_t b, Py_ssize_t last) noexcept nogil:
    """Coming in during interval y for a use at b; the interval before it may end with a forward of the same stage."""
    return t.Z[y] if y == last and last < b else t.Y[y]


cdef inline void _returns(Lines *t, Py_ssize_t y, Py_ssize_t b, Py_ssize_t last, double size) noexcept nogil:
    if y == last and last < b:
        t.before[y] += size
    else:
        t.back[y] += size
    _hold(t, y, b, size)


cdef double _valid(Lines *t, Py_ssize_t a, Py_ssize_t b, Py_ssize_t last, double size) noexcept nogil:
    """A byte of which the host has a valid copy: it stays, or comes back."""
    cdef double best = INFINITY
    cdef Py_ssize_t y, at = a
    for y in range(a, last + 1):
        if _back(t, y, b, last) < best:
            best = _back(t, y, b, last)
            at = y
    if best + t.cum[b] < t.cum[b] - t.cum[a]:
        if size > 0.0:
            _returns(t, at, b, last, size)
        return best + t.cum[b]
    if size > 0.0:
        _hold(t, a, b, size)
    return t.cum[b] - t.cum[a]


cdef double _made_valid(Lines *t, Py_ssize_t a, Py_ssize_t b, Py_ssize_t last, Py_ssize_t made, double paid,
                        double size) noexcept nogil:
    """A byte that the host does not have, and has at the end; made in interval `made`, or -1. paid: share of the steps
    in which the copy out runs."""
    cdef double lowest_P = INFINITY, lowest_X = INFINITY, pair = INFINITY, out
    cdef Py_ssize_t k, x_at = a, out_at = a, back_at = a, P_at = a
    for k in range(a, last + 1):
        out = paid * (t.Q[k] if k == made else t.P[k])
        if out < lowest_P:
            lowest_P = out
            P_at = k
        if out + t.cum[k] < lowest_X:
            lowest_X = out + t.cum[k]
            x_at = k
        if lowest_X + _back(t, k, b, last) < pair:
            pair = lowest_X + _back(t, k, b, last)
            out_at = x_at
            back_at = k
    if lowest_P + t.cum[b] - t.cum[a] <= pair - t.cum[a] + t.cum[b]:
        if size > 0.0:
            _leaves(t, P_at, made, paid * size)
            _hold(t, a, b, size)
        return lowest_P + t.cum[b] - t.cum[a]
    if size > 0.0:
        _leaves(t, out_at, made, paid * size)
        _hold(t, a, out_at, size)
        _returns(t, back_at, b, last, size)
    return pair - t.cum[a] + t.cum[b]


cdef double _fresh(Lines *t, Py_ssize_t a, Py_ssize_t b, Py_ssize_t last, Py_ssize_t made, double paid,
                   double size) noexcept nogil:
    """A byte that the host does not have: it stays, or leaves and comes back."""
    cdef double stays = t.cum[b] - t.cum[a]
    if _made_valid(t, a, b, last, made, paid, 0.0) < stays:
        return _made_valid(t, a, b, last, made, paid, size)
    if size > 0.0:
        _hold(t, a, b, size)
    return stays


cdef double _across(Lines *t, Py_ssize_t a, Py_ssize_t b, Py_ssize_t last, Py_ssize_t end, bint made, bint flies,
                    double size) noexcept nogil:
    """A byte between positions before and after the step's end. It is made in interval a, and valid on the host at b;
    or, without `made`, valid there from a on. flies: whether it may come in across the end."""
    cdef double best = INFINITY, cost, out, stays = INFINITY if made else 0.0
    cdef double left = INFINITY if made else t.cum[a], crossed = INFINITY  # left before the end, or across it
    cdef Py_ssize_t k, stays_at = a, left_at = a, crossed_at = a, x = a, y = a
    cdef int way, found = BACK
    for k in range(a, last + 1):
        if made:
            out = t.Q[k] if k == a else t.P[k]
            if t.paid * out < stays:
                stays, stays_at = t.paid * out, k
            if k < end and out + t.cum[k] < left:
                left, left_at = out + t.cum[k], k
            cost = t.paid * out + t.cum[k if k > end else end]
            if cost < crossed:
                crossed, crossed_at = cost, k
        cost, way = left + t.Y[k], BACK
        if flies and k < end:
            cost, way = left + t.crossing[k], EARLY
        elif flies and k >= end and left + t.late[k] - t.cum[end - 1] < cost:
            cost, way = left + t.late[k] - t.cum[end - 1], LATE
        if k >= end and crossed + t.Y[k] < cost:
            cost, way = crossed + t.Y[k], LEFT
        if cost < best:
            best, found, y = cost, way, k
            x = crossed_at if way == LEFT else left_at
    if stays + t.cum[b] - t.cum[a] <= best + t.cum[b] - t.cum[a]:
        if size > 0.0:
            if made:
                _leaves(t, stays_at, a, t.paid * size)
            _hold(t, a, b, size)
        return stays + t.cum[b] - t.cum[a]
    if size > 0.0:
        if made:
            _leaves(t, x, a, t.paid * size if found == LEFT else size)
            _hold(t, a, end if found == LEFT and x < end else x, size)
        _comes(t, y, b, end, found, size)
    return best + t.cum[b] - t.cum[a]


cdef inline void _comes(Lines *t, Py_ssize_t y, Py_ssize_t b, Py_ssize_t end, int way, double size) noexcept nogil:
    if way == EARLY:
        t.crossed[y] += size
    elif way == LATE:
        t.came[y] += size
    else:
        t.back[y] += size
    _hold(t, end - 1 if way == LATE else y, b, size)


cdef double _uses(Lines *t, const int32_t *cuts, Py_ssize_t n, Py_ssize_t N, bint valid, double size,
                  double *fresh) noexcept nogil:
    """A byte of w from its first use to its last, the host's copy valid at the end; valid: at the start too.

    fresh[0]: what it costs where the host has no copy at the end either. A copy out of what has been there since the
    step before may cross the step's end.
    """
    cdef double has = 0.0 if valid else INFINITY, none = INFINITY if valid else 0.0, made
    cdef Py_ssize_t i, made_in = -1
    for i in range(n - 1):
        made = none + _made_valid(t, N + cuts[i], N + cuts[i + 1], N + cuts[i + 1] - 1, -1, t.paid, 0.0)
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
                _made_valid(t, N + cuts[i], N + cuts[i + 1], N + cuts[i + 1] - 1, -1, t.paid, size)
            else:
                _valid(t, N + cuts[i], N + cuts[i + 1], N + cuts[i + 1] - 1, size)
    return has


# -- a group that the device updates


cdef void _states(Groups *c, Lines *t) noexcept nogil:
    """A byte of optimizer state for each interval of the update."""
    cdef Py_ssize_t u, N = c.N
    for u in range(c.earliest, N - 1):
        t.state[u] = min(t.cum[u + N] - t.cum[u], _across(t, u, u + N, u + N, N - 1, True, not c.after, 0.0))


cdef void _last_uses(Lines *t, Py_ssize_t whole, Py_ssize_t N) noexcept nogil:
    """[u] From the last backward to an update in u: w with and without a valid copy on the host, and g."""
    cdef double lowest_X = INFINITY, lowest_Y = INFINITY, pair = INFINITY, made = INFINITY, pair_g = INFINITY, kept
    cdef Py_ssize_t u
    for u in range(whole, N - 1):
        lowest_X = min(lowest_X, t.paid * t.P[u] + t.cum[u])
        made = min(made, (t.Q[u] if u == whole else t.P[u]) + t.cum[u])
        lowest_Y = min(lowest_Y, t.Y[u])
        pair = min(pair, lowest_X + t.Y[u])
        pair_g = min(pair_g, made + t.Y[u])
        kept = t.cum[u] - t.cum[whole]
        t.ends_1[u] = min(kept, lowest_Y + t.cum[u])
        t.ends_0[u] = min(kept, pair + kept)
        t.ends_g[u] = min(kept, pair_g + kept)


cdef double _update(Groups *c, Lines *t, Py_ssize_t k, Py_ssize_t *chosen) noexcept nogil:
    """Group k updated on the device in the best interval."""
    cdef Py_ssize_t N = c.N, first = c.ends[k - 1] if k > 0 else 0, n = c.ends[k] - first, u
    cdef const int32_t *cuts = c.cuts + first
    cdef Py_ssize_t whole = cuts[n - 1], use = N + cuts[0], low = whole if whole > c.earliest else c.earliest
    cdef double q_00, q_01, q_11, q_ignored, best = INFINITY, cost, w_cost, kept, made
    cdef double lowest_P = INFINITY, lowest_Y = INFINITY, late = INFINITY, pair = INFINITY, into, early = INFINITY
    q_01 = _uses(t, cuts, n, N, False, 0.0, &q_00)
    q_11 = _uses(t, cuts, n, N, True, 0.0, &q_ignored)
    _last_uses(t, whole, N)
    # As in `_across`, for all u at once: `pair` leaves across the end, or before it once u has passed it; `into` comes
    # in, for what has left before the end; `early` leaves across the end and before it.
    for u in range(use - 1, N - 2, -1):
        lowest_Y = min(lowest_Y, t.Y[u])
        late = min(late, t.late[u])
        lowest_P = min(lowest_P, t.paid * t.P[u])
        pair = min(pair, t.paid * t.P[u] + t.cum[u] + lowest_Y)
    into = min(lowest_Y, late - t.cum[N - 2])
    for u in range(N - 2, low - 1, -1):
        into = min(into, t.crossing[u])
        # What U makes is copied out after the first part of u, or later.
        made = t.Q[u] + t.cum[u]
        cost = t.alpha[u] * c.update[k] + c.g[k] * (t.ends_g[u] + t.cum[whole] - t.cum[c.begun[k] - 1])
        if c.o[k] > 0.0:
            cost += c.o[k] * t.state[u]
        if c.w[k] > 0.0:
            kept = t.cum[use] - t.cum[u]
            w_cost = min(pair, min(made + into, min(early, t.paid * t.Q[u]) + t.cum[N - 1] + lowest_Y))
            w_cost = kept + min(min(lowest_P, t.paid * t.Q[u]), w_cost)
            w_cost = min(w_cost + q_11 + t.ends_1[u], kept + min(q_00 + t.ends_0[u], q_01 + t.ends_1[u]))
            cost += c.w[k] * w_cost
        if cost < best:
            best = cost
            chosen[0] = u
        pair = min(pair, t.X[u] + into)
        early = min(early, t.paid * t.P[u])
        lowest_P = min(lowest_P, t.paid * t.P[u])
    return best


cdef void _write_update(Groups *c, Lines *t, Py_ssize_t k, Py_ssize_t u) noexcept nogil:
    """The copies and bytes of that."""
    cdef Py_ssize_t N = c.N, first = c.ends[k - 1] if k > 0 else 0, n = c.ends[k] - first, end = N - 1
    cdef const int32_t *cuts = c.cuts + first
    cdef Py_ssize_t whole = cuts[n - 1], use = N + cuts[0]
    cdef double size, q_00, q_01, q_11, q_ignored, fresh, made, ends_1, ends_0
    t.updates[u] += c.update[k]
    size = c.g[k]
    _hold(t, c.begun[k] - 1, whole, size)
    _fresh(t, whole, u, u, whole, 1.0, size)
    size = c.o[k]
    if size > 0.0:
        if t.state[u] < t.cum[u + N] - t.cum[u]:
            _across(t, u, u + N, u + N, end, True, not c.after, size)
        else:
            _hold(t, u, u + N, size)
    size = c.w[k]
    if size <= 0.0:
        return
    q_01 = _uses(t, cuts, n, N, False, 0.0, &q_00)
    q_11 = _uses(t, cuts, n, N, True, 0.0, &q_ignored)
    ends_1 = _valid(t, whole, u, u, 0.0)
    ends_0 = _fresh(t, whole, u, u, -1, t.paid, 0.0)
    fresh = t.cum[use] - t.cum[u]
    made = _across(t, u, use, use - 1, end, True, True, 0.0)
    if made + q_11 + ends_1 < fresh + min(q_00 + ends_0, q_01 + ends_1):
        _across(t, u, use, use - 1, end, True, True, size)
        _uses(t, cuts, n, N, True, size, &q_ignored)
        _valid(t, N + whole, N + u, N + u, size)
        return
    _hold(t, u, use, size)
    if q_00 + ends_0 < q_01 + ends_1:
        _hold(t, use, N + whole, size)
        _fresh(t, N + whole, N + u, N + u, -1, t.paid, size)
    else:
        _uses(t, cuts, n, N, False, size, &q_ignored)
        _valid(t, N + whole, N + u, N + u, size)


# -- a group that the host updates, or nobody


# A gradient leaves in interval `out`, H runs in `run`, w comes in in `back`.
cdef struct Service:
    double cost
    Py_ssize_t out, run, back


cdef inline double _gone(Lines *t, Py_ssize_t j, Py_ssize_t whole) noexcept nogil:
    """A byte of a gradient, whole in interval `whole`, that leaves in interval j."""
    return (t.Q[j] if j == whole else t.P[j]) + t.cum[j]


cdef Service _served(Groups *c, Lines *t, Py_ssize_t k, Py_ssize_t whole, Py_ssize_t use, bint flies) noexcept nogil:
    """The cheapest service of group k. w comes in after the step's end, or (`flies`) is held from there on."""
    cdef Service best = Service(INFINITY, -1, -1, -1), now = Service(INFINITY, -1, -1, -1)
    cdef Py_ssize_t j, back = -1, end = c.N - 1
    cdef double into = INFINITY, cost, held = t.cum[c.begun[k] - 1]
    for j in range(use - 1, whole - 1, -1):
        cost = t.late[j] / t.paid - t.cum[end - 1] if flies and j >= end else t.Y[j]
        if (flies or j >= end) and cost < into:
            into = cost
            back = j
        cost = t.interval[j % c.N].host.cost * c.host_update[k] + c.w[k] * (into + t.cum[use])
        if j >= c.earliest and cost < now.cost:
            now.cost = cost
            now.run = j
            now.back = back
        cost = c.g[k] * (_gone(t, j, whole) - held) + now.cost
        if j < end and cost < best.cost:
            best = Service(cost, j, now.run, now.back)
    return best


cdef double _host_update(Groups *c, Lines *t, Py_ssize_t k, bint write) noexcept nogil:
    """Group k updated on the host. In a share `paid` of the steps it is served; in the others its gradient leaves, and
    w comes in where it does so after the step's end, or is held."""
    cdef Py_ssize_t N = c.N, first = c.ends[k - 1] if k > 0 else 0, n = c.ends[k] - first, end = N - 1
    cdef const int32_t *cuts = c.cuts + first
    cdef Py_ssize_t whole = cuts[n - 1], use = N + cuts[0], j, out = whole, back = end
    cdef double w = c.w[k], g = c.g[k], alone, cost, ignored, unpaid = 1.0 - t.paid
    cdef Service served, flying
    cdef bint flies
    for j in range(whole, end):
        if _gone(t, j, whole) < _gone(t, out, whole):
            out = j
    alone = g * (_gone(t, out, whole) - t.cum[c.begun[k] - 1])
    if w <= 0.0:  # an update that nobody waits for costs nothing
        if write:
            _hold(t, c.begun[k] - 1, out, g)
            _leaves(t, out, whole, g)
        return alone
    for j in range(end, use):
        if t.Y[j] < t.Y[back]:
            back = j
    served, flying = _served(c, t, k, whole, use, False), _served(c, t, k, whole, use, True)
    cost = t.paid * served.cost + unpaid * (alone + w * (t.Y[back] + t.cum[use]))
    flies = t.paid * flying.cost + unpaid * (alone + w * (t.cum[use] - t.cum[end - 1])) < cost
    if flies:
        served = flying
        cost = t.paid * served.cost + unpaid * (alone + w * (t.cum[use] - t.cum[end - 1]))
    if write:
        _hold(t, c.begun[k] - 1, served.out, t.paid * g)
        _leaves(t, served.out, whole, t.paid * g)
        _hold(t, c.begun[k] - 1, out, unpaid * g)
        _leaves(t, out, whole, unpaid * g)
        t.host_updates[served.run % N] += t.paid * c.host_update[k]
        if flies and served.back >= end:
            _comes(t, served.back, use, end, LATE, w)
        else:
            t.back[served.back] += t.paid * w
            _hold(t, served.back, use, t.paid * w)
            t.back[back] += 0.0 if flies else unpaid * w
            _hold(t, end - 1 if flies else back, use, unpaid * w)
    return cost + w * _uses(t, cuts, n, N, True, w if write else 0.0, &ignored)


cdef double _frozen(Groups *c, Lines *t, Py_ssize_t k) noexcept nogil:
    """Group k, which nobody updates."""
    cdef Py_ssize_t N = c.N, first = c.ends[k - 1] if k > 0 else 0, n = c.ends[k] - first, use = N + c.cuts[first]
    cdef double ignored
    if c.w[k] <= 0.0:
        return 0.0
    return c.w[k] * (_across(t, c.cuts[first + n - 1], use, use - 1, N - 1, False, True, c.w[k])
                     + _uses(t, c.cuts + first, n, N, True, c.w[k], &ignored))


cdef double group_value(Groups *c, Problem *a, const double *lam, double *g_lam, Lines *t) noexcept nogil:
    """What the groups add to the dual, and to its supergradient."""
    cdef Py_ssize_t N = c.N, k, j, u = 0
    cdef double value = 0.0, on_device, on_host, used
    cdef Interval *i
    for j in range(2 * N):
        i = &t.interval[j % N]
        t.cum[j] = lam[j % N] + (t.cum[j - 1] if j > 0 else 0.0)
        t.P[j], t.Q[j], t.late[j] = i.out.cost * a.out_rate, i.made.cost * a.out_rate, i.late.cost
        t.X[j] = t.P[j] + t.cum[j]
        t.Y[j], t.Z[j], t.crossing[j] = i.back.cost - t.cum[j], i.before.cost - t.cum[j], i.crossing.cost - t.cum[j]
        t.held[j] = t.out[j] = t.made[j] = t.back[j] = t.crossed[j] = t.came[j] = t.before[j] = 0.0
    t.held[2 * N] = 0.0
    for j in range(N):
        t.updates[j] = t.host_updates[j] = 0.0
    _states(c, t)
    for k in range(c.K):
        if c.g[k] <= 0.0:
            value += _frozen(c, t, k)
            continue
        on_device = _update(c, t, k, &u)
        on_host = _host_update(c, t, k, False) if c.host_update[k] >= 0.0 else INFINITY
        value += min(on_device, on_host)
        if on_device <= on_host:
            _write_update(c, t, k, u)
        else:
            _host_update(c, t, k, True)
    used = 0.0
    for j in range(2 * N):
        used += t.held[j]
        g_lam[j % N] += used
    return value
