# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Search over plans of chains with parameters, each of which is decoded to a whole steady step.

A plan is one row of numbers: the codes of the stages (`rotoff.solver.plan_codes`), then the genes of each group
(`kernels.cycle`).
"""

import numpy as np

from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint64_t

from rotoff.solver.kernels.cycle cimport (AFTER_UPDATE, AT, FLAGS, GENES, GRADIENT_LEAVES, MASK, ON_HOST, RANK, SLOTS,
                                          STATE_LEAVES, STEPS_ASIDE, Cycle, CycleGap, CycleValue, Group, GroupPlaces,
                                          Groups, Position, Use, cycle, mark)
from rotoff.solver.kernels.decode cimport Verdict
from rotoff.solver.kernels.flow cimport ROUNDS, flow, host_peak, work
from rotoff.solver.kernels.lanes cimport PERIODS, Event
from rotoff.solver.kernels.moves cimport below, mutate
from rotoff.solver.kernels.plan cimport Evaluator
from rotoff.solver.kernels.work cimport Chain, Work

cdef double INF = float("inf")
# What a second of a lane's work costs beside the step's seconds: of plans that take equally long, the one that moves
# less has more room for what is to come.
cdef double EASE = 0.06


cdef void _preset(int16_t *gene, Py_ssize_t which) noexcept nogil:
    """A place that people write by hand."""
    cdef int16_t everywhere = (1 << (AFTER_UPDATE + 1)) - 1
    gene[MASK] = everywhere if which >= 3 else 0
    gene[FLAGS] = 0
    if which == 1 or which == 3:
        gene[FLAGS] = STATE_LEAVES | (GRADIENT_LEAVES if which == 3 else 0)
    elif which == 2 or which == 4:
        gene[FLAGS] = ON_HOST
    elif which == 5:
        gene[MASK] = (1 << AFTER_UPDATE) | 4
        gene[FLAGS] = STATE_LEAVES


cdef void _shift(Groups *p, int16_t *genes, Py_ssize_t k, uint64_t *state) noexcept nogil:
    """Another place for the update of group k."""
    cdef int16_t *gene = genes + k * GENES
    cdef Py_ssize_t choice = below(state, 8), other
    cdef int16_t rank
    if choice < 2:
        gene[AT] += <int16_t>(1 + below(state, 4)) * (1 if below(state, 2) else -1)
    elif choice == 2:
        gene[AT] = 1
    elif choice == 3:
        gene[AT] = <int16_t>p.group[k].first
    elif choice < 6:
        other = below(state, p.K)
        rank = gene[RANK]
        gene[RANK] = genes[other * GENES + RANK]
        genes[other * GENES + RANK] = rank
    else:
        gene[RANK] = <int16_t>(below(state, 2 * p.K + 1)) - <int16_t>p.K
    if gene[AT] < 1:
        gene[AT] = 1
    elif gene[AT] > p.group[k].first:
        gene[AT] = <int16_t>p.group[k].first


cdef void _mutate_groups(Groups *p, int16_t *genes, uint64_t *state) noexcept nogil:
    """One random change of where parameters lie and when they are updated: of one group, or of all of its stages."""
    cdef Py_ssize_t k = below(state, p.K), other, x
    cdef bint all_of_them = below(state, 2) == 0
    _mutate_group(p, genes, k, state)
    if not all_of_them:
        return
    for other in range(p.K):
        if (p.group[other].first == p.group[k].first and p.group[other].last == p.group[k].last and other != k
                and (p.group[other].g > 0) == (p.group[k].g > 0)):
            for x in range(MASK, RANK + 1):
                genes[other * GENES + x] = genes[k * GENES + x]


cdef void _mutate_group(Groups *p, int16_t *genes, Py_ssize_t k, uint64_t *state) noexcept nogil:
    cdef Py_ssize_t other, x, choice = below(state, 16)
    cdef int16_t *gene = genes + k * GENES
    cdef int16_t held
    if choice < 4:
        x = below(state, 8)
        if x < 3:
            gene[MASK] ^= 1 << AFTER_UPDATE
        elif x < 5:
            gene[MASK] ^= 4
        elif x < 7:
            gene[MASK] ^= 1
        else:
            gene[MASK] ^= <int16_t>(1 << below(state, 3 * SLOTS))
    elif choice < 6:
        gene[FLAGS] ^= STATE_LEAVES
    elif choice < 7:
        gene[FLAGS] ^= GRADIENT_LEAVES if below(state, 2) else STEPS_ASIDE
    elif choice < 9:
        gene[FLAGS] ^= ON_HOST
    elif choice < 10:
        _preset(gene, below(state, 6))
    elif choice < 12:  # as a group near by
        other = k + 1 - 2 * <Py_ssize_t>below(state, 2)
        if 0 <= other < p.K:
            gene[MASK] = genes[other * GENES + MASK]
            gene[FLAGS] = genes[other * GENES + FLAGS]
    elif choice < 14:
        other = below(state, p.K)
        for x in range(MASK, FLAGS + 1):
            held = gene[x]
            gene[x] = genes[other * GENES + x]
            genes[other * GENES + x] = held
    else:
        _shift(p, genes, k, state)


cdef class Placer(Evaluator):
    """Decodes plans of one chain with parameters at one limit.

    Args:
        groups, reads: as `rotoff.solver.placed_search.group_arrays` returns them. after: whether updates come after
            ``B 1``. The others are those of `Evaluator`.
    """

    cdef Groups p
    cdef Cycle s

    def __init__(self, chain, arrays, int64_t limit, host_limit, Py_ssize_t visits, Py_ssize_t cap, groups, reads,
                 bint after):
        Evaluator.__init__(self, chain, arrays, limit, host_limit, visits, cap)
        cdef Groups *p = &self.p
        cdef Cycle *s = &self.s
        cdef Py_ssize_t k, n
        reads_from, read, slots = reads
        p.K = len(groups)
        p.after = after
        p.group = <Group *>self._input(groups)
        p.reads_from = <int32_t *>self._input(reads_from)
        p.reads = <int32_t *>self._input(read)
        p.slot = <int32_t *>self._input(slots)
        n = cap + p.K + 4
        s.at = <Position *>self._room(n * sizeof(Position))
        s.pos = self._ints(n)
        s.room = <int64_t *>self._room(n * sizeof(int64_t))
        s.left = <int64_t *>self._room(n * sizeof(int64_t))
        s.before = <double *>self._room(2 * n * sizeof(double))
        s.group = <GroupPlaces *>self._room((p.K + 1) * sizeof(GroupPlaces))
        s.order = self._ints(p.K + 1)
        s.n_order = 0
        for k in range(p.K):
            if p.group[k].g > 0:
                s.order[s.n_order] = <int32_t>k
                s.n_order += 1
        uses = n * max(1, int(np.diff(reads_from).max())) + p.K
        s.use = <Use *>self._room(uses * sizeof(Use))
        s.use_next = self._ints(uses)
        s.base = <int32_t>(cap + 2)
        values = s.base + 3 * p.K + 1
        s.value = <CycleValue *>self._room(values * sizeof(CycleValue))
        for k in range(values):
            s.value[k].away_from = -1
        s.on_host = <int8_t *>self._room(values)
        self._lanes(values + PERIODS * p.K, s.base, p.K)
        self.harder = True
        gaps = 3 * values + uses
        s.gap = <CycleGap *>self._room(gaps * sizeof(CycleGap))
        s.out_next = self._ints(gaps)
        s.free_next = self._ints(gaps)
        s.in_next = self._ints(gaps)
        s.wait_next = self._ints(gaps)
        self.w.event = <Event *>self._room((4 * gaps + 4 * n) * sizeof(Event))

    cdef void look(self, const int16_t *codes, double enough, double weight, Verdict *r) noexcept nogil:
        """As in `Evaluator`. `r` stays where both plans make the same step, as a third of all changes do."""
        cdef Chain *c = &self.c
        cdef Work *w = &self.w
        cdef Cycle *s = &self.s
        cdef bint runs = cycle(c, w, &self.p, s, codes, self.V) >= 0
        cdef uint64_t made = mark(w, s) if runs else 0
        if runs and made == r.mark:
            return
        r[0] = Verdict(INF, s.over, 0, <double>s.over_sum / (s.n + 1), 0.0, 0, made)
        if not runs:
            return
        work(c, w, &self.p, s)
        r.work = EASE * s.work
        enough -= r.work + weight * (r.over + r.spread)
        r.makespan = flow(c, w, &self.p, s, enough, ROUNDS, &r.rounds)
        if c.host_limit >= 0:
            r.host_over = max(0, host_peak(w, &self.p, s) - c.host_limit)

    cdef void change(self, int16_t *codes, uint64_t *state) noexcept nogil:
        while True:
            if below(state, 3) == 0:
                mutate(&self.c, &self.w, codes, self.V, state)
            else:
                _mutate_groups(&self.p, codes + (self.c.L + 1) * self.V, state)
            if below(state, 3):
                return

    cdef void confine(self, int16_t *codes, const int16_t *rules) noexcept nogil:
        """Masks and flags of groups are and-ed with the last two rules."""
        cdef Py_ssize_t k
        cdef int16_t *genes = codes + (self.c.L + 1) * self.V
        Evaluator.confine(self, codes, rules)
        for k in range(self.p.K):
            genes[k * GENES + MASK] &= rules[2]
            genes[k * GENES + FLAGS] &= rules[3]

    cdef void decode_again(self, const int16_t *codes) noexcept nogil:
        cdef Verdict r = Verdict(0.0, 0, 0, 0.0, 0.0, 0, 0)
        cdef int unused
        self.look(codes, INF, 0.0, &r)
        cycle(&self.c, &self.w, &self.p, &self.s, codes, self.V)
        flow(&self.c, &self.w, &self.p, &self.s, INF, r.rounds + 1, &unused)
