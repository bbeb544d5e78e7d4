"""The seconds of a step: the lane of compute, and those beside it as in `rotoff.core.lanes`, whose arithmetic this is;
tests hold them equal.

A job is the number of the value that it copies, which has one at a time. Updates on the host have numbers of their own,
K for each period, since nobody may wait for them.
"""

from libc.stdint cimport int16_t, int32_t

cdef enum:
    OUT = 0
    BACK_IN = 1
    HOST = 2


# What a step is made of, as in rotoff.solver.plan_codes.KINDS.
cdef enum:
    ALL = 0  # F_all, or F_sel of a form
    CK = 1
    NONE = 2
    BACK = 3
    E_OFFLOAD = 4
    E_FREE = 5
    E_PREFETCH = 6
    E_WAIT = 7
    E_DROP = 8
    E_U = 9
    E_H = 10
    E_HERE = 11  # no operation: the next position begins
    PERIODS = 4  # as in rotoff.core.steady_step


cdef struct Event:
    int32_t kind
    int32_t subject     # of a move the value, of an update the group
    double seconds
    int32_t waits[3]    # whose copies must end: of values that it drops once it has run, or before U; -1 for none


# What copies a value, by its number.
cdef struct Job:
    int32_t next
    double ready, seconds
    bint out              # whether it is a copy out
    bint held             # whether what it needs has not ended
    double copy_end       # of the value's last copy, below 0 until that is known
    double off_end        # of what made the host's copy, likewise: the copy out, or the update on the host
    double[2] late        # how long both went on after the last period


cdef struct Lanes:
    int32_t back          # the lane of copies in: that of copies out where the link is not duplex
    double[2] share       # of a direction's bandwidth while the other one is busy
    bint apart            # whether that is all of it, in both directions
    int32_t[3] head       # the first job of each lane, or -1
    int32_t[3] tail
    bint[3] begun
    double[3] end         # of the first job if it has begun, else of the last one that ran
    double[3] late        # how long each went on after the last period
    Job *job
    int32_t base, K       # from base on: w of K groups, their g, their o, and their updates on the host
    int32_t *update       # the last one of a group


cdef inline void reset(Lanes *l) noexcept nogil:
    cdef int32_t x
    for x in range(3):
        l.head[x] = l.tail[x] = -1
        l.begun[x] = False
        l.end[x] = 0.0


cdef inline double _begins(Lanes *l, int32_t lane, int32_t job) noexcept nogil:
    """When the first job of a lane may begin; below 0 while that is not known."""
    if l.job[job].held:
        return -1.0
    return l.job[job].ready if l.job[job].ready > l.end[lane] else l.end[lane]


cdef inline void _release(Lanes *l, int32_t job, double now) noexcept nogil:
    if l.job[job].held:
        l.job[job].held = False
        l.job[job].ready = now if now > l.job[job].ready else l.job[job].ready


cdef inline void _ended(Lanes *l, int32_t lane, int32_t job, double now) noexcept nogil:
    cdef int32_t w
    l.end[lane] = now
    if lane == HOST:
        w = l.base + (job - l.base) % l.K
        l.job[w].off_end = l.job[w + 2 * l.K].off_end = now
        _release(l, w, now)
        return
    l.job[job].copy_end = now
    if l.job[job].out:
        l.job[job].off_end = now
        w = job - l.K
        if l.base <= w < l.base + l.K:
            _release(l, l.update[w - l.base], now)


cdef inline void issue(Lanes *l, int32_t direction, int32_t job, double ready, double seconds) noexcept nogil:
    """A job on a lane that begins at `ready` or later, and not before what it needs has ended."""
    cdef int32_t lane = l.back if direction == BACK_IN else direction, w = job
    cdef Job *j = &l.job[job]
    cdef double after = 0.0
    if direction == HOST:
        w = l.base + (job - l.base) % l.K
        l.update[w - l.base] = job
        after = l.job[w + l.K].off_end
    elif direction == BACK_IN:
        after = j.off_end
    j.ready, j.out, j.held = after if after > ready else ready, direction == OUT, after < 0.0
    if l.apart:  # what is issued later changes nothing
        _ended(l, lane, job, _begins(l, lane, job) + seconds)
        return
    j.seconds, j.next = seconds, -1
    if direction == HOST:
        l.job[w].off_end = l.job[w + 2 * l.K].off_end = -1.0
    else:
        j.copy_end = -1.0
        if direction == OUT:
            j.off_end = -1.0
    if l.head[lane] < 0:
        l.head[lane] = job
    else:
        l.job[l.tail[lane]].next = job
    l.tail[lane] = job


cdef inline double _scaled(double end, double now, double by) noexcept nogil:
    return end if by == 1.0 else now + (end - now) * by


cdef inline void _step(Lanes *l) noexcept nogil:
    """The next job begins or ends."""
    cdef int32_t x, at = -1, job, other
    cdef double when, now = 0.0
    cdef bint beside
    for x in range(3):
        job = l.head[x]
        if job < 0:
            continue
        when = l.end[x] if l.begun[x] else _begins(l, x, job)
        if when < 0.0:
            continue
        if at < 0 or when < now:
            at, now = x, when
    other = 1 - at
    beside = at < 2 and l.begun[other]
    job = l.head[at]
    if not l.begun[at]:
        l.begun[at] = True
        l.end[at] = now + l.job[job].seconds
        if beside:
            l.end[at] = _scaled(l.end[at], now, 1.0 / l.share[at])
            l.end[other] = _scaled(l.end[other], now, 1.0 / l.share[other])
        return
    l.begun[at] = False
    l.head[at] = l.job[job].next
    _ended(l, at, job, now)
    if beside:
        l.end[other] = _scaled(l.end[other], now, l.share[other])


cdef inline double copied(Lanes *l, int32_t v) noexcept nogil:
    """When the copy of v has ended, if nothing is issued before that."""
    while l.job[v].copy_end < 0.0:
        _step(l)
    return l.job[v].copy_end


cdef inline double drained(Lanes *l) noexcept nogil:
    """When all jobs have ended: the later of the ends of both directions."""
    while l.head[0] >= 0 or l.head[1] >= 0 or l.head[2] >= 0:
        _step(l)
    return l.end[0] if l.end[0] > l.end[1] else l.end[1]


cdef inline bint _same(double *late, double end, double now) noexcept nogil:
    """Whether something ends as long after `now`, the end of a period, as it did in the period before (`late`)."""
    cdef double before = late[0]
    late[0] = end - now if end > now else 0.0
    return -1e-12 * now < late[0] - before < 1e-12 * now


cdef inline bint same_lanes(Lanes *l, double now) noexcept nogil:
    """Whether the lanes are at the end of a period as they were at that of the one before. If all jobs are, too
    (`same_job`), later periods repeat it. Where the directions slow each other down it is not known yet."""
    cdef int32_t x
    cdef bint same = l.apart
    for x in range(3):
        same &= _same(&l.late[x], l.end[x], now)
    return same


cdef inline bint same_job(Job *j, double now) noexcept nogil:
    cdef bint same = _same(&j.late[0], j.copy_end, now)
    return _same(&j.late[1], j.off_end, now) and same


cdef inline double run(Lanes *l, const Event *events, const int16_t *order, Py_ssize_t n, double now, Py_ssize_t period,
                       double *at) noexcept nogil:
    """Run a step from `now` on; returns when its compute ends. order: of the events; NULL for theirs. at: seconds from
    `now` to each E_HERE."""
    cdef double compute = now
    cdef Py_ssize_t x, y
    cdef int32_t kind, v
    cdef const Event *e
    for x in range(n):
        e = &events[order[x] if order != NULL else x]
        kind, v = e.kind, e.subject
        if kind == E_HERE:
            at[v] = compute - now
        elif kind == E_PREFETCH:
            issue(l, BACK_IN, v, compute, e.seconds)
        elif kind == E_OFFLOAD:
            issue(l, OUT, v, compute, e.seconds)
        elif kind == E_H:
            issue(l, HOST, l.base + (3 + <int32_t>period) * l.K + v, compute, e.seconds)
        elif kind == E_U:
            for y in range(3):
                compute = max(compute, copied(l, e.waits[y]))
            compute += e.seconds
        elif kind <= BACK:
            compute += e.seconds
            for y in range(3):
                v = e.waits[y]
                if v >= 0:
                    compute = max(compute, copied(l, v))
                    l.job[v].copy_end = 0.0
        else:
            compute = max(compute, copied(l, v))
            if kind != E_WAIT:
                l.job[v].copy_end = 0.0
    return compute


cdef inline double steady(Lanes *l, const Event *events, const int16_t *order, Py_ssize_t n, bint exact, double *at,
                          double *span) noexcept nogil:
    """Seconds of a steady step. exact: whether to the machine's last bit. span: start and end of the last one run."""
    cdef Py_ssize_t period, x
    cdef double compute = 0.0, second = 0.0
    cdef bint same
    reset(l)
    for x in range(l.base + 3 * l.K):
        l.job[x].copy_end = l.job[x].off_end = 0.0
    for period in range(PERIODS):
        if period == 2:
            second = compute
        span[0] = compute
        compute = span[1] = run(l, events, order, n, compute, period, at)
        same = same_lanes(l, compute)
        for x in range(l.base, l.base + 3 * l.K):
            same &= same_job(&l.job[x], compute)
        if same and period and not exact:
            second = compute - 2 * (compute - span[0])
            break
    drained(l)
    return (compute - second) / 2
