"""Pinned host memory on a machine without CUDA: a runtime that notes what it is asked to lock, and refuses what a test
wants."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import rotoff
from rotoff import accelerator
from rotoff.planning.request import Request
from rotoff.planning.step_planner import make_plan
from rotoff.profile.estimate.estimate import estimate_profile
from rotoff.profile.tape_profile import TapeProfile as Profile
from rotoff.runtime.links import pinned as host_memory
from rotoff.runtime.links.pinned import PinnedSegment, Slab, pin, room_for_plan

DEVICE = torch.device("cuda", 0)
MIB = 1 << 20


class FakeRuntime:
    """locked: address -> bytes. refuses: whether it refuses a range of so many bytes, the n-th it is asked for."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.asked: list[int] = []
        self.refuses: Callable[[int, int], bool] = lambda nbytes, n: False

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert flags == 1  # cudaHostRegisterPortable
        self.asked.append(nbytes)
        if self.refuses(nbytes, len(self.asked)):
            return 2
        self.locked[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if self.locked.pop(address, None) else 1


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRuntime]:
    """The segments are small here, and the host has room for 100 MiB."""
    fake = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(host_memory, "numa_node", lambda _: 0)
    monkeypatch.setattr(host_memory, "SEGMENT_BYTES", MIB)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(accelerator, "_clear_last_error", lambda _: None)
    monkeypatch.setenv("ROTOFF_HOST_MEMORY", "100 MiB")
    yield fake
    assert fake.locked == {}
    assert host_memory.available_bytes() == 100 * MIB


def close(segments: list[Any]) -> None:
    for segment in segments:
        segment.close()


def test_what_must_be_whole_lies_in_one_segment(runtime: FakeRuntime) -> None:
    """Small and large ranges that fill the memory, and some with others between."""
    random, end, whole = Random(0), 0, []
    while end < 40 * MIB:
        size = random.choice([64, 5000, MIB // 3, MIB, 3 * MIB])
        if random.random() < 0.7:
            whole.append((end, size))
        end += size
    segments, slab = pin(end, DEVICE, whole), Slab()
    for segment in segments:
        slab.add(segment)
    assert slab.nbytes == end
    assert max(runtime.asked) <= 3 * MIB
    registered = [(address, address + nbytes) for address, nbytes in runtime.locked.items()]
    for first, size in whole:
        tensor = slab.in_one_piece(first, size)
        assert tensor.untyped_storage().nbytes() == size
        begin, stop = tensor.data_ptr(), tensor.data_ptr() + size
        assert any(low <= begin and stop <= high for low, high in registered)
    del tensor
    slab.close()


def test_what_is_pinned_is_no_longer_free(runtime: FakeRuntime) -> None:
    assert host_memory.available_bytes() == 100 * MIB
    segments = pin(60 * MIB, DEVICE)
    assert host_memory.available_bytes() == 40 * MIB
    assert room_for_plan(DEVICE) == 100 * MIB  # the next step's plan may use them again
    with pytest.raises(
        rotoff.ExecutionError, match=f"^{50 * MIB} bytes of pinned host memory are needed and {40 * MIB} are"
    ):
        pin(50 * MIB, DEVICE)
    assert len(runtime.asked) == 60  # nothing of what does not fit is tried
    close(segments)
    assert host_memory.available_bytes() == 100 * MIB


def test_all_or_nothing(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime.refuses = lambda nbytes, n: n == 3
    monkeypatch.setattr(torch, "empty", out_of_memory)
    with pytest.raises(
        rotoff.ExecutionError, match=r"cannot be pinned: registering them gives CUDA error 2.*'no more'"
    ):
        pin(5 * MIB, DEVICE)
    assert len(runtime.asked) == 3
    assert host_memory.available_bytes() == 100 * MIB


def out_of_memory(*_: Any, **__: Any) -> torch.Tensor:
    raise RuntimeError("no more\nat all")


def test_where_registering_fails_what_pytorch_rounds_to_must_fit(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's own pinned allocator takes a power of two."""
    runtime.refuses = lambda nbytes, n: True
    made: list[int] = []
    real = torch.empty

    def unpinned(nbytes: int, **options: Any) -> torch.Tensor:
        assert options.pop("pin_memory")
        made.append(nbytes)
        return real(nbytes, **options)

    monkeypatch.setattr(torch, "empty", unpinned)
    segment = PinnedSegment(33 * MIB, DEVICE)
    assert host_memory.available_bytes() == 36 * MIB
    with pytest.raises(
        rotoff.ExecutionError, match=rf"CUDA error 2\), allocating them takes {64 * MIB} and {36 * MIB} are available"
    ):
        PinnedSegment(33 * MIB, DEVICE)
    assert made == [33 * MIB]
    segment.close()


def test_the_environment_may_know_better(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROTOFF_HOST_MEMORY", "2 MiB")
    assert host_memory.available_bytes() == 2 << 20
    monkeypatch.setenv("ROTOFF_HOST_MEMORY", "much")
    with pytest.raises(rotoff.LimitError, match="ROTOFF_HOST_MEMORY is 'much'"):
        host_memory.available_bytes()


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("0::/job/step\n", {"memory.max": "max", "job/memory.max": "9000", "job/step/memory.max": "max"}),
        ("5:cpu:/other\n4:memory,x:/job\n0::/\n", {"memory/job/memory.limit_in_bytes": "9000"}),
        ("4:memory:/docker/1\n", {"memory/memory.limit_in_bytes": "9000"}),  # a container sees its own as the root
        ("0::/../../job\n", {"memory.max": "9000"}),
    ],
)
def test_a_job_has_what_its_own_group_leaves_it(
    groups: str, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROTOFF_HOST_MEMORY", raising=False)
    monkeypatch.setattr(host_memory, "CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(host_memory, "CGROUP_ROOT", tmp_path / "fs")
    (tmp_path / "groups").write_text(groups)
    for name, content in files.items():
        file = tmp_path / "fs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
        for used in ("memory.current", "memory.usage_in_bytes"):
            (file.parent / used).write_text("2000")
        (file.parent / "memory.stat").write_text("inactive_file 500\nactive_file 100\nanon 7\n")
    assert host_memory.available_bytes() == int(0.95 * (9000 - 2000 + 600))


def test_processes_of_a_host_share_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROTOFF_HOST_MEMORY", "80 MiB")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert room_for_plan(DEVICE) == 10 * MIB
    assert room_for_plan(torch.device("cpu")) is None  # whose host tier is a file
    blocks = [nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(4)]
    wrapped = rotoff.Checkpointable(nn.Sequential(*blocks)).measure(torch.randn(64, 16))
    with pytest.raises(rotoff.InfeasibleError, match="on the device and host_limit=10; without"):
        wrapped.compute_sequence(wrapped.min_mem_limit("offload"), mode="offload", host_limit=80)


# -- plans that fit the host


@pytest.fixture(scope="module")
def profile() -> Profile:
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()) for _ in range(6)]
    device = rotoff.Device("for the host", 10**12, 1e12, {"float32": 1e9}, 1e9, 1e9)
    return estimate_profile(nn.Sequential(*blocks, nn.Linear(64, 1)), (torch.randn(512, 64),), {}, device)


def request(profile: Profile, mode: str, share: float = 0.6, **options: Any) -> Request:
    return Request(int(share * profile.keep_all_bytes()), mode, 50, {"refine": 0.1, **options})


@pytest.mark.parametrize("mode", ["joint", "offload"])
def test_a_plan_uses_no_more_of_the_host_than_there_is(profile: Profile, mode: str) -> None:
    asked = request(profile, mode, 0.8)
    free = make_plan(profile, asked)
    room = free.execution.host_bytes
    assert room > 0
    assert make_plan(profile, asked, room=room).sequence.ops == free.sequence.ops
    if mode == "joint":
        tight = make_plan(profile, asked, room=room - 1)
        assert 0 <= tight.execution.host_bytes < room
        assert tight.trace.makespan >= free.trace.makespan
        assert make_plan(profile, asked, room=0).execution.host_bytes == 0


def test_a_plan_that_does_not_fit_the_host_is_refused_and_not_its_step(profile: Profile) -> None:
    asked = request(profile, "offload")
    needed = make_plan(profile, asked).execution.host_bytes
    with pytest.raises(
        rotoff.InfeasibleError,
        match=rf"keeps {needed} bytes in pinned host memory, and 1000 are available; give a limit",
    ) as error:
        make_plan(profile, asked, room=1000)
    enough = replace(asked, mem_limit=error.value.min_mem_limit, mode="remat")
    assert make_plan(profile, enough, room=1000).execution.host_bytes == 0
