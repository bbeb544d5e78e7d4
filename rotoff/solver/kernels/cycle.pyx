# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""First half of decoding a step with parameters: its operations, which values leave the device between which uses,
least bytes.

The forwards and backwards are those of the stages' codes (`kernels.operations`); after each B come the updates whose
genes say so. A value that leaves does so between two of its uses. With each of these gaps at its longest, free right
after the use before and prefetch right before the use after, every operation holds what it holds at least; what is left
of the limit there is `room`.
"""

from libc.stdint cimport int16_t, int32_t, int64_t

from rotoff.solver.kernels.operations cimport operations
from rotoff.solver.kernels.work cimport ALL, BACK, CK, Chain, Work, forward_time

cdef int64_t HUGE = 4611686018427387904


cdef inline void _between(Cycle *s, int32_t first, int32_t last, int64_t size) noexcept nogil:
    """`size` bytes more at positions `first` to `last`, which may go on in the next step."""
    cdef int32_t n = <int32_t>s.n
    if last < first:
        return
    s.room[first] -= size
    if last > n:
        s.room[n + 1] += size
        s.room[0] -= size
        last -= n + 1
    s.room[last + 1] += size


cdef int32_t _gap(Cycle *s, int32_t v, int32_t after, int32_t before, int32_t made) noexcept nogil:
    """v is away between the uses at two positions; `made` is where its copy out is issued, -1 where the host has one.
    """
    cdef int32_t x = <int32_t>s.n_gaps
    s.n_gaps += 1
    s.value[x] = v
    s.from_[x] = after
    s.to[x] = before
    s.free_most[x] = before if before >= 0 else <int32_t>s.n
    s.in_least[x] = after + 1
    s.copies[x] = made >= 0
    s.made[x] = made
    s.out_end[x] = 0.0
    if made >= 0:
        s.out_gap[v] = x
        s.out_next[x] = -1
        if s.out_head[made] < 0:
            s.out_head[made] = x
        else:
            s.out_next[s.out_tail[made]] = x
        s.out_tail[made] = x
    if before >= 0:
        _between(s, after + 1, before - 1, -s.size[v])
    return x


cdef inline int32_t _stage_of(Groups *p, const int16_t *genes, int32_t k) noexcept nogil:
    """The stage after whose B group k is updated."""
    cdef int32_t at = genes[k * GENES + AT]
    if p.after or at < 1:
        return 1
    return at if at < p.first[k] else p.first[k]


cdef inline bint _on_host(Groups *p, const int16_t *genes, int32_t k) noexcept nogil:
    return (genes[k * GENES + FLAGS] & ON_HOST) != 0 and p.host[k] >= 0


cdef inline int64_t _key(Groups *p, const int16_t *genes, int32_t k) noexcept nogil:
    """Updates are in the order of these: by place, those on the host first, which nothing shall hold up, by rank and
    number."""
    cdef int64_t key = -_stage_of(p, genes, k)
    key = key * 2 + (0 if _on_host(p, genes, k) else 1)
    return (key * 65536 + genes[k * GENES + RANK]) * 1048576 + k


cdef void _sort(Groups *p, Cycle *s, const int16_t *genes) noexcept nogil:
    """Put the groups that are updated in order; they are nearly so from last time."""
    cdef Py_ssize_t x, y
    cdef int32_t k
    cdef int64_t key
    for x in range(1, s.n_order):
        k = s.order[x]
        key = _key(p, genes, k)
        y = x
        while y > 0 and _key(p, genes, s.order[y - 1]) > key:
            s.order[y] = s.order[y - 1]
            y -= 1
        s.order[y] = k


cdef void _positions(Work *w, Groups *p, Cycle *s, const int16_t *genes, Py_ssize_t acts) noexcept nogil:
    cdef int32_t t, k, x = 0
    cdef Py_ssize_t next_update = 0
    _sort(p, s, genes)
    for t in range(<int32_t>acts):
        s.act[x] = t
        s.pos[t] = x
        x += 1
        if w.kind[t] != BACK:
            continue
        while next_update < s.n_order and _stage_of(p, genes, s.order[next_update]) == w.stage[t]:
            k = s.order[next_update]
            next_update += 1
            s.update_at[k] = x
            if not _on_host(p, genes, k):
                s.act[x] = -1 - k
                x += 1
    s.n = x


cdef void _costs(Chain *c, Work *w, Groups *p, Cycle *s) noexcept nogil:
    """Seconds, and bytes beside the values, at each position; room holds differences from one to the next still."""
    cdef int32_t t, i, x
    cdef Py_ssize_t r
    cdef int64_t gradient = 0, need, after
    cdef bint backward = False
    s.least = 0.0
    for x in range(<int32_t>s.n):
        t = s.act[x]
        if t < 0:
            s.lasts[x] = p.update[-1 - t]
            need = gradient + p.transient[-1 - t]
        else:
            i = w.stage[t]
            if w.kind[t] == BACK:
                s.lasts[x] = c.u_B[i * c.K + w.form[t]]
                need = c.grad[i] + c.grad[i - 1] + c.b_transient[i * c.K + w.form[t]]
                if i == c.L:
                    # a_L alone may outweigh the ā_L that held it; what follows B L would see that.
                    after = c.out[i] + c.grad[i - 1] - w.size[w.saved_set[t]]
                    if w.gone[t] >= 0:
                        after -= w.size[w.gone[t]]
                    if after > need:
                        need = after
                    _between(s, x + 1, <int32_t>s.n, c.out[i])
                gradient = c.grad[i - 1]
            else:
                s.lasts[x] = forward_time(c, w, t, s.act[x + 1])
                need = gradient + (c.f_transient[i * c.K + w.form[t]] if w.kind[t] == ALL else c.ck_transient[i])
                if i == c.L and not backward:
                    backward = True
                    gradient = c.grad[i]
                    if need < gradient:  # held as soon as stage L has run, by any free before B L too
                        need = gradient
        s.least += s.lasts[x]
        _between(s, x, x, need)
    _between(s, <int32_t>s.n, <int32_t>s.n, c.grad[0])


cdef void _activations(Work *w, Cycle *s, Py_ssize_t acts) noexcept nogil:
    """When each value of a stage is there, and its gaps: the longest where it moves, and any in which it must be away.
    """
    cdef int32_t t, v, u, here, longest, after, before, far, x, away, until
    for t in range(<int32_t>acts):
        v = w.away[t]
        if v >= 0:
            if s.away_from[v] < 0:
                s.away_from[v] = s.pos[t]
            s.away_until[v] = s.pos[t]
    for t in range(<int32_t>acts):
        v = w.made[t]
        if v < 0:
            continue
        s.size[v] = w.size[v]
        away, until, s.away_from[v] = s.away_from[v], s.away_until[v], -1
        here, longest, far = s.pos[t], 1, -1
        u = w.head[v]
        while u >= 0:
            if s.pos[w.use_op[u]] - here > longest:
                longest = s.pos[w.use_op[u]] - here
                far = here
            here = s.pos[w.use_op[u]]
            u = w.use_next[u]
        _between(s, s.pos[t], here, w.size[v])
        if not w.movable[v] or far < 0:
            continue
        after, u, here = s.pos[t], w.head[v], s.pos[t]
        while u >= 0:
            before = s.pos[w.use_op[u]]
            if after == far or after < away < before:
                x = _gap(s, v, after, before, -1 if w.moves[v] else here)
                w.moves[v] = 1
                if after < away < before:
                    s.free_most[x] = away
                    s.in_least[x] = until + 1
            after = before
            u = w.use_next[u]


cdef inline void _use(Cycle *s, int32_t *count, int32_t k, int32_t x, int32_t bit) noexcept nogil:
    cdef int32_t u = count[0]
    count[0] = u + 1
    s.use_pos[u] = x
    s.use_bit[u] = bit
    s.use_next[u] = -1
    if s.use_head[k] < 0:
        s.use_head[k] = u
    else:
        s.use_next[s.use_tail[k]] = u
    s.use_tail[k] = u


cdef void _uses(Chain *c, Work *w, Groups *p, Cycle *s) noexcept nogil:
    """Where each w is used, and where each gradient begins and is whole. `w.have` counts the forwards of each stage."""
    cdef int32_t k, x, t, i, r, slot, count = 0
    for k in range(<int32_t>p.K):
        s.use_head[k] = -1
    for i in range(1, <int32_t>c.L + 1):
        w.have[i] = 0
    for x in range(<int32_t>s.n):
        t = s.act[x]
        if t < 0:
            _use(s, &count, -1 - t, x, AFTER_UPDATE)
            continue
        i = w.stage[t]
        for r in range(p.reads_from[i], p.reads_from[i + 1]):
            k, slot = p.reads[r], p.slot[r]
            if w.kind[t] == BACK:
                _use(s, &count, k, x, 3 * slot + 2)
                if i == p.last[k]:
                    s.begun[k] = x
                if i == p.first[k]:
                    s.whole[k] = x
            else:
                _use(s, &count, k, x, 3 * slot + (1 if w.have[i] else 0))
        if w.kind[t] != BACK:
            w.have[i] = 1


cdef void _weights(Groups *p, Cycle *s, const int16_t *genes, int32_t k) noexcept nogil:
    """The gaps of w k. The first one after an update on the device begins with the copy out."""
    cdef int32_t v = s.base + k, u = s.use_head[k], after, before, made = -1, x, n = <int32_t>s.n
    cdef bint host = _on_host(p, genes, k), trained = p.g[k] > 0
    s.size[v] = p.w[k]
    if p.w[k] == 0:
        return
    _between(s, 0, n, p.w[k])
    if trained and not host:
        made = s.update_at[k]
    # From the last use of the step on, which wraps: the one after the update.
    after, before = s.use_pos[s.use_tail[k]], s.use_pos[u] + n + 1
    if (trained and host) or ((genes[k * GENES + MASK] >> s.use_bit[s.use_tail[k]]) & 1 and before - after > 1):
        x = _gap(s, v, after, before, made)
        made = -1
        if trained and host:
            s.free_most[x] = s.in_least[x] = s.update_at[k]
    while s.use_next[u] >= 0:
        after, before = s.use_pos[u], s.use_pos[s.use_next[u]]
        if (genes[k * GENES + MASK] >> s.use_bit[u]) & 1 and before - after > 1:
            _gap(s, v, after, before, made)
            made = -1
        u = s.use_next[u]


cdef void _gradient_and_state(Groups *p, Cycle *s, const int16_t *genes, int32_t k) noexcept nogil:
    cdef int32_t g = s.base + <int32_t>p.K + k, o = g + <int32_t>p.K, n = <int32_t>s.n, at = s.update_at[k], x
    cdef int16_t flags = genes[k * GENES + FLAGS]
    s.size[g] = p.g[k]
    s.size[o] = p.o[k]
    if _on_host(p, genes, k):
        _between(s, s.begun[k], s.whole[k], p.g[k])
        _gap(s, g, s.whole[k], -1, s.whole[k])
        return
    _between(s, s.begun[k], at, p.g[k])
    if flags & GRADIENT_LEAVES and at - s.whole[k] > 1:
        _gap(s, g, s.whole[k], at, s.whole[k])
    if p.o[k] == 0:
        return
    _between(s, 0, n, p.o[k])
    if flags & STATE_LEAVES:
        x = _gap(s, o, at, at + n + 1, at)
        if p.after:  # between steps only w may be in flight
            s.in_least[x] = n + 1


cdef Py_ssize_t cycle(Chain *c, Work *w, Groups *p, Cycle *s, const int16_t *codes, Py_ssize_t V) noexcept nogil:
    """Operations, gaps and room of the plan `codes`; the number of positions, or -1 where it has too many operations.
    """
    cdef const int16_t *genes = codes + (c.L + 1) * V
    cdef Py_ssize_t acts = operations(c, w, codes, V), x
    cdef int32_t k
    cdef int64_t now
    s.n_gaps = 0
    s.over = s.over_sum = 0
    if acts < 0:
        s.over = s.over_sum = HUGE
        return -1
    _positions(w, p, s, genes, acts)
    for x in range(s.n + 2):
        s.room[x] = 0
        s.out_head[x] = -1
    _costs(c, w, p, s)
    _between(s, 0, <int32_t>s.n, c.out[0])
    _activations(w, s, acts)
    _uses(c, w, p, s)
    for k in range(<int32_t>p.K):
        _weights(p, s, genes, k)
        if p.g[k] > 0:
            _gradient_and_state(p, s, genes, k)
    now = c.limit
    for x in range(s.n + 1):
        now += s.room[x]
        s.room[x] = now
        if now < 0:
            s.over_sum -= now
            if -now > s.over:
                s.over = -now
    return s.n
