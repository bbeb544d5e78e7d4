# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Pass 1 of decoding a plan: the operations of its codes, and the values that each makes, uses and drops.

Forwards 1..L; then for each B i = L..1 the forwards that are missing, from the nearest value below that exists.
`kernels.work` defines the rows of operations, values and uses; `kernels.decode` has the next passes.
"""

from libc.stdint cimport int16_t, int32_t, int64_t

from rotoff.solver.kernels.lanes cimport ALL, BACK, CK, NONE
from rotoff.solver.kernels.work cimport (APART, DROP, EARLY, KIND, MOVE, Chain, List,
                                         Operation, Value, Work, append)


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
