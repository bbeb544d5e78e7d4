"""What rotoff asks of a device, on a machine without one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._C._profiler import _EventType

from rotoff.profile.allocations import Event, events_of

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("kind", ["cuda", "hip"])
def test_memory_events_of_amds_devices_are_theirs_by_either_name(kind: str) -> None:
    """Some builds report them as of "hip", though their tensors say "cuda"."""

    def event(kind: str, index: int, ptr: int) -> SimpleNamespace:
        fields = SimpleNamespace(device=SimpleNamespace(type=kind, index=index), ptr=ptr, alloc_size=512)
        return SimpleNamespace(children=[], tag=_EventType.Allocation, extra_fields=fields, start_time_ns=ptr)

    events = [event(kind, 0, 1), event(kind, 1, 2), event("cpu", -1, 3)]
    assert events_of(events, CUDA) == [Event(512, 1)]
    assert events_of(events, torch.device("cpu")) == [Event(512, 3)]
