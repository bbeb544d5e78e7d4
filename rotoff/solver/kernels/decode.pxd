from libc.stdint cimport int16_t, int32_t, int64_t

from rotoff.solver.kernels.work cimport Chain, Work


cdef struct Result:
    double makespan
    int64_t peak, host_peak, over   # bytes; over: the most that exceeds a limit, 0 where the plan fits
    Py_ssize_t n_ops, n_emitted


cdef void judge(Chain *c, Work *w, const int16_t *codes, Py_ssize_t V, Result *r) noexcept nogil
cdef void write(Chain *c, Work *w, const int16_t *codes, Py_ssize_t V, int32_t *emitted, Result *r) noexcept nogil
