from libc.stdint cimport int16_t, int64_t, uint64_t

from rotoff.solver.kernels.work cimport Chain, Work


cdef struct Verdict:
    double makespan           # infinite for too many operations
    int64_t over, host_over   # the most bytes that exceed the limits; 0 where the plan fits
    double spread             # the mean excess over the positions, so that each that is less is seen
    double work               # what the work of all lanes costs in the search, in seconds
    int rounds                # after which the best was found
    uint64_t mark             # of the step (`cycle.mark`); 0 for none


cdef void decode(Chain *c, Work *w, const int16_t *codes, Py_ssize_t V, Verdict *r) noexcept nogil
cdef Py_ssize_t operations(Chain *c, Work *w, const int16_t *codes, Py_ssize_t V) noexcept nogil
