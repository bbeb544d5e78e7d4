import numpy as np

def ascend(
    lam: np.ndarray,
    p: np.ndarray,
    r: np.ndarray,
    steps: int,
    goal: float,
    patience: int,
    shrink: float,
    duplex: bool,
    out_rate: float,
    in_rate: float,
    room: np.ndarray,
    work: np.ndarray,
    u_F: np.ndarray,
    saved: np.ndarray,
    slower: np.ndarray,
    entry: np.ndarray,
    n_forms: np.ndarray,
) -> float: ...
