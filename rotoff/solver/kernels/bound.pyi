import numpy as np

def ascend(
    prices: np.ndarray, steps: int, goal: float, patience: int, shrink: float, *costs: np.ndarray | float | None
) -> float: ...
