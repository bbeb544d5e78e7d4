# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Kernel of POFO as published: OC_x and C_A of the NeurIPS 2021 supplement, B.1 to B.3; each size is rounded up.

Symbols: A slots kept; A_F slots still leaving; A_B and D (Δ) slots that must be back; u_F, u_B seconds; β slots a
second; I_i^x input of stage i (x = 0: a_{i-1}, x = 1: ā_{i-1}); ε idle seconds. Stages count from 1.
`rotoff.solver.policies.pofo` makes the arrays and backtracks; `rotoff._dp.Joint` is the variant that `solve` uses.
"""

from libc.math cimport INFINITY, ceil
from libc.stdint cimport int32_t, int64_t

cdef struct Costs:
    Py_ssize_t L, N
    double beta
    const double *U           # running sums of u_F
    const double *u_again     # [i] u_F less the tail
    const double *u_B
    const int32_t *out        # slots of a_i
    const int32_t *saved      # slots of ā_i
    const int32_t *all_F      # slots of ā_i and o_F, what F_all needs beyond what is held
    const int32_t *need_B     # slots of ā_i, δ_i, δ_{i-1}, o_B
    const int32_t *held       # [j] slots of δ_j (and the caller's a_L)
    const int32_t *step       # [i, q] slots of F_ck i (q = i) or F_∅ q: outputs and o_F
    const int32_t *most       # [i, k] max_{i≤q≤k} step[i, q]
    const int32_t *rest       # [i, k] max_{i<q≤k} step[i, q], 0 where there is none
    const double *late        # [i, k] max_q step[i, q] − β Σ_{q<r≤k} u_F(r)
    const double *early       # [i, k] max_q step[i, q] − β Σ_{i≤r<q} u_F(r)
    const int64_t *row        # (i, j), i ≤ j < L, is row[i] + j of C
    double *C                 # [row, A, D]
    double *O                 # [i, x, A, A_F, A_B]

cdef struct Choice:
    double cost
    int32_t cut, moved, A, A_F, A_B, D   # cut: 0 for F_all i, else F_ck i, F_∅ up to `cut`


cdef inline double _over(double slots) noexcept nogil:
    return slots if slots > 0.0 else 0.0


cdef inline double _C(Costs *c, Py_ssize_t i, Py_ssize_t j, Py_ssize_t A, Py_ssize_t D) noexcept nogil:
    """C_A(i, j, A, Δ); infinite if kept and arriving slots exceed the memory."""
    if A + D > c.N:
        return INFINITY
    return c.C[((c.row[i] + j) * (c.N + 1) + A) * (c.N + 1) + D]


cdef inline double _O(Costs *c, Py_ssize_t i, Py_ssize_t x, Py_ssize_t A, Py_ssize_t F, Py_ssize_t B) noexcept nogil:
    if A + F > c.N or A + B > c.N:
        return INFINITY
    return c.O[(((i * 2 + x) * (c.N + 1) + A) * (c.N + 1) + F) * (c.N + 1) + B]


cdef inline Py_ssize_t _left(Py_ssize_t backlog, double drained) noexcept nogil:
    """The rest of a backlog, rounded up to whole slots, since states are whole."""
    cdef double rest = backlog - drained
    return <Py_ssize_t>ceil(rest - 1e-9) if rest > 1e-9 else 0


cdef void _backward(Costs *c, Py_ssize_t i, Py_ssize_t j, Py_ssize_t A, Py_ssize_t D, Choice *best) noexcept nogil:
    """C_A(i, j, A, Δ = D), B.3."""
    cdef Py_ssize_t N = c.N, k, D1, D2, D3
    cdef double u_F = c.U[i] - c.U[i - 1], u_B = c.u_B[i], need_F = c.all_F[i] + c.held[j], need_B = c.need_B[i]
    cdef double idle, other, c1, c2, cost
    best[0] = Choice(INFINITY, -1, 0, 0, 0, 0, 0)
    if A + D > N:
        return
    if need_F + A <= N and need_B + A <= N:
        if i == j:
            idle = _over(need_B + A + D - N)
            other = _over(need_F - c.beta * u_B + A + D - N)
            best.cost = c.u_again[i] + u_B + (idle if idle > other else other) / c.beta
            best.cut = 0
        else:
            idle = _over(need_B + A + D - N) / c.beta
            D1 = _left(D, c.beta * (u_B + idle))
            c1 = _C(c, i + 1, j, A + c.saved[i], D1)
            if c1 < INFINITY:
                D2 = _left(D1, c.beta * c1)
                best.cost = u_F + c1 + u_B + idle + _over(need_F + A + D2 - N) / c.beta
                best.cut = 0
                best.A = <int32_t>(A + c.saved[i])
                best.D = <int32_t>D1
    for k in range(i, j):
        if c.most[i * (c.L + 1) + k] + c.held[j] + A > N:
            break  # longer sweeps need no less
        c1 = _C(c, i, k, A, D)
        if c1 == INFINITY:
            continue
        D2 = _left(D, c.beta * c1)
        c2 = _C(c, k + 1, j, A + c.out[k], D2)
        if c2 == INFINITY:
            continue
        D3 = _left(D2, c.beta * c2)
        cost = c.U[k] - c.U[i - 1] + c1 + c2
        cost += _over(c.late[i * (c.L + 1) + k] + c.held[j] + A + D3 - N) / c.beta
        if cost < best.cost:
            best.cost = cost
            best.cut = <int32_t>k
            best.A = <int32_t>(A + c.out[k])
            best.D = <int32_t>D2


cdef void _forward(Costs *c, Py_ssize_t i, Py_ssize_t x, Py_ssize_t A, Py_ssize_t F, Py_ssize_t B,
                   Choice *best) noexcept nogil:
    """OC_x(i, A, A_F, A_B), B.1 and B.2."""
    cdef Py_ssize_t N = c.N, L = c.L, j, v, A1, F1, B1
    cdef Py_ssize_t size = c.saved[i - 1] if x else c.out[i - 1]
    cdef double u_F = c.U[i] - c.U[i - 1], u_B = c.u_B[i], wait_F, wait_B, D_F, D_B, cost, rest, segment
    best[0] = Choice(INFINITY, -1, 0, 0, 0, 0, 0)
    if A + F > N or A + B > N:
        return
    if c.all_F[i] + A + size <= N and c.need_B[i] + A + size <= N:
        wait_F = _over(c.all_F[i] + A + F + size - N) / c.beta
        wait_B = _over(c.need_B[i] + A + B + size - N) / c.beta
        D_F, D_B = c.beta * (u_F + wait_F), c.beta * (u_B + wait_B)
        cost = u_F + wait_F + u_B + wait_B
        if i == L:
            # B.2: finish all copies out before the loss, and all copies back after it.
            best.cost = cost + (_over(F - D_F) + _over(B - D_B)) / c.beta
            best.cut = 0
        else:
            for v in range(2 if i > 1 else 1):
                A1 = A if v else A + size
                F1 = _left(F + (size if v else 0), D_F)
                B1 = _left(B, D_B) + (size if v else 0)
                rest = cost + _O(c, i + 1, 1, A1, F1, B1)
                if rest < best.cost:
                    best.cost, best.cut, best.moved = rest, 0, <int32_t>v
                    best.A, best.A_F, best.A_B = <int32_t>A1, <int32_t>F1, <int32_t>B1
    for j in range(i, L):
        if c.step[i * (L + 1) + i] + A + size > N or c.rest[i * (L + 1) + j] + A > N:
            break
        segment = _C(c, i, j, A + size, B)
        if segment == INFINITY:
            continue
        wait_F = _over(c.early[i * (L + 1) + j] + A + F + size - N) / c.beta
        D_F, D_B = c.beta * (c.U[j] - c.U[i - 1] + wait_F), c.beta * segment
        cost = c.U[j] - c.U[i - 1] + wait_F + segment
        for v in range(2 if i > 1 else 1):
            if not v and c.rest[i * (L + 1) + j] + A + size > N:
                continue
            A1 = A if v else A + size
            F1 = _left(F + (size if v else 0), D_F)
            B1 = _left(B, D_B) + (size if v else 0)
            rest = cost + _O(c, j + 1, 0, A1, F1, B1)
            if rest < best.cost:
                best.cost, best.cut, best.moved = rest, <int32_t>j, <int32_t>v
                best.A, best.A_F, best.A_B = <int32_t>A1, <int32_t>F1, <int32_t>B1


cdef class Kernel:
    """Both tables of one chain at one discretization, filled bottom up; `costs` has the arrays of `Costs` by name."""

    cdef Costs c
    cdef list keep

    def __init__(self, costs, double[:, :, ::1] C, double[:, :, :, :, ::1] O):
        self.keep = [costs, C, O]
        cdef Costs *c = &self.c
        c.L, c.N, c.beta = costs.L, costs.N, costs.beta
        cdef const double[::1] U = costs.U, u_again = costs.u_again, u_B = costs.u_B
        cdef const int32_t[::1] out = costs.out, saved = costs.saved, all_F = costs.all_F
        cdef const int32_t[::1] need_B = costs.need_B, held = costs.held
        cdef const int32_t[:, ::1] step = costs.step, most = costs.most, rest = costs.rest
        cdef const double[:, ::1] late = costs.late, early = costs.early
        c.U, c.u_again, c.u_B = &U[0], &u_again[0], &u_B[0]
        c.out, c.saved, c.all_F, c.need_B, c.held = &out[0], &saved[0], &all_F[0], &need_B[0], &held[0]
        c.step, c.most, c.rest = &step[0, 0], &most[0, 0], &rest[0, 0]
        cdef const int64_t[::1] row = costs.row
        c.row = &row[0]
        c.late, c.early = &late[0, 0], &early[0, 0]
        c.C, c.O = &C[0, 0, 0], &O[0, 0, 0, 0, 0]

    def fill_backward(self, Py_ssize_t i):
        """C_A of all segments that begin at stage i; those of later stages are filled already."""
        cdef Py_ssize_t j, A, D, N = self.c.N, L = self.c.L
        cdef Choice best
        with nogil:
            for j in range(i, L):
                for A in range(N + 1):
                    for D in range(N + 1 - A):
                        _backward(&self.c, i, j, A, D, &best)
                        self.c.C[((self.c.row[i] + j) * (N + 1) + A) * (N + 1) + D] = best.cost

    def fill_forward(self, Py_ssize_t i):
        """OC of stage i; that of later stages is filled already."""
        cdef Py_ssize_t x, A, F, B, N = self.c.N
        cdef Choice best
        with nogil:
            for x in range(2):
                for A in range(N + 1):
                    for F in range(N + 1 - A):
                        for B in range(N + 1 - A):
                            _forward(&self.c, i, x, A, F, B, &best)
                            self.c.O[(((i * 2 + x) * (N + 1) + A) * (N + 1) + F) * (N + 1) + B] = best.cost

    def backward(self, Py_ssize_t i, Py_ssize_t j, Py_ssize_t A, Py_ssize_t D):
        """(cost, 0 for F_all or -1, cut, A and Δ of the part that runs first) of C_A(i, j, A, Δ)."""
        cdef Choice best
        _backward(&self.c, i, j, A, D, &best)
        return best.cost, 0 if best.cut == 0 else -1, best.cut, best.A, best.D

    def forward(self, Py_ssize_t i, Py_ssize_t x, Py_ssize_t A, Py_ssize_t A_F, Py_ssize_t A_B):
        """(cost, 0 for F_all or -1, cut, whether the input moves, A with the input, A', A_F', A_B') of OC_x(i, A, A_F,
        A_B)."""
        cdef Choice best
        _forward(&self.c, i, x, A, A_F, A_B, &best)
        kept = A + (self.c.saved[i - 1] if x else self.c.out[i - 1])
        return best.cost, 0 if best.cut == 0 else -1, best.cut, bool(best.moved), kept, best.A, best.A_F, best.A_B
