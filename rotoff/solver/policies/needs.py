"""Bytes of a step that keeps everything during each operation: m_F and m_B of Euro-Par 2020, section 3.2.

Source: Beaumont, Eyraud-Dubois, Shilova, *Optimal GPU-CPU Offloading Strategies for Deep Neural Network Training*.
x_i there is ā_i here, x_0 is a_0; F_i and B_i there are those of stage i+1.
"""

from __future__ import annotations

import numpy as np

from ...core.chain import Chain
from ..arrays import arrays


def needs(chain: Chain) -> tuple[list[int], list[int]]:
    """m_F and m_B: bytes held during F_1..F_L and B_1..B_L with nothing moved (entry 0 is 0)."""
    c = arrays(chain)
    kept = int(c.out[0]) + np.cumsum(c.saved[:, 0]) - c.saved[:, 0]  # before F_i
    m_F, m_B = kept + c.M_all[:, 0], kept + c.M_B[:, 0]
    return [0, *m_F[1:].tolist()], [0, *m_B[1:].tolist()]


def peak_bytes(chain: Chain) -> int:
    """M_peak: the bytes of keeping everything."""
    m_F, m_B = needs(chain)
    return max(*m_F, *m_B)
