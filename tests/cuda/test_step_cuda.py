"""Whole training steps on CUDA: gradients, the limit as the allocator counts it, overlap, and no host
synchronisation."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from models import Does, Residual
from placed_models import dropping
from planned_steps import run_twice, with_sequence
from torch import nn

import rotoff
from rotoff import accelerator

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("deterministic")]

MODES = ["joint", "remat", "offload"]
FRACTIONS = [0.8, 0.5, 0.3]
STANDIN = "STANDIN" in os.environ  # tests/cuda_standin, which computes on the CPU
SIZE = 128 if STANDIN else 1024


def mean_square() -> nn.Module:
    """A loss as the last stage, so that its bytes are the model's."""
    return Does(lambda net, x: x.square().mean())


def large() -> tuple[nn.Sequential, torch.Tensor]:
    """Stages of tens of megabytes on a GPU, so that the allocator's rounding does not decide."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(256, SIZE), *[Residual(SIZE) for _ in range(10)], nn.Linear(SIZE, 64), mean_square()
    ).cuda()
    return model, torch.randn(8 * SIZE, 256, device="cuda")


def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(1)
    output = model(x)
    (output if output.dim() == 0 else output.square().mean()).backward()
    return output.detach()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def with_zero_gradients(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.zeros_like(p)


class Peak(NamedTuple):
    """Bytes above what there was before. asked: for. given: in the allocator's blocks. slack: what `given` may be more
    than the same step takes at another time: a block above 1 MiB is not split where at most 1 MiB would be left, and
    counts as a whole."""

    asked: int
    given: int
    slack: int


def step_peak(step: Callable[[], object]) -> Peak:
    """Of one `step`: workspaces, gradients and caches come with earlier ones."""
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_stats()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    asked, given = (
        after[f"{kind}_bytes.all.peak"] - before[f"{kind}_bytes.all.current"] for kind in ("requested", "allocated")
    )
    return Peak(asked, given, after["allocation.large_pool.peak"] << 20)


@pytest.mark.parametrize("mode", MODES)
def test_the_peak_stays_below_the_prediction_and_the_limit(mode: str, record_property: Any) -> None:
    module, x = large()
    model = rotoff.Checkpointable(module).measure(x)
    everything = model.keep_all_memory
    for fraction in FRACTIONS:
        try:
            model.compute_sequence(int(everything * fraction), mode=mode)
        except rotoff.InfeasibleError:
            continue
        with_zero_gradients(model)
        step(model, x)
        step(model, x)  # libraries' workspaces are there now
        gc.collect()
        resident = torch.cuda.memory_allocated()
        peak, predicted = step_peak(lambda: step(model, x)), model.get_expected_memory()
        record_property(f"asked for, given and predicted bytes at {fraction}", f"{peak.asked} {peak.given} {predicted}")
        assert peak.asked <= predicted <= everything * fraction, (mode, fraction, peak)
        assert peak.given <= predicted + peak.slack, (mode, fraction, peak)
        assert predicted <= 1.05 * peak.given, (mode, fraction, peak)
        assert torch.cuda.memory_allocated() == resident
    model.close()


@pytest.mark.parametrize(("recorded", "foretold"), [(500, 1100), (2500, 5000), (6000, 11500)])
def test_blocks_larger_than_asked_count_at_a_recorded_size_and_at_one_that_is_foretold(
    recorded: int, foretold: int
) -> None:
    """Of 0.6 to 11 MiB: blocks above 1 MiB are not split where at most 1 MiB would be left."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 256), *(Residual(256) for _ in range(4)), mean_square()).cuda()
    with_zero_gradients(module)
    model = rotoff.Checkpointable(module).measure(torch.randn(recorded, 64, device="cuda"), repeats=1)
    limit = model.keep_all_memory
    model.compute_sequence(limit, refine=False)
    for size in (recorded, foretold, recorded):
        x = torch.randn(size, 64, device="cuda")
        step(model, x)  # planned now, and its blocks are there
        peak, predicted = step_peak(lambda x=x: step(model, x)), model.get_expected_memory()
        assert peak.given <= predicted <= limit, (size, peak)
    assert {row.shapes[0][0]: row.measured for row in model.plans()} == {recorded: True, foretold: False}
    model.close()


def test_measuring_leaves_the_memory_statistics_alone() -> None:
    gc.collect()
    module, x = large()
    step(module, x)
    rotoff.Checkpointable(module).measure(x).close()  # what libraries set up for each thread stays
    torch.cuda.synchronize()
    spike = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    del spike
    before = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated(), torch.cuda.get_rng_state()
    rotoff.Checkpointable(module).measure(x).close()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() == before[0]
    assert torch.cuda.memory_allocated() == before[1]
    assert torch.equal(torch.cuda.get_rng_state(), before[2])


@pytest.mark.concurrent
@pytest.mark.alone
def test_copies_overlap_compute() -> None:
    """A step that moves much takes far less than its compute and its copies one after another."""
    module, x = large()
    model = rotoff.Checkpointable(module).measure(x)
    model.compute_sequence(int(model.keep_all_memory * 0.6), mode="offload")
    trace = rotoff.simulate(model.chain, model.sequence)
    assert trace.d2h_bytes > 0
    copies = trace.d2h_bytes / model.chain.d2h_bandwidth + trace.h2d_bytes / model.chain.h2d_bandwidth

    def seconds(run: nn.Module) -> float:
        times = []
        for _ in range(7):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            step(run, x)
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 1000)
        return sorted(times)[3]

    plain, planned = seconds(module), seconds(model)
    expected = plain + (trace.makespan - model.chain.compute_time)  # what the plan says cannot be hidden
    assert planned < expected + 0.5 * copies, (plain, planned, expected, copies)
    model.close()


class Seeded(torch.autograd.Function):
    """Saves a tensor of the host, as the memory-efficient attention saves the seed of its dropout."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, seed)
        return x * seed.item()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, seed = ctx.saved_tensors
        assert (x.device.type, seed.device.type) == ("cuda", "cpu")
        return gradients[0] * seed.item(), None


def sometimes_seeded(net: Any, given: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of its forwards only those with `seeded` have such a tensor, and a tensor of the host as an output."""
    x, count = given
    x = torch.tanh(net.up(x))
    if not net.seeded:
        x = torch.tanh(torch.tanh(torch.tanh(x)))  # what moves has room on the host for what the other course saves
    else:
        seed = x.detach().square().mean().cpu()
        x, count = Seeded.apply(x, seed), 2 * seed
    return torch.relu(net.down(x)) * count.item(), count


@pytest.mark.parametrize("mode", MODES)
def test_off_the_planned_course_what_lies_on_the_host_stays_there(mode: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*[
        Does(sometimes_seeded, up=nn.Linear(32, 64), down=nn.Linear(64, 32), seeded=False) for _ in range(6)
    ]).cuda()  # fmt: skip
    x, count = torch.randn(256, 32, device="cuda"), torch.ones(1)
    model = rotoff.Checkpointable(module, stages=[*module])

    def gradients_of(run: nn.Module) -> list[torch.Tensor]:
        run.zero_grad()
        run((x, count))[0].square().mean().backward()
        return gradients(run)

    model.measure((x, count))
    with pytest.raises(rotoff.InfeasibleError) as caught:
        model.compute_sequence(1, mode=mode)
    model.compute_sequence(caught.value.min_mem_limit, mode=mode)
    for seeded in (False, True, True, False):
        for block in module:
            block.seeded = seeded
        assert all(map(torch.equal, gradients_of(model), gradients_of(module)))
    model.close()


def test_auto_takes_what_is_free_where_the_steps_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that has so little free that the steps must recompute, and a model that still has to move there from a
    host with even less: no step runs out of memory, and none has the allocator try again."""
    module, x = large()
    measured = rotoff.Checkpointable(module).measure(x)
    everything = measured.keep_all_memory
    measured.close()
    with_zero_gradients(module.cpu())
    weights, total = sum(p.nbytes for p in module.parameters()), torch.cuda.get_device_properties(0).total_memory
    free, wanted = 0, 0.5 * everything + 2 * weights
    while accelerator.reservable_bytes(free) < wanted:
        free += 1 << 20
    monkeypatch.setenv("ROTOFF_HOST_MEMORY", "1 MiB")
    gc.collect()
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved() + free
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _=None: (room - torch.cuda.memory_reserved(), total))
    torch.cuda.set_per_process_memory_fraction(room / total)
    model = rotoff.Checkpointable(module, device="cuda")
    try:
        model.compute_sequence("auto")
        before = torch.cuda.memory_stats()
        for _ in range(3):
            step(model, x)
        after = torch.cuda.memory_stats()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert model.mem_limit is not None
    assert 0.4 * everything < model.mem_limit < 0.7 * everything
    assert [after[name] - before[name] for name in ("num_alloc_retries", "num_ooms")] == [0, 0]
    model.close()


def test_an_allocator_that_has_to_try_again_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module, x = large()
    model = rotoff.Checkpointable(module).measure(x)
    model.compute_sequence(int(model.keep_all_memory * 0.6))
    statistics, more = torch.cuda.memory_stats_as_nested_dict, [0]
    monkeypatch.setattr(
        torch.cuda,
        "memory_stats_as_nested_dict",
        lambda device=None: (now := statistics(device)) | {"num_alloc_retries": now["num_alloc_retries"] + more[0]},
    )
    for more[0] in (0, 0, 3, 4):
        step(model, x)
    said = [record.getMessage() for record in caplog.records if "found no room" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("rotoff: 3 times")
    model.close()


def test_fragmentation_stays_flat_over_hundreds_of_steps(record_property: Any) -> None:
    """Of what is reserved: what is unused of that grows with garbage of other tests, collected meanwhile."""
    module, x = large()
    module, x = module[:6].append(mean_square()), x[: 2 * SIZE]
    model = rotoff.Checkpointable(module).measure(x)
    model.compute_sequence(int(model.keep_all_memory * 0.6))
    with_zero_gradients(model)
    reserved = []
    for _ in range(5):
        for _ in range(20 if STANDIN else 200):
            model(x).backward()
        torch.cuda.synchronize()
        reserved.append(torch.cuda.memory_reserved())
    record_property("reserved, MiB", [round(n / 2**20, 1) for n in reserved])
    assert reserved[-1] <= reserved[0]
    model.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_step_without_room_leaves_nothing_behind_and_the_next_one_is_the_plain_models(mode: str) -> None:
    plain, _ = large()
    module, x = large()
    model = rotoff.Checkpointable(module).measure(x)
    model.compute_sequence(int(model.keep_all_memory * 0.6), mode=mode)
    with_zero_gradients(model), with_zero_gradients(plain)
    step(model, x), step(plain, x)
    total, failed = torch.cuda.get_device_properties(0).total_memory, 0
    for share in (0.1, 0.4, 0.7):
        gc.collect()
        torch.cuda.empty_cache()
        held = torch.cuda.memory_allocated()
        room = torch.cuda.memory_reserved() + share * model.get_expected_memory()
        torch.cuda.set_per_process_memory_fraction(room / total)
        try:
            step(model, x)
        except torch.OutOfMemoryError:
            failed += 1
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        gc.collect()
        assert torch.cuda.memory_allocated() == held
        with_zero_gradients(model), with_zero_gradients(plain)
        torch.testing.assert_close(step(model, x), step(plain, x))
        for a, b in zip(gradients(model), gradients(plain), strict=True):
            torch.testing.assert_close(a, b)
    assert failed
    model.close()


# -- the first replay of a training finds what measuring left on autograd's thread: cuDNN's choices of algorithms, workspaces

# shapes that no other test has, since the choices are the process's
WIDTH, BATCH, SIDE = (7, 3, 14) if STANDIN else (72, 24, 60)


def test_the_first_step_with_replays_keeps_to_its_bytes_where_cudnn_benchmarks() -> None:
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.Tanh()) for _ in range(4)]
        model = nn.Sequential(nn.Conv2d(3, WIDTH, 3, padding=1), *blocks).cuda()
        x = torch.randn(BATCH, 3, SIDE, SIDE, device="cuda")
        wrapped = rotoff.Checkpointable(model, stages=[*model], forms=False).measure(x)
        with_sequence(wrapped, run_twice(len(wrapped.chain)))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        gradient = torch.ones(BATCH, WIDTH, SIDE, SIDE, device="cuda")
        peak = step_peak(lambda: wrapped(x).backward(gradient))
        wrapped.close()
    assert peak.asked <= wrapped.get_expected_memory()


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_replay_makes_the_host_wait_for_cudnns_own_dropout_alone(recurrent: bool, record_property: Any) -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Tanh()) for _ in range(10)]
    model = nn.Sequential(*blocks, *([dropping(64)] if recurrent else []), nn.Linear(64, 64)).cuda()
    x = torch.randn(16, 8, 64, device="cuda")
    wrapped = rotoff.Checkpointable(model, forms=False).measure(x)
    with_sequence(wrapped, run_twice(len(wrapped.chain)))
    gradient = torch.ones(16, 8, 64, device="cuda")
    wrapped(x).backward(gradient)
    torch.cuda.set_sync_debug_mode("error")
    waited = ""
    try:
        wrapped(x).backward(gradient)
    except RuntimeError as error:
        waited = str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    record_property("the host waits", waited or "nowhere")
    assert bool(waited) == recurrent
    wrapped.close()
