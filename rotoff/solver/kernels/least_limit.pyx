# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Kernel of the smallest limit of recompute: typed arrays in, tables of bytes out, arithmetic only.

Rounding and checks stay in Python (`rotoff.solver.bounds`). Stages count from 1, so row 0 of every per-stage array is
unused (or stands for a_0).
"""

import numpy as np

from libc.stdint cimport int32_t, int64_t


def remat_need(const int64_t[::1] out, const int64_t[::1] grad, const int64_t[::1] ck_transient,
               const int32_t[::1] n_forms, const int64_t[:, ::1] saved, const int64_t[:, ::1] f_transient,
               const int64_t[:, ::1] b_transient):
    """Bytes that recompute needs beyond the input of its first stage: (backward table P, forward column W).

    P[i, j] is for "input of i and δ_j held, go to δ_{i-1}", W[i] for "input of i held, nothing run past it yet"; both
    are 0 where no stage is left. P is C_A's feasibility (NeurIPS 2021 supplement, B.3) as a bottleneck recurrence: held
    bytes add to every need. It has one choice more than the paper: sweep to k - 1, F_all k, drop a_{k-1} but keep ā_k,
    and make a_{k-1} again for B k.
    """
    cdef Py_ssize_t L = out.shape[0] - 1
    P_array = np.zeros((L + 2, L + 2), dtype=np.int64)
    W_array = np.zeros(L + 2, dtype=np.int64)
    cdef int64_t[:, ::1] P = P_array
    cdef int64_t[::1] W = W_array
    with nogil:
        _remat_need(L, out, grad, ck_transient, n_forms, saved, f_transient, b_transient, P, W)
    return P_array, W_array


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
                b_need = saved[i, f] + grad[i] + grad[i - 1] + out[L] + b_transient[i, f]
                need = max(held + saved[i, f] + f_transient[i, f], b_need, saved[i, f] + P[i + 1, j])
                best = min(best, need)
            sweep = 0
            for k in range(i, j):
                if k > i:  # sweep still ends at k - 1
                    for f in range(n_forms[k]):
                        b_need = out[k - 1] + saved[k, f] + grad[k] + grad[k - 1] + out[L] + b_transient[k, f]
                        need = max(sweep, held + out[k - 1] + saved[k, f] + f_transient[k, f], b_need)
                        need = max(need, sweep - held + grad[k] + out[L] + saved[k, f])
                        need = max(need, saved[k, f] + P[k + 1, j], P[i, k - 1])
                        best = min(best, need)
                sweep = max(sweep, held + out[k] + ck_transient[k] + (out[k - 1] if k > i else 0))
                best = min(best, max(sweep, out[k] + P[k + 1, j], P[i, k]))
            P[i, j] = best
        best = 4611686018427387904
        for f in range(n_forms[i]):
            b_need = saved[i, f] + grad[i] + grad[i - 1] + b_transient[i, f] + (out[L] if i < L else 0)
            need = max(saved[i, f] + f_transient[i, f], b_need, saved[i, f] + W[i + 1])
            best = min(best, need)
        sweep = 0
        for k in range(i, L):
            if k > i:
                for f in range(n_forms[k]):
                    b_need = out[k - 1] + saved[k, f] + grad[k] + grad[k - 1] + out[L] + b_transient[k, f]
                    need = max(sweep + grad[k] + out[L] + saved[k, f], out[k - 1] + saved[k, f] + f_transient[k, f])
                    need = max(need, b_need, saved[k, f] + W[k + 1], P[i, k - 1])
                    best = min(best, need)
            sweep = max(sweep, out[k] + ck_transient[k] + (out[k - 1] if k > i else 0))
            best = min(best, max(sweep, out[k] + W[k + 1], P[i, k]))
        W[i] = best
