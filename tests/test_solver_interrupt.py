"""Ctrl-C stops a long solve at once, in the tables and in the search."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
from test_solver_long_chains import uneven

import rotoff
from rotoff.solver import joint

CHAIN = uneven(1, 200)
LIMIT = int(rotoff.simulate(CHAIN, rotoff.keep_all(CHAIN)).peak_bytes * 0.4)


@pytest.mark.parametrize(
    "work",
    [lambda: joint.solve_slots(CHAIN, LIMIT, 50, "up"), lambda: rotoff.solve(CHAIN, LIMIT, refine=120)],
    ids=["tables", "search"],
)
def test_an_interrupt_stops_it_within_a_second(work: Callable[[], object]) -> None:
    sent = []

    def interrupt() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(1.5, interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        work()
    assert time.monotonic() - sent[0] < 1
