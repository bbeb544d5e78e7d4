"""A linear program written row by row, solved by HiGHS, whose value is then proved from the solver's prices alone."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

Term = tuple[int, float]  # a variable, and what it is multiplied by

EPSILON = 2.0**-52


class Program:
    """Least sum of the `lengths` within rows ``sum of terms >= right`` or ``== right``, over variables of at least 0.

    Every variable but a length has a largest value that it need not exceed. The value rests on it.
    """

    def __init__(self) -> None:
        self.most: list[float] = []  # of each variable; infinite for a length
        self.right: list[float] = []
        self.equal: list[bool] = []
        self._row: list[int] = []
        self._variable: list[int] = []
        self._factor: list[float] = []

    def variable(self, most: float = 1.0) -> int:
        self.most.append(most)
        return len(self.most) - 1

    def variables(self, count: int, most: float = 1.0) -> list[int]:
        return [self.variable(most) for _ in range(count)]

    def length(self) -> int:
        return self.variable(math.inf)

    def row(self, terms: Iterable[Term], right: float = 0.0, equal: bool = False) -> None:
        for variable, factor in terms:
            self._row.append(len(self.right))
            self._variable.append(variable)
            self._factor.append(factor)
        self.right.append(right)
        self.equal.append(equal)

    def value(self) -> float:
        """A sum that no solution is below, near the least one; -inf where the solver has no prices.

        Proof. At any prices y, of at least 0 where a row is no equation, each solution x has c·x >= y·b + (c - yA)·x.
        A variable below `most` takes at least most · min(0, c - yA) of that. Let v be how far c - yA of a length is
        below 0 at most: the lengths, whose sum M is c·x, take at least -v M. So M >= (what is left) / (1 + v).
        A sum of n products of factors with up to three roundings each is wrong by less than n + 8 roundings of the sum
        of their absolute values.
        """
        from scipy.optimize import linprog
        from scipy.sparse import csr_matrix

        shape = len(self.right), len(self.most)
        A = csr_matrix((self._factor, (self._row, self._variable)), shape)
        right, most, equal = np.array(self.right), np.array(self.most), np.array(self.equal)
        cost = np.where(np.isinf(most), 1.0, 0.0)
        found = linprog(
            cost, A_ub=-A[~equal], b_ub=-right[~equal], A_eq=A[equal], b_eq=right[equal], method="highs-ipm"
        )
        if found.ineqlin.marginals is None or found.eqlin.marginals is None:
            return -math.inf
        prices = np.zeros(shape[0])
        prices[~equal], prices[equal] = np.maximum(-found.ineqlin.marginals, 0.0), found.eqlin.marginals
        roundings = EPSILON * (int(np.bincount(self._variable).max()) + 8)
        reduced = cost - A.T @ prices - roundings * (cost + abs(A).T @ abs(prices))
        below = np.minimum(reduced, 0.0)
        over = -float(below[cost > 0].min())
        terms = np.concatenate([prices * right, most[cost == 0] * below[cost == 0]])
        return float((math.fsum(terms) - 8 * EPSILON * math.fsum(abs(terms))) / (1 + over) * (1 - 2 * EPSILON))
