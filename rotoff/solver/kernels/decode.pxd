from libc.stdint cimport int16_t

from rotoff.solver.kernels.work cimport Chain, Work

cdef bint decode(Chain *c, Work *w, const int16_t *codes, Py_ssize_t V) noexcept nogil
cdef bint operations(Chain *c, Work *w, const int16_t *codes, Py_ssize_t V) noexcept nogil
