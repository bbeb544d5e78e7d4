"""What decoding a plan works on: a chain's costs, the bits of a plan's codes, and the room that the passes share."""

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
    int64_t memory      # bytes while it runs, prefetches risen included


cdef struct Value:
    int32_t level
    int32_t form        # -1 for a, else the form of ā
    int64_t size
    bint movable, moves, apart, on
    List uses           # yet to come
    int32_t gap_of


# An absence from the device.
cdef struct Gap:
    int32_t value, begin, end
    int32_t floor       # no prefetch before the operation after this one


# Workspace: `cap` operations, as many values, twice as many uses.
cdef struct Work:
    Py_ssize_t cap
    Operation *op
    Value *value
    Lanes lanes
    int32_t *use_op
    int32_t *use_next
    Gap *gap            # in order of `free`
    int32_t *gap_next   # next prefetch at the same place
    int32_t *reload     # the gaps in order of need
    List *place         # prefetches before each operation
    # stages
    int32_t *have
    int32_t *stash      # ā on the host that `have` does not show, or -1
    int32_t *visits
    int32_t *live       # movable values on the device
    Event *event        # of the decoded step, in program order
    Py_ssize_t n_events


cdef inline double forward_time(Chain *c, Work *w, int32_t t, int32_t next) noexcept nogil:
    """Seconds of the forward t; `next` is the operation after it on the compute lane, below 0 for an update. Right
    before B i it is a replay, which stops early, unless i is L."""
    cdef int32_t i = w.op[t].stage
    if w.op[t].kind == ALL and next >= 0 and w.op[next].kind == BACK and w.op[next].stage == i:
        return c.u_again[i]
    return c.u_F[i]


cdef inline void add_event(Work *w, int32_t kind, int32_t subject, double seconds = 0.0, int32_t first = -1,
                           int32_t second = -1, int32_t third = -1) noexcept nogil:
    w.event[w.n_events] = Event(kind, subject, seconds, [first, second, third])
    w.n_events += 1
