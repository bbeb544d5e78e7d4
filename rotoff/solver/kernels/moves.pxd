"""Random changes of plans, for the search that decodes one in each step (`kernels.plan`)."""

from libc.stdint cimport int16_t, uint64_t

from rotoff.solver.kernels.cycle cimport (AFTER_UPDATE, AT, FLAGS, GENES, GRADIENT_LEAVES, MASK, ON_HOST, RANK, SLOTS,
                                          STATE_LEAVES, STEPS_ASIDE, Groups)
from rotoff.solver.kernels.work cimport APART, DROP, EARLY, KIND, MOVE, Chain, Work


cdef inline uint64_t random(uint64_t *state) noexcept nogil:
    """xorshift64*: a fixed seed gives a fixed sequence on every machine."""
    cdef uint64_t x = state[0]
    x ^= x >> 12
    x ^= x << 25
    x ^= x >> 27
    state[0] = x
    return (x * <uint64_t>2685821657736338717) >> 11


cdef inline Py_ssize_t below(uint64_t *state, Py_ssize_t n) noexcept nogil:
    return <Py_ssize_t>(random(state) % <uint64_t>n)


cdef inline double unit(uint64_t *state) noexcept nogil:
    return random(state) / 9007199254740992.0


cdef inline int16_t draw_code(Chain *c, uint64_t *state, Py_ssize_t q) noexcept nogil:
    cdef int16_t kind = 0
    if below(state, 2):
        kind = <int16_t>(1 + below(state, c.n_forms[q]))
    return <int16_t>((kind << KIND) | (MOVE if below(state, 2) else 0) | (DROP if below(state, 3) == 0 else 0)
                     | (APART if below(state, 8) == 0 else 0)
                     | (EARLY if below(state, 16) == 0 else 0))


cdef inline void mutate(Chain *c, Work *w, int16_t *codes, Py_ssize_t V, uint64_t *state) noexcept nogil:
    """One random change of a plan; `w.visits` still holds how often each stage ran in some recent plan."""
    cdef Py_ssize_t L = c.L, q, p, v, length, choice = below(state, 16)
    cdef int16_t code, other
    q = 1 + below(state, L)
    v = w.visits[q]
    v = below(state, v if 0 < v < V else V)
    if choice < 4:
        codes[q * V + v] ^= MOVE
    elif choice < 6:
        if below(state, 4):
            codes[q * V + v] ^= DROP
        elif codes[q * V + v] & (APART | EARLY):
            codes[q * V + v] &= ~(APART | EARLY)
        else:
            codes[q * V + v] |= MOVE | (APART if below(state, 2) else EARLY)
    elif choice < 9:
        codes[q * V + v] = draw_code(c, state, q)
    elif choice < 11:  # swap the first visits of two near stages
        p = q + 1 + below(state, 4)
        if p <= L:
            for v in range(V):
                code = codes[q * V + v]
                codes[q * V + v] = codes[p * V + v]
                codes[p * V + v] = code
    elif choice < 13:  # a segment q..p recomputed later from the input of q
        length = 1 + below(state, 1 + L // 4 if L > 4 else L)
        p = q + length
        if p > L:
            p = L
        codes[q * V] = (codes[q * V] & MOVE) if q == p else 0
        for q in range(q + 1, p):
            codes[q * V] = DROP
        if p < L and q + 1 < p + 1:
            codes[(p) * V] = <int16_t>(codes[p * V] & ~DROP) if below(state, 2) else DROP
    elif choice < 14:  # a run of stages kept, or moved
        length = 1 + below(state, 1 + L // 4 if L > 4 else L)
        code = <int16_t>((1 << KIND) | below(state, 2))
        for p in range(q, q + length if q + length <= L else L + 1):
            codes[p * V] = code
    elif choice < 15:  # a boundary shifts: a stage takes its neighbour's codes
        p = q + (1 if below(state, 2) else -1)
        if 1 <= p <= L:
            for v in range(V):
                codes[q * V + v] = codes[p * V + v]
    else:
        p = 1 + below(state, L)
        other = codes[q * V] & MOVE
        codes[q * V] = <int16_t>((codes[q * V] & ~MOVE) | (codes[p * V] & MOVE))
        codes[p * V] = <int16_t>((codes[p * V] & ~MOVE) | other)


cdef inline void _preset(int16_t *gene, Py_ssize_t which) noexcept nogil:
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


cdef inline void _shift(Groups *p, int16_t *genes, Py_ssize_t k, uint64_t *state) noexcept nogil:
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


cdef inline void mutate_groups(Groups *p, int16_t *genes, uint64_t *state) noexcept nogil:
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


cdef inline void _mutate_group(Groups *p, int16_t *genes, Py_ssize_t k, uint64_t *state) noexcept nogil:
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
