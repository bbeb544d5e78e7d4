import numpy as np

class Dual:
    def __init__(
        self,
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
        apart: np.ndarray,
        sizes: np.ndarray,
        times: np.ndarray,
        ends: np.ndarray,
        cuts: np.ndarray,
        begun: np.ndarray,
        earliest: int,
        after: bool,
        unpaid: float,
        shares: tuple[float, float],
    ) -> None: ...
    @property
    def duplex(self) -> bool: ...
    @property
    def rates(self) -> tuple[float, float]: ...
    def at(self, prices: np.ndarray) -> tuple[float, np.ndarray]: ...
    def ascend(
        self, prices: np.ndarray, steps: int, goal: float, patience: int, shrink: float, least_goal: float, scale: float
    ) -> float: ...
