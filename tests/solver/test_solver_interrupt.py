"""Ctrl-C stops a long solve at once, in the tables and in the search."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from oracles.chains import uneven

import rotoff
from rotoff.solver import joint, search
from rotoff.solver.anneal import Budget

pytestmark = pytest.mark.full_search


def with_forms(chain: rotoff.Chain) -> rotoff.Chain:
    """Four smaller forms of each stage."""

    def form(stage: rotoff.Stage, k: int) -> rotoff.Form:
        kept = stage.output_bytes + (stage.saved_bytes - stage.output_bytes) * (5 - k) // 5
        return rotoff.Form(kept, stage.backward_time + stage.forward_time * k / 5)

    stages = [replace(s, forms=tuple(form(s, k) for k in range(1, 5))) for s in chain.stages]
    return replace(chain, stages=tuple(stages))


CHAIN = uneven(1, 200)
WITH_FORMS = with_forms(CHAIN)
LIMIT = int(rotoff.simulate(CHAIN, rotoff.keep_all(CHAIN)).peak_bytes * 0.4)


@pytest.mark.parametrize(
    "work",
    [
        lambda: joint.solve_slots(CHAIN, LIMIT, 50, "up"),
        lambda: rotoff.solve(CHAIN, LIMIT, refine=120),
        lambda: joint.solve_slots(WITH_FORMS, LIMIT, 24, "up"),
        lambda: search._searched(search.Problem(WITH_FORMS, LIMIT, None, 50, Budget(120)), "joint", None),
    ],
    ids=["tables", "search", "tables with forms", "search with forms"],
)
def test_an_interrupt_stops_it_within_a_second(work: Callable[[], object]) -> None:
    sent = []

    def interrupt() -> None:
        sent.append(time.process_time())  # which other work on the machine does not lengthen
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(1.5, interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        work()
    assert time.process_time() - sent[0] < 1
