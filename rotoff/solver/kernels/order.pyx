# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The order of a plan's operations: a search that moves one of them at a time, on exact bytes.

An operation reads and writes values. Two of them may change places unless one writes what the other one reads or
writes; then every order is legal whose bytes fit. What an operation needs beyond what is held before it, and by how
much it changes that, is the same in every order. A step follows a step, so some operations may also move across its
end: the last one of a step becomes the first one of the next. `rotoff.solver.reorder` makes the rows.
"""

import numpy as np

from libc.math cimport log, pow
from libc.stdint cimport int8_t, int32_t, int64_t, uint8_t, uint64_t
from libc.string cimport memcmp, memcpy, memmove

from rotoff.solver.kernels.lanes cimport PERIODS, Event, Job, Lanes, steady
from rotoff.solver.kernels.moves cimport below, unit

cdef enum:
    FARTHEST = 7  # a move passes at most 2 ** this many operations


# A row of rotoff.solver.reorder.OPERATION.
cdef struct Operation:
    int64_t need, more, host_more  # bytes beyond those held, and changes of those
    int32_t first, last            # of its accesses
    int32_t crosses                # whether it may move across the step's end


cdef struct Text:
    Py_ssize_t n
    int64_t limit, host_limit
    Operation *op
    Event *event
    const int32_t *access          # twice the value, and 1 where it is written; ascending
    Lanes lanes


cdef inline bint _tied(Text *t, Operation *a, Operation *b) noexcept nogil:
    """Whether the order of the two matters to what is legal."""
    cdef Py_ssize_t x = a.first, y = b.first
    cdef int32_t u, v
    while x < a.last and y < b.last:
        u, v = t.access[x] >> 1, t.access[y] >> 1
        if u == v:
            if (t.access[x] | t.access[y]) & 1:
                return True
            x += 1
            y += 1
        elif u < v:
            x += 1
        else:
            y += 1
    return False


cdef inline double _seconds(Text *t, const int32_t *order, bint exact) noexcept nogil:
    cdef double[2] unused
    return steady(&t.lanes, t.event, order, t.n, exact, NULL, unused)


cdef inline bint _fits(Text *t, Operation *op, int64_t held, int64_t host) noexcept nogil:
    return held + op.need <= t.limit and (t.host_limit < 0 or host + op.host_more <= t.host_limit)


cdef bint _cross(Text *t, int32_t *order, int64_t *held, int64_t *host, bint ahead) noexcept nogil:
    """Make the last operation the first one (ahead), or the first one the last; returns whether that fits."""
    cdef Py_ssize_t n = t.n, at = n - 1 if ahead else 0, to = n - 1 - at, old = 0 if ahead else 1
    cdef int32_t moved = order[at]
    cdef Operation *op = &t.op[moved]
    cdef Operation *last = &t.op[order[n - 1]]
    cdef int64_t now = held[0] - op.more if ahead else held[n - 1] + last.more
    cdef int64_t now_host = host[0] - op.host_more if ahead else host[n - 1] + last.host_more
    if not op.crosses or not _fits(t, op, now, now_host):
        return False
    memmove(order + 1 - old, order + old, (n - 1) * sizeof(int32_t))
    memmove(held + 1 - old, held + old, (n - 1) * sizeof(int64_t))
    memmove(host + 1 - old, host + old, (n - 1) * sizeof(int64_t))
    order[to], held[to], host[to] = moved, now, now_host
    return True


cdef void _shift(Text *t, int32_t *order, int64_t *held, int64_t *host, Py_ssize_t at, Py_ssize_t far,
                 bint ahead) noexcept nogil:
    """Move the operation at position `at` by up to `far` positions ahead or back, as far as is legal and fits."""
    cdef int32_t moved = order[at]
    cdef Operation *op = &t.op[moved]
    cdef Operation *other
    cdef int64_t now = held[at], now_host = host[at], then, then_host, its, its_host
    cdef Py_ssize_t to = at, side = 1 if ahead else -1
    while far > 0:
        far -= 1
        if to == (t.n - 1 if ahead else 0):
            order[to], held[to], host[to] = moved, now, now_host
            if not _cross(t, order, held, host, ahead):
                return
            to = t.n - 1 - to
            now, now_host = held[to], host[to]
            continue
        other = &t.op[order[to + side]]
        then, then_host = now + side * other.more, now_host + side * other.host_more
        its = now if ahead else then + op.more
        its_host = now_host if ahead else then_host + op.host_more
        if _tied(t, op, other) or not _fits(t, other, its, its_host) or not _fits(t, op, then, then_host):
            break
        order[to], held[to], host[to] = order[to + side], its, its_host
        now, now_host = then, then_host
        to += side
    order[to], held[to], host[to] = moved, now, now_host


cdef class Order:
    """The operations of one sequence of a chain with parameters.

    Args:
        chain: the costs. rows, events: `rotoff.solver.reorder.OPERATION` and `EVENT`, one for each operation. access:
            see `Text`. movable: the operations that may move. base: the number of the first group's ``w``. held,
            host_held: bytes at the start. limit, host_limit: bytes; None for no limit.
    """

    cdef Text t
    cdef object keep
    cdef int64_t[2] start

    def __init__(self, chain, rows, events, const int32_t[::1] access, const int32_t[::1] movable, Py_ssize_t base,
                 int64_t held, int64_t host_held, int64_t limit, host_limit):
        cdef Text *t = &self.t
        cdef Py_ssize_t K = len(chain.parameters)
        cdef uint8_t[::1] ops = rows.view(np.uint8), event = events.view(np.uint8)
        room = np.zeros((base + (3 + PERIODS) * K + 1) * sizeof(Job), np.int8)
        update = np.zeros(K + 1, np.int32)
        cdef int8_t[::1] job = room
        cdef int32_t[::1] last = update
        t.n, t.limit = len(rows), limit
        t.host_limit = -1 if host_limit is None else min(host_limit, 2**63 - 1)
        t.op, t.event, t.access = <Operation *>&ops[0], <Event *>&event[0], &access[0]
        t.lanes.share[0], t.lanes.share[1] = chain.bidirectional_shares
        t.lanes.back, t.lanes.base, t.lanes.K = 1 if chain.duplex else 0, <int32_t>base, <int32_t>K
        t.lanes.apart = t.lanes.share[0] == 1.0 and t.lanes.share[1] == 1.0
        t.lanes.job, t.lanes.update = <Job *>&job[0], &last[0]
        self.start[0], self.start[1] = held, host_held
        self.keep = (rows, events, access, movable, room, update)

    def seconds(self, const int32_t[::1] order):
        """Seconds of a step in this order."""
        return _seconds(&self.t, &order[0], True)

    def anneal(self, int32_t[::1] order, Py_ssize_t tries, uint64_t seed, double hot, double cold,
               int32_t[::1] best, const int8_t[::1] stop):
        """Search from `order`, which fits (changed in place to the last one); the best one goes to `best`.

        Simulated annealing. tries: moves. hot, cold: temperatures in seconds. stop: the search ends soon after stop[0]
        is set.
        """
        cdef uint64_t state = seed * <uint64_t>2654435769 + <uint64_t>88172645463325252
        cdef Text *t = &self.t
        cdef Py_ssize_t n = t.n, x, at = 0, step, moves, far
        cdef int64_t[::1] room = np.zeros(4 * n, np.int64)
        cdef int64_t *held = &room[0]
        cdef int64_t *host = held + n
        cdef int64_t *kept_held = host + n
        cdef const int32_t[::1] movable = self.keep[3]
        cdef int32_t[::1] kept = np.zeros(n, np.int32)
        cdef double now, found, cost, temperature
        held[0], host[0] = self.start
        for x in range(1, n):
            held[x] = held[x - 1] + t.op[order[x - 1]].more
            host[x] = host[x - 1] + t.op[order[x - 1]].host_more
        with nogil:
            now = found = _seconds(t, &order[0], False)
            memcpy(&best[0], &order[0], n * sizeof(int32_t))
            for step in range(tries):
                if stop[0]:
                    break
                temperature = hot * pow(cold / hot, (<double>step) / tries)
                memcpy(&kept[0], &order[0], n * sizeof(int32_t))
                memcpy(kept_held, held, 2 * n * sizeof(int64_t))
                for moves in range(1 + below(&state, 3) // 2):
                    x = movable[below(&state, movable.shape[0])]
                    for at in range(n):
                        if order[at] == x:
                            break
                    far = 1 + below(&state, <Py_ssize_t>1 << below(&state, FARTHEST + 1))
                    _shift(t, &order[0], held, host, at, far, below(&state, 2))
                if memcmp(&order[0], &kept[0], n * sizeof(int32_t)) == 0:
                    continue
                cost = _seconds(t, &order[0], False)
                if cost <= now - temperature * log(unit(&state) + 1e-300):
                    now = cost
                    if now < found:
                        found = now
                        memcpy(&best[0], &order[0], n * sizeof(int32_t))
                else:
                    memcpy(&order[0], &kept[0], n * sizeof(int32_t))
                    memcpy(held, kept_held, 2 * n * sizeof(int64_t))
