# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Second half of decoding a step with parameters: when what leaves is freed and what comes back is prefetched, and the
time it takes.

Out: first in, first out from the moment that a value is made or updated; each free as late as its copy's predicted end
while room lasts. In: earliest deadline first, scheduled backward around the cycle; each prefetch at its latest start
while room lasts. What is left goes to earlier prefetches. The lanes of the machine (`rotoff.core.simulator`) then tell
the times, which are the prediction of the next round. The arithmetic of the lanes is that of
`rotoff.core.simulator.Machine`; tests hold them equal.
"""

from libc.stdint cimport int8_t, int32_t, int64_t
from libc.string cimport memcpy, memset

from rotoff.solver.kernels.cycle cimport Cycle, Groups
from rotoff.solver.kernels.lanes cimport BACK_IN, HOST, OUT, Lanes, copied, drained, issue, reset
from rotoff.solver.kernels.work cimport ALL, BACK, NONE, Chain, Work

cdef double INF = float("inf")


cdef inline double _later(double a, double b) noexcept nogil:
    return a if a > b else b


cdef void _alone(Chain *c, Cycle *s) noexcept nogil:
    """A first prediction: compute never waits, and copies out run one after another."""
    cdef Py_ssize_t x, turn
    cdef int32_t g
    cdef double now = 0.0, lane = 0.0, period
    for x in range(s.n):
        s.before[x] = now
        now += s.lasts[x]
    s.before[s.n] = period = now
    for turn in range(2):
        for x in range(s.n):
            g = s.out_head[x]
            while g >= 0:
                lane = _later(lane, s.before[x + 1]) + s.size[s.value[g]] / c.out_bandwidth
                s.out_end[g] = lane
                g = s.out_next[g]
        lane -= period


cdef inline void _append(int32_t *head, int32_t *tail, int32_t *next, Py_ssize_t x, int32_t g) noexcept nogil:
    next[g] = -1
    if head[x] < 0:
        head[x] = g
    else:
        next[tail[x]] = g
    tail[x] = g


cdef inline int64_t _left(Cycle *s, int32_t x) noexcept nogil:
    return s.left[x if x <= s.n else x - s.n - 1]


cdef inline void _take(Cycle *s, int32_t x, int64_t size) noexcept nogil:
    s.left[x if x <= s.n else x - s.n - 1] -= size


cdef void _frees(Cycle *s) noexcept nogil:
    """Each gap begins right after the use before it, or at the end of its copy out while room lasts."""
    cdef int32_t x, g, at, most
    cdef int64_t size
    cdef double end
    for g in range(<int32_t>s.n_gaps):
        s.free_at[g] = s.from_[g] + 1
    for x in range(<int32_t>s.n):
        g = s.out_head[x]
        while g >= 0:
            size, end = s.size[s.value[g]], s.out_end[g]
            if s.from_[g] < x:  # made in the step before
                end -= s.before[s.n]
            at, most = s.from_[g] + 1, s.free_most[g]
            while at < most and s.before[at] < end and _left(s, at) >= size:
                _take(s, at, size)
                at += 1
            s.free_at[g] = at
            g = s.out_next[g]


cdef void _starts(Chain *c, Cycle *s) noexcept nogil:
    """The latest starts of the copies in, so that none is late: backward around the cycle, twice to close it."""
    cdef Py_ssize_t x, turn
    cdef int32_t g
    cdef double cursor = INF
    for turn in range(2):
        for x in range(s.n - 1, -1, -1):
            g = s.wait_head[x]
            while g >= 0:
                if cursor > s.before[x]:
                    cursor = s.before[x]
                cursor -= s.size[s.value[g]] / c.in_bandwidth
                s.start[g] = cursor
                g = s.wait_next[g]
        cursor += s.before[s.n]


cdef void _prefetches(Cycle *s) noexcept nogil:
    """Each gap ends before its copy's latest start while room lasts; then, in order of need, as early as what is left
    allows."""
    cdef int32_t x, g, at, least, n1 = <int32_t>s.n + 1, floor, wraps
    cdef int64_t size
    cdef double start
    for x in range(<int32_t>s.n):
        g = s.wait_head[x]
        while g >= 0:
            size, start, at = s.size[s.value[g]], s.start[g], s.to[g]
            if at >= n1:
                start += s.before[s.n]
            least = s.in_least[g] if s.in_least[g] > s.free_at[g] else s.free_at[g]
            while at > least and s.before[at] > start and _left(s, at - 1) >= size:
                at -= 1
                _take(s, at, size)
            s.in_at[g] = at
            g = s.wait_next[g]
    floor = -2 * n1
    for x in range(<int32_t>s.n):
        g = s.wait_head[x]
        while g >= 0:
            size, at = s.size[s.value[g]], s.in_at[g]
            wraps = n1 if s.to[g] >= n1 else 0
            least = s.in_least[g] if s.in_least[g] > s.free_at[g] else s.free_at[g]
            if least < floor + wraps:
                least = floor + wraps
            while at > least and _left(s, at - 1) >= size:
                at -= 1
                _take(s, at, size)
            s.in_at[g] = at
            floor = at - wraps
            g = s.wait_next[g]


cdef inline void _event(Cycle *s, int32_t kind, int32_t subject, int32_t gone, double seconds) noexcept nogil:
    cdef Py_ssize_t e = s.n_events
    s.n_events = e + 1
    s.event[e] = kind
    s.subject[e] = subject
    s.gone[e] = gone
    s.seconds[e] = seconds


cdef void _places(Cycle *s) noexcept nogil:
    """Which frees and prefetches stand at each position of the text; of prefetches those of this step's uses first."""
    cdef int32_t x, g, n1 = <int32_t>s.n + 1, turn
    for x in range(n1):
        s.free_head[x] = -1
        s.in_head[x] = -1
    for g in range(<int32_t>s.n_gaps):
        x = s.free_at[g]
        _append(s.free_head, s.free_tail, s.free_next, x if x < n1 else x - n1, g)
    for turn in range(2):
        for x in range(n1 - 1):
            g = s.wait_head[x]
            while g >= 0:
                if turn == (s.in_at[g] < n1 <= s.to[g]):
                    _append(s.in_head, s.in_tail, s.in_next, s.in_at[g] - (n1 if s.in_at[g] >= n1 else 0), g)
                g = s.wait_next[g]


cdef void _text(Chain *c, Work *w, Groups *p, Cycle *s) noexcept nogil:
    """The step's events in program order."""
    cdef int32_t x, g, t, v, k
    cdef Py_ssize_t update = 0
    s.n_events = 0
    _places(s)
    for x in range(<int32_t>s.n + 1):
        _event(s, E_HERE, x, -1, 0.0)
        g = s.free_head[x]
        while g >= 0:
            v = s.value[g]
            _event(s, E_FREE if s.copies[g] or v < s.base else E_DROP, v, -1, 0.0)
            g = s.free_next[g]
        while update < s.n_order and s.update_at[s.order[update]] <= x:
            k = s.order[update]
            update += 1
            if s.update_at[k] == x and (x == s.n or s.act[x] != -1 - k):
                _event(s, E_H, k, -1, p.host[k])
        g = s.in_head[x]
        while g >= 0:
            _event(s, E_PREFETCH, s.value[g], -1, s.size[s.value[g]] / c.in_bandwidth)
            g = s.in_next[g]
        if x == s.n:
            break
        g = s.wait_head[x]
        while g >= 0:
            _event(s, E_WAIT, s.value[g], -1, 0.0)
            g = s.wait_next[g]
        t = s.act[x]
        if t < 0:
            _event(s, E_U, -1 - t, -1, s.lasts[x])
        elif w.kind[t] == BACK:
            _event(s, E_B, t, w.gone[t], s.lasts[x])
        elif w.kind[t] == NONE:
            _event(s, E_NONE, t, w.gone[t], s.lasts[x])
        else:
            _event(s, E_ALL if w.kind[t] == ALL else E_CK, t, -1, s.lasts[x])
            if w.gone[t] >= 0:
                _event(s, E_DROP, w.gone[t], -1, 0.0)
        g = s.out_head[x]
        while g >= 0:
            _event(s, E_OFFLOAD, s.value[g], -1, s.size[s.value[g]] / c.out_bandwidth)
            g = s.out_next[g]


cdef double _lanes(Chain *c, Work *w, Groups *p, Cycle *s) noexcept nogil:
    """Seconds of a steady step; `before` and `out_end` then say when things happened in the last one."""
    cdef Py_ssize_t e, period, x
    cdef int32_t v, g, kind, K = <int32_t>p.K
    cdef double compute = 0.0, begin = 0.0, second = 0.0
    cdef Lanes *l = &s.lanes
    reset(l)
    memset(l.copy_end, 0, (s.base + 3 * K) * sizeof(double))
    memset(l.off_end, 0, (s.base + 3 * K) * sizeof(double))
    for period in range(PERIODS):
        if period == 2:
            second = compute
        begin = compute
        for e in range(s.n_events):
            kind, v = s.event[e], s.subject[e]
            if kind == E_HERE:
                s.before[v] = compute - begin
            elif kind == E_FREE or kind == E_DROP:
                compute = _later(compute, copied(l, v))
                l.copy_end[v] = 0.0
            elif kind == E_WAIT:
                compute = _later(compute, copied(l, v))
            elif kind == E_PREFETCH:
                issue(l, BACK_IN, v, compute, s.seconds[e])
            elif kind == E_OFFLOAD:
                issue(l, OUT, v, compute, s.seconds[e])
            elif kind == E_U:
                for x in range(3):
                    compute = _later(compute, copied(l, s.base + <int32_t>x * K + v))
                compute += s.seconds[e]
            elif kind == E_H:
                issue(l, HOST, s.base + (3 + <int32_t>period) * K + v, compute, s.seconds[e])
            else:
                compute += s.seconds[e]
                if kind == E_B:
                    compute = _later(compute, copied(l, w.saved_set[v]))
                    l.copy_end[w.saved_set[v]] = 0.0
                if s.gone[e] >= 0:
                    compute = _later(compute, copied(l, s.gone[e]))
                    l.copy_end[s.gone[e]] = 0.0
    drained(l)
    for g in range(<int32_t>s.n_gaps):
        if s.copies[g]:
            s.out_end[g] = l.off_end[s.value[g]] - begin
    for x in range(s.n + 1):
        s.before[s.n + 1 + x] = s.before[x] + (compute - begin)
    return (compute - second) / 2


cdef void _work(Chain *c, Groups *p, Cycle *s) noexcept nogil:
    """What compute, the links and the host have to do in a step, apart."""
    cdef Py_ssize_t g
    cdef int32_t k
    cdef double out = 0.0, back = 0.0, host = 0.0
    for g in range(s.n_gaps):
        if s.copies[g]:
            out += s.size[s.value[g]] / c.out_bandwidth
        if s.to[g] >= 0:
            back += s.size[s.value[g]] / c.in_bandwidth
    for g in range(s.n_order):
        k = s.order[g]
        if s.update_at[k] == s.n or s.act[s.update_at[k]] != -1 - k:
            host += p.host[k]
    s.work = s.least + out + back + host


cdef double flow(Chain *c, Work *w, Groups *p, Cycle *s, double enough, int rounds, int *best) noexcept nogil:
    """Seconds of a steady step, the best of `rounds`, and which; not to be told apart above `enough`."""
    cdef int32_t g, x, n1 = <int32_t>s.n + 1
    cdef double found = INF, now
    cdef int r
    best[0] = 0
    _work(c, p, s)
    if s.least > enough:
        return s.least
    for x in range(n1):
        s.wait_head[x] = -1
    for g in range(<int32_t>s.n_gaps):
        if s.to[g] >= 0:
            x = s.to[g]
            _append(s.wait_head, s.wait_tail, s.wait_next, x if x < n1 else x - n1, g)
    _alone(c, s)
    for x in range(n1):
        s.before[n1 + x] = s.before[x] + s.before[s.n]
    for r in range(rounds):
        memcpy(s.left, s.room, n1 * sizeof(int64_t))
        _frees(s)
        _starts(c, s)
        _prefetches(s)
        _text(c, w, p, s)
        now = _lanes(c, w, p, s)
        if now < found:
            found = now
            best[0] = r
        if found <= s.least * (1 + 1e-12) or now > 2 * enough:
            break
    return found


cdef inline int64_t _gone(Cycle *s, int32_t v) noexcept nogil:
    """Bytes that the host is rid of once v is dropped."""
    if v < 0 or not s.on_host[v]:
        return 0
    s.on_host[v] = 0
    return s.size[v]


cdef int64_t host_peak(Work *w, Groups *p, Cycle *s) noexcept nogil:
    """The most bytes that the host holds during a step; what it holds at the start is what it holds at the end."""
    cdef Py_ssize_t e
    cdef int32_t g, v, x, K = <int32_t>p.K
    cdef int64_t now = 0, peak
    memset(s.on_host, 0, s.base + 3 * K)
    for g in range(s.n_gaps):
        if s.value[g] >= s.base and (s.value[g] < s.base + K or s.value[g] >= s.base + 2 * K):
            s.on_host[s.value[g]] = 1
    for g in range(K):
        if p.g[g] > 0 and not (s.update_at[g] < s.n and s.act[s.update_at[g]] == -1 - g):
            s.on_host[s.base + g] = s.on_host[s.base + 2 * K + g] = 1
    for g in range(s.base, s.base + 3 * K):
        now += s.size[g] if s.on_host[g] else 0
    peak = now
    for e in range(s.n_events):
        v = s.subject[e]
        if s.event[e] == E_OFFLOAD:
            s.on_host[v] = 1
            now += s.size[v]
            peak = now if now > peak else peak
        elif s.event[e] == E_U:
            for x in range(3):
                now -= _gone(s, s.base + x * K + v)
        elif s.event[e] == E_H:
            now -= _gone(s, s.base + K + v)
        elif s.event[e] == E_B:
            now -= _gone(s, w.saved_set[v]) + _gone(s, s.gone[e])
        elif s.event[e] == E_NONE:
            now -= _gone(s, s.gone[e])
        elif s.event[e] == E_DROP and v < s.base:
            now -= _gone(s, v)
    return peak
