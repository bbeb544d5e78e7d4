# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""A plan decoded on exact bytes: from a table of small codes to operations, their memory and their time.

A plan says, for each stage q and each visit v (the v-th time that a forward of q runs; the last column serves all later
visits), one code: how q runs (``F_ck`` or ``F_all`` / ``F_sel`` of a form), whether its value may move to the host,
and whether its input is dropped right after. `rotoff.solver.plan_codes` documents the codes. Decoding has four passes:

1. operations (`kernels.operations`): forwards 1..L, then for B i = L..1 the forwards that are missing, and B i;
2. memory: before each operation, while it does not fit, the movable value needed latest is freed; values that an
   operation uses are fetched;
3. prefetches are moved up, in order of need, as early as memory allows;
4. time: the three lanes of the machine (`rotoff.core.simulator`), copy by copy.

The arithmetic of passes 2 and 4 is that of `rotoff.core.simulator.Machine`; tests hold them equal.
"""

from libc.stdint cimport int16_t, int32_t, int64_t

from rotoff.solver.kernels.lanes cimport BACK_IN, OUT, Lanes, copied, drained, issue, reset
from rotoff.solver.kernels.operations cimport operations
from rotoff.solver.kernels.work cimport (ALL, BACK, CK, E_DROP, E_FREE, E_OFFLOAD, E_PREFETCH, E_WAIT, Chain, Gap,
                                         Operation, Value, Work, append, forward_time)

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
    """Use v in operation t; it must be on the device by then."""
    if v < 0:
        return
    cdef Value *value = &w.value[v]
    value.uses.head = w.use_next[value.uses.head]
    if not value.on:
        value.on = True
        held[0] += value.size
        w.gap[value.gap_of].end = t
        w.reload[n_reloads[0]] = value.gap_of
        n_reloads[0] += 1
        w.live[n_live[0]] = v
        n_live[0] += 1


cdef void _lose(Work *w, int32_t v, int64_t *held, Py_ssize_t *n_live) noexcept nogil:
    if v >= 0 and w.value[v].on:
        held[0] -= w.value[v].size
        w.value[v].on = False
        if w.value[v].movable:
            _live_remove(w, n_live, v)


cdef void _evict(Work *w, int32_t v, int32_t t, int64_t *held, Py_ssize_t *n_live, Py_ssize_t *n_gaps) noexcept nogil:
    """Free v before operation t; it comes back before its next use."""
    _live_remove(w, n_live, v)
    w.value[v].on, w.value[v].moves, w.value[v].gap_of = False, True, <int32_t>n_gaps[0]
    held[0] -= w.value[v].size
    w.gap[n_gaps[0]] = Gap(v, t, -1, t)
    n_gaps[0] += 1


cdef inline void _emit(int32_t *emitted, Result *r, int32_t kind, int32_t stage, int32_t form,
                       int32_t of) noexcept nogil:
    """Append a row to `emitted`, unless that is NULL."""
    cdef int32_t *row = emitted + 4 * r.n_emitted
    if emitted != NULL:
        row[0], row[1], row[2], row[3] = kind, stage, form, of
        r.n_emitted += 1


cdef inline void _emit_move(int32_t *emitted, Result *r, int32_t kind, Value *value) noexcept nogil:
    _emit(emitted, r, kind, value.level, 0, 0 if value.form >= 0 else -1)


cdef struct Moves:
    Py_ssize_t n_gaps, n_reloads
    int32_t turn  # the operation that first ran stage L


cdef void _memory(Chain *c, Work *w, Py_ssize_t n, Moves *m, Result *r) noexcept nogil:
    """Pass 2: program order alone decides memory."""
    cdef int32_t v, i, t, farthest, use
    cdef Py_ssize_t x, n_live = 0, n_gaps = 0, n_reloads = 0, best_x
    cdef int64_t held = c.out[0], need, gradient = 0, over = 0
    cdef bint backward = False
    cdef int32_t turn = 0
    cdef Operation *op
    for t in range(<int32_t>n):
        op = &w.op[t]
        i = op.stage
        _bring(w, op.source, t, &held, &n_live, &n_reloads)
        if op.kind == BACK:
            _bring(w, op.saved_set, t, &held, &n_live, &n_reloads)
            need = c.grad[i] + c.grad[i - 1] + c.b_transient[i * c.K + op.form]
        else:
            need = w.value[op.made].size
            if op.kind == ALL:
                need += c.f_transient[i * c.K + op.form]
            else:
                need += c.ck_transient[i]
            if backward:
                need += gradient
            elif i == c.L:
                turn = t
                # δ_L is held as soon as stage L has run, also during a free before B L.
                if w.value[op.made].size + c.grad[i] > need:
                    need = w.value[op.made].size + c.grad[i]
        if op.away >= 0:
            if w.value[op.away].on:
                _evict(w, op.away, t, &held, &n_live, &n_gaps)
            else:
                w.gap[w.value[op.away].gap_of].floor = t
        while held + need > c.limit:
            farthest = t
            best_x = -1
            for x in range(n_live):
                v = w.live[x]
                use = w.value[v].uses.head
                if use >= 0 and v != op.source and v != op.saved_set and w.use_op[use] > farthest:
                    farthest = w.use_op[use]
                    best_x = x
            if best_x < 0:
                if held + need - c.limit > over:
                    over = held + need - c.limit
                break
            _evict(w, w.live[best_x], t, &held, &n_live, &n_gaps)
        op.memory = held + need
        if op.made >= 0:
            v = op.made
            held += w.value[v].size
            w.value[v].on = True
            if w.value[v].movable:
                w.live[n_live] = v
                n_live += 1
            if i == c.L:
                backward = True
                gradient = c.grad[i]
        else:
            _lose(w, op.saved_set, &held, &n_live)
            gradient = c.grad[i - 1]
            if i == c.L:
                held += c.out[i]  # the caller still holds a_L
        _lose(w, op.gone, &held, &n_live)
    m.n_gaps = n_gaps
    m.n_reloads = n_reloads
    m.turn = turn
    r.over = over


cdef void _prefetches(Chain *c, Work *w, Py_ssize_t n, Moves *m, int32_t floor_place) noexcept nogil:
    """Pass 3: move each prefetch up while the operations that it passes still fit, but not above `floor_place`."""
    cdef int32_t t, p, g
    cdef Py_ssize_t x
    cdef int64_t size
    for t in range(<int32_t>n):
        w.place[t].head = -1
    for x in range(m.n_reloads):
        g = w.reload[x]
        size = w.value[w.gap[g].value].size
        p = w.gap[g].end
        while p - 1 > w.gap[g].floor and p > floor_place and w.op[p - 1].memory + size <= c.limit:
            p -= 1
            w.op[p].memory += size
        append(&w.place[p], w.gap_next, g)


cdef void _lanes(Chain *c, Work *w, Py_ssize_t n, Moves *m, int32_t *emitted, Result *r) noexcept nogil:
    """Pass 4: the times of all operations; rows (kind, stage, form, of) go to `emitted` unless that is NULL."""
    cdef int32_t v, i, t, g
    cdef Py_ssize_t next_free = 0, next_wait = 0
    cdef int64_t peak = 0, host = 0, host_peak = 0
    cdef double compute = 0.0
    cdef Lanes *l = &w.lanes
    cdef Operation *op
    r.n_emitted = 0
    reset(l)
    for t in range(<int32_t>n):
        op = &w.op[t]
        if op.memory > peak:
            peak = op.memory
        while next_free < m.n_gaps and w.gap[next_free].begin == t:
            v = w.gap[next_free].value
            compute = max(compute, copied(l, v))
            l.job[v].copy_end = 0.0
            next_free += 1
            _emit_move(emitted, r, E_FREE, &w.value[v])
        g = w.place[t].head
        while g >= 0:
            v = w.gap[g].value
            issue(l, BACK_IN, v, compute, w.value[v].size / c.in_bandwidth)
            _emit_move(emitted, r, E_PREFETCH, &w.value[v])
            g = w.gap_next[g]
        while next_wait < m.n_reloads and w.gap[w.reload[next_wait]].end == t:
            v = w.gap[w.reload[next_wait]].value
            compute = max(compute, copied(l, v))
            next_wait += 1
            _emit_move(emitted, r, E_WAIT, &w.value[v])
        i = op.stage
        if op.kind == BACK:
            compute += c.u_B[i * c.K + op.form]
            v = op.saved_set
            compute = max(compute, copied(l, v))
            if w.value[v].moves:
                host -= w.value[v].size
        else:
            compute += forward_time(c, w, t, t + 1)
        v = op.gone
        if v >= 0:
            compute = max(compute, copied(l, v))
            if w.value[v].moves:
                host -= w.value[v].size
        _emit(emitted, r, op.kind, i, op.form, -1)
        if v >= 0 and (op.kind == ALL or op.kind == CK):
            _emit_move(emitted, r, E_DROP, &w.value[v])
        v = op.made
        if v >= 0 and w.value[v].moves:
            issue(l, OUT, v, compute, w.value[v].size / c.out_bandwidth)
            host += w.value[v].size
            if host > host_peak:
                host_peak = host
            _emit_move(emitted, r, E_OFFLOAD, &w.value[v])
    if c.host_limit >= 0 and host_peak - c.host_limit > r.over:
        r.over = host_peak - c.host_limit
    r.makespan = max(compute, drained(l))
    r.peak = peak
    r.host_peak = host_peak


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


# Two functions, so that the compiler specializes the search's one without rows.
cdef void judge(Chain *c, Work *w, const int16_t *codes, Py_ssize_t V, Result *r) noexcept nogil:
    """Memory and time of the plan `codes`."""
    _decode(c, w, codes, V, NULL, r)


cdef void write(Chain *c, Work *w, const int16_t *codes, Py_ssize_t V, int32_t *emitted, Result *r) noexcept nogil:
    """`judge`, which also emits the operations as rows (kind, stage, form, of) for `plan_codes.to_ops`."""
    _decode(c, w, codes, V, emitted, r)
