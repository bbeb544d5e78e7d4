from libc.stdint cimport int64_t

from rotoff.solver.kernels.cycle cimport Cycle, Groups
from rotoff.solver.kernels.work cimport Chain, Work

cdef enum:
    ROUNDS = 4
    PERIODS = 4  # as in rotoff.core.steady_step

# Events, as in rotoff.solver.genes.KINDS.
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
    E_U = 9
    E_H = 10
    E_HERE = 11  # no operation: the next position begins

cdef double flow(Chain *c, Work *w, Groups *p, Cycle *s, double enough, int rounds, int *best) noexcept nogil
cdef int64_t host_peak(Work *w, Groups *p, Cycle *s) noexcept nogil
