import numpy as np

from ...core.chain import Chain

class Order:
    def __init__(
        self,
        chain: Chain,
        rows: np.ndarray,
        access: np.ndarray,
        movable: np.ndarray,
        base: int,
        periods: int,
        held: int,
        host_held: int,
        limit: int,
        host_limit: int | None,
    ) -> None: ...
    def seconds(self, order: np.ndarray) -> float: ...
    def anneal(
        self,
        order: np.ndarray,
        tries: int,
        seed: int,
        hot: float,
        cold: float,
        best: np.ndarray,
        stop: np.ndarray,
    ) -> None: ...
