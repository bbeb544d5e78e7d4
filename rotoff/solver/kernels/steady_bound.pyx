# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The dual of `rotoff.solver.steady_bounds`: activations as in `kernels.bound`, and each group of parameters, around
the whole step.

Cut and interval k of 0..N-1, N = 2L + 1: k < L starts with F_{k+1}, k < 2L with B_{2L-k}, and 2L is the step's end. An
interval has parts: while its operation runs; then, between B_{q+1} and B_q, until the last forward of stage q in it
begins; and the rest. What comes in during the first is held at the interval's cut too. P_k and R_k are the prices of a
byte's copies in the cheapest part, λ_k in the first part's R_k; not in the first part are updates and copies out of
what the operation or an update in the interval has made (price Q_k). Parameters that B_q needs next have come in before
the last part (Z_k in place of Y_k).

A group's life goes from its update in interval u of one step to that in the next: positions u..u+N on a time line of
two steps, whose cut k and interval k are those of k mod N. With X_k = P_k + λ_0 + ... + λ_k and Y_k = R_k − (λ_0 + ...
+ λ_k), a byte that leaves in interval x and is back in interval y pays X_x + Y_y more than λ from its start to its end.
A copy under way at the step's end runs in a share `paid` of the steps, whose price it pays: Y'_k up to the end, and
where its bytes are held from the end on, R'_k, without λ_k.
"""

import numpy as np

from libc.math cimport INFINITY
from libc.stdint cimport int8_t, int32_t

from rotoff.solver.kernels.bound cimport Problem, Second, Work, compute_price, dual_value, lower


cdef double MOST_PRICE = 1e6  # of memory: where rounding makes a limit too small by a hair, the dual rises without end

cdef enum:
    PARTS = 3
    ROWS = 1 + 3 * PARTS  # of prices: λ, and p, r, η of each part


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
    bint after                   # whether no state comes in across the step's end


# A price that is the least of those of several parts, and the part.
cdef struct Price:
    double cost
    int part


# Prices of an interval's cheapest parts.
cdef struct Interval:
    Price out, made, back, crossing, late, before, host, again


cdef struct Lines:
    double *cum        # over two steps: sums of λ, X, Y, Z, Y', R', P, Q
    double *X
    double *Y
    double *Z
    double *crossing
    double *late
    double *P
    double *Q
    double *updates    # seconds by interval: on the device, on the host
    double *host_updates
    double *ends_1     # [u] from the cut of the last backward to the update, with and without a valid copy on the host
    double *ends_0
    double *ends_g     # the same of a gradient, which the interval has made
    double *state      # [u] a byte of the optimizer's state, updated in u
    double *held
    double *out        # copies' bytes by interval, at P; those at Q, Y, Y', R', Z
    double *made
    double *back
    double *crossed
    double *came
    double *before
    double paid        # share of the steps in which a copy across the step's end runs
    Interval *interval
    double *p          # of the intervals: the cheapest prices, as `kernels.bound` reads them
    double *r
    double *made_p
    double *before_r
    double *own        # α of the first parts, of the cheaper other part, and of the last part
    double *alpha
    double *last
    double *g_p
    double *g_r
    double[2] *by      # of all parts: what a price of copies out, and in, takes of α


cdef inline double _min(double x, double y) noexcept nogil:
    return x if x < y else y


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
        t.state[u] = _min(t.cum[u + N] - t.cum[u], _across(t, u, u + N, u + N, N - 1, True, not c.after, 0.0))


cdef void _last_uses(Lines *t, Py_ssize_t whole, Py_ssize_t N) noexcept nogil:
    """[u] From the last backward to an update in u: w with and without a valid copy on the host, and g."""
    cdef double lowest_X = INFINITY, lowest_Y = INFINITY, pair = INFINITY, made = INFINITY, pair_g = INFINITY, kept
    cdef Py_ssize_t u
    for u in range(whole, N - 1):
        lowest_X = _min(lowest_X, t.paid * t.P[u] + t.cum[u])
        made = _min(made, (t.Q[u] if u == whole else t.P[u]) + t.cum[u])
        lowest_Y = _min(lowest_Y, t.Y[u])
        pair = _min(pair, lowest_X + t.Y[u])
        pair_g = _min(pair_g, made + t.Y[u])
        kept = t.cum[u] - t.cum[whole]
        t.ends_1[u] = _min(kept, lowest_Y + t.cum[u])
        t.ends_0[u] = _min(kept, pair + kept)
        t.ends_g[u] = _min(kept, pair_g + kept)


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
        lowest_Y = _min(lowest_Y, t.Y[u])
        late = _min(late, t.late[u])
        lowest_P = _min(lowest_P, t.paid * t.P[u])
        pair = _min(pair, t.paid * t.P[u] + t.cum[u] + lowest_Y)
    into = _min(lowest_Y, late - t.cum[N - 2])
    for u in range(N - 2, low - 1, -1):
        into = _min(into, t.crossing[u])
        # What U makes is copied out after the first part of u, or later.
        made = t.Q[u] + t.cum[u]
        cost = t.alpha[u] * c.update[k] + c.g[k] * (t.ends_g[u] + t.cum[whole] - t.cum[c.begun[k] - 1])
        if c.o[k] > 0.0:
            cost += c.o[k] * t.state[u]
        if c.w[k] > 0.0:
            kept = t.cum[use] - t.cum[u]
            w_cost = _min(pair, _min(made + into, _min(early, t.paid * t.Q[u]) + t.cum[N - 1] + lowest_Y))
            w_cost = kept + _min(_min(lowest_P, t.paid * t.Q[u]), w_cost)
            w_cost = _min(w_cost + q_11 + t.ends_1[u], kept + _min(q_00 + t.ends_0[u], q_01 + t.ends_1[u]))
            cost += c.w[k] * w_cost
        if cost < best:
            best = cost
            chosen[0] = u
        pair = _min(pair, t.X[u] + into)
        early = _min(early, t.paid * t.P[u])
        lowest_P = _min(lowest_P, t.paid * t.P[u])
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
    if made + q_11 + ends_1 < fresh + _min(q_00 + ends_0, q_01 + ends_1):
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


cdef double _groups(Groups *c, Problem *a, const double *lam, double *g_lam, Lines *t) noexcept nogil:
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
        value += _min(on_device, on_host)
        if on_device <= on_host:
            _write_update(c, t, k, u)
        else:
            _host_update(c, t, k, True)
    used = 0.0
    for j in range(2 * N):
        used += t.held[j]
        g_lam[j % N] += used
    return value


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
    value += _groups(c, a, x, g, t)
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
        x[k] = 0.0 if x[k] < 0.0 else _min(x[k], MOST_PRICE)
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
                 const double[::1] entry, const int32_t[::1] n_forms, const double[:, ::1] sizes,
                 const double[:, ::1] times, const int32_t[::1] ends, const int32_t[::1] cuts,
                 const int32_t[::1] begun, Py_ssize_t earliest, bint after, double unpaid, shares):
        cdef Py_ssize_t L = u_F.shape[0] - 1, N = 2 * L + 1
        at = np.zeros(N, dtype=np.int32)
        of = np.zeros((50, 2 * N + 1))
        intervals = np.zeros(N * sizeof(Interval), dtype=np.int8)
        cdef int32_t[::1] leave_at = at
        cdef double[:, ::1] rows = of
        cdef int8_t[::1] room_of = intervals
        cdef Work *v = &self.work
        cdef Lines *t = &self.t
        self.keep = (room, work, u_F, saved, slower, entry, n_forms, sizes, times, ends, cuts, begun, at, of, intervals)
        self.a.L, self.a.K, self.a.duplex = L, saved.shape[1], duplex
        self.a.out_rate, self.a.in_rate = out_rate, in_rate
        self.a.out_share, self.a.in_share = shares
        self.a.room, self.a.work, self.a.u_F, self.a.saved = &room[0], &work[0], &u_F[0], &saved[0, 0]
        self.a.slower, self.a.entry, self.a.n_forms = &slower[0, 0], &entry[0], &n_forms[0]
        self.a.out = NULL
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
    def rate(self):
        """Units of time for which a unit of bytes keeps both directions of the link."""
        return self.a.out_rate + self.a.in_rate

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
