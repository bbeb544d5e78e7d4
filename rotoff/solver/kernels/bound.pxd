"""The dual of a step's activations, for `kernels.bound` itself and for `kernels.steady_bound`, which adds the
parameters."""

from libc.stdint cimport int8_t, int32_t


cdef struct Problem:
    Py_ssize_t L, K
    bint duplex
    double out_rate, in_rate     # 1 / β in these units
    double out_share, in_share   # of a direction's β while copies run in the other one too; 1 where not duplex
    const double *room           # [k] limit − what operation k needs itself
    const double *work           # [k] seconds of operation k, in its fastest form
    const double *u_F            # [q]
    const double *saved          # [q, form]
    const double *slower         # [q, form] backward time beyond the fastest form's
    const double *entry          # [q] bytes of the smallest form of a_q or ā_q: part of the next operation's own need
    const int32_t *n_forms
    const int8_t *apart          # [q, form] whether ā_q does not fit beside F_{q+1} (1), beside B_{q+1} (2)
    const double *out            # [q] bytes of a_q, where something may be paid for inputs; else NULL
    # Where an interval is cut in two, when its operation ends (`kernels.steady_bound`), α of both; else NULL. p and r
    # are then those of the cheaper part, and p_made is p of the second part, in which the interval's operation has made
    # its value.
    const double *own            # [k] of the operation
    const double *again          # [k] of what is made again
    const double *late           # [k] of stage q, made again between B q+1 and B q
    const double *before         # [k] price of a byte of ā_q that comes in between them
    const double *p_made


cdef struct Second:
    double *lam      # λ'
    double *r        # r'
    double *alpha    # α'


cdef struct Work:
    double *whole      # α, and what a price of copies out, and in, takes of it
    double *by_out
    double *by_in
    double *total      # running sums of λ
    double *minus      # their negatives
    double *alpha      # α − α'
    double *arrive     # [k] link in during k, less total
    double *leave      # [k] least over a ≥ k of link out during a, and λ_0 + ... + λ_a
    double *away       # [k] that, less total
    int32_t *leave_at
    double *held       # [k] bytes that begin to be held at cut k, less those that end before it
    double *spent      # [k] seconds paid with `own`, with `again`, with `late`, bytes with `p_made`
    double *redone
    double *redone_late
    double *before      # bytes that come in at that price
    double *left


cdef inline double compute_price(Problem *c, double p, double r, double more, double other, double *by_out,
                                 double *by_in) noexcept nogil:
    """α where a second's copying alone is worth p out, and r + more in; other: what else is paid of the second.

    In a second the link copies what takes a second, one way, or `out_share` and `in_share` of that both ways.
    """
    cdef double both
    by_out[0] = by_in[0] = 1.0
    if not c.duplex or (c.out_share == 1.0 and c.in_share == 1.0):
        return 1.0 - p - (r if c.duplex else 0.0) - more - other
    r += more
    both = c.out_share * p + c.in_share * r
    if both >= p and both >= r:
        by_out[0], by_in[0] = c.out_share, c.in_share
    elif p >= r:
        both, by_in[0] = p, 0.0
    else:
        both, by_out[0] = r, 0.0
    return 1.0 - both - other


cdef inline void lower(double *v, const double *by) noexcept nogil:
    """The nearest prices v at or above 0 with v · by ≤ 1; four of them."""
    cdef double over = -1.0, most, squares
    cdef Py_ssize_t i
    for i in range(4):
        v[i] = v[i] if v[i] > 0.0 else 0.0
        over += by[i] * v[i]
    while over > 1e-15:
        squares = 0.0
        for i in range(4):
            squares += by[i] * by[i] if v[i] > 0.0 else 0.0
        most = over / squares
        over = -1.0
        for i in range(4):
            v[i] = v[i] - most * by[i] if v[i] > most * by[i] else 0.0
            over += by[i] * v[i]


cdef double dual_value(Problem *c, const double *lam, const double *p, const double *r, const Second *s, double *g_lam,
                       double *g_p, double *g_r, Second *g, Work *w) noexcept nogil
