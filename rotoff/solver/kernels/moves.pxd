"""Random changes of plans, for the searches that decode one in each step (`kernels.plan`, `kernels.place`)."""

from libc.stdint cimport int16_t, uint64_t

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
    elif below(state, 8) == 0:
        codes[0] ^= 1
    else:
        p = 1 + below(state, L)
        other = codes[q * V] & MOVE
        codes[q * V] = <int16_t>((codes[q * V] & ~MOVE) | (codes[p * V] & MOVE))
        codes[p * V] = <int16_t>((codes[p * V] & ~MOVE) | other)
