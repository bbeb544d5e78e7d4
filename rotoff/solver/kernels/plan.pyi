from typing import Any

import numpy as np

class Evaluator:
    V: int
    def __init__(
        self,
        arrays: Any,
        out_bandwidth: float,
        in_bandwidth: float,
        duplex: bool,
        shares: tuple[float, float],
        limit: int,
        host_limit: int,
        visits: int,
        cap: int,
    ) -> None: ...
    def evaluate(self, codes: np.ndarray) -> tuple[float, int, int, int]: ...
    def operations(self, codes: np.ndarray) -> np.ndarray | None: ...
    def anneal(
        self,
        codes: np.ndarray,
        evaluations: int,
        seed: int,
        hot: float,
        cold: float,
        masks: np.ndarray,
        weight: float,
        best: np.ndarray,
        stop: np.ndarray,
    ) -> float: ...
