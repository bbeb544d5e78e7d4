# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""A plan decoded on exact bytes: from a table of small codes (`rotoff.solver.plan_codes`) to operations, and to the gaps
between uses in which values leave the device. Three passes:

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
from rotoff.solver.kernels.work cimport (APART, DROP, EARLY, KIND, MOVE, Chain, Gap, List, Operation, Value, Work,
                                         append, beside, seconds)


cdef struct Counts:
    Py_ssize_t ops
    int32_t values, uses


cdef inline int32_t _value(Work *w, Counts *n, int32_t level, int32_t form, int64_t size, bint movable) noexcept nogil:
    """A value that the next operation makes."""
    cdef int32_t v = n.values
    n.values = v + 1
    w.value[v] = Value(level, form, size, movable, False, False, False, List(-1, -1), <int32_t>n.ops, -1, -1, -1)
    w.lanes.job[v].copy_end = w.lanes.job[v].off_end = 0.0
    return v


cdef inline void _use(Work *w, Counts *n, int32_t v, int32_t op) noexcept nogil:
    if v < 0:
        return
    w.use_op[n.uses] = op
    append(&w.value[v].uses, w.use_next, n.uses)
    n.uses += 1


cdef void _forward(Chain *c, Work *w, Counts *n, int32_t q, int32_t code, bint last, bint must_save) noexcept nogil:
    """Append one forward of stage q; `last` keeps its input, `must_save` makes ā_q regardless of the code."""
    cdef int32_t kind = code >> KIND, source = w.have[q - 1], form = kind - 1
    cdef bint dropped = (code & DROP) and not last and q > 1
    if must_save and kind == 0:
        form = 0
    if form >= c.n_forms[q]:
        form = 0
    if w.stash[q] >= 0:
        form = -1
    if form >= 0 and (code & EARLY) and (code & MOVE) and not must_save and q < c.L:
        _forward_one(c, w, n, q, form, True, False, source)
        w.stash[q] = w.op[n.ops - 1].made
        _forward_one(c, w, n, q, -1, True, dropped, source)
        return
    _forward_one(c, w, n, q, form, code & MOVE, dropped, source)
    w.value[w.op[n.ops - 1].made].apart = form >= 0 and (code & APART) and (code & MOVE) and q < c.L


cdef inline void _stays_away(Work *w, int32_t v, int32_t t) noexcept nogil:
    """During operation t, if that is a value."""
    w.op[t].away = v
    if v >= 0:
        w.value[v].away_until = t
        if w.value[v].away_from < 0:
            w.value[v].away_from = t


cdef void _forward_one(Chain *c, Work *w, Counts *n, int32_t q, int32_t form, bint moves, bint dropped,
                       int32_t source) noexcept nogil:
    cdef int32_t t = <int32_t>n.ops, made
    cdef Operation *op = &w.op[t]
    _use(w, n, source, t)
    if form < 0:
        made = _value(w, n, q, -1, c.out[q], moves and q < c.L)
        op[0] = Operation(CK, q, 0, source, made, -1, -1, -1)
        _stays_away(w, w.stash[q], t)
    else:
        made = _value(w, n, q, form, c.saved[q * c.K + form], moves and q < c.L)
        op[0] = Operation(ALL, q, form, source, made, -1, -1, -1)
    n.ops = t + 1
    w.have[q] = made
    if dropped:
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


cdef inline bint _fits(Work *w, Counts *n, int32_t forwards, int32_t i) noexcept nogil:
    """Whether the arrays have room for so many forwards, each of which may be two, and for the least that B i..1 need.
    """
    return n.ops + 2 * forwards + 2 * i + 2 <= w.cap


cdef Py_ssize_t operations(Chain *c, Work *w, const int16_t *codes, Py_ssize_t V) noexcept nogil:
    """Returns the number of operations, or -1 if there are more than `cap`."""
    cdef Counts n
    cdef int32_t q, i, t, L = <int32_t>c.L, low, high, source, aside
    n.ops = n.values = n.uses = 0
    for q in range(L + 1):
        w.have[q] = -1
        w.stash[q] = -1
        w.visits[q] = 0
    for q in range(1, L + 1):
        _forward(c, w, &n, q, _next_code(w, codes, V, q), q == L, q == L)
    w.turn = <int32_t>n.ops
    for i in range(L, 0, -1):
        while True:
            if w.have[i] < 0 and w.stash[i] >= 0:
                w.have[i] = w.stash[i]
                w.stash[i] = -1
            if w.have[i] < 0:
                high = i
            elif i > 1 and w.have[i - 1] < 0:
                high = i - 1
            else:
                break
            low = _nearest(w, high - 1)
            if not _fits(w, &n, high - low, i):
                return -1
            for q in range(low + 1, high + 1):
                _forward(c, w, &n, q, _next_code(w, codes, V, q), q == i, q == i)
        source = w.have[i - 1]
        if i > 1 and w.value[source].apart and w.value[source].movable and w.value[source].uses.head >= 0:
            # a_{i-1} from the nearest value below, while ā_{i-1} waits on the host for B i-1.
            aside = source
            w.have[i - 1] = -1
            low = _nearest(w, i - 2)
            if not _fits(w, &n, i - 1 - low, i):
                return -1
            for q in range(low + 1, i - 1):
                _forward(c, w, &n, q, _next_code(w, codes, V, q), False, False)
            w.visits[i - 1] += 1
            _forward(c, w, &n, i - 1, 0, False, False)
            _stays_away(w, aside, <int32_t>n.ops - 1)
            source = w.have[i - 1]
            w.have[i - 1] = aside
        t = <int32_t>n.ops
        w.op[t] = Operation(BACK, i, w.value[w.have[i]].form, source, -1, -1, w.have[i], -1)
        _use(w, &n, source, t)
        _use(w, &n, w.have[i], t)
        w.have[i] = -1
        if i > 1 and w.value[source].form < 0:
            w.op[t].gone = source
            if w.have[i - 1] == source:
                w.have[i - 1] = -1
        n.ops += 1
    w.n = n.ops
    return n.ops


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
    cdef int32_t x = <int32_t>w.n_gaps
    _live_remove(w, n_live, v)
    w.gap[x] = Gap(v, value.size, t, -1, t, t + 1, not value.moves, t, 0, 0.0, 0.0)
    append(&w.at[t].freed, w.free_next, x)
    if not value.moves:
        append(&w.at[value.made].leaving, w.out_next, x)
    value.on, value.moves, value.gap_of = False, True, x
    held[0] -= value.size
    w.n_gaps += 1


cdef int64_t _memory(Chain *c, Work *w) noexcept nogil:
    """Pass 2: program order alone decides memory. Returns the bytes that exceed the limit."""
    cdef int32_t v, t, farthest, use
    cdef Py_ssize_t x, n_live = 0, best_x
    cdef int64_t held = c.out[0], need, gradient = 0, over = 0
    cdef Operation *op
    w.n_gaps = 0
    for t in range(<int32_t>w.n + 1):
        w.at[t].leaving.head = w.at[t].freed.head = w.at[t].fetched.head = w.at[t].awaited.head = -1
    for t in range(<int32_t>w.n):
        op = &w.op[t]
        w.at[t].act, w.at[t].lasts = t, seconds(c, w, t, t + 1)
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
                over = max(over, held + need - c.limit)
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
    return over


cdef void _prefetches(Work *w, int32_t first) noexcept nogil:
    """Pass 3: move each prefetch up while the operations that it passes still fit, but not above the position `first`.
    """
    cdef int32_t t, p, g
    cdef Gap *gap
    for t in range(<int32_t>w.n):
        g = w.at[t].awaited.head
        while g >= 0:
            gap, p = &w.gap[g], t
            while p > gap.in_least and p > first and w.room[p - 1] >= gap.size:
                p -= 1
                w.room[p] -= gap.size
            append(&w.at[p].fetched, w.in_next, g)
            g = w.wait_next[g]


cdef int64_t decode(Chain *c, Work *w, const int16_t *codes, Py_ssize_t V) noexcept nogil:
    """Operations and gaps of the plan `codes`. Returns the bytes that exceed the limit, -1 for too many operations."""
    cdef int64_t over
    if operations(c, w, codes, V) < 0:
        return -1
    over = _memory(c, w)
    _prefetches(w, w.turn if codes[0] & 1 else 0)
    return over
