# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The smallest limit of recompute: a table of bytes. Stages count from 1; row 0 is that of a_0, or unused."""

import numpy as np

from libc.stdint cimport int32_t, int64_t


def remat_need(const int64_t[::1] out, const int64_t[::1] delta, const int32_t[::1] n_forms,
               const int64_t[:, ::1] saved, const int64_t[:, ::1] M_all, const int64_t[:, ::1] M_B,
               const int64_t[:, ::1] M_ck):
    """[i, j]: bytes that recompute of i..j needs beyond the input of i, from δ_j to δ_{i-1}; 0 where no stage is left.

    Column L is the forward phase, which holds no gradient. This is C_A's feasibility (NeurIPS 2021 supplement, B.3)
    as a bottleneck recurrence: held bytes add to every need. It has one choice more than the paper: sweep to k - 1,
    F_all k, drop a_{k-1} but keep ā_k, and make a_{k-1} again for B k. The arrays are those of
    `rotoff.solver.arrays.Arrays`.
    """
    cdef Py_ssize_t L = out.shape[0] - 1, i, j, k, f
    made = np.zeros((L + 2, L + 2), dtype=np.int64)
    cdef int64_t[:, ::1] P = made
    cdef int64_t best, need, held, sweep
    with nogil:
        for i in range(L, 0, -1):
            for j in range(i, L + 1):
                best, sweep, held = 4611686018427387904, 0, delta[j] if j < L else 0
                for f in range(n_forms[i]):
                    best = min(best, max(held + M_all[i, f], M_B[i, f], saved[i, f] + P[i + 1, j]))
                for k in range(i, j):
                    for f in range(n_forms[k] if k > i else 0):  # `sweep` still ends at k - 1
                        need = max(held + sweep, held + out[k - 1] + M_all[k, f], out[k - 1] + M_B[k, f])
                        need = max(need, delta[k] + sweep + saved[k, f], saved[k, f] + P[k + 1, j], P[i, k - 1])
                        best = min(best, need)
                    sweep = max(sweep, M_ck[i, k])
                    best = min(best, max(held + sweep, out[k] + P[k + 1, j], P[i, k]))
                P[i, j] = best
    return made
