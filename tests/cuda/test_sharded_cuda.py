"""FSDP2 on a device: its shards there, or on the host by a `CPUOffloadPolicy`; in one process, whose collectives copy, or
in two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed_placed import Trained, train
from models import Residual, same
from ranks import printed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

import rotoff

pytestmark = pytest.mark.cuda
POLICIES = {"device": OffloadPolicy, "host": CPUOffloadPolicy}


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:fake", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def split(shards: str, planned: bool) -> nn.Module:
    """The model, whose root has parameters of its own, sharded; wrapped if it is to be `planned`."""
    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(nn.Linear(64, 64), *[Residual(64) for _ in range(5)], nn.Linear(64, 64))
    net = net if shards == "host" else net.cuda()
    how = {"mesh": init_device_mesh("cuda", (1,)), "offload_policy": POLICIES[shards]()}
    for block in list(net)[1:-1]:
        fully_shard(block, **how)
    return fully_shard(rotoff.Checkpointable(net, process_group=True) if planned else net, **how)


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    model(x).square().mean().backward()
    return [p.grad.to_local().cpu() for p in model.parameters() if p.grad is not None]  # type: ignore[attr-defined]


@pytest.mark.parametrize("shards", POLICIES)
def test_a_limit_counts_what_the_device_holds(group: None, shards: str) -> None:
    x = torch.randn(256, 64).cuda()
    expected = step(split(shards, False), x)
    model = split(shards, True)
    assert isinstance(model, rotoff.Checkpointable)
    model.compute_sequence(1 << 40)
    step(model, x), step(model, x)
    for mode in ("joint", "remat", "offload"):
        model.compute_sequence((model.min_mem_limit(mode) + model.keep_all_memory) // 2, mode=mode)
        got = step(model, x)
        assert len(got) == len(expected) > 0
        assert all(map(torch.equal, got, expected))
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(x).square().mean().backward()
        torch.cuda.synchronize()
        told = model.get_expected_memory()
        assert told * 0.95 <= torch.cuda.max_memory_allocated() - before <= told <= (model.mem_limit or 0)
    model.close()


@pytest.mark.parametrize(
    "row", [*(f"root {loop}" for loop in ("clipped", "accumulated", "evaluated")), "copies plainly", "hybrid plainly"]
)
def test_what_surrounds_a_step_under_a_device_limit(group: None, row: str) -> None:
    model, loop = row.split()
    plain, one = Trained(model, None, "cuda"), Trained(model, "after", "cuda")
    for n, _ in enumerate(zip(train(plain, loop), train(one, loop), strict=True)):
        if n == 0:
            one.limit_further()
    assert one.planned is not None
    assert any(op.of for op in one.planned.sequence)
    assert same(one.result(), plain.result())
    one.planned.close()


PLACED = "adamw plainly after", "adamw plainly during", "root plainly during", "uneven plainly during"
FURTHER = (
    *(f"{model} plainly {updates}" for model in ("frozen", "adapters", "half") for updates in ("after", "during")),
    *("momentum plainly during", "unsharded plainly after", "offloaded plainly after", "quantized plainly after"),
    *("foreach plainly during", "root accumulated after", "adamw evaluated during", "adamw synced_last after"),
)


@pytest.mark.parametrize("row", [*PLACED, *(pytest.param(row, marks=pytest.mark.slow) for row in FURTHER)])
def test_a_device_limit_trains_as_fsdp2_alone(row: str, record_property: Callable[[str, object], None]) -> None:
    """In two processes, whose collectives go through the host."""
    case = f"2 distributed_placed {row} cuda"
    said, figures = printed(case)[case][:2]
    record_property("predicted, limit and measured bytes of each process", figures)
    assert said == "equal=True same_plan=True within=True close=True moves=True", figures
