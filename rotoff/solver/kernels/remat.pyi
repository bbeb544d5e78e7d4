from enum import IntFlag
from typing import Any

import numpy as np

class Table(IntFlag):
    BACKWARD = 0
    FORWARD = 1
    WITHOUT = 2

class Kernel:
    C: np.ndarray
    W: np.ndarray
    def __init__(self, costs: Any, slots: Any, need: Any, base: np.ndarray, reach: int, bare: int) -> None: ...
    def fill(self, d: int, low: int, high: int) -> None: ...
    def fill_forward(self) -> None: ...
    def choice(self, table: Table, i: int, j: int, m: int) -> tuple[float, str, int, int]: ...
