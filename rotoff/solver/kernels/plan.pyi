import numpy as np

from ...core.chain import Chain
from ..arrays import Arrays

class Evaluator:
    V: int
    def __init__(
        self, chain: Chain, arrays: Arrays, limit: int, host_limit: int | None, visits: int, cap: int
    ) -> None: ...
    def evaluate(self, codes: np.ndarray) -> tuple[float, int, int, int]: ...
    def operations(self, codes: np.ndarray) -> list[list[int]] | None: ...
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
