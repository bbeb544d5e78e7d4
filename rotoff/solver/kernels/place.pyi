import numpy as np

from ...core.chain import Chain
from ..arrays import Arrays
from .plan import Evaluator

class Placer(Evaluator):
    def __init__(
        self,
        chain: Chain,
        arrays: Arrays,
        limit: int,
        host_limit: int | None,
        visits: int,
        cap: int,
        groups: np.ndarray,
        reads: tuple[np.ndarray, np.ndarray, np.ndarray],
        after: bool,
    ) -> None: ...
    def judge(self, codes: np.ndarray) -> tuple[float, int, int, int]: ...
    def text(self, codes: np.ndarray) -> tuple[list[tuple[int, int, int, int]], list[tuple[int, int]]]: ...
    def search(
        self,
        codes: np.ndarray,
        evaluations: int,
        seed: int,
        hot: float,
        cold: float,
        rules: np.ndarray,
        weight: float,
        best: np.ndarray,
        stop: np.ndarray,
    ) -> float: ...
