"""What decoding a step with parameters works on: the groups, the genes of a plan, and the room that the passes share.

Positions: the n operations of the compute lane in program order, updates on the device included, then position n, the
end of the step. A step follows a step, so position n + 1 is position 0 of the next; such later positions stand in gaps.
"""

from libc.stdint cimport int8_t, int16_t, int32_t, int64_t

from rotoff.solver.kernels.lanes cimport Lanes
from rotoff.solver.kernels.work cimport Chain, Work

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


cdef struct Groups:
    Py_ssize_t K
    bint after
    int64_t *w
    int64_t *g
    int64_t *o
    int64_t *transient
    double *update
    double *host       # seconds, below 0 where the host cannot
    int32_t *first     # smallest stage: its B makes the gradient whole
    int32_t *last
    int32_t *reads_from  # stage -> where its groups begin in `reads`
    int32_t *reads
    int32_t *slot      # of the stage among those of the group


cdef struct Cycle:
    Py_ssize_t n, n_gaps, n_order, n_events
    int32_t base       # value number of w of the first group; g and o follow, K each
    int64_t over, over_sum
    double least       # seconds of compute
    double work        # seconds of all of them and of the host together
    # positions
    int32_t *act       # operation of the activations, or -1 - group
    int32_t *pos       # of each of them
    double *lasts
    int64_t *room      # bytes of the limit that are left, with every gap at its longest
    int64_t *left      # the same, with the gaps as long as they are now
    double *before     # when the operation there could start, over two steps
    int32_t *out_head
    int32_t *out_tail
    int32_t *free_head
    int32_t *free_tail
    int32_t *in_head
    int32_t *in_tail
    int32_t *wait_head
    int32_t *wait_tail
    # groups
    int32_t *order
    int32_t *update_at  # position of U, or before which H is issued
    int32_t *begun     # position of the first B
    int32_t *whole     # position of the last B
    int32_t *use_head
    int32_t *use_tail
    # uses of w
    int32_t *use_pos
    int32_t *use_bit
    int32_t *use_next
    # values
    int64_t *size
    Lanes lanes
    int32_t *out_gap   # the gap whose free waits for this value's copy out, or -1
    int8_t *on_host
    int32_t *away_from  # of the operations at which a value must be away, the first, or -1, and the last
    int32_t *away_until
    # gaps: absences from the device between two uses
    int32_t *value
    int32_t *from_     # position of the use before
    int32_t *to        # position of the use after, or -1
    int32_t *free_most
    int32_t *in_least
    int8_t *copies     # whether it begins with a copy out
    int32_t *made      # position after which that copy is issued
    double *out_end
    double *start
    int32_t *free_at
    int32_t *in_at
    int32_t *out_next
    int32_t *free_next
    int32_t *in_next
    int32_t *wait_next
    # events in program order
    int32_t *event
    int32_t *subject
    int32_t *gone
    double *seconds


cdef Py_ssize_t cycle(Chain *c, Work *w, Groups *p, Cycle *s, const int16_t *codes, Py_ssize_t V) noexcept nogil
