# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Second half of decoding a step with parameters: when values are freed and prefetched, and the time of the step.

Out: first in, first out from the moment that a value is made or updated; each free as late as its copy's predicted end
while room lasts. In: earliest deadline first, scheduled backward around the cycle; each prefetch at its latest start
while room lasts. Remaining room is used for earlier prefetches. The lanes then give the times, which are the prediction
of the next round.
"""

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

from rotoff.solver.kernels.cycle cimport Cycle, Groups
from rotoff.solver.kernels.lanes cimport (ALL, CK, E_DROP, E_FREE, E_H, E_HERE, E_OFFLOAD, E_PREFETCH, E_U, E_WAIT, OUT,
                                         Event, steady)
from rotoff.solver.kernels.work cimport Chain, Gap, Operation, Position, Work, add_event, append

cdef double INF = float("inf")
cdef double NEAR = 1.0  # of `enough`: how far above it the first round may be; later ones gain less and less


cdef void _alone(Chain *c, Work *w, Cycle *s) noexcept nogil:
    """A first prediction: compute is as slow as the busiest lane throughout, and copies out run one after another."""
    cdef Py_ssize_t x, turn
    cdef int32_t g
    cdef double now = 0.0, lane = 0.0, period, slower = s.busiest / s.least if s.least > 0.0 else 1.0
    for x in range(w.n):
        s.before[x] = now
        now += w.at[x].lasts * slower
    s.before[w.n] = period = now
    for turn in range(2):
        for x in range(w.n):
            g = w.at[x].leaving.head
            while g >= 0:
                lane = max(lane, s.before[x + 1]) + w.gap[g].size / c.out_bandwidth
                w.gap[g].out_end = lane
                g = w.out_next[g]
        lane -= period


cdef inline int64_t _left(Work *w, Cycle *s, int32_t x) noexcept nogil:
    return s.left[x if x <= w.n else x - w.n - 1]


cdef inline void _take(Work *w, Cycle *s, int32_t x, int64_t size) noexcept nogil:
    s.left[x if x <= w.n else x - w.n - 1] -= size


cdef void _frees(Work *w, Cycle *s) noexcept nogil:
    """Each gap begins right after the use before it, or at the end of its copy out while room lasts."""
    cdef int32_t x, g, at, most
    cdef int64_t size
    cdef double end
    for g in range(<int32_t>w.n_gaps):
        w.gap[g].free_at = w.gap[g].begin + 1
    for x in range(<int32_t>w.n):
        g = w.at[x].leaving.head
        while g >= 0:
            size, end = w.gap[g].size, w.gap[g].out_end
            if w.gap[g].begin < x:  # made in the step before
                end -= s.before[w.n]
            at, most = w.gap[g].begin + 1, w.gap[g].free_most
            while at < most and s.before[at] < end and _left(w, s, at) >= size:
                _take(w, s, at, size)
                at += 1
            w.gap[g].free_at = at
            g = w.out_next[g]


cdef void _starts(Chain *c, Work *w, Cycle *s) noexcept nogil:
    """The latest starts of the copies in such that none is late: backward around the cycle, twice to close it."""
    cdef Py_ssize_t x, turn
    cdef int32_t g
    cdef double cursor = INF
    for turn in range(2):
        for x in range(w.n - 1, -1, -1):
            g = w.at[x].awaited.head
            while g >= 0:
                if cursor > s.before[x]:
                    cursor = s.before[x]
                cursor -= w.gap[g].size / c.in_bandwidth
                w.gap[g].start = cursor
                g = w.wait_next[g]
        cursor += s.before[w.n]


cdef inline void _earlier(Work *w, Cycle *s, Gap *gap, double start) noexcept nogil:
    """Issue a prefetch earlier, while room lasts, until it may begin at `start`."""
    cdef int32_t least = max(gap.in_least, gap.free_at)
    while gap.in_at > least and s.before[gap.in_at] > start and _left(w, s, gap.in_at - 1) >= gap.size:
        gap.in_at -= 1
        _take(w, s, gap.in_at, gap.size)


cdef void _prefetches(Work *w, Cycle *s) noexcept nogil:
    """Each gap ends before its copy's latest start while room lasts; then, in order of need, as early as the remaining
    room allows."""
    cdef int32_t x, g, turn
    cdef Gap *gap
    for turn in range(2):
        for x in range(<int32_t>w.n):
            g = w.at[x].awaited.head
            while g >= 0:
                gap = &w.gap[g]
                if turn == 0:
                    gap.in_at = gap.end
                    _earlier(w, s, gap, gap.start + (s.before[w.n] if gap.end > w.n else 0.0))
                else:
                    _earlier(w, s, gap, -INF)
                g = w.wait_next[g]


cdef void _places(Work *w) noexcept nogil:
    """List the frees and prefetches at each position of the sequence; prefetches for this step's uses come first."""
    cdef int32_t x, g, n1 = <int32_t>w.n + 1, turn
    for x in range(n1):
        w.at[x].freed.head = w.at[x].fetched.head = -1
    for g in range(<int32_t>w.n_gaps):
        x = w.gap[g].free_at
        append(&w.at[x if x < n1 else x - n1].freed, w.free_next, g)
    for turn in range(2):
        for x in range(n1 - 1):
            g = w.at[x].awaited.head
            while g >= 0:
                if turn == (w.gap[g].in_at < n1 <= w.gap[g].end):
                    append(&w.at[w.gap[g].in_at - (n1 if w.gap[g].in_at >= n1 else 0)].fetched, w.in_next, g)
                g = w.wait_next[g]


cdef void text(Chain *c, Work *w, Groups *p, Cycle *s) noexcept nogil:
    """The step's events in program order."""
    cdef int32_t x, g, t, v, k, K = <int32_t>p.K
    cdef Py_ssize_t update = 0
    cdef bint drops
    cdef Operation *op
    cdef Position *at
    w.n_events = 0
    for x in range(<int32_t>w.n + 1):
        at = &w.at[x]
        if K > 0:
            add_event(w, E_HERE, x)
        g = at.freed.head
        while g >= 0:
            v = w.gap[g].value
            add_event(w, E_FREE if w.gap[g].copies or v < s.base else E_DROP, v)
            g = w.free_next[g]
        while update < s.n_order and s.group[s.order[update]].update_at <= x:
            k = s.order[update]
            update += 1
            if s.group[k].update_at == x and s.group[k].on_host:
                add_event(w, E_H, k, p.group[k].host)
        g = at.fetched.head
        while g >= 0:
            add_event(w, E_PREFETCH, w.gap[g].value, w.gap[g].size / c.in_bandwidth)
            g = w.in_next[g]
        if x == w.n:
            break
        g = at.awaited.head
        while g >= 0:
            add_event(w, E_WAIT, w.gap[g].value)
            g = w.wait_next[g]
        t = at.act
        if t < 0:
            k = -1 - t
            add_event(w, E_U, k, at.lasts, s.base + k, s.base + K + k, s.base + 2 * K + k)
        else:
            op = &w.op[t]
            drops = op.gone >= 0 and (op.kind == ALL or op.kind == CK)
            add_event(w, op.kind, t, at.lasts, op.saved_set, -1 if drops else op.gone)
            if drops:
                add_event(w, E_DROP, op.gone)
        g = at.leaving.head
        while g >= 0:
            add_event(w, E_OFFLOAD, w.gap[g].value, w.gap[g].size / c.out_bandwidth)
            g = w.out_next[g]


cdef double _lanes(Work *w, Cycle *s) noexcept nogil:
    """Seconds of a steady step; `before` and `out_end` then hold the times of the last one."""
    cdef double[2] span
    cdef double found = steady(&w.lanes, w.event, NULL, w.n_events, False, s.before, span)
    cdef Py_ssize_t g, x
    for g in range(w.n_gaps):
        if w.gap[g].copies:
            w.gap[g].out_end = w.lanes.job[w.gap[g].value].off_end - span[0]
    for x in range(w.n + 1):
        s.before[w.n + 1 + x] = s.before[x] + (span[1] - span[0])
    return found


cdef void work(Chain *c, Work *w, Groups *p, Cycle *s) noexcept nogil:
    """The seconds that compute, the links and the host work in a step, each alone."""
    cdef Py_ssize_t g
    cdef int32_t k
    cdef double out = 0.0, back = 0.0, host = 0.0
    for g in range(w.n_gaps):
        if w.gap[g].copies:
            out += w.gap[g].size / c.out_bandwidth
        if w.gap[g].end >= 0:
            back += w.gap[g].size / c.in_bandwidth
    for g in range(s.n_order):
        k = s.order[g]
        if s.group[k].on_host:
            host += p.group[k].host
    s.work = s.least + out + back + host
    if w.lanes.back == OUT:
        out += back
    s.busiest = max(s.least, out, back, host)


cdef double flow(Chain *c, Work *w, Groups *p, Cycle *s, double enough, int rounds, int *best) noexcept nogil:
    """Seconds of a steady step, the best of `rounds`, and which round; above `enough` the result is not exact."""
    cdef int32_t g, x, n1 = <int32_t>w.n + 1
    cdef double found = INF, now, near = NEAR
    cdef int r
    best[0] = 0
    if s.busiest > enough:
        return s.busiest
    for x in range(n1):
        w.at[x].awaited.head = -1
    for g in range(<int32_t>w.n_gaps):
        if w.gap[g].end >= 0:
            x = w.gap[g].end
            append(&w.at[x if x < n1 else x - n1].awaited, w.wait_next, g)
    _alone(c, w, s)
    for x in range(n1):
        s.before[n1 + x] = s.before[x] + s.before[w.n]
    for r in range(rounds):
        memcpy(s.left, w.room, n1 * sizeof(int64_t))
        _frees(w, s)
        _starts(c, w, s)
        _prefetches(w, s)
        _places(w)
        text(c, w, p, s)
        now = _lanes(w, s)
        if now >= found:
            break
        found = now
        best[0] = r
        if found <= s.busiest * (1 + 1e-12) or found > enough * (1 + near):
            break
        near /= 4
    return found


cdef inline int64_t _gone(Work *w, int32_t v) noexcept nogil:
    """Remove v from the host; returns the bytes that this frees."""
    if v < 0 or not w.value[v].on:
        return 0
    w.value[v].on = False
    return w.value[v].size


cdef int64_t host_peak(Work *w, Groups *p, Cycle *s) noexcept nogil:
    """The most bytes that the host holds during a step, which starts and ends with the same values there."""
    cdef Py_ssize_t e
    cdef int32_t g, v, x, K = <int32_t>p.K
    cdef int64_t now = 0, peak
    cdef Event *event
    for v in range(s.base, s.base + 3 * K):
        w.value[v].on = False
    for g in range(w.n_gaps):
        v = w.gap[g].value
        if v >= s.base and not s.base + K <= v < s.base + 2 * K:
            w.value[v].on = True
    for g in range(K):
        if p.group[g].g > 0 and s.group[g].on_host:
            w.value[s.base + g].on = w.value[s.base + 2 * K + g].on = True
    for v in range(s.base, s.base + 3 * K):
        now += w.value[v].size if w.value[v].on else 0
    peak = now
    for e in range(w.n_events):
        event, v = &w.event[e], w.event[e].subject
        if event.kind == E_OFFLOAD:
            w.value[v].on = True
            now += w.value[v].size
            peak = max(peak, now)
        elif event.kind == E_H:
            now -= _gone(w, s.base + K + v)
        elif event.kind == E_DROP and v < s.base:
            now -= _gone(w, v)
        for x in range(3):
            now -= _gone(w, event.waits[x])
    return peak
