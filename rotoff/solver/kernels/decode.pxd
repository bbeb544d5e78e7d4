from libc.stdint cimport int16_t, int64_t

from rotoff.solver.kernels.work cimport Chain, Work

cdef int64_t decode(Chain *c, Work *w, const int16_t *codes, Py_ssize_t V) noexcept nogil
cdef Py_ssize_t operations(Chain *c, Work *w, const int16_t *codes, Py_ssize_t V) noexcept nogil
