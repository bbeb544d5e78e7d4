# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""A plan decoded on exact bytes: from a table of small codes (`rotoff.solver.plan_codes`) to operations, and to the
gaps between uses in which values leave the device. Three passes:

1. operations: forwards 1..L, then for B i = L..1 the forwards that are missing, from the nearest value below that
   exists, and B i; `kernels.work` defines the rows of operations, values and uses;
2. memory: before each operation, while it does not fit, the movable value needed latest is freed; values that an
   operation uses are fetched;
3. prefetches are moved up, in order of need, as early as memory allows.

For a step with parameters `kernels.cycle` and `kernels.flow` take the place of the last two. The arithmetic of pass 2
is that of `rotoff.core.simulator.Machine`; tests hold them equal.
"""

from libc.stdint cimport int16_t, int32_t, int64_t

from rotoff.solver.kernels.lanes cimport ALL, BACK, CK, NONE
from rotoff.solver.kernels.work cimport (APART, DROP, EARLY, KIND, MOVE, Chain, Gap, List, Operation, Position, Value,
                                         Work, add_gap, append, beside, seconds)


cdef inline void _use(Work *w, int32_t v, int32_t op) noexcept nogil:
    if v < 0:
        return
    w.use_op[w.n_uses] = op
    append(&w.value[v].uses, w.use_next, w.n_uses)
    w.n_uses += 1


cdef void _forward(Chain *c, Work *w, int32_t q, int32_t code, bint last, bint must_save) noexcept nogil:
    """Append one forward of stage q; `last` keeps its input, `must_save` makes ā_q regardless of the code."""
    cdef int32_t t = <int32_t>w.n, made = w.n_values, source = w.have[q - 1], form = (code >> KIND) - 1
    cdef bint moves = code & MOVE and q < c.L, early
    cdef Operation *op = &w.op[t]
    if form >= c.n_forms[q] or (form < 0 and must_save):
        form = 0
    if w.stash[q] >= 0:
        form = -1
        w.value[w.stash[q]].away_until = t
        if w.value[w.stash[q]].away_from < 0:
            w.value[w.stash[q]].away_from = t
    early = form >= 0 and moves and code & EARLY and not must_save
    op[0] = Operation(CK if form < 0 else ALL, q, max(form, 0), source, made, -1, -1, w.stash[q])
    w.value[made] = Value(q, form, c.out[q] if form < 0 else c.saved[q * c.K + form], moves, False,
                          form >= 0 and moves and code & APART, False, List(-1, -1), t, -1, -1, -1)
    w.lanes.job[made].copy_end = w.lanes.job[made].off_end = 0.0
    _use(w, source, t)
    w.n, w.n_values, w.have[q] = t + 1, made + 1, made
    if early:
        w.stash[q] = made
        _forward(c, w, q, code, last, False)
    elif code & DROP and not last and q > 1:
        op.gone = source
        w.value[source].movable = False  # its host copy would outlive it and forbid making it again
        w.have[q - 1] = -1
        if form < 0 and w.value[source].form < 0:
            op.kind = NONE


cdef inline int32_t _nearest(Work *w, int32_t q) noexcept nogil:
    """The highest level up to q that has a value; 0 for the chain's input."""
    while q > 0 and w.have[q] < 0:
        q -= 1
    return q


cdef inline int32_t _next_code(Work *w, const int16_t *codes, Py_ssize_t V, int32_t q) noexcept nogil:
    """The code of the next visit of stage q; counts the visit."""
    cdef Py_ssize_t v = w.visits[q]
    w.visits[q] += 1
    return codes[q * V + (v if v < V else V - 1)]


cdef inline bint _apart(Work *w, int32_t v) noexcept nogil:
    """Whether v, a value that a forward has used, waits on the host while its stage's output is made again."""
    return w.value[v].apart and w.value[v].movable and w.value[v].uses.head >= 0


cdef bint operations(Chain *c, Work *w, const int16_t *codes, Py_ssize_t V) noexcept nogil:
    """Returns whether there are no more operations than `cap`."""
    cdef int32_t q, i, t, L = <int32_t>c.L, low, high, source
    w.n = w.n_values = w.n_uses = 0
    for q in range(L + 1):
        w.have[q] = -1
        w.stash[q] = -1
        w.visits[q] = 0
    for q in range(1, L + 1):
        _forward(c, w, q, _next_code(w, codes, V, q), q == L, q == L)
    for i in range(L, 0, -1):
        while True:
            if w.have[i] < 0 and w.stash[i] >= 0:
                w.have[i] = w.stash[i]
                w.stash[i] = -1
            high = i if w.have[i] < 0 else i - 1
            if high == i - 1 and i > 1 and w.have[i - 1] >= 0 and _apart(w, w.have[i - 1]):
                w.stash[i - 1] = w.have[i - 1]
                w.have[i - 1] = -1
            if high == 0 or w.have[high] >= 0:
                break
            low = _nearest(w, high - 1)
            # Each of these forwards may be two operations, and so may what B i..1 need at least.
            if w.n + 2 * (high - low) + 2 * i + 2 > w.cap:
                return False
            for q in range(low + 1, high + 1):
                _forward(c, w, q, _next_code(w, codes, V, q), q == i, q == i)
        t, source = <int32_t>w.n, w.have[i - 1]
        w.op[t] = Operation(BACK, i, w.value[w.have[i]].form, source, -1, -1, w.have[i], -1)
        _use(w, source, t)
        _use(w, w.have[i], t)
        w.have[i] = -1
        if i > 1 and w.value[source].form < 0:
            w.op[t].gone = source
            w.have[i - 1] = -1
        w.n += 1
    return True


cdef inline void _live_remove(Work *w, Py_ssize_t *n_live, int32_t v) noexcept nogil:
    cdef Py_ssize_t x
    for x in range(n_live[0]):
        if w.live[x] == v:
            n_live[0] -= 1
            w.live[x] = w.live[n_live[0]]
            return


cdef void _bring(Work *w, int32_t v, int32_t t, int64_t *held, Py_ssize_t *n_live) noexcept nogil:
    """Use v in operation t; it must be on the device by then."""
    if v < 0:
        return
    cdef Value *value = &w.value[v]
    value.uses.head = w.use_next[value.uses.head]
    if not value.on:
        value.on = True
        held[0] += value.size
        w.gap[value.gap_of].end = t
        append(&w.at[t].awaited, w.wait_next, value.gap_of)
        w.live[n_live[0]] = v
        n_live[0] += 1


cdef void _lose(Work *w, int32_t v, int64_t *held, Py_ssize_t *n_live) noexcept nogil:
    if v >= 0 and w.value[v].on:
        held[0] -= w.value[v].size
        w.value[v].on = False
        if w.value[v].movable:
            _live_remove(w, n_live, v)


cdef void _evict(Work *w, int32_t v, int32_t t, int64_t *held, Py_ssize_t *n_live) noexcept nogil:
    """Free v before operation t; it comes back before its next use."""
    cdef Value *value = &w.value[v]
    _live_remove(w, n_live, v)
    value.gap_of = add_gap(w, v, t, -1, -1 if value.moves else value.made)
    value.on, value.moves = False, True
    append(&w.at[t].freed, w.free_next, value.gap_of)
    held[0] -= value.size


cdef void _memory(Chain *c, Work *w) noexcept nogil:
    """Pass 2: program order alone decides memory."""
    cdef int32_t v, t, farthest, use
    cdef Py_ssize_t x, n_live = 0, best_x
    cdef int64_t held = c.out[0], need, gradient = 0
    cdef Operation *op
    cdef Position *at
    w.n_gaps = w.over = 0
    w.at[w.n].freed.head = w.at[w.n].fetched.head = -1
    for t in range(<int32_t>w.n):
        op, at = &w.op[t], &w.at[t]
        at.act, at.lasts = t, seconds(c, w, t, t + 1)
        at.leaving.head = at.freed.head = at.fetched.head = at.awaited.head = -1
        _bring(w, op.source, t, &held, &n_live)
        _bring(w, op.saved_set, t, &held, &n_live)
        need = beside(c, op, &gradient)
        if op.made >= 0:
            need += w.value[op.made].size
        if op.away >= 0:
            if w.value[op.away].on:
                _evict(w, op.away, t, &held, &n_live)
            else:
                w.gap[w.value[op.away].gap_of].in_least = t + 1
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
                w.over = max(w.over, held + need - c.limit)
                break
            _evict(w, w.live[best_x], t, &held, &n_live)
        w.room[t] = c.limit - held - need
        if op.made >= 0:
            v = op.made
            held += w.value[v].size
            w.value[v].on = True
            if w.value[v].movable:
                w.live[n_live] = v
                n_live += 1
        else:
            _lose(w, op.saved_set, &held, &n_live)
            if op.stage == c.L:
                held += c.out[c.L]  # the caller still holds a_L
        _lose(w, op.gone, &held, &n_live)


cdef void _prefetches(Work *w) noexcept nogil:
    """Pass 3: move each prefetch up while the operations that it passes still fit."""
    cdef int32_t t, p, g
    cdef Gap *gap
    for t in range(<int32_t>w.n):
        g = w.at[t].awaited.head
        while g >= 0:
            gap, p = &w.gap[g], t
            while p > gap.in_least and w.room[p - 1] >= gap.size:
                p -= 1
                w.room[p] -= gap.size
            append(&w.at[p].fetched, w.in_next, g)
            g = w.wait_next[g]


cdef bint decode(Chain *c, Work *w, const int16_t *codes, Py_ssize_t V) noexcept nogil:
    """Operations and gaps of the plan `codes`; returns whether there are no more operations than `cap`."""
    if not operations(c, w, codes, V):
        return False
    _memory(c, w)
    _prefetches(w)
    return True
