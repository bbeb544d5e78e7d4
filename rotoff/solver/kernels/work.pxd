"""What decoding a plan works on: a chain's costs, the bits of a plan's codes, and the room that the passes share.

Positions: the n operations of the compute lane in program order, updates on the device included, then position n, the
end of the step. A step with parameters follows itself, so position n + 1 is position 0 of the next; such later
positions stand in gaps.
"""

from libc.stdint cimport int8_t, int32_t, int64_t

from rotoff.solver.kernels.lanes cimport ALL, BACK, Event, Lanes

cdef enum:
    MOVE = 1   # the value made may move to the host
    DROP = 2   # the input is dropped once the stage has run
    APART = 4  # B q+1 takes a_q, made again for it while ā_q waits on the host
    EARLY = 8  # the same from the start: a_q is made right after ā_q, which leaves at once
    KIND = 4   # code >> KIND: 0 is F_ck, 1 + k is F_all (k = 0) or F_sel k

cdef struct Chain:
    Py_ssize_t L, K
    int64_t limit, host_limit
    double out_bandwidth, in_bandwidth
    int64_t *out
    int64_t *grad
    int64_t *ck_transient
    int64_t *saved
    int64_t *f_transient
    int64_t *b_transient
    double *u_F
    double *u_again   # of a forward that stops early
    double *u_B
    int32_t *n_forms


# Numbers in a row, by the first and the last of them; -1 for none. What follows each stands in an array beside it.
cdef struct List:
    int32_t head, tail


cdef inline void append(List *l, int32_t *next, int32_t x) noexcept nogil:
    next[x] = -1
    if l.head < 0:
        l.head = x
    else:
        next[l.tail] = x
    l.tail = x


cdef struct Operation:
    int8_t kind
    int32_t stage, form
    int32_t source      # value used as input, -1 for a_0
    int32_t made        # value made, -1 for B
    int32_t gone        # value dropped right after, or -1
    int32_t saved_set   # B: the value that is ā_i
    int32_t away        # value that must be on the host meanwhile, or -1


# Of stages, then w, g and o of each group, whose `size` alone counts.
cdef struct Value:
    int32_t level
    int32_t form        # -1 for a, else the form of ā
    int64_t size
    int8_t movable, moves, apart
    int8_t on           # the device; in `host_peak` the host
    List uses           # yet to come
    int32_t made        # operation
    int32_t gap_of
    int32_t away_from   # of the operations at which it must be away, the first, or -1, and the last
    int32_t away_until


# An absence from the device between two uses.
cdef struct Gap:
    int32_t value
    int64_t size
    int32_t begin       # position of the use before
    int32_t end         # position of the use after, or -1
    int32_t free_most, in_least
    bint copies         # whether it begins with a copy out
    int32_t free_at, in_at
    double out_end, start


cdef struct Position:
    int32_t act         # operation of the activations, or -1 - group
    double lasts
    List leaving, freed, fetched, awaited  # gaps


# Workspace: `cap` operations, as many values, twice as many uses.
cdef struct Work:
    Py_ssize_t cap, n, n_gaps, n_events
    int32_t n_values, n_uses
    Operation *op
    Value *value
    Lanes lanes
    int32_t *use_op
    int32_t *use_next
    Position *at
    int64_t *room       # bytes of the limit that are left
    int64_t over        # the most that exceed it
    Gap *gap
    int32_t *out_next
    int32_t *free_next
    int32_t *in_next
    int32_t *wait_next
    # stages
    int32_t *have
    int32_t *stash      # ā on the host that `have` does not show, or -1
    int32_t *visits
    int32_t *live       # movable values on the device
    Event *event        # of the decoded step, in program order


cdef inline int32_t add_gap(Work *w, int32_t v, int32_t after, int32_t before, int32_t made) noexcept nogil:
    """A gap of v between uses at two positions; made: where its copy out is issued, -1 if the host has a copy."""
    cdef int32_t x = <int32_t>w.n_gaps, most = before if before >= 0 else <int32_t>w.n
    w.n_gaps += 1
    w.gap[x] = Gap(v, w.value[v].size, after, before, most, after + 1, made >= 0, 0, 0, 0.0, 0.0)
    if made >= 0:
        append(&w.at[made].leaving, w.out_next, x)
    return x


cdef inline double seconds(Chain *c, Work *w, int32_t t, int32_t next) noexcept nogil:
    """Of the operation t; `next` is the one after it on the compute lane, below 0 for an update. A forward right before
    its B is a replay, which stops early, unless it is that of L."""
    cdef Operation *op = &w.op[t]
    if op.kind == BACK:
        return c.u_B[op.stage * c.K + op.form]
    if op.kind == ALL and next >= 0 and w.op[next].kind == BACK and w.op[next].stage == op.stage:
        return c.u_again[op.stage]
    return c.u_F[op.stage]


cdef inline int64_t beside(Chain *c, Operation *op, int64_t *gradient) noexcept nogil:
    """Bytes that an operation needs beside the values. gradient: bytes of the one held before it, and then after it."""
    cdef int32_t i = op.stage
    cdef int64_t need
    if op.kind == BACK:
        gradient[0] = c.grad[i - 1]
        return c.grad[i] + c.grad[i - 1] + c.b_transient[i * c.K + op.form]
    need = gradient[0] + (c.f_transient[i * c.K + op.form] if op.kind == ALL else c.ck_transient[i])
    if i == c.L:  # δ_L is held as soon as stage L has run, also during a free before B L
        gradient[0] = c.grad[i]
        need = max(need, c.grad[i])
    return need


cdef inline void add_event(Work *w, int32_t kind, int32_t subject, double seconds = 0.0, int32_t first = -1,
                           int32_t second = -1, int32_t third = -1) noexcept nogil:
    w.event[w.n_events] = Event(kind, subject, seconds, [first, second, third])
    w.n_events += 1
