# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Kernels of the dynamic programs: typed arrays in, cost tables out, arithmetic only.

Rounding, checking, backtracking and threads stay in Python (`rotoff.bounds`, `rotoff.solver`). Stages count from 1, so
row 0 of every per-stage array is unused (or stands for a_0). Infinity means that nothing fits.
"""

import numpy as np

from libc.stdint cimport int32_t, int64_t
from libc.math cimport INFINITY


def remat_need(const int64_t[::1] out, const int64_t[::1] grad, const int64_t[::1] ck_transient,
               const int32_t[::1] n_forms, const int64_t[:, ::1] saved, const int64_t[:, ::1] f_transient,
               const int64_t[:, ::1] b_transient):
    """Bytes that recompute needs beyond the input of its first stage: (backward table P, forward column W).

    P[i, j] is for "input of i and δ_j held, go to δ_{i-1}", W[i] for "input of i held, nothing run past it yet".
    P is C_A's feasibility (NeurIPS 2021 supplement, B.3) as a bottleneck recurrence: whatever is held adds to every need. One
    choice more than the paper's: sweep to k - 1, F_all k, drop a_{k-1} under the kept ā_k, and make it again for B k.
    """
    cdef Py_ssize_t L = out.shape[0] - 1
    P_array = np.zeros((L + 2, L + 2), dtype=np.int64)
    W_array = np.zeros(L + 2, dtype=np.int64)
    cdef int64_t[:, ::1] P = P_array
    cdef int64_t[::1] W = W_array
    with nogil:
        _remat_need(L, out, grad, ck_transient, n_forms, saved, f_transient, b_transient, P, W)
    return P_array, W_array


cdef inline int64_t _max(int64_t x, int64_t y) noexcept nogil:
    return x if x > y else y


cdef void _remat_need(Py_ssize_t L, const int64_t[::1] out, const int64_t[::1] grad, const int64_t[::1] ck_transient,
                      const int32_t[::1] n_forms, const int64_t[:, ::1] saved, const int64_t[:, ::1] f_transient,
                      const int64_t[:, ::1] b_transient, int64_t[:, ::1] P, int64_t[::1] W) noexcept nogil:
    cdef Py_ssize_t i, j, k, f
    cdef int64_t best, need, b_need, sweep, held
    for i in range(L, 0, -1):
        for j in range(i, L):
            best = 4611686018427387904
            held = grad[j] + out[L]  # the caller holds a_L through the backward phase
            for f in range(n_forms[i]):
                need = held + saved[i, f] + f_transient[i, f]
                b_need = saved[i, f] + grad[i] + grad[i - 1] + out[L] + b_transient[i, f]
                need = _max(need, b_need)
                if i < j:
                    need = _max(need, saved[i, f] + P[i + 1, j])
                if need < best:
                    best = need
            sweep = 0
            for k in range(i, j):
                if k > i:  # sweep still ends at k - 1
                    for f in range(n_forms[k]):
                        need = _max(sweep, held + out[k - 1] + saved[k, f] + f_transient[k, f])
                        need = _max(need, saved[k, f] + P[k + 1, j])
                        need = _max(need, sweep - held + grad[k] + out[L] + saved[k, f])
                        need = _max(need, out[k - 1] + saved[k, f] + grad[k] + grad[k - 1] + out[L] + b_transient[k, f])
                        need = _max(need, P[i, k - 1])
                        if need < best:
                            best = need
                sweep = _max(sweep, held + out[k] + ck_transient[k] + (out[k - 1] if k > i else 0))
                need = _max(sweep, _max(out[k] + P[k + 1, j], P[i, k]))
                if need < best:
                    best = need
            P[i, j] = best
        best = 4611686018427387904
        for f in range(n_forms[i]):
            need = saved[i, f] + f_transient[i, f]
            b_need = saved[i, f] + grad[i] + grad[i - 1] + b_transient[i, f] + (out[L] if i < L else 0)
            need = _max(need, b_need)
            if i < L:
                need = _max(need, saved[i, f] + W[i + 1])
            if need < best:
                best = need
        sweep = 0
        for k in range(i, L):
            if k > i:
                for f in range(n_forms[k]):
                    need = _max(sweep + grad[k] + out[L] + saved[k, f], out[k - 1] + saved[k, f] + f_transient[k, f])
                    need = _max(need, saved[k, f] + W[k + 1])
                    need = _max(need, out[k - 1] + saved[k, f] + grad[k] + grad[k - 1] + out[L] + b_transient[k, f])
                    need = _max(need, P[i, k - 1])
                    if need < best:
                        best = need
            sweep = _max(sweep, out[k] + ck_transient[k] + (out[k - 1] if k > i else 0))
            need = _max(sweep, _max(out[k] + W[k + 1], P[i, k]))
            if need < best:
                best = need
        W[i] = best




def remat_diagonal(Py_ssize_t d, Py_ssize_t low, Py_ssize_t high, double[:, ::1] C, const int64_t[::1] base,
                   const double[::1] U, const double[:, ::1] u_B, const int32_t[::1] n_forms, const int32_t[::1] out,
                   const int32_t[:, ::1] saved, const int64_t[::1] held, const int64_t[:, ::1] ck_need,
                   const int64_t[:, ::1] all_need, const int64_t[:, ::1] b_need, int64_t room, int32_t[::1] least):
    """Fill the rows of segments (i, i + d), low <= i < high, from shorter ones (rotor's Opt: C_A with Δ = 0, m = N − A).

    C[base[i] + j, m]: seconds from "input of i held, δ_j" to δ_{i-1} with m slots beyond the input of i; N + 1 columns.
    U: running sums of u_F. out, saved: sizes in slots by the rule of `solver.slots`. Needs are exact bytes, rounded up here to
    slots of room / N: held[j] for δ_j and a_L; ck_need[i, k] for F_ck i, F_∅ i+1..k; all_need, b_need[i, x] for form x.
    least[row]: the fewest slots with which a filled row is finite; what needs more is never looked at.
    """
    with nogil:
        _remat_diagonal(d, low, high, C, base, U, u_B, n_forms, out, saved, held, ck_need, all_need, b_need, room, least)


cdef inline Py_ssize_t _slots(int64_t size, Py_ssize_t N, int64_t room) noexcept nogil:
    """Slots of room / N that hold `size` bytes, at most N + 1 (which fits nowhere)."""
    if size > room:
        return N + 1
    return (size * N + room - 1) // room if size > 0 else 0


cdef void _remat_diagonal(Py_ssize_t d, Py_ssize_t low, Py_ssize_t high, double[:, ::1] C, const int64_t[::1] base,
                          const double[::1] U, const double[:, ::1] u_B, const int32_t[::1] n_forms,
                          const int32_t[::1] out, const int32_t[:, ::1] saved, const int64_t[::1] held,
                          const int64_t[:, ::1] ck_need, const int64_t[:, ::1] all_need, const int64_t[:, ::1] b_need,
                          int64_t room, int32_t[::1] least) noexcept nogil:
    cdef Py_ssize_t i, j, k, x, m, first, N = C.shape[1] - 1
    cdef double cost, sweep
    cdef double *row
    cdef double *left
    cdef double *right
    for i in range(low, high):
        j = i + d
        row = &C[base[i] + j, 0]
        for m in range(N + 1):
            row[m] = INFINITY
        for x in range(n_forms[i]):
            cost = U[i] - U[i - 1] + u_B[i, x]
            first = _slots(_max(held[j] + all_need[i, x], b_need[i, x]), N, room)
            if d == 0:
                for m in range(first, N + 1):
                    row[m] = cost if cost < row[m] else row[m]
            else:
                first = _max(first, saved[i, x] + least[base[i + 1] + j])
                right = &C[base[i + 1] + j, 0]
                for m in range(first, N + 1):
                    sweep = cost + right[m - saved[i, x]]
                    row[m] = sweep if sweep < row[m] else row[m]
        for k in range(i, j):
            first = _slots(held[j] + ck_need[i, k], N, room)
            first = _max(first, _max(least[base[i] + k], out[k] + least[base[k + 1] + j]))
            sweep = U[k] - U[i - 1]
            left = &C[base[i] + k, 0]
            right = &C[base[k + 1] + j, 0]
            for m in range(first, N + 1):
                cost = sweep + left[m] + right[m - out[k]]
                row[m] = cost if cost < row[m] else row[m]
        m = 0
        while m <= N and row[m] == INFINITY:
            m += 1
        least[base[i] + j] = <int32_t>m
