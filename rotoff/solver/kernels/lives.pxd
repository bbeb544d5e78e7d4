"""The lives of groups of parameters, for `kernels.steady_bound`; `lives.pyx` has the words."""

from libc.stdint cimport int32_t

from rotoff.solver.kernels.bound cimport Problem


cdef struct Groups:
    Py_ssize_t K, N
    const double *w              # [k] bytes of the parameters, of the gradients (0: frozen), of the state
    const double *g
    const double *o
    const double *update         # [k] seconds of U
    const double *host_update    # [k] seconds of H; negative where it is not legal
    const int32_t *ends          # [k] where the cuts of group k end in `cuts`
    const int32_t *cuts          # of the forwards and backwards that need w, ascending
    const int32_t *begun         # [k] cut of the backward that takes the bytes of g
    Py_ssize_t earliest          # no update before this interval
    bint after                   # whether no state comes in across the step's end


# A price that is the least of those of several parts, and the part.
cdef struct Price:
    double cost
    int part


# Prices of an interval's cheapest parts.
cdef struct Interval:
    Price out, made, back, crossing, late, before, host, again


cdef struct Lines:
    double *cum        # over two steps: sums of λ, X, Y, Z, Y', R', P, Q
    double *X
    double *Y
    double *Z
    double *crossing
    double *late
    double *P
    double *Q
    double *updates    # seconds by interval: on the device, on the host
    double *host_updates
    double *ends_1     # [u] from the cut of the last backward to the update, with and without a valid copy on the host
    double *ends_0
    double *ends_g     # the same of a gradient, which the interval has made
    double *state      # [u] a byte of the optimizer's state, updated in u
    double *held
    double *out        # copies' bytes by interval, at P; those at Q, Y, Y', R', Z
    double *made
    double *back
    double *crossed
    double *came
    double *before
    double paid        # share of the steps in which a copy across the step's end runs
    Interval *interval
    double *p          # of the intervals: the cheapest prices, as `kernels.bound` reads them
    double *r
    double *made_p
    double *before_r
    double *own        # α of the first parts, of the cheaper other part, and of the last part
    double *alpha
    double *last
    double *g_p
    double *g_r
    double[2] *by      # of all parts: what a price of copies out, and in, takes of α


cdef double group_value(Groups *c, Problem *a, const double *lam, double *g_lam, Lines *t) noexcept nogil
