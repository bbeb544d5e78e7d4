"""Bytes of a step that keeps everything during each operation: m_F and m_B of Euro-Par 2020, section 3.2.

Source: Beaumont, Eyraud-Dubois, Shilova, *Optimal GPU-CPU Offloading Strategies for Deep Neural Network Training*.
x_i there is ā_i here, x_0 is a_0; F_i and B_i there are those of stage i+1.
"""

from __future__ import annotations

from ...core.chain import Chain
from ..arrays import arrays


def needs(chain: Chain) -> tuple[list[int], list[int]]:
    """m_F and m_B: bytes held during F_1..F_L and B_1..B_L with nothing moved (entry 0 is 0)."""
    c, L = arrays(chain), len(chain)
    m_F, m_B, kept = [0] * (L + 1), [0] * (L + 1), int(c.out[0])
    for i in range(1, L + 1):
        kept += int(c.saved[i, 0])
        m_F[i] = kept + int(c.f_transient[i, 0])
        m_B[i] = kept + int(c.grad[i] + c.grad[i - 1] + c.b_transient[i, 0]) + (int(c.out[L]) if i < L else 0)
    return m_F, m_B


def peak_bytes(chain: Chain) -> int:
    """M_peak: the bytes of keeping everything."""
    m_F, m_B = needs(chain)
    return max(*m_F, *m_B)
