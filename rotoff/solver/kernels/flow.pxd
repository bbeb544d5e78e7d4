from libc.stdint cimport int64_t

from rotoff.solver.kernels.cycle cimport Cycle, Groups
from rotoff.solver.kernels.work cimport Chain, Work

cdef enum:
    ROUNDS = 4

cdef void text(Chain *c, Work *w, Groups *p, Cycle *s) noexcept nogil
cdef void work(Chain *c, Work *w, Groups *p, Cycle *s) noexcept nogil
cdef double flow(Chain *c, Work *w, Groups *p, Cycle *s, double enough, int rounds, int *best) noexcept nogil
cdef int64_t host_peak(Work *w, Groups *p, Cycle *s) noexcept nogil
