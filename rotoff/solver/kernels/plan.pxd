from libc.stdint cimport int16_t, int32_t, int64_t, uint64_t

from rotoff.solver.kernels.cycle cimport Cycle, Groups
from rotoff.solver.kernels.work cimport Chain, Work


cdef struct Verdict:
    double makespan           # infinite for too many operations
    int64_t over, host_over   # the most bytes that exceed the limits; 0 where the plan fits
    double spread             # the mean excess over the positions, so that each that is less is seen
    double work               # what the work of all lanes costs in the search, in seconds
    int rounds                # after which the best was found
    uint64_t mark             # of the step (`cycle.mark`); 0 for none


cdef class Evaluator:
    cdef Chain c
    cdef Work w
    cdef Groups p
    cdef Cycle s
    cdef Py_ssize_t V
    cdef object keep

    cdef size_t _input(self, array)
    cdef size_t _room(self, n)
    cdef int32_t *_ints(self, n)
    cdef void _chain(self, chain, arrays, int64_t limit, host_limit)
    cdef void _lanes(self, chain, n, base, K)
    cdef void look(self, const int16_t *codes, double enough, double weight, Verdict *r) noexcept nogil
    cdef void change(self, int16_t *codes, uint64_t *state) noexcept nogil
    cdef void confine(self, int16_t *codes, const int16_t *rules) noexcept nogil
