"""Mode offload: every stage runs forward once and some ā go to the host. Proposes which ones."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..core.chain import Chain
from .arrays import arrays
from .plan_codes import ALL, MOVE, empty


def proposals(chain: Chain) -> Iterator[np.ndarray]:
    """Plans that move the ā of the first stages (they are needed last), or of stages with the longest forward per byte.

    Values move only if they have to. So the plan that moves all of them fits whenever any plan of this mode does.
    Sources: Euro-Par 2020 for the order of needs; the prefix is its GREEDY with the set chosen by size.
    """
    L, c = len(chain), arrays(chain)
    # Long stages hide their own copy: rank by forward time per byte saved.
    rank = np.argsort(-c.u_F[1:] / np.maximum(c.saved[1:, 0], 1), kind="stable") + 1
    first = sorted({L * part // 12 for part in range(1, 13)})
    for moved in (*(np.arange(1, last + 1) for last in first), *(rank[: L * part // 12] for part in (3, 6, 9))):
        codes = empty(chain)
        codes[moved] = ALL | MOVE
        yield codes
