# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""First half of decoding a step with parameters: its operations, the gaps between uses in which values leave the
device, and the least bytes.

The forwards and backwards are those of the stages' codes (`kernels.decode`); each B is followed by the updates that
the genes place there. A value leaves between two of its uses: a gap. If each gap is as long as possible (free right
after the use before it, prefetch right before the use after it), every operation holds its least bytes; `room` is what
these leave of the limit.
"""

from libc.stdint cimport int16_t, int32_t, int64_t, uint64_t

from rotoff.solver.kernels.cycle cimport Use
from rotoff.solver.kernels.decode cimport operations
from rotoff.solver.kernels.lanes cimport BACK
from rotoff.solver.kernels.work cimport Chain, Gap, Operation, Work, add_gap, append, beside, seconds


cdef inline void _between(Work *w, int32_t first, int32_t last, int64_t size) noexcept nogil:
    """Add `size` bytes at positions `first` to `last`; `last` may lie in the next step."""
    cdef int32_t n = <int32_t>w.n
    if last < first:
        return
    w.room[first] -= size
    if last > n:
        w.room[n + 1] += size
        w.room[0] -= size
        last -= n + 1
    w.room[last + 1] += size


cdef int32_t _gap(Work *w, int32_t v, int32_t after, int32_t before, int32_t made) noexcept nogil:
    """Add a gap as `add_gap` does, as long as it can be."""
    if before >= 0:
        _between(w, after + 1, before - 1, -w.value[v].size)
    return add_gap(w, v, after, before, made)


cdef inline int32_t _stage_of(Groups *p, const int16_t *genes, int32_t k) noexcept nogil:
    """The stage after whose B group k is updated."""
    cdef int32_t at = genes[k * GENES + AT]
    if p.after or at < 1:
        return 1
    return at if at < p.group[k].first else p.group[k].first


cdef inline bint _on_host(Groups *p, const int16_t *genes, int32_t k) noexcept nogil:
    return (genes[k * GENES + FLAGS] & ON_HOST) != 0 and p.group[k].host >= 0


cdef inline int64_t _key(Groups *p, const int16_t *genes, int32_t k) noexcept nogil:
    """The sort key of updates: by place, then those on the host first, so that nothing delays them, by rank and
    number."""
    cdef int64_t key = -_stage_of(p, genes, k)
    key = key * 2 + (0 if _on_host(p, genes, k) else 1)
    return (key * 65536 + genes[k * GENES + RANK]) * 1048576 + k


cdef void _sort(Groups *p, Cycle *s, const int16_t *genes) noexcept nogil:
    """Sort the groups that are updated; they are nearly sorted from the last call."""
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
        w.at[x].act = t
        s.pos[t] = x
        x += 1
        if w.op[t].kind != BACK:
            continue
        while next_update < s.n_order and _stage_of(p, genes, s.order[next_update]) == w.op[t].stage:
            k = s.order[next_update]
            next_update += 1
            s.group[k].update_at, s.group[k].on_host = x, _on_host(p, genes, k)
            if not s.group[k].on_host:
                w.at[x].act = -1 - k
                x += 1
    w.n = x


cdef void _costs(Chain *c, Work *w, Groups *p, Cycle *s) noexcept nogil:
    """Seconds, and bytes beside the values, at each position; `room` still holds differences between positions."""
    cdef int32_t t, x, n = <int32_t>w.n
    cdef int64_t gradient = 0
    s.least = 0.0
    for x in range(n):
        t = w.at[x].act
        if t < 0:
            w.at[x].lasts = p.group[-1 - t].update
            _between(w, x, x, gradient + p.group[-1 - t].transient)
        else:
            w.at[x].lasts = seconds(c, w, t, w.at[x + 1].act)
            _between(w, x, x, beside(c, &w.op[t], &gradient))
            if w.op[t].kind == BACK and w.op[t].stage == c.L:
                _between(w, x + 1, n, c.out[c.L])  # the caller still holds a_L
        s.least += w.at[x].lasts
    _between(w, n, n, c.grad[0])


cdef inline bint _alone(Work *w, const int16_t *genes, int32_t after, int32_t before) noexcept nogil:
    """Whether an update between two uses needs the device for itself."""
    return (before - after > 1 and w.at[after + 1].act < 0
            and (genes[(-1 - w.at[after + 1].act) * GENES + FLAGS] & ALONE) != 0)


cdef void _activations(Work *w, Cycle *s, const int16_t *genes, Py_ssize_t acts) noexcept nogil:
    """When each value of a stage is held, and its gaps: the longest one if it moves, and all in which it must be away.
    """
    cdef int32_t t, v, u, here, longest, after, before, far, x, away
    for t in range(<int32_t>acts):
        v = w.op[t].made
        if v < 0:
            continue
        away = w.value[v].away_from
        if away >= 0:
            away = s.pos[away]
        here, longest, far = s.pos[t], 1, -1
        u = w.value[v].uses.head
        while u >= 0:
            before = s.pos[w.use_op[u]]
            if before - here > longest and not _alone(w, genes, here, before):
                longest = before - here
                far = here
            here = before
            u = w.use_next[u]
        _between(w, s.pos[t], here, w.value[v].size)
        if not w.value[v].movable:
            continue
        after, u, here = s.pos[t], w.value[v].uses.head, s.pos[t]
        while u >= 0:
            before = s.pos[w.use_op[u]]
            if after == far or after < away < before or _alone(w, genes, after, before):
                x = _gap(w, v, after, before, -1 if w.value[v].moves else here)
                w.value[v].moves = True
                if after < away < before:
                    w.gap[x].free_most = away
                    w.gap[x].in_least = s.pos[w.value[v].away_until] + 1
            after = before
            u = w.use_next[u]


cdef inline void _use(Cycle *s, int32_t *count, int32_t k, int32_t x, int32_t bit) noexcept nogil:
    s.use[count[0]] = Use(x, bit)
    append(&s.group[k].uses, s.use_next, count[0])
    count[0] += 1


cdef void _uses(Chain *c, Work *w, Groups *p, Cycle *s) noexcept nogil:
    """Where each w is used, and where each gradient begins and is whole. `w.have` counts the forwards of each stage."""
    cdef int32_t k, x, t, i, r, slot, count = 0
    for k in range(<int32_t>p.K):
        s.group[k].uses.head = -1
    for i in range(1, <int32_t>c.L + 1):
        w.have[i] = 0
    for x in range(<int32_t>w.n):
        t = w.at[x].act
        if t < 0:
            _use(s, &count, -1 - t, x, AFTER_UPDATE)
            continue
        i = w.op[t].stage
        for r in range(p.reads_from[i], p.reads_from[i + 1]):
            k, slot = p.reads[r], p.slot[r]
            if w.op[t].kind == BACK:
                _use(s, &count, k, x, 3 * slot + 2)
                if i == p.group[k].last:
                    s.group[k].begun = x
                if i == p.group[k].first:
                    s.group[k].whole = x
            else:
                _use(s, &count, k, x, 3 * slot + (1 if w.have[i] else 0))
        if w.op[t].kind != BACK:
            w.have[i] = 1


cdef inline bint _apart(Work *w, Groups *p, const int16_t *genes, int32_t k, int32_t after,
                        int32_t before) noexcept nogil:
    """Whether more lies between two positions of one step than updates of groups that begin at the stage of group k, or
    the group leaves for those too."""
    cdef int32_t x
    if genes[k * GENES + FLAGS] & STEPS_ASIDE:
        return before - after > 1
    for x in range(after + 1, before):
        if w.at[x].act >= 0 or p.group[-1 - w.at[x].act].first != p.group[k].first:
            return True
    return False


cdef void _weights(Work *w, Groups *p, Cycle *s, const int16_t *genes, int32_t k) noexcept nogil:
    """The gaps of w k. The first one after an update on the device begins with the copy out."""
    cdef int32_t v = s.base + k, u = s.group[k].uses.head, last = s.group[k].uses.tail
    cdef int32_t after, before, made = -1, x, n = <int32_t>w.n, mask = genes[k * GENES + MASK]
    cdef bint trained = p.group[k].g > 0, host = trained and s.group[k].on_host
    if p.group[k].w == 0:
        return
    _between(w, 0, n, p.group[k].w)
    if trained and not host:
        made = s.group[k].update_at
    # The gap after the last use of the step, which wraps around: the one after the update.
    after, before = s.use[last].pos, s.use[u].pos + n + 1
    if host or ((mask >> s.use[last].bit) & 1 and before - after > 1):
        x = _gap(w, v, after, before, made)
        made = -1
        if host:
            w.gap[x].free_most = w.gap[x].in_least = s.group[k].update_at
    while s.use_next[u] >= 0:
        after, before = s.use[u].pos, s.use[s.use_next[u]].pos
        if (mask >> s.use[u].bit) & 1 and _apart(w, p, genes, k, after, before):
            _gap(w, v, after, before, made)
            made = -1
        u = s.use_next[u]


cdef void _gradient_and_state(Work *w, Groups *p, Cycle *s, const int16_t *genes, int32_t k) noexcept nogil:
    cdef int32_t g = s.base + <int32_t>p.K + k, o = g + <int32_t>p.K, n = <int32_t>w.n, at = s.group[k].update_at, x
    cdef int32_t begun = s.group[k].begun, whole = s.group[k].whole
    cdef int16_t flags = genes[k * GENES + FLAGS]
    cdef Group *group = &p.group[k]
    if s.group[k].on_host:
        _between(w, begun, whole, group.g)
        _gap(w, g, whole, -1, whole)
        return
    _between(w, begun, at, group.g)
    if flags & GRADIENT_LEAVES and _apart(w, p, genes, k, whole, at):
        _gap(w, g, whole, at, whole)
    if group.o == 0:
        return
    _between(w, 0, n, group.o)
    if flags & STATE_LEAVES:
        x = _gap(w, o, at, at + n + 1, at)
        if p.after:  # between steps only w may be in flight
            w.gap[x].in_least = n + 1


cdef bint cycle(Chain *c, Work *w, Groups *p, Cycle *s, const int16_t *codes, Py_ssize_t V) noexcept nogil:
    """Operations, gaps and room of the plan `codes`; returns whether there are no more operations than `cap`."""
    cdef const int16_t *genes = codes + (c.L + 1) * V
    cdef Py_ssize_t acts, x
    cdef int32_t k
    cdef int64_t now
    w.n_gaps = 0
    w.over = s.over_sum = 0
    if not operations(c, w, codes, V):
        return False
    acts = w.n
    _positions(w, p, s, genes, acts)
    for x in range(w.n + 2):
        w.room[x] = 0
        w.at[x].leaving.head = -1
    _costs(c, w, p, s)
    _between(w, 0, <int32_t>w.n, c.out[0])
    _activations(w, s, genes, acts)
    _uses(c, w, p, s)
    for k in range(<int32_t>p.K):
        _weights(w, p, s, genes, k)
        if p.group[k].g > 0:
            _gradient_and_state(w, p, s, genes, k)
    now = c.limit
    for x in range(w.n + 1):
        now += w.room[x]
        w.room[x] = now
        if now < 0:
            s.over_sum -= now
            w.over = max(w.over, -now)
    return True


cdef inline uint64_t _mixed(uint64_t made, uint64_t by) noexcept nogil:
    made = (made ^ by) * <uint64_t>0x9E3779B97F4A7C15
    return made ^ made >> 29


cdef uint64_t mark(Work *w, Cycle *s) noexcept nogil:
    """A hash of all that `cycle` has made: plans with the same one make the same step, but for a chance of 2^-64."""
    cdef Py_ssize_t x
    cdef uint64_t made = <uint64_t>w.n
    cdef Operation *op
    cdef Gap *gap
    for x in range(w.n):
        made = _mixed(made, <uint64_t>w.at[x].act)
        if w.at[x].act >= 0:
            op = &w.op[w.at[x].act]
            made = _mixed(made, <uint64_t>op.kind << 60 ^ <uint64_t>op.form << 44 ^ <uint64_t>op.stage << 24
                          ^ <uint64_t>op.gone)
    for x in range(s.n_order):
        made = _mixed(made, <uint64_t>s.order[x] << 32 ^ <uint64_t>s.group[s.order[x]].update_at)
    for x in range(w.n_gaps):
        gap = &w.gap[x]
        made = _mixed(made, <uint64_t>gap.value << 32 ^ <uint64_t>gap.begin << 1 ^ <uint64_t>gap.copies)
        made = _mixed(made, <uint64_t>gap.end)
        made = _mixed(made, <uint64_t>gap.free_most << 32 ^ <uint64_t>gap.in_least)
    return made
