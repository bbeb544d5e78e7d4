from libc.stdint cimport int32_t

from rotoff.solver.kernels.lanes cimport Lanes
from rotoff.solver.kernels.work cimport Chain, Work


cdef class Evaluator:
    cdef Chain c
    cdef Work w
    cdef readonly Py_ssize_t V
    cdef list keep
    cdef tuple link
    cdef int32_t[::1] emitted

    cdef size_t _input(self, array)
    cdef size_t _room(self, n)
    cdef int32_t *_ints(self, n)
    cdef void _lanes(self, Lanes *l, n, base, K)
