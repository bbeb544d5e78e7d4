# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""A plan decoded on exact bytes: from a table of small codes to operations, their memory and their time.

A plan says, for each stage q and each visit v (the v-th time that a forward of q runs; the last column serves all later
visits), one code: how q runs (``F_ck`` or ``F_all`` / ``F_sel`` of a form), whether what it makes may move to the host,
and whether its input is dropped right after. `rotoff.solver.plan_codes` documents the codes. Decoding has four passes:

1. operations (`kernels.operations`): forwards 1..L, then for B i = L..1 whatever forwards are missing;
2. memory: before each operation, while it does not fit, the movable value needed latest is freed; what an operation
   uses is brought back;
3. prefetches rise, in order of need, as early as memory allows;
4. time: the three lanes of the machine (`rotoff.core.simulator`), copy by copy.

The arithmetic of passes 2 and 4 is that of `rotoff.core.simulator.Machine`; tests hold them equal.
"""

from libc.stdint cimport int16_t, int32_t, int64_t

from rotoff.solver.kernels.lanes cimport BACK_IN, OUT, Lanes, copied, drained, issue, reset
from rotoff.solver.kernels.operations cimport operations
from rotoff.solver.kernels.work cimport ALL, BACK, CK, NONE, Chain, Work, forward_time

# Rows of the emitted operations, as in rotoff.solver.plan_codes.KINDS.
cdef enum:
    E_ALL = 0
    E_CK = 1
    E_NONE = 2
    E_B = 3
    E_OFFLOAD = 4
    E_FREE = 5
    E_PREFETCH = 6
    E_WAIT = 7
    E_DROP = 8

cdef double INF = float("inf")


cdef inline void _live_remove(Work *w, Py_ssize_t *n_live, int32_t v) noexcept nogil:
    cdef Py_ssize_t x
    for x in range(n_live[0]):
        if w.live[x] == v:
            n_live[0] -= 1
            w.live[x] = w.live[n_live[0]]
            return


cdef void _bring(Work *w, int32_t v, int32_t t, int64_t *held, Py_ssize_t *n_live,
                 Py_ssize_t *n_reloads) noexcept nogil:
    """v is used by operation t: on the device by then."""
    if v < 0:
        return
    w.head[v] = w.use_next[w.head[v]]
    if not w.on[v]:
        w.on[v] = 1
        held[0] += w.size[v]
        w.gap_to[w.gap_of[v]] = t
        w.reload[n_reloads[0]] = w.gap_of[v]
        n_reloads[0] += 1
        w.live[n_live[0]] = v
        n_live[0] += 1


cdef void _lose(Work *w, int32_t v, int64_t *held, Py_ssize_t *n_live) noexcept nogil:
    if v < 0:
        return
    if w.on[v]:
        held[0] -= w.size[v]
        w.on[v] = 0
        if w.movable[v]:
            _live_remove(w, n_live, v)


cdef void _evict(Work *w, int32_t v, int32_t t, int64_t *held, Py_ssize_t *n_live, Py_ssize_t *n_gaps) noexcept nogil:
    """v is freed before operation t and comes back before its next use."""
    cdef Py_ssize_t g = n_gaps[0]
    _live_remove(w, n_live, v)
    w.on[v] = 0
    held[0] -= w.size[v]
    w.moves[v] = 1
    w.gap_of[v] = <int32_t>g
    w.gap_value[g] = v
    w.gap_from[g] = t
    w.gap_floor[g] = t
    w.gap_to[g] = -1
    n_gaps[0] = g + 1


cdef inline Py_ssize_t _emit(int32_t *emitted, Py_ssize_t e, int32_t kind, int32_t stage, int32_t form,
                             bint saved) noexcept nogil:
    emitted[4 * e] = kind
    emitted[4 * e + 1] = stage
    emitted[4 * e + 2] = form
    emitted[4 * e + 3] = saved
    return e + 1


cdef struct Moves:
    Py_ssize_t n_gaps, n_reloads
    int32_t turn  # the operation that first ran stage L


cdef void _memory(Chain *c, Work *w, Py_ssize_t n, Moves *m, Result *r) noexcept nogil:
    """Pass 2: program order alone decides memory."""
    cdef int32_t v, i, t, farthest
    cdef Py_ssize_t x, n_live = 0, n_gaps = 0, n_reloads = 0, best_x
    cdef int64_t held = c.out[0], need, gradient = 0, over = 0
    cdef bint backward = False
    cdef int32_t turn = 0
    for t in range(<int32_t>n):
        i = w.stage[t]
        _bring(w, w.source[t], t, &held, &n_live, &n_reloads)
        if w.kind[t] == BACK:
            _bring(w, w.saved_set[t], t, &held, &n_live, &n_reloads)
            need = c.grad[i] + c.grad[i - 1] + c.b_transient[i * c.K + w.form[t]]
        else:
            need = w.size[w.made[t]]
            if w.kind[t] == ALL:
                need += c.f_transient[i * c.K + w.form[t]]
            else:
                need += c.ck_transient[i]
            if backward:
                need += gradient
            elif i == c.L:
                turn = t
                # δ_L is held as soon as stage L has run, by any free before B L too.
                if w.size[w.made[t]] + c.grad[i] > need:
                    need = w.size[w.made[t]] + c.grad[i]
        if w.away[t] >= 0:
            if w.on[w.away[t]]:
                _evict(w, w.away[t], t, &held, &n_live, &n_gaps)
            else:
                w.gap_floor[w.gap_of[w.away[t]]] = t
        while held + need > c.limit:
            farthest = t
            best_x = -1
            for x in range(n_live):
                v = w.live[x]
                if w.head[v] >= 0 and v != w.source[t] and v != w.saved_set[t] and w.use_op[w.head[v]] > farthest:
                    farthest = w.use_op[w.head[v]]
                    best_x = x
            if best_x < 0:
                if held + need - c.limit > over:
                    over = held + need - c.limit
                break
            _evict(w, w.live[best_x], t, &held, &n_live, &n_gaps)
        w.memory[t] = held + need
        if w.made[t] >= 0:
            v = w.made[t]
            held += w.size[v]
            w.on[v] = 1
            if w.movable[v]:
                w.live[n_live] = v
                n_live += 1
            if i == c.L:
                backward = True
                gradient = c.grad[i]
        else:
            _lose(w, w.saved_set[t], &held, &n_live)
            gradient = c.grad[i - 1]
            if i == c.L:
                held += c.out[i]  # the caller still holds a_L
        _lose(w, w.gone[t], &held, &n_live)
    m.n_gaps = n_gaps
    m.n_reloads = n_reloads
    m.turn = turn
    r.over = over


cdef void _prefetches(Chain *c, Work *w, Py_ssize_t n, Moves *m, int32_t floor_place) noexcept nogil:
    """Pass 3: each prefetch rises while what it passes still fits, but not above `floor_place`."""
    cdef int32_t t, p, g
    cdef Py_ssize_t x
    cdef int64_t size
    for t in range(<int32_t>n):
        w.place_head[t] = -1
    for x in range(m.n_reloads):
        g = w.reload[x]
        size = w.size[w.gap_value[g]]
        p = w.gap_to[g]
        while p - 1 > w.gap_floor[g] and p > floor_place and w.memory[p - 1] + size <= c.limit:
            p -= 1
            w.memory[p] += size
        w.gap_next[g] = -1
        if w.place_head[p] < 0:
            w.place_head[p] = g
        else:
            w.gap_next[w.place_tail[p]] = g
        w.place_tail[p] = g


cdef inline double _later(double a, double b) noexcept nogil:
    return a if a > b else b


cdef void _lanes(Chain *c, Work *w, Py_ssize_t n, Moves *m, int32_t *emitted, Result *r) noexcept nogil:
    """Pass 4: when everything happens; rows (kind, stage, form, saved) go to `emitted` where that is not NULL."""
    cdef int32_t v, i, t, g
    cdef Py_ssize_t e = 0, next_free = 0, next_wait = 0
    cdef int64_t peak = 0, host = 0, host_peak = 0
    cdef double compute = 0.0
    cdef Lanes *l = &w.lanes
    reset(l)
    for t in range(<int32_t>n):
        if w.memory[t] > peak:
            peak = w.memory[t]
        while next_free < m.n_gaps and w.gap_from[next_free] == t:
            v = w.gap_value[next_free]
            compute = _later(compute, copied(l, v))
            l.copy_end[v] = 0.0
            next_free += 1
            if emitted != NULL:
                e = _emit(emitted, e, E_FREE, w.level[v], 0, w.vform[v] >= 0)
        g = w.place_head[t]
        while g >= 0:
            v = w.gap_value[g]
            issue(l, BACK_IN, v, compute, w.size[v] / c.in_bandwidth)
            if emitted != NULL:
                e = _emit(emitted, e, E_PREFETCH, w.level[v], 0, w.vform[v] >= 0)
            g = w.gap_next[g]
        while next_wait < m.n_reloads and w.gap_to[w.reload[next_wait]] == t:
            v = w.gap_value[w.reload[next_wait]]
            compute = _later(compute, copied(l, v))
            next_wait += 1
            if emitted != NULL:
                e = _emit(emitted, e, E_WAIT, w.level[v], 0, w.vform[v] >= 0)
        i = w.stage[t]
        if w.kind[t] == BACK:
            compute += c.u_B[i * c.K + w.form[t]]
            v = w.saved_set[t]
            compute = _later(compute, copied(l, v))
            if w.moves[v]:
                host -= w.size[v]
        else:
            compute += forward_time(c, w, t, t + 1)
        v = w.gone[t]
        if v >= 0:
            compute = _later(compute, copied(l, v))
            if w.moves[v]:
                host -= w.size[v]
        if emitted != NULL:
            if w.kind[t] == ALL:
                e = _emit(emitted, e, E_ALL, i, w.form[t], 1)
            elif w.kind[t] == BACK:
                e = _emit(emitted, e, E_B, i, 0, 0)
            else:
                e = _emit(emitted, e, E_NONE if w.kind[t] == NONE else E_CK, i, 0, 0)
            if v >= 0 and (w.kind[t] == ALL or w.kind[t] == CK):
                e = _emit(emitted, e, E_DROP, w.level[v], 0, w.vform[v] >= 0)
        v = w.made[t]
        if v >= 0 and w.moves[v]:
            issue(l, OUT, v, compute, w.size[v] / c.out_bandwidth)
            host += w.size[v]
            if host > host_peak:
                host_peak = host
            if emitted != NULL:
                e = _emit(emitted, e, E_OFFLOAD, w.level[v], 0, w.vform[v] >= 0)
    if c.host_limit >= 0 and host_peak - c.host_limit > r.over:
        r.over = host_peak - c.host_limit
    r.makespan = _later(compute, drained(l))
    r.peak = peak
    r.host_peak = host_peak
    r.n_emitted = e


cdef void _decode(Chain *c, Work *w, const int16_t *codes, Py_ssize_t V, int32_t *emitted, Result *r) noexcept nogil:
    cdef Moves m
    cdef Py_ssize_t n = operations(c, w, codes, V)
    r.n_ops = n
    if n < 0:
        r.makespan = INF
        r.over = 4611686018427387904
        return
    _memory(c, w, n, &m, r)
    _prefetches(c, w, n, &m, m.turn + 1 if codes[0] & 1 else 0)
    _lanes(c, w, n, &m, emitted, r)


# Two, so that the compiler makes the search's own without the rows.
cdef void judge(Chain *c, Work *w, const int16_t *codes, Py_ssize_t V, Result *r) noexcept nogil:
    """Memory and time of the plan `codes`."""
    _decode(c, w, codes, V, NULL, r)


cdef void write(Chain *c, Work *w, const int16_t *codes, Py_ssize_t V, int32_t *emitted, Result *r) noexcept nogil:
    """The same, and its operations as rows (kind, stage, form, saved)."""
    _decode(c, w, codes, V, emitted, r)
