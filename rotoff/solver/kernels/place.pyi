from typing import Any

import numpy as np

from .plan import Evaluator

class Placer(Evaluator):
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
        groups: Any,
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
