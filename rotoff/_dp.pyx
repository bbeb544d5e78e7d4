# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The papers' dynamic programs, term by term: `Opt` of rotor (slides, 2021), OC and C_A of the NeurIPS 2021 supplement
(Beaumont, Eyraud-Dubois, Shilova: Efficient Combination of Rematerialization and Offloading for Training DNNs).

Symbols are the supplement's:

- u_F, u_B seconds; U running sums of u_F; ω sizes in slots (of a_i: `out`, of ā_i^f in form f: `saved`);
- M_Fall, M_Fck, M_F∅, M_B needs of an operation beyond its input: `M_all`, `M_ck`, `M_none`, `M_B`, and `M_sweep` of
  F_ck i, F_∅ i+1..k together; those of forwards without the gradient δ_j that is held in the backward phase (`delta`,
  with the caller's a_L);
- N slots in all (M_GPU); A slots kept; A_F slots still leaving; A_B and Δ (`Delta`) slots that must be back; I_i^x the
  input of stage i, x = 0 for a_{i-1}, 1 + f for ā_{i-1}^f; v whether it is offloaded; β slots a second (β_F out, β_B
  in);
- ε idle times, as the whole slots βε that a link copies in them: `e`, `e_F`, `e_B`; D_F, D_B slots that the links copy
  in all the time of a choice.

Sizes and backlogs are whole slots, needs are real; `rotoff.solver.slots` has the rules and makes the arrays. Stages
count from 1; row 0 of arrays by stage is unused. Infinity means that nothing fits.

Every choice of k costs at least its sweep and, before and after k, the seconds of keeping all (sums of `U_keep`, less
`tail`, what a stage's forward saves right before its own backward), which grows with k. So a state that costs less
already needs no later k.
"""

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from libc.math cimport INFINITY, isnan
from libc.stdint cimport int32_t, int64_t

import numpy as np

cdef enum:
    BLOCK = 16  # values of m

cdef double ERROR = 1e-9  # slots, by which sums of reals may be wrong
cdef double SAME = 1e-12  # relative, of seconds


cdef inline Py_ssize_t _up(double slots) noexcept nogil:
    """max(slots, 0), rounded up."""
    return <Py_ssize_t>(slots + (1 - ERROR)) if slots > 0 else 0


cdef inline Py_ssize_t _copied(double clock, double slots) noexcept nogil:
    """Whole slots that a link copies in the time of `slots`, from `clock` on, so that errors do not add up."""
    return <Py_ssize_t>(clock + slots + (0.5 + ERROR)) - <Py_ssize_t>(clock + (0.5 + ERROR))


cdef inline Py_ssize_t _left(Py_ssize_t backlog, Py_ssize_t copied) noexcept nogil:
    return backlog - copied if backlog > copied else 0


cdef int look_for_signals() except -1 nogil:
    """So that Ctrl-C works."""
    with gil:
        PyErr_CheckSignals()
    return 0


def _rows(Py_ssize_t L, Py_ssize_t last, Py_ssize_t reach):
    """(base, count): segment i..j has row base[i] + j, for i ≤ j ≤ last and j < i + reach; the rows in all."""
    first = np.concatenate([[0], np.cumsum(np.minimum(reach, last - np.arange(last)))])
    return np.pad(first, (1, L - last))[: L + 1] - np.arange(L + 1), int(first[last])


# -- rotor: recompute alone


cpdef enum Table:
    BACKWARD
    FORWARD
    BESIDE

cpdef enum First:
    ALL
    CK
    BARE


cdef struct Decision:
    First first
    Py_ssize_t k, form


cdef struct Row:
    double *cost       # [m] seconds
    Py_ssize_t fewest  # slots m with which they are finite


@cython.final
cdef class Opt:
    """Opt_BP(i, ℓ, m) of the slides, equation (1), for all m up to N at once; m excludes the input of i.

    Table BACKWARD: Opt_BP, from the input of i and δ_j to δ_{i-1}. FORWARD: the same in the forward phase, from stage i
    to L; there is no δ_L before the loss. A third choice is not in the slides: a sweep to k − 1, then ā_k is kept
    without its input, which is made again for B k, so that stage k runs once. BESIDE: BACKWARD with such an ā_j beside
    it, and without the seconds of B j.
    """

    cdef readonly object slots
    cdef Py_ssize_t L, N, last, reach, bare
    cdef const double[::1] U, u_again, U_keep, tail, delta
    cdef const double[:, ::1] u_B, M_all, M_all_swept, M_B, M_sweep
    cdef const int32_t[::1] n_forms, out
    cdef const int32_t[:, ::1] saved
    cdef const int64_t[:, ::1] base    # segment i..j of a table has row base[table, i] + j
    cdef double[:, ::1] known          # [row, m] seconds
    cdef int32_t[::1] fewest           # [row] slots with which they are finite
    cdef double[::1] nothing

    def __init__(self, slots, Py_ssize_t last, Py_ssize_t reach, Py_ssize_t bare):
        """slots: a `rotoff.solver.slots.Slots`. last: the last stage of segments in BACKWARD. reach, bare: the most
        stages of one in BACKWARD and BESIDE."""
        self.slots, self.L, self.N, self.last, self.reach, self.bare = slots, slots.L, slots.N, last, reach, bare
        self.U, self.u_again, self.u_B = slots.U, slots.u_again, slots.u_B
        self.U_keep, self.tail = slots.U_keep, slots.tail
        self.M_all, self.M_B, self.M_all_swept, self.M_sweep = slots.M_all, slots.M_B, slots.M_all_swept, slots.M_sweep
        self.n_forms, self.out, self.saved, self.delta = slots.n_forms, slots.out, slots.saved, slots.delta
        backward, n_backward = _rows(self.L, last, reach)
        beside, n_beside = _rows(self.L, last, bare)
        n_both, n = n_backward + self.L, n_backward + self.L + n_beside
        self.base = np.stack([backward, n_backward + np.arange(-1 - self.L, 0), n_both + beside])
        self.known, self.fewest = np.empty((n, self.N + 1)), np.empty(n, np.int32)
        self.nothing = np.zeros(self.N + 1)
        with nogil:
            self.fill()

    cdef int fill(self) except -1 nogil:
        """BACKWARD and BESIDE of the segments that end at each stage, after those that end before; then FORWARD."""
        cdef Py_ssize_t i, j
        for j in range(1, self.last + 1):
            look_for_signals()
            for i in range(j, max(0, j - self.reach), -1):
                self._fill(BACKWARD, i, j)
                if j - i < self.bare:
                    self._fill(BESIDE, i, j)
        for i in range(self.L, 0, -1):
            self._fill(FORWARD, i, self.L)
        return 0

    def choice(self, Table table, Py_ssize_t i, Py_ssize_t j, Py_ssize_t m):
        """(cost, first, k, form) in m slots: F_all i in `form` (ALL), a sweep to a_k (CK), or to ā_k in `form` (BARE).
        The cost is infinite if nothing fits."""
        cdef double[::1] row = np.empty(self.N + 1)
        cdef Decision best = self._best(table, i, j, m, m, &row[0])
        return row[m], best.first, best.k, best.form

    cdef void _fill(self, Table table, Py_ssize_t i, Py_ssize_t j) noexcept nogil:
        cdef Py_ssize_t row = self.base[<int>table, i] + j, m = 0
        self._best(table, i, j, 0, self.N, &self.known[row, 0])
        while m <= self.N and self.known[row, m] == INFINITY:
            m += 1
        self.fewest[row] = <int32_t>m

    cdef inline Row _row(self, Table table, Py_ssize_t i, Py_ssize_t j, Py_ssize_t size) noexcept nogil:
        """Segment i..j with `size` slots charged; no seconds if no stage is left."""
        cdef Py_ssize_t row
        if i > j:
            return Row(&self.nothing[0], 0)
        row = self.base[<int>table, i] + j
        return Row(&self.known[row, 0] - size, self.fewest[row] + size)

    cdef Decision _best(self, Table table, Py_ssize_t i, Py_ssize_t j, Py_ssize_t low, Py_ssize_t high,
                        double *row) noexcept nogil:
        """The least seconds at m = low..high into `row`; the decision at `low`, the first of those that cost equal."""
        cdef Py_ssize_t k, f, m, first
        cdef double sweep, cost, was, delta = 0.0 if table == FORWARD else self.delta[j]
        cdef double keep = self.U_keep[j] - self.U_keep[i - 1] - self.tail[j]  # seconds of keeping all
        cdef Row inner
        cdef Decision best = Decision(ALL, i, 0)
        for m in range(low, high + 1):
            row[m] = INFINITY
        if table == BESIDE and i == j:
            # B j with the input just made: the largest of its forms' needs, since the form is not known here
            first = low
            for f in range(self.n_forms[i]):
                first = max(first, _up(self.M_B[i, f]) - self.saved[i, f])
            for m in range(first, high + 1):
                row[m] = 0.0
            return best
        # Opt_2 = u_f(i) + Opt_BP(i+1, ℓ, m − ω_ā^i) + u_b(i)
        for f in range(self.n_forms[i]):
            was = row[low]
            cost = (self.u_again[i] if table == BACKWARD and i == j else self.U[i] - self.U[i - 1]) + self.u_B[i, f]
            inner = self._row(table, i + 1, j, self.saved[i, f])
            for m in range(max(low, inner.fewest, _up(delta + self.M_all[i, f]), _up(self.M_B[i, f])), high + 1):
                row[m] = min(row[m], cost + inner.cost[m])
            if row[low] < was * (1 - SAME):
                best = Decision(ALL, i, f)
        # Opt_1 = min over k of Σ_{q=i..k} u_f(q) + Opt_BP(k+1, ℓ, m − ω_a^k) + Opt_BP(i, k, m), k = s − 1
        for k in range(i, min(j, i + self.reach)):
            was, sweep = row[low], self.U[k] - self.U[i - 1]
            self._split(row, max(low, _up(delta + self.M_sweep[i, k])), high, sweep, sweep - self.tail[k] + keep,
                        self._row(table, k + 1, j, self.out[k]), self._row(BACKWARD, i, k, 0))
            if row[low] < was * (1 - SAME):
                best = Decision(CK, k, 0)
        # min over k of Σ_{q=i..k} u_f(q) + u_b(k) + Opt_BP(k+1, ℓ, m − ω_ā^k) + BESIDE(i, k, m − ω_ā^k)
        for k in range(i + 1, min(j, i + self.bare) if table != BESIDE else 0):
            for f in range(self.n_forms[k]):
                was, sweep = row[low], self.U[k] - self.U[i - 1]
                first = max(low, _up(delta + max(self.M_sweep[i, k - 1], self.M_all_swept[k, f])))
                self._split(row, first, high, sweep + self.u_B[k, f], self.U[k - 1] - self.U[i - 1] + keep,
                            self._row(table, k + 1, j, self.saved[k, f]), self._row(BESIDE, i, k, self.saved[k, f]))
                if row[low] < was * (1 - SAME):
                    best = Decision(BARE, k, f)
        return best

    cdef inline void _split(self, double *row, Py_ssize_t first, Py_ssize_t high, double cost, double bound, Row later,
                            Row earlier) noexcept nogil:
        """row(m) = min(row(m), cost + later(m) + earlier(m)) from m = `first` to `high`: seconds of the segments after
        and before the cut. bound: what all of it costs at least."""
        cdef Py_ssize_t m, end
        first = max(first, later.fewest, earlier.fewest)
        while first <= high and row[first] > bound:
            # Costs never rise with m: no m of a block gains if its first m costs no more than its last would.
            end = min(first + BLOCK - 1, high)
            if row[first] > cost + earlier.cost[end] + later.cost[end]:
                for m in range(first, end + 1):
                    row[m] = min(row[m], cost + earlier.cost[m] + later.cost[m])
            first = end + 1


# -- the smallest limit of recompute


def remat_need(const int64_t[::1] out, const int64_t[::1] delta, const int32_t[::1] n_forms,
               const int64_t[:, ::1] saved, const int64_t[:, ::1] M_all, const int64_t[:, ::1] M_B,
               const int64_t[:, ::1] M_ck):
    """P(i, j): bytes that recompute of i..j needs beyond the input of i, from δ_j to δ_{i-1}; 0 where no stage is left.

    Column L is the forward phase, which holds no gradient: δ_L counts as 0. This is C_A's feasibility (NeurIPS 2021
    supplement, B.3, Δ = 0): held bytes add to every need, and P is the least maximum of the needs. It has one choice
    more than the paper, the third below: sweep to k - 1, F_all k, drop a_{k-1} but keep ā_k, and make a_{k-1} again for
    B k. The arrays are those of `rotoff.solver.arrays.Arrays`.
    """
    cdef Py_ssize_t L = out.shape[0] - 1, i, j, k, f
    made = np.zeros((L + 2, L + 2), dtype=np.int64)
    cdef int64_t[:, ::1] P = made
    cdef int64_t best, need, held, sweep
    with nogil:
        for i in range(L, 0, -1):
            for j in range(i, L + 1):
                best, held = 4611686018427387904, delta[j] if j < L else 0
                # min over f of max(δ_j + M_Fall, M_B, ā_i + P(i+1, j))
                for f in range(n_forms[i]):
                    best = min(best, max(held + M_all[i, f], M_B[i, f], saved[i, f] + P[i + 1, j]))
                # min over k of max(δ_j + max_{q=i..k} M_q, a_k + P(k+1, j), P(i, k))
                sweep = 0
                for k in range(i, j):
                    sweep = max(sweep, M_ck[i, k])
                    best = min(best, max(held + sweep, out[k] + P[k + 1, j], P[i, k]))
                # min over k and f of max(δ_j + max_{q<k} M_q, δ_j + a_{k-1} + M_Fall, ā_k + P(k+1, j),
                #                         δ_k + ā_k + max_{q<k} M_q, a_{k-1} + M_B, P(i, k-1))
                sweep = 0
                for k in range(i + 1, j):
                    sweep = max(sweep, M_ck[i, k - 1])
                    for f in range(n_forms[k]):
                        need = max(held + sweep, held + out[k - 1] + M_all[k, f], saved[k, f] + P[k + 1, j])
                        need = max(need, delta[k] + saved[k, f] + sweep, out[k - 1] + M_B[k, f], P[i, k - 1])
                        best = min(best, need)
                P[i, j] = best
    return made


# -- POFO: recompute and offloading together


cdef struct Choice:
    double cost
    Py_ssize_t cut, form  # F_all i in this form if `cut` is 0, else F_ck i, F_∅ i+1..cut
    Py_ssize_t A, Delta   # of the backwards that run first

cdef struct State:
    double cost                 # of the way there
    Py_ssize_t A, A_F, A_B, at  # `at` is its place in a row of OC


@cython.final
cdef class Joint:
    """C_A(i, j, A, Δ), each state when it is first asked for, and OC_x(i, A, A_F, A_B).

    OC is a shortest way: each state adds the seconds of its first operations in both phases, and of their idle times.
    `OC_known` has the least seconds of a way *to* each state, since a way need not go on from a state that another
    beats: with no more slots of any kind, no more seconds follow (but for the rounding of D_B).
    """

    cdef readonly Py_ssize_t L, N
    cdef Py_ssize_t X, states
    cdef double beta_F, beta_B
    cdef const double[::1] U, u_again, U_keep, tail, delta
    cdef const double[::1] clock_F, clock_B, clock  # β times running seconds
    cdef const double[::1] M_ck
    cdef const double[:, ::1] u_B, M_all, M_B
    cdef const double[:, ::1] M_sweep, M_none  # [i, k] max_q M(q) of F_ck i, F_∅ i+1..k, and of F_∅ i+1..k
    cdef const double[:, ::1] early, late   # [i, k] max_q M(q) − β Σ_{r=i..q−1} u_F(r), and − β Σ_{r=q+1..k} u_F(r)
    cdef const int32_t[::1] n_forms, out
    cdef const int32_t[:, ::1] saved
    cdef const int64_t[::1] base            # (i, j) has row base[i] + j of C
    cdef const int64_t[::1] start           # (A, A_F, A_B) is at start[A] + A_F (N + 1 − A) + A_B of row i X + x of OC
    cdef double[:, ::1] C_known, OC_known   # NaN where C is not asked for yet
    cdef int64_t[:, ::1] came               # [row, at] the state before, row and place as one number
    cdef double[::1] below                  # [at] the least seconds of all states with no more slots of any kind
    cdef State[::1] live                    # those that go on

    def __init__(self, slots):
        """slots: a `rotoff.solver.slots.Slots`."""
        self.L, self.N, self.X = slots.L, slots.N, 1 + slots.saved.shape[1]
        self.U, self.u_again, self.u_B = slots.U, slots.u_again, slots.u_B
        self.U_keep, self.tail = slots.U_keep, slots.tail
        self.M_all, self.M_B, self.delta, self.M_sweep = slots.M_all, slots.M_B, slots.delta, slots.M_sweep
        self.n_forms, self.out, self.saved = slots.n_forms, slots.out, slots.saved
        self.beta_F, self.beta_B, self.M_ck, self.M_none = slots.beta_F, slots.beta_B, slots.M_ck, slots.M_none
        self.clock_F, self.clock_B, self.clock = slots.clock_F, slots.clock_B, slots.clock
        self.early, self.late = slots.early, slots.late
        self.base, count = _rows(self.L, self.L - 1, self.L)
        self.C_known = np.full((count, (self.N + 1) * (self.N + 2) // 2), np.nan)
        self.start = np.concatenate([[0], np.cumsum(np.arange(self.N + 1, 0, -1) ** 2)])
        shape = (self.L + 2) * self.X, int(self.start[self.N + 1])
        self.OC_known, self.came = np.full(shape, np.inf), np.empty(shape, np.int64)
        self.below, self.live = np.empty(shape[1]), np.empty(shape[1], "f8, p, p, p, p")

    def backward(self, Py_ssize_t i, Py_ssize_t j, Py_ssize_t A, Py_ssize_t Delta):
        """(cost, cut, form, A and Δ of the backwards that run first) of C_A(i, j, A, Δ)."""
        cdef Choice best
        with nogil:
            self.C_state(i, j, A, Delta, &best)
        return best.cost, best.cut, best.form, best.A, best.Delta

    def forward(self):
        """(seconds of OC_0(1, 0, 0, 0), the last state on its way); infinite if nothing fits."""
        cdef int64_t end = 0
        cdef double cost
        with nogil:
            cost = self.OC(&end)
        return cost, end

    def state(self, int64_t at):
        """(i, x, A, A_F, A_B, the state before) of a state on the way."""
        cdef int64_t cells = self.below.shape[0], row = at // cells, cell = at % cells, A = 0
        while self.start[A + 1] <= cell:
            A += 1
        A_F, A_B = (cell - self.start[A]) // (self.N + 1 - A), (cell - self.start[A]) % (self.N + 1 - A)
        return row // self.X, row % self.X, A, A_F, A_B, self.came[row, cell]

    # B.3, backward phase

    cdef double C(self, Py_ssize_t i, Py_ssize_t j, Py_ssize_t A, Py_ssize_t Delta) except -1 nogil:
        """C_A(i, j, A, Δ)."""
        if A + Delta > self.N:
            return INFINITY
        cdef double *known = &self.C_known[self.base[i] + j, A * (2 * self.N + 3 - A) // 2 + Delta]
        cdef Choice best
        if isnan(known[0]):
            self.C_state(i, j, A, Delta, &best)
            known[0] = best.cost
        return known[0]

    cdef int C_state(self, Py_ssize_t i, Py_ssize_t j, Py_ssize_t A, Py_ssize_t Delta, Choice *best) except -1 nogil:
        cdef Py_ssize_t k, f, e, e_F, e_B, Delta_1, Delta_2, Delta_3
        cdef double over = A + self.delta[j] - self.N, M_F, M_B, cost, sweep, later, earlier
        best[0] = Choice(INFINITY, 0, 0, 0, 0)
        self.states += 1
        if self.states % 16384 == 0:
            look_for_signals()
        for f in range(self.n_forms[i]):
            M_F, M_B = self.M_all[i, f] + over, self.M_B[i, f] + A - self.N
            if M_F > ERROR or M_B > ERROR:
                continue
            if i == j:
                # u_F + u_B + ε, ε = max(M_B − N + A + Δ, M_Fall + δ_j − β u_B − N + A + Δ, 0) / β
                e = max(_up(M_B + Delta), _up(M_F + Delta - self.beta_B * self.u_B[i, f]))
                cost, Delta_1 = self.u_again[i] + self.u_B[i, f] + e / self.beta_B, 0
            else:
                # u_F + C_A(i+1, j, A + ā_i, Δ_1) + u_B + ε_F + ε_B
                # ε_B = max(M_B − N + A + Δ, 0) / β, Δ_1 = max(Δ − β (u_B + ε_B), 0)
                e_B = _up(M_B + Delta)
                Delta_1 = _left(Delta, _copied(self.clock_B[i - 1], self.beta_B * self.u_B[i, f]) + e_B)
                later = self.C(i + 1, j, A + self.saved[i, f], Delta_1)
                if later == INFINITY:
                    continue
                # Δ_2 = max(Δ_1 − β C_A(i+1, j, A + ā_i, Δ_1), 0), ε_F = max(M_Fall + δ_j − N + A + Δ_2, 0) / β
                Delta_2 = _left(Delta_1, _copied(self.clock[i], self.beta_B * later))
                e_F = _up(M_F + Delta_2)
                cost = self.U[i] - self.U[i - 1] + later + self.u_B[i, f] + (e_F + e_B) / self.beta_B
            if cost < best.cost:
                best[0] = Choice(cost, 0, f, A + self.saved[i, f], Delta_1)
        # min over k of Σ_{q=i..k} u_F(q) + C_A(i, k, A, Δ) + C_A(k+1, j, A + a_k, Δ_2) + ε
        for k in range(i, j):
            sweep = self.U[k] - self.U[i - 1]
            if self.M_sweep[i, k] + over > ERROR or sweep + self.keep(i, k) + self.keep(k + 1, j) >= best.cost:
                break
            earlier = self.C(i, k, A, Delta)
            if sweep + earlier + self.keep(k + 1, j) >= best.cost:
                continue
            # Δ_2 = max(Δ − β C_A(i, k, A, Δ), 0), Δ_3 = max(Δ_2 − β C_A(k+1, j, A + a_k, Δ_2), 0)
            Delta_2 = _left(Delta, _copied(self.clock[i - 1], self.beta_B * earlier))
            later = self.C(k + 1, j, A + self.out[k], Delta_2)
            if sweep + earlier + later >= best.cost:
                continue
            Delta_3 = _left(Delta_2, _copied(self.clock[k], self.beta_B * later))
            # ε = max(max_q (M_q − β Σ_{q<r≤k} u_F(r)) + δ_j − N + A + Δ_3, 0) / β
            e = _up(self.late[i, k] + over + Delta_3)
            cost = sweep + earlier + later + e / self.beta_B
            if cost < best.cost:
                best[0] = Choice(cost, k, 0, A + self.out[k], Delta_2)
        return 0

    # B.1, forward phase, and B.2, the loss

    cdef double OC(self, int64_t *end) except -1 nogil:
        """OC_0(1, 0, 0, 0), and the last state on its way."""
        cdef Py_ssize_t i, x, n, s
        cdef double cost, best = INFINITY
        self.OC_known[self.X, 0] = 0.0
        for i in range(1, self.L + 2):
            look_for_signals()
            for x in range(1 if i == 1 else 1 + self.n_forms[i - 1]):
                n = self.find_live(i, x)
                if i <= self.L:
                    self.OC_all(i, x, n)
                    self.OC_ck(i, x, n)
                    continue
                for s in range(n):
                    # B.2: both copies end after the loss, ε = (A_F + A_B) / β
                    cost = self.live[s].cost + self.live[s].A_F / self.beta_F + self.live[s].A_B / self.beta_B
                    if cost < best:
                        best, end[0] = cost, (i * self.X + x) * self.below.shape[0] + self.live[s].at
        return best

    cdef Py_ssize_t find_live(self, Py_ssize_t i, Py_ssize_t x) noexcept nogil:
        """Collect the states of OC_x(i, ·, ·, ·) that no other beats, with no more slots of any kind, by rising A.
        Returns how many there are."""
        cdef Py_ssize_t n = 0, A, A_F, A_B, at = 0, side
        cdef double cost, others
        for A in range(self.N + 1):
            side = self.N + 1 - A
            for A_F in range(side):
                for A_B in range(side):
                    cost, others = self.OC_known[i * self.X + x, at], INFINITY
                    if A_B > 0:
                        others = self.below[at - 1]
                    if A_F > 0:
                        others = min(others, self.below[at - side])
                    if A > 0:
                        others = min(others, self.below[self.start[A - 1] + A_F * (side + 1) + A_B])
                    self.below[at] = min(cost, others)
                    if cost < others:
                        self.live[n] = State(cost, A, A_F, A_B, at)
                        n += 1
                    at += 1
        return n

    cdef int OC_all(self, Py_ssize_t i, Py_ssize_t x, Py_ssize_t n) except -1 nogil:
        """F_all first: u_F + u_B + min_v OC_1(i+1, A', A_F', A_B') + ε_F + ε_B."""
        cdef Py_ssize_t f, s, e_F, e_B, D_F, D_B, I = self.size(i, x)
        cdef double over, cost
        cdef State *state
        for f in range(self.n_forms[i]):
            for s in range(n):
                state = &self.live[s]
                over = state.A + I - self.N
                if self.M_all[i, f] + over > ERROR or self.M_B[i, f] + over > ERROR:
                    break
                # ε_F = max(M_Fall − N + A + A_F + I, 0) / β, ε_B = max(M_B − N + A + A_B + I, 0) / β
                e_F, e_B = _up(self.M_all[i, f] + over + state.A_F), _up(self.M_B[i, f] + over + state.A_B)
                # D_F = β (u_F + ε_F), D_B = β (u_B + ε_B)
                D_F = _copied(self.clock_F[i - 1], self.clock_F[i] - self.clock_F[i - 1]) + e_F
                D_B = _copied(self.clock_B[i - 1], self.beta_B * self.u_B[i, f]) + e_B
                cost = self.U[i] - self.U[i - 1] + self.u_B[i, f] + e_F / self.beta_F + e_B / self.beta_B
                self.go_on(i, x, state, cost, i + 1, 1 + f, D_F, D_B, True)
        return 0

    cdef int OC_ck(self, Py_ssize_t i, Py_ssize_t x, Py_ssize_t n) except -1 nogil:
        """F_ck first: min over j of Σ_{q=i..j} u_F(q) + min_v OC_0(j+1, A', A_F', A_B') + C_A(i, j, A + I, A_B) + ε_F.
        """
        cdef Py_ssize_t j, s, e_F, D_F, D_B, I = self.size(i, x)
        cdef double over, sweep, segment
        cdef State *state
        for j in range(i, self.L):
            sweep = self.U[j] - self.U[i - 1]
            for s in range(n):
                state = &self.live[s]
                over = state.A + I - self.N
                if self.M_ck[i] + over > ERROR or self.M_none[i, j] + state.A - self.N > ERROR:
                    break
                segment = self.C(i, j, state.A + I, state.A_B)
                if segment == INFINITY:
                    continue
                # ε_F = max(max_q (M_q − β Σ_{i≤r<q} u_F(r)) − N + A + A_F + I, 0) / β
                e_F = _up(self.early[i, j] + over + state.A_F)
                # D_F = β (Σ_{q=i..j} u_F(q) + ε_F), D_B = β C_A(i, j, A + I, A_B)
                D_F = _copied(self.clock_F[i - 1], self.clock_F[j] - self.clock_F[i - 1]) + e_F
                D_B = _copied(self.clock[i - 1], self.beta_B * segment)
                self.go_on(i, x, state, sweep + segment + e_F / self.beta_F, j + 1, 0, D_F, D_B,
                           self.M_none[i, j] + over <= ERROR)
        return 0

    cdef inline void go_on(self, Py_ssize_t i, Py_ssize_t x, State *state, double cost, Py_ssize_t i1, Py_ssize_t x1,
                           Py_ssize_t D_F, Py_ssize_t D_B, bint stays) noexcept nogil:
        """Table 2: to OC_x1(i1, A', A_F', A_B'), with I kept (v = 0, if it `stays`) and offloaded (v = 1):
        A' = A + (1 − v) I, A_F' = max(A_F + v I − D_F, 0), A_B' = max(A_B − D_B, 0) + v I."""
        cdef Py_ssize_t v, I = self.size(i, x), row = i1 * self.X + x1, A, A_F, A_B, at
        cost += state.cost
        for v in range(0 if stays else 1, 2 if i > 1 else 1):
            A = state.A + (1 - v) * I
            A_F = _left(state.A_F + v * I, D_F)
            A_B = _left(state.A_B, D_B) + v * I
            if A + A_F > self.N or A + A_B > self.N:
                continue
            at = self.start[A] + A_F * (self.N + 1 - A) + A_B
            if cost < self.OC_known[row, at]:
                self.OC_known[row, at], self.came[row, at] = cost, (i * self.X + x) * self.below.shape[0] + state.at

    cpdef Py_ssize_t size(self, Py_ssize_t i, Py_ssize_t x) noexcept nogil:
        """Slots of I_i^x; 0 for a_0, which is the caller's."""
        if i == 1:
            return 0
        return self.out[i - 1] if x == 0 else self.saved[i - 1, x - 1]

    cdef inline double keep(self, Py_ssize_t i, Py_ssize_t j) noexcept nogil:
        """Seconds of keeping all of stages i..j, in their fastest forms."""
        return self.U_keep[j] - self.U_keep[i - 1] - self.tail[j]
