"""What decoding a step with parameters works on besides: the groups, the genes of a plan, and the room that the passes
share."""

from libc.stdint cimport int16_t, int32_t, int64_t, uint64_t

from rotoff.solver.kernels.work cimport Chain, List, Work

# A group's genes, after the codes of the stages.
cdef enum:
    MASK = 0    # after which uses w leaves: 3 * slot + (0 first forward, 1 later forward, 2 backward); AFTER_UPDATE
    FLAGS = 1
    AT = 2      # after B of which stage the update is issued
    RANK = 3    # order of updates at one place
    GENES = 4
    SLOTS = 4   # stages of a group that have bits of their own
    AFTER_UPDATE = 12

cdef enum:
    STATE_LEAVES = 1
    GRADIENT_LEAVES = 2
    ON_HOST = 4
    STEPS_ASIDE = 8     # w and g leave for updates of groups that begin at the same stage, too
    ALONE = 16          # so do values of stages that may move, between two backwards


# A row of rotoff.solver.placed_search.GROUP.
cdef struct Group:
    int64_t w, g, o, transient
    double update
    double host        # seconds, below 0 where the host cannot
    int32_t first      # smallest stage: its B makes the gradient whole
    int32_t last


cdef struct Groups:
    Py_ssize_t K
    bint after
    Group *group
    int32_t *reads_from  # stage -> where its groups begin in `reads`
    int32_t *reads
    int32_t *slot      # of the stage among those of the group


cdef struct GroupPlaces:
    int32_t update_at  # position of U, or before which H is issued
    bint on_host       # whether it is H
    int32_t begun      # position of the first B
    int32_t whole      # position of the last B
    List uses          # of w


cdef struct Use:
    int32_t pos, bit


cdef struct Cycle:
    Py_ssize_t n_order
    int32_t base       # value number of w of the first group; g and o follow, K each
    int64_t over_sum   # of the bytes over the limit at each position
    double least       # seconds of compute
    double busiest     # seconds of the busiest of compute, the links and the host
    double work        # seconds of all of them together
    int32_t *pos       # of each operation of the activations
    int64_t *left      # of `room`, with the gaps as long as they are now
    double *before     # when the operation at each position could start, over two steps
    GroupPlaces *group
    int32_t *order     # of updates
    Use *use           # of w
    int32_t *use_next


cdef bint cycle(Chain *c, Work *w, Groups *p, Cycle *s, const int16_t *codes, Py_ssize_t V) noexcept nogil
cdef uint64_t mark(Work *w, Cycle *s) noexcept nogil
