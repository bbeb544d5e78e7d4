import numpy as np

def remat_need(
    out: np.ndarray,
    grad: np.ndarray,
    ck_transient: np.ndarray,
    n_forms: np.ndarray,
    saved: np.ndarray,
    f_transient: np.ndarray,
    b_transient: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]: ...
