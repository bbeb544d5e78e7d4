"""The lane of the host on which it updates parameters beside a device."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from rotoff.runtime.placed.updates import HostLane


@pytest.fixture
def _four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_four_threads")
def test_updates_leave_a_core_to_the_thread_that_launches_kernels_and_other_threads_as_they_were() -> None:
    lane, seen = HostLane(True), list[int]()
    for k in (1, 2):
        lane.run(k, lambda: seen.append(torch.get_num_threads()))
    lane.join()
    lane.close()
    other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert [*seen, torch.get_num_threads()] == [3, 3, 4, 4]
