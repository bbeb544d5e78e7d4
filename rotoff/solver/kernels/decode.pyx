# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""A plan decoded on exact bytes: from a table of small codes (`rotoff.solver.plan_codes`) to operations, their memory
and their time. Decoding has four passes:

1. operations: forwards 1..L, then for B i = L..1 the forwards that are missing, from the nearest value below that
   exists, and B i; `kernels.work` defines the rows of operations, values and uses;
2. memory: before each operation, while it does not fit, the movable value needed latest is freed; values that an
   operation uses are fetched;
3. prefetches are moved up, in order of need, as early as memory allows;
4. the events, and their time on the machine's lanes (`kernels.lanes`).

The arithmetic of pass 2 is that of `rotoff.core.simulator.Machine`; tests hold them equal.
"""

from libc.stdint cimport int16_t, int32_t, int64_t

from rotoff.solver.kernels.lanes cimport (ALL, BACK, CK, E_DROP, E_FREE, E_OFFLOAD, E_PREFETCH, E_WAIT, NONE, drained,
                                         reset, run)
from rotoff.solver.kernels.work cimport (APART, DROP, EARLY, KIND, MOVE, Chain, Gap, List, Operation, Value, Work,
                                         add_event, append, forward_time)

cdef double INF = float("inf")
cdef int64_t HUGE = 4611686018427387904


cdef struct Counts:
    Py_ssize_t ops
    int32_t values, uses


cdef inline int32_t _value(Work *w, Counts *n, int32_t level, int32_t form, int64_t size, bint movable) noexcept nogil:
    cdef int32_t v = n.values
    n.values = v + 1
    w.value[v] = Value(level, form, size, movable, False, False, False, List(-1, -1), -1)
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


cdef void _forward_one(Chain *c, Work *w, Counts *n, int32_t q, int32_t form, bint moves, bint dropped,
                       int32_t source) noexcept nogil:
    cdef int32_t t = <int32_t>n.ops, made
    cdef Operation *op = &w.op[t]
    n.ops = t + 1
    _use(w, n, source, t)
    if form < 0:
        made = _value(w, n, q, -1, c.out[q], moves and q < c.L)
        op[0] = Operation(CK, q, 0, source, made, -1, -1, w.stash[q], 0)
    else:
        made = _value(w, n, q, form, c.saved[q * c.K + form], moves and q < c.L)
        op[0] = Operation(ALL, q, form, source, made, -1, -1, -1, 0)
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
            w.op[n.ops - 1].away = aside
            source = w.have[i - 1]
            w.have[i - 1] = aside
        t = <int32_t>n.ops
        w.op[t] = Operation(BACK, i, w.value[w.have[i]].form, source, -1, -1, w.have[i], -1, 0)
        _use(w, &n, source, t)
        _use(w, &n, w.have[i], t)
        w.have[i] = -1
        if i > 1 and w.value[source].form < 0:
            w.op[t].gone = source
            if w.have[i - 1] == source:
                w.have[i - 1] = -1
        n.ops += 1
    return n.ops


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


cdef struct Moves:
    Py_ssize_t n_gaps, n_reloads
    int32_t turn  # the operation that first ran stage L


cdef void _memory(Chain *c, Work *w, Py_ssize_t n, Moves *m, Verdict *r) noexcept nogil:
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


cdef void _text(Chain *c, Work *w, Py_ssize_t n, Moves *m, Verdict *r) noexcept nogil:
    """The events in program order, and the most bytes on the host."""
    cdef int32_t v, i, t, g
    cdef Py_ssize_t next_free = 0, next_wait = 0
    cdef int64_t host = 0, most = 0
    cdef bint drops
    cdef Operation *op
    w.n_events = 0
    for t in range(<int32_t>n):
        op, i = &w.op[t], w.op[t].stage
        while next_free < m.n_gaps and w.gap[next_free].begin == t:
            add_event(w, E_FREE, w.gap[next_free].value)
            next_free += 1
        g = w.place[t].head
        while g >= 0:
            add_event(w, E_PREFETCH, w.gap[g].value, w.value[w.gap[g].value].size / c.in_bandwidth)
            g = w.gap_next[g]
        while next_wait < m.n_reloads and w.gap[w.reload[next_wait]].end == t:
            add_event(w, E_WAIT, w.gap[w.reload[next_wait]].value)
            next_wait += 1
        drops = op.gone >= 0 and (op.kind == ALL or op.kind == CK)
        add_event(w, op.kind, t, c.u_B[i * c.K + op.form] if op.kind == BACK else forward_time(c, w, t, t + 1),
                  op.saved_set, -1 if drops else op.gone)
        if drops:
            add_event(w, E_DROP, op.gone)
        if op.saved_set >= 0 and w.value[op.saved_set].moves:
            host -= w.value[op.saved_set].size
        if op.gone >= 0 and w.value[op.gone].moves:
            host -= w.value[op.gone].size
        v = op.made
        if v >= 0 and w.value[v].moves:
            add_event(w, E_OFFLOAD, v, w.value[v].size / c.out_bandwidth)
            host += w.value[v].size
            most = max(most, host)
    if c.host_limit >= 0:
        r.host_over = max(0, most - c.host_limit)


cdef void decode(Chain *c, Work *w, const int16_t *codes, Py_ssize_t V, Verdict *r) noexcept nogil:
    """The events of the plan `codes`, its excess and its time."""
    cdef Moves m
    cdef Py_ssize_t n = operations(c, w, codes, V)
    r[0] = Verdict(INF, HUGE, 0, 0.0, 0.0, 0, 0)
    if n < 0:
        return
    _memory(c, w, n, &m, r)
    _prefetches(c, w, n, &m, m.turn + 1 if codes[0] & 1 else 0)
    _text(c, w, n, &m, r)
    reset(&w.lanes)
    r.makespan = run(&w.lanes, w.event, NULL, w.n_events, 0.0, 0, NULL)
    r.makespan = max(r.makespan, drained(&w.lanes))
