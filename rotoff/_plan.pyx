# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""A plan decoded on exact bytes: from a table of small codes to operations, their memory and their time.

A plan says, for each stage q and each visit v (the v-th time that a forward of q runs; the last column serves all later
visits), one code: how q runs (``F_ck`` or ``F_all`` / ``F_sel`` of a form), whether what it makes may move to the host, and
whether its input is dropped right after. `rotoff.solver.plan` documents the codes. Decoding has four passes:

1. operations: forwards 1..L, then for B i = L..1 whatever forwards are missing, from the nearest value below that exists;
2. memory: before each operation, while it does not fit, the movable value needed latest is freed; what an operation uses
   is brought back;
3. prefetches rise, in order of need, as early as memory allows;
4. time: the three lanes of the machine (`rotoff.simulator`), copy by copy.

The arithmetic of passes 2 and 4 is that of `rotoff.simulator.Machine`; tests hold them equal.
"""

import numpy as np

from libc.math cimport exp, pow
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint64_t
from libc.string cimport memcmp, memcpy

cdef enum:
    MOVE = 1   # the value made may move to the host
    DROP = 2   # the input is dropped once the stage has run
    APART = 4  # B q+1 takes a_q, made again for it while ā_q waits on the host
    EARLY = 8  # the same from the start: a_q is made right after ā_q, which leaves at once
    KIND = 4   # code >> KIND: 0 is F_ck, 1 + k is F_all (k = 0) or F_sel k
    CK = 0
    NONE = 1
    ALL = 2
    BACK = 3

# Rows of the emitted operations, as in rotoff.solver.plan.KINDS.
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


cdef struct Chain:
    Py_ssize_t L, K
    int64_t limit, host_limit
    double out_bandwidth, in_bandwidth
    bint duplex
    int64_t *out
    int64_t *grad
    int64_t *ck_transient
    int64_t *saved
    int64_t *f_transient
    int64_t *b_transient
    double *u_F
    double *u_B
    int32_t *n_forms


cdef struct Result:
    double makespan
    int64_t peak, host_peak, over   # bytes; over: the most that exceeds a limit, 0 where the plan fits
    Py_ssize_t n_ops, n_emitted


# Workspace: `cap` operations, as many values, twice as many uses.
cdef struct Work:
    Py_ssize_t cap
    # operations
    int8_t *kind
    int32_t *stage
    int32_t *form
    int32_t *source     # value used as input, -1 for a_0
    int32_t *made       # value made, -1 for B
    int32_t *gone       # value dropped right after, or -1
    int32_t *saved_set  # B: the value that is ā_i
    int32_t *away       # value that must be on the host meanwhile, or -1
    int64_t *memory     # bytes while it runs, prefetches risen included
    # values
    int32_t *level
    int32_t *vform      # -1 for a, else the form of ā
    int64_t *size
    int8_t *movable
    int8_t *moves
    int8_t *apart
    int8_t *on
    int32_t *head
    int32_t *tail
    int32_t *gap_of
    double *copy_end
    double *off_end
    # uses
    int32_t *use_op
    int32_t *use_next
    # absences from the device, in order of `free`; reload: the same in order of need
    int32_t *gap_value
    int32_t *gap_from
    int32_t *gap_to
    int32_t *gap_floor  # no prefetch before the operation after this one
    int32_t *gap_next   # next prefetch at the same place
    int32_t *reload
    int32_t *place_head
    int32_t *place_tail
    # stages
    int32_t *have
    int32_t *stash      # ā on the host that `have` does not show, or -1
    int32_t *visits
    int32_t *live       # movable values on the device


cdef inline int32_t _value(Work *w, int32_t *n_values, int32_t level, int32_t form, int64_t size, bint movable) noexcept nogil:
    cdef int32_t v = n_values[0]
    n_values[0] = v + 1
    w.level[v] = level
    w.vform[v] = form
    w.size[v] = size
    w.movable[v] = movable
    w.moves[v] = 0
    w.apart[v] = 0
    w.on[v] = 0
    w.head[v] = -1
    w.tail[v] = -1
    w.gap_of[v] = -1
    w.copy_end[v] = 0.0
    w.off_end[v] = 0.0
    return v


cdef inline void _use(Work *w, int32_t *n_uses, int32_t v, int32_t op) noexcept nogil:
    cdef int32_t u
    if v < 0:
        return
    u = n_uses[0]
    n_uses[0] = u + 1
    w.use_op[u] = op
    w.use_next[u] = -1
    if w.head[v] < 0:
        w.head[v] = u
    else:
        w.use_next[w.tail[v]] = u
    w.tail[v] = u


cdef void _forward(Chain *c, Work *w, int32_t q, int32_t code, bint last, bint must_save, Py_ssize_t *n_ops,
                   int32_t *n_values, int32_t *n_uses) noexcept nogil:
    """Append one forward of stage q; `last` keeps its input, `must_save` makes ā_q whatever the code says."""
    cdef int32_t kind = code >> KIND, source = w.have[q - 1], form = kind - 1
    cdef bint dropped = (code & DROP) and not last and q > 1
    if must_save and kind == 0:
        form = 0
    if form >= c.n_forms[q]:
        form = 0
    if w.stash[q] >= 0:
        form = -1
    if form >= 0 and (code & EARLY) and (code & MOVE) and not must_save and q < c.L:
        _forward_one(c, w, q, form, True, False, source, n_ops, n_values, n_uses)
        w.stash[q] = w.made[n_ops[0] - 1]
        _forward_one(c, w, q, -1, True, dropped, source, n_ops, n_values, n_uses)
        return
    _forward_one(c, w, q, form, code & MOVE, dropped, source, n_ops, n_values, n_uses)
    w.apart[w.made[n_ops[0] - 1]] = form >= 0 and (code & APART) and (code & MOVE) and q < c.L


cdef void _forward_one(Chain *c, Work *w, int32_t q, int32_t form, bint moves, bint dropped, int32_t source,
                       Py_ssize_t *n_ops, int32_t *n_values, int32_t *n_uses) noexcept nogil:
    cdef int32_t t = <int32_t>n_ops[0]
    n_ops[0] = t + 1
    w.stage[t] = q
    w.source[t] = source
    w.gone[t] = -1
    w.saved_set[t] = -1
    w.away[t + 1] = -1
    _use(w, n_uses, source, t)
    if form < 0:
        w.kind[t] = CK
        w.form[t] = 0
        w.made[t] = _value(w, n_values, q, -1, c.out[q], moves and q < c.L)
        if w.stash[q] >= 0:
            w.away[t] = w.stash[q]
    else:
        w.kind[t] = ALL
        w.form[t] = form
        w.made[t] = _value(w, n_values, q, form, c.saved[q * c.K + form], moves and q < c.L)
    w.have[q] = w.made[t]
    if dropped:
        w.gone[t] = source
        w.movable[source] = 0  # its host copy would outlive it and forbid making it again
        w.have[q - 1] = -1
        if form < 0 and w.vform[source] < 0:
            w.kind[t] = NONE


cdef Py_ssize_t _operations(Chain *c, Work *w, const int16_t *codes, Py_ssize_t V, int32_t *n_values,
                            int32_t *n_uses) noexcept nogil:
    """Pass 1; the number of operations, or -1 where there are more than `cap`."""
    cdef Py_ssize_t n = 0, L = c.L
    w.away[0] = -1
    cdef int32_t q, i, low, high, v, source, aside
    cdef bint missing
    for q in range(L + 1):
        w.have[q] = -1
        w.stash[q] = -1
        w.visits[q] = 0
    for q in range(1, <int32_t>L + 1):
        _forward(c, w, q, codes[q * V], q == L, q == L, &n, n_values, n_uses)
        w.visits[q] = 1
    for i in range(<int32_t>L, 0, -1):
        while True:
            if w.have[i] < 0 and w.stash[i] >= 0:
                w.have[i] = w.stash[i]
                w.stash[i] = -1
            missing = w.have[i] < 0
            if missing:
                high = i
            elif i > 1 and w.have[i - 1] < 0:
                high = i - 1
            else:
                break
            low = high - 1
            while low > 0 and w.have[low] < 0:
                low -= 1
            if n + 2 * (high - low) + 2 * i + 2 > w.cap:
                return -1
            for q in range(low + 1, high + 1):
                v = w.visits[q]
                if v >= V:
                    v = <int32_t>V - 1
                _forward(c, w, q, codes[q * V + v], q == i, q == i, &n, n_values, n_uses)
                w.visits[q] += 1
        source = w.have[i - 1]
        if i > 1 and w.apart[source] and w.movable[source] and w.head[source] >= 0:
            # a_{i-1} from the nearest value below, while ā_{i-1} waits on the host for B i-1.
            aside = source
            w.have[i - 1] = -1
            low = i - 2
            while low > 0 and w.have[low] < 0:
                low -= 1
            if n + 2 * (i - 1 - low) + 2 * i + 2 > w.cap:
                return -1
            for q in range(low + 1, i):
                v = w.visits[q]
                if v >= V:
                    v = <int32_t>V - 1
                _forward(c, w, q, codes[q * V + v] if q < i - 1 else 0, False, False, &n, n_values, n_uses)
                w.visits[q] += 1
            w.away[n - 1] = aside
            source = w.have[i - 1]
            w.have[i - 1] = aside
        w.kind[n] = BACK
        w.stage[n] = i
        w.source[n] = source
        w.away[n + 1] = -1
        w.made[n] = -1
        w.gone[n] = -1
        w.saved_set[n] = w.have[i]
        w.form[n] = w.vform[w.have[i]]
        _use(w, n_uses, source, <int32_t>n)
        _use(w, n_uses, w.have[i], <int32_t>n)
        w.have[i] = -1
        if i > 1 and w.vform[source] < 0:
            w.gone[n] = source
            if w.have[i - 1] == source:
                w.have[i - 1] = -1
        n += 1
    return n


cdef inline void _live_remove(Work *w, Py_ssize_t *n_live, int32_t v) noexcept nogil:
    cdef Py_ssize_t x
    for x in range(n_live[0]):
        if w.live[x] == v:
            n_live[0] -= 1
            w.live[x] = w.live[n_live[0]]
            return


cdef void _bring(Work *w, int32_t v, int32_t t, int64_t *held, Py_ssize_t *n_live, Py_ssize_t *n_reloads) noexcept nogil:
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


cdef void _decode(Chain *c, Work *w, const int16_t *codes, Py_ssize_t V, int32_t *emitted, Result *r) noexcept nogil:
    """All four passes; where `emitted` is not NULL, rows (kind, stage, form, saved) are written there."""
    cdef int32_t n_values = 0, n_uses = 0, v, i, t, p, g
    cdef Py_ssize_t n, x, n_live = 0, n_gaps = 0, n_reloads = 0, e = 0, next_free = 0, next_wait = 0, best_x
    cdef int64_t held = c.out[0], need, after, gradient = 0, peak = 0, over = 0, host = 0, host_peak = 0, size
    cdef double compute = 0.0, out_lane = 0.0, in_lane = 0.0, start, end
    cdef bint backward = False
    cdef int32_t turn = 0, floor_place, farthest

    n = _operations(c, w, codes, V, &n_values, &n_uses)
    r.n_ops = n
    if n < 0:
        r.makespan = INF
        r.over = 4611686018427387904
        return

    # Pass 2: program order alone decides memory.
    for t in range(<int32_t>n):
        i = w.stage[t]
        _bring(w, w.source[t], t, &held, &n_live, &n_reloads)
        if w.kind[t] == BACK:
            _bring(w, w.saved_set[t], t, &held, &n_live, &n_reloads)
            need = c.grad[i] + c.grad[i - 1] + c.b_transient[i * c.K + w.form[t]]
            if i == c.L:
                # a_L alone may outweigh the ā_L that held it; a free right after B L would see that.
                after = c.out[i] + c.grad[i - 1] - w.size[w.saved_set[t]]
                if w.gone[t] >= 0:
                    after -= w.size[w.gone[t]]
                if after > need:
                    need = after
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

    # Pass 3: each prefetch rises while what it passes still fits.
    for t in range(<int32_t>n):
        w.place_head[t] = -1
    floor_place = turn + 1 if codes[0] & 1 else 0
    for x in range(n_reloads):
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

    # Pass 4: the lanes.
    for t in range(<int32_t>n):
        if w.memory[t] > peak:
            peak = w.memory[t]
        while next_free < n_gaps and w.gap_from[next_free] == t:
            v = w.gap_value[next_free]
            if w.copy_end[v] > compute:
                compute = w.copy_end[v]
            w.copy_end[v] = 0.0
            next_free += 1
            if emitted != NULL:
                e = _emit(emitted, e, E_FREE, w.level[v], 0, w.vform[v] >= 0)
        g = w.place_head[t]
        while g >= 0:
            v = w.gap_value[g]
            start = compute if compute > in_lane else in_lane
            if w.off_end[v] > start:
                start = w.off_end[v]
            if not c.duplex and out_lane > start:
                start = out_lane
            end = start + w.size[v] / c.in_bandwidth
            in_lane = end
            if not c.duplex:
                out_lane = end
            w.copy_end[v] = end
            if emitted != NULL:
                e = _emit(emitted, e, E_PREFETCH, w.level[v], 0, w.vform[v] >= 0)
            g = w.gap_next[g]
        while next_wait < n_reloads and w.gap_to[w.reload[next_wait]] == t:
            v = w.gap_value[w.reload[next_wait]]
            if w.copy_end[v] > compute:
                compute = w.copy_end[v]
            next_wait += 1
            if emitted != NULL:
                e = _emit(emitted, e, E_WAIT, w.level[v], 0, w.vform[v] >= 0)
        i = w.stage[t]
        if w.kind[t] == BACK:
            compute += c.u_B[i * c.K + w.form[t]]
            v = w.saved_set[t]
            if w.copy_end[v] > compute:
                compute = w.copy_end[v]
            if w.moves[v]:
                host -= w.size[v]
        else:
            compute += c.u_F[i]
        v = w.gone[t]
        if v >= 0:
            if w.copy_end[v] > compute:
                compute = w.copy_end[v]
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
            start = compute if compute > out_lane else out_lane
            if not c.duplex and in_lane > start:
                start = in_lane
            end = start + w.size[v] / c.out_bandwidth
            out_lane = end
            if not c.duplex:
                in_lane = end
            w.copy_end[v] = end
            w.off_end[v] = end
            host += w.size[v]
            if host > host_peak:
                host_peak = host
            if emitted != NULL:
                e = _emit(emitted, e, E_OFFLOAD, w.level[v], 0, w.vform[v] >= 0)
    end = compute
    if out_lane > end:
        end = out_lane
    if in_lane > end:
        end = in_lane
    if c.host_limit >= 0 and host_peak - c.host_limit > over:
        over = host_peak - c.host_limit
    r.makespan = end
    r.peak = peak
    r.host_peak = host_peak
    r.over = over
    r.n_emitted = e


cdef inline Py_ssize_t _emit(int32_t *emitted, Py_ssize_t e, int32_t kind, int32_t stage, int32_t form, bint saved) noexcept nogil:
    emitted[4 * e] = kind
    emitted[4 * e + 1] = stage
    emitted[4 * e + 2] = form
    emitted[4 * e + 3] = saved
    return e + 1


cdef inline uint64_t _random(uint64_t *state) noexcept nogil:
    """xorshift64*: a fixed seed gives a fixed sequence on every machine."""
    cdef uint64_t x = state[0]
    x ^= x >> 12
    x ^= x << 25
    x ^= x >> 27
    state[0] = x
    return (x * <uint64_t>2685821657736338717) >> 11


cdef inline Py_ssize_t _below(uint64_t *state, Py_ssize_t n) noexcept nogil:
    return <Py_ssize_t>(_random(state) % <uint64_t>n)


cdef inline double _unit(uint64_t *state) noexcept nogil:
    return _random(state) / 9007199254740992.0


cdef int16_t _draw_code(Chain *c, uint64_t *state, Py_ssize_t q) noexcept nogil:
    cdef int16_t kind = 0
    if _below(state, 2):
        kind = <int16_t>(1 + _below(state, c.n_forms[q]))
    return <int16_t>((kind << KIND) | (MOVE if _below(state, 2) else 0) | (DROP if _below(state, 3) == 0 else 0)
                     | (APART if _below(state, 8) == 0 else 0)
                     | (EARLY if _below(state, 16) == 0 else 0))


cdef void _mutate(Chain *c, Work *w, int16_t *codes, Py_ssize_t V, uint64_t *state) noexcept nogil:
    """One random change of a plan; `w.visits` still holds how often each stage ran in some recent plan."""
    cdef Py_ssize_t L = c.L, q, p, v, length, choice = _below(state, 16)
    cdef int16_t code, other
    q = 1 + _below(state, L)
    v = w.visits[q]
    v = _below(state, v if 0 < v < V else V)
    if choice < 4:
        codes[q * V + v] ^= MOVE
    elif choice < 6:
        if _below(state, 4):
            codes[q * V + v] ^= DROP
        elif codes[q * V + v] & (APART | EARLY):
            codes[q * V + v] &= ~(APART | EARLY)
        else:
            codes[q * V + v] |= MOVE | (APART if _below(state, 2) else EARLY)
    elif choice < 9:
        codes[q * V + v] = _draw_code(c, state, q)
    elif choice < 11:  # swap the first visits of two near stages
        p = q + 1 + _below(state, 4)
        if p <= L:
            for v in range(V):
                code = codes[q * V + v]
                codes[q * V + v] = codes[p * V + v]
                codes[p * V + v] = code
    elif choice < 13:  # a segment q..p recomputed later from the input of q
        length = 1 + _below(state, 1 + L // 4 if L > 4 else L)
        p = q + length
        if p > L:
            p = L
        codes[q * V] = (codes[q * V] & MOVE) if q == p else 0
        for q in range(q + 1, p):
            codes[q * V] = DROP
        if p < L and q + 1 < p + 1:
            codes[(p) * V] = <int16_t>(codes[p * V] & ~DROP) if _below(state, 2) else DROP
    elif choice < 14:  # a run of stages kept, or moved
        length = 1 + _below(state, 1 + L // 4 if L > 4 else L)
        code = <int16_t>((1 << KIND) | _below(state, 2))
        for p in range(q, q + length if q + length <= L else L + 1):
            codes[p * V] = code
    elif choice < 15:  # a boundary shifts: a stage takes its neighbour's codes
        p = q + (1 if _below(state, 2) else -1)
        if 1 <= p <= L:
            for v in range(V):
                codes[q * V + v] = codes[p * V + v]
    elif _below(state, 8) == 0:
        codes[0] ^= 1
    else:
        p = 1 + _below(state, L)
        other = codes[q * V] & MOVE
        codes[q * V] = <int16_t>((codes[q * V] & ~MOVE) | (codes[p * V] & MOVE))
        codes[p * V] = <int16_t>((codes[p * V] & ~MOVE) | other)


cdef class Evaluator:
    """Decodes plans of one chain at one limit.

    Args:
        arrays: the chain as `rotoff.bounds.Arrays`. out_bandwidth, in_bandwidth: bytes per second. limit, host_limit: bytes
        (host_limit < 0 for none). visits: columns V of a plan. cap: the most compute operations a plan may decode to.
    """

    cdef Chain c
    cdef Work w
    cdef readonly Py_ssize_t V
    cdef list keep
    cdef int32_t[::1] emitted

    def __init__(self, arrays, double out_bandwidth, double in_bandwidth, bint duplex, int64_t limit, int64_t host_limit,
                 Py_ssize_t visits, Py_ssize_t cap):
        self.keep = []
        self.V = visits
        cdef Chain *c = &self.c
        cdef Work *w = &self.w
        c.L = arrays.out.shape[0] - 1
        c.K = arrays.saved.shape[1]
        c.limit = limit
        c.host_limit = host_limit
        c.out_bandwidth = out_bandwidth
        c.in_bandwidth = in_bandwidth
        c.duplex = duplex
        c.out = <int64_t *>self._input(arrays.out)
        c.grad = <int64_t *>self._input(arrays.grad)
        c.ck_transient = <int64_t *>self._input(arrays.ck_transient)
        c.saved = <int64_t *>self._input(arrays.saved)
        c.f_transient = <int64_t *>self._input(arrays.f_transient)
        c.b_transient = <int64_t *>self._input(arrays.b_transient)
        c.u_F = <double *>self._input(arrays.u_F)
        c.u_B = <double *>self._input(arrays.u_B)
        c.n_forms = <int32_t *>self._input(arrays.n_forms)
        w.cap = cap
        n = cap + 2
        w.kind = <int8_t *>self._room(n, np.int8)
        w.stage = <int32_t *>self._room(n, np.int32)
        w.form = <int32_t *>self._room(n, np.int32)
        w.source = <int32_t *>self._room(n, np.int32)
        w.made = <int32_t *>self._room(n, np.int32)
        w.gone = <int32_t *>self._room(n, np.int32)
        w.saved_set = <int32_t *>self._room(n, np.int32)
        w.away = <int32_t *>self._room(n, np.int32)
        w.memory = <int64_t *>self._room(n, np.int64)
        w.level = <int32_t *>self._room(n, np.int32)
        w.vform = <int32_t *>self._room(n, np.int32)
        w.size = <int64_t *>self._room(n, np.int64)
        w.movable = <int8_t *>self._room(n, np.int8)
        w.moves = <int8_t *>self._room(n, np.int8)
        w.apart = <int8_t *>self._room(n, np.int8)
        w.on = <int8_t *>self._room(n, np.int8)
        w.head = <int32_t *>self._room(n, np.int32)
        w.tail = <int32_t *>self._room(n, np.int32)
        w.gap_of = <int32_t *>self._room(n, np.int32)
        w.copy_end = <double *>self._room(n, np.float64)
        w.off_end = <double *>self._room(n, np.float64)
        w.use_op = <int32_t *>self._room(2 * n, np.int32)
        w.use_next = <int32_t *>self._room(2 * n, np.int32)
        # A value is absent at most once before each of its uses.
        w.gap_value = <int32_t *>self._room(3 * n, np.int32)
        w.gap_from = <int32_t *>self._room(3 * n, np.int32)
        w.gap_to = <int32_t *>self._room(3 * n, np.int32)
        w.gap_floor = <int32_t *>self._room(3 * n, np.int32)
        w.gap_next = <int32_t *>self._room(3 * n, np.int32)
        w.reload = <int32_t *>self._room(3 * n, np.int32)
        w.place_head = <int32_t *>self._room(n, np.int32)
        w.place_tail = <int32_t *>self._room(n, np.int32)
        w.have = <int32_t *>self._room(c.L + 2, np.int32)
        w.stash = <int32_t *>self._room(c.L + 2, np.int32)
        w.visits = <int32_t *>self._room(c.L + 2, np.int32)
        w.live = <int32_t *>self._room(n, np.int32)
        self.emitted = np.zeros(4 * 12 * n, dtype=np.int32)

    cdef size_t _input(self, array):
        made = np.ascontiguousarray(array)
        self.keep.append(made)
        return <size_t>made.ctypes.data

    cdef size_t _room(self, n, dtype):
        made = np.zeros(n, dtype=dtype)
        self.keep.append(made)
        return <size_t>made.ctypes.data

    def evaluate(self, const int16_t[:, ::1] codes):
        """(makespan in seconds, peak bytes, host peak bytes, bytes over the limits: 0 where the plan fits)."""
        cdef Result r
        with nogil:
            _decode(&self.c, &self.w, &codes[0, 0], self.V, NULL, &r)
        return r.makespan, r.peak, r.host_peak, r.over

    def operations(self, const int16_t[:, ::1] codes):
        """The plan's operations as rows (kind, stage, form, saved); None where it has too many."""
        cdef Result r
        with nogil:
            _decode(&self.c, &self.w, &codes[0, 0], self.V, &self.emitted[0], &r)
        if r.n_ops < 0:
            return None
        return np.asarray(self.emitted)[: 4 * r.n_emitted].reshape(-1, 4).copy()

    def anneal(self, int16_t[:, ::1] codes, Py_ssize_t evaluations, uint64_t seed, double hot, double cold,
               const int16_t[::1] masks, double weight, int16_t[:, ::1] best, const int8_t[::1] stop):
        """Search from `codes` (changed in place to the last plan); the best plan that fits goes to `best`.

        Simulated annealing: `evaluations` random changes, temperatures falling geometrically from `hot` to `cold` seconds;
        a plan over the limits costs `weight` seconds a byte more. masks: what a code is and-ed, then or-ed with (a mode's
        rules). stop: the search ends soon after stop[0] is set. Returns the best makespan, infinity where no plan fitted.
        """
        cdef double found
        cdef Py_ssize_t n = codes.shape[0] * codes.shape[1]
        work = np.zeros(2 * n, dtype=np.int16)
        cdef int16_t[::1] room = work
        with nogil:
            found = _anneal(&self.c, &self.w, &codes[0, 0], n, self.V, evaluations, seed, hot, cold, masks[0], masks[1], weight,
                            &best[0, 0], &room[0], &stop[0])
        return found


cdef double _anneal(Chain *c, Work *w, int16_t *codes, Py_ssize_t n, Py_ssize_t V, Py_ssize_t evaluations, uint64_t seed,
                    double hot, double cold, int16_t keep, int16_t force, double weight, int16_t *best,
                    int16_t *tried, const int8_t *stop) noexcept nogil:
    cdef uint64_t state = seed * <uint64_t>2654435769 + <uint64_t>88172645463325252
    cdef Result r
    cdef double cost, now, temperature, found = INF
    cdef Py_ssize_t step, x
    _decode(c, w, codes, V, NULL, &r)
    now = r.makespan + weight * r.over
    if r.over == 0:
        found = r.makespan
        memcpy(best, codes, n * sizeof(int16_t))
    for step in range(evaluations):
        if stop[0]:
            break
        temperature = hot * pow(cold / hot, (<double>step) / evaluations)
        memcpy(tried, codes, n * sizeof(int16_t))
        _mutate(c, w, tried, V, &state)
        while _below(&state, 3) == 0:
            _mutate(c, w, tried, V, &state)
        for x in range(V, n):
            tried[x] = (tried[x] & keep) | force
        if memcmp(tried, codes, n * sizeof(int16_t)) == 0:
            continue
        _decode(c, w, tried, V, NULL, &r)
        cost = r.makespan + weight * r.over
        if cost <= now or _unit(&state) < exp((now - cost) / temperature):
            now = cost
            memcpy(codes, tried, n * sizeof(int16_t))
            if r.over == 0 and cost < found:
                found = cost
                memcpy(best, codes, n * sizeof(int16_t))
    return found
