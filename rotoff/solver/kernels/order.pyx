# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The order of a plan's operations: a search that moves one of them at a time, on exact bytes.

An operation reads and writes values. Two of them may change places unless one writes what the other one reads or
writes; then every order is legal whose bytes fit. What an operation needs beyond what is held before it, and by how
much it changes that, is the same in every order. A step follows a step, so some operations may also move across its
end: the last one of a step becomes the first one of the next. `rotoff.solver.reorder` makes the rows.
"""

from libc.stdint cimport int16_t, int32_t, int64_t, uint64_t
from libc.string cimport memcpy, memmove

from rotoff.solver.kernels.lanes cimport PERIODS, Event, steady
from rotoff.solver.kernels.moves cimport below
from rotoff.solver.kernels.plan cimport Evaluator, Verdict

cdef double INF = float("inf")

cdef enum:
    FARTHEST = 7  # a move passes at most 2 ** this many operations


# A row of rotoff.solver.reorder.OPERATION.
cdef struct Operation:
    int64_t need, more, host_more  # bytes beyond those held, and changes of those
    int32_t first, last            # of its accesses
    int32_t crosses                # whether it may move across the step's end


cdef struct Text:
    Py_ssize_t n, n_movable
    int64_t limit, host_limit
    Operation *op
    Event *event
    int32_t *access                # twice the value, and 1 where it is written; ascending
    int32_t *movable               # the operations that may move
    int64_t *held                  # bytes before each operation, on the device and on the host
    int64_t *host


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


cdef inline bint _fits(Text *t, Operation *op, int64_t held, int64_t host) noexcept nogil:
    return held + op.need <= t.limit and (t.host_limit < 0 or host + op.host_more <= t.host_limit)


cdef bint _cross(Text *t, int16_t *order, bint ahead) noexcept nogil:
    """Make the last operation the first one (ahead), or the first one the last; returns whether that fits."""
    cdef Py_ssize_t n = t.n, at = n - 1 if ahead else 0, to = n - 1 - at, old = 0 if ahead else 1
    cdef int16_t moved = order[at]
    cdef int64_t *held = t.held
    cdef int64_t *host = t.host
    cdef Operation *op = &t.op[moved]
    cdef Operation *last = &t.op[order[n - 1]]
    cdef int64_t now = held[0] - op.more if ahead else held[n - 1] + last.more
    cdef int64_t now_host = host[0] - op.host_more if ahead else host[n - 1] + last.host_more
    if not op.crosses or not _fits(t, op, now, now_host):
        return False
    memmove(order + 1 - old, order + old, (n - 1) * sizeof(int16_t))
    memmove(held + 1 - old, held + old, (n - 1) * sizeof(int64_t))
    memmove(host + 1 - old, host + old, (n - 1) * sizeof(int64_t))
    order[to], held[to], host[to] = moved, now, now_host
    return True


cdef void _shift(Text *t, int16_t *order, Py_ssize_t at, Py_ssize_t far, bint ahead) noexcept nogil:
    """Move the operation at position `at` by up to `far` positions ahead or back, as far as is legal and fits."""
    cdef int16_t moved = order[at]
    cdef int64_t *held = t.held
    cdef int64_t *host = t.host
    cdef Operation *op = &t.op[moved]
    cdef Operation *other
    cdef int64_t now = held[at], now_host = host[at], then, then_host, its, its_host
    cdef Py_ssize_t to = at, side = 1 if ahead else -1
    while far > 0:
        far -= 1
        if to == (t.n - 1 if ahead else 0):
            order[to], held[to], host[to] = moved, now, now_host
            if not _cross(t, order, ahead):
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


cdef class Order(Evaluator):
    """The operations of one sequence of a chain with parameters. A plan is an order of them, then the bytes that are
    held at its start, on the device and on the host, as four numbers each.

    Args:
        chain, arrays, limit, host_limit: those of `Evaluator`. rows, events: `rotoff.solver.reorder.OPERATION` and
            `EVENT`, one for each operation. access, movable: see `Text`. base: the number of the first group's ``w``.
    """

    cdef Text t

    def __init__(self, chain, arrays, int64_t limit, host_limit, rows, events, access, movable, Py_ssize_t base):
        Evaluator.__init__(self, chain, arrays, limit, host_limit, 1, 0)
        cdef Text *t = &self.t
        K = len(chain.parameters)
        self._lanes(chain, base + (3 + PERIODS) * K + 1, base, K)
        t.n, t.n_movable, t.limit, t.host_limit = len(rows), len(movable), limit, self.c.host_limit
        t.op, t.event = <Operation *>self._input(rows), <Event *>self._input(events)
        t.access, t.movable = <int32_t *>self._input(access), <int32_t *>self._input(movable)
        t.held = <int64_t *>self._room(2 * t.n * sizeof(int64_t))
        t.host = t.held + t.n

    cdef void look(self, const int16_t *order, double enough, double weight, Verdict *r) noexcept nogil:
        cdef double[2] unused
        r[0] = Verdict(0.0, 0, 0, 0.0, 0.0, 0, 0)
        r.makespan = steady(&self.w.lanes, self.t.event, order, self.t.n, enough == INF, NULL, unused)

    cdef void change(self, int16_t *order, uint64_t *state) noexcept nogil:
        """One or two operations move, as far as is legal and fits."""
        cdef Text *t = &self.t
        cdef Py_ssize_t n = t.n, x, at = 0, moves, far
        memcpy(t.held, order + n, sizeof(int64_t))
        memcpy(t.host, order + n + 4, sizeof(int64_t))
        for x in range(1, n):
            t.held[x] = t.held[x - 1] + t.op[order[x - 1]].more
        for x in range(1, n if t.host_limit >= 0 else 1):
            t.host[x] = t.host[x - 1] + t.op[order[x - 1]].host_more
        for moves in range(1 + below(state, 3) // 2):
            x = t.movable[below(state, t.n_movable)]
            for at in range(n):
                if order[at] == x:
                    break
            far = 1 + below(state, <Py_ssize_t>1 << below(state, FARTHEST + 1))
            _shift(t, order, at, far, below(state, 2))
        memcpy(order + n, t.held, sizeof(int64_t))
        memcpy(order + n + 4, t.host, sizeof(int64_t))

    cdef void confine(self, int16_t *order, const int16_t *rules) noexcept nogil:
        """Every order is one of any mode."""
