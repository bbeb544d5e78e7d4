from libc.stdint cimport int16_t, int32_t, uint64_t

from rotoff.solver.kernels.decode cimport Verdict
from rotoff.solver.kernels.lanes cimport Lanes
from rotoff.solver.kernels.work cimport Chain, Work


cdef class Evaluator:
    cdef Chain c
    cdef Work w
    cdef Py_ssize_t V
    cdef bint harder
    cdef object keep, link

    cdef size_t _input(self, array)
    cdef size_t _room(self, n)
    cdef int32_t *_ints(self, n)
    cdef void _lanes(self, n, base, K)
    cdef void look(self, const int16_t *codes, double enough, double weight, Verdict *r) noexcept nogil
    cdef void change(self, int16_t *codes, uint64_t *state) noexcept nogil
    cdef void confine(self, int16_t *codes, const int16_t *rules) noexcept nogil
    cdef void decode_again(self, const int16_t *codes) noexcept nogil
