"""Measuring: exact bytes, and nothing of the user's changed."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from allocated import live_bytes, most_held, peak_bytes
from models import ALL, fresh
from torch import nn

import rotoff
from rotoff.profile import stage_meter
from rotoff.profile.memory.allocator import Allocation, AllocationLog, mark, record
from rotoff.profile.timing import stage_timing
from rotoff.profile.timing.convergence import Repeats
from rotoff.profile.timing.harness import Run
from rotoff.tensors.stage import StageModule

KIB = 1024


def measured(*modules: nn.Module, x: torch.Tensor) -> rotoff.Chain:
    model = rotoff.Checkpointable(nn.Sequential(*modules)).measure(x)
    model.close()
    return model.chain


def test_measured_bytes_of_simple_stages() -> None:
    """1024 x 64 floats are 256 KiB."""
    chain = measured(
        nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.5), nn.GELU(), nn.Linear(64, 16), x=torch.randn(1024, 64)
    )
    kib = [(s.output_bytes / KIB, s.saved_bytes / KIB, s.grad_bytes / KIB) for s in chain.stages]
    assert [s.name for s in chain.stages] == ["0..1", "2", "3", "4"]  # the first layer's output is saved by nobody
    assert kib == [(256, 256, 256), (256, 512, 256), (256, 256, 256), (64, 64, 64)]
    assert chain.input_bytes == 256 * KIB
    assert chain.input_grad_bytes == 0
    # weight and bias gradients, until they have been added to .grad
    assert chain.stages[3].backward_transient_bytes == 4 * (16 * 64 + 16)
    assert [s.forward_transient_bytes for s in chain.stages] == [256 * KIB, 0, 0, 0]
    assert chain.stages[1].checkpoint_transient_bytes == 256 * KIB  # the mask, which F_ck lets go


def test_input_gradient_is_charged_if_needed() -> None:
    assert measured(nn.Linear(64, 64), x=torch.randn(1024, 64, requires_grad=True)).input_grad_bytes == 256 * KIB


def test_aliasing_and_in_place_stages_are_merged() -> None:
    views = nn.Unflatten(1, (8, 8)), nn.Flatten()
    chain = measured(nn.Linear(64, 64), nn.ReLU(inplace=True), *views, nn.Linear(64, 8), x=torch.randn(32, 64))
    assert [s.name for s in chain.stages] == ["0..3", "4"]
    model, batch = fresh("overwriting")
    x = batch()
    before = x.clone()
    wrapped = rotoff.Checkpointable(model).measure(x)
    assert torch.equal(x, before)
    assert [s.name for s in wrapped.profile.prefix] == ["0"]  # nothing in it needs a gradient


def test_passed_on_batch_tensors_and_tables_cost_nothing() -> None:
    model, batch = fresh("side_inputs")
    wrapped = rotoff.Checkpointable(model).measure(batch())
    chain = wrapped.chain
    assert [s.name for s in wrapped.profile.prefix] == ["masks and tables"]
    assert [s.name for s in chain.stages] == ["0", "1", "2", "3", "5"]
    assert [s.output_bytes for s in chain.stages[:3]] == [32 * 16 * 4] * 3
    assert chain.input_bytes == 2 * 32 * 16 * 4 + 32
    assert [s.grad_bytes for s in chain.stages[:3]] == [2 * 32 * 16 * 4] * 3  # the scale's too


def test_skip_is_charged_to_every_value_carrying_it() -> None:
    model, batch = fresh("handed_on")
    chain = rotoff.Checkpointable(model).measure(batch()).chain
    assert [s.name for s in chain.stages] == ["0", "1", "2", "3..4", "5..6"]
    tensor = 32 * 16 * 4
    assert [s.output_bytes // tensor for s in chain.stages[:4]] == [1, 2, 2, 2]
    assert [s.grad_bytes // tensor for s in chain.stages[:4]] == [1, 2, 2, 2]


def test_late_in_place_change_of_batch_matches_plain_model() -> None:
    class Meddler(nn.Module):
        def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return pair[0] * pair[1].add_(1)

    class HandsOn(nn.Module):
        def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            return pair[0].tanh(), pair[1]

    model = nn.Sequential(HandsOn(), HandsOn(), Meddler(), nn.Linear(4, 4))
    pair = torch.randn(4, 4), torch.randn(4, 4)
    mine = copy.deepcopy(pair)
    wrapped = rotoff.Checkpointable(copy.deepcopy(model))
    wrapped.compute_sequence(wrapped.measure(mine).min_mem_limit())
    assert torch.equal(mine[1], pair[1])
    wrapped(mine).sum().backward()
    model(pair).sum().backward()
    assert torch.equal(mine[1], pair[1])
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(wrapped.parameters(), model.parameters(), strict=True))


def test_stages_before_first_gradient_form_the_prefix() -> None:
    model, batch = fresh("frozen")
    wrapped = rotoff.Checkpointable(model).measure(batch())
    assert [s.name for s in wrapped.chain.stages] == ["2..3", "4..5", "6"]
    assert [s.name for s in wrapped.profile.prefix] == ["0..1"]
    assert wrapped.profile.resident_input_bytes == 0


def test_bytes_held_by_ctx_are_unmanaged() -> None:
    model, batch = fresh("stateful")
    wrapped = rotoff.Checkpointable(model).measure(batch())
    assert wrapped.profile.unmanaged_bytes == 32 * 16 * 4


class ByNorm(nn.Module):
    """A layer divided by a norm of its weight that is no part of the gradient, as in DoRA; the norm's graph ends in
    nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        columns = torch.eye(64) @ self.weight * self.weight  # saves two products
        return x @ self.weight / columns.square().sum(0).sqrt().detach()


def test_saved_tensors_of_unused_graph_are_not_counted() -> None:
    """1024 x 64 floats are 256 KiB; the eye and the products, 16 KiB each, go with their graph."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(ByNorm(), nn.GELU()) for _ in range(4)])
    x = torch.randn(1024, 64)
    wrapped = rotoff.Checkpointable(copy.deepcopy(model)).measure(x)
    norm = 64 * 4
    assert [s.saved_bytes for s in wrapped.chain.stages] == [256 * KIB + norm, 256 * KIB] * 4
    estimated = rotoff.estimate(model, x, device="cpu")
    assert [s.saved_bytes for s in estimated.stages] == [s.saved_bytes for s in wrapped.chain.stages]

    def step(of: nn.Module) -> list[torch.Tensor]:
        of.zero_grad()
        of(x).sum().backward()
        return [p.grad for p in of.parameters() if p.grad is not None]

    expected = step(model)
    for mode in ("remat", "offload", "joint"):
        wrapped.compute_sequence(wrapped.keep_all_memory * 6 // 10, mode=mode)
        step(wrapped)
        assert peak_bytes(lambda: step(wrapped)) <= wrapped.get_expected_memory()
        assert all(map(torch.equal, step(wrapped), expected))
    wrapped.close()


class Leaves(nn.Module):
    """Taken as a whole, since a transform of torch.func runs in it; leaves half a MiB, if at all, until its next
    run."""

    def __init__(self, leaves: bool) -> None:
        super().__init__()
        self.up, self.leaves = nn.Linear(64, 64), leaves
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.func.vmap(torch.sin)(self.up(x))
        last = h.detach().repeat(4, 1)
        if self.leaves:
            self.last = last
        return x + h * torch.tanh(h).repeat(6, 1).sum(0).detach()


def test_attribute_freed_by_next_run_is_not_counted() -> None:
    found = []
    for leaves in (False, True):
        model = nn.Sequential(*[Leaves(leaves) for _ in range(3)])
        stages = rotoff.Checkpointable(model).measure(torch.randn(512, 64)).chain.stages
        found.append([(s.checkpoint_transient_bytes or 0) - (s.forward_transient_bytes or 0) for s in stages])
    assert found[0] == found[1]


def test_measuring_under_a_profiler_is_refused() -> None:
    model = rotoff.Checkpointable(nn.Sequential(nn.Linear(4, 4)))
    with torch.autograd.profiler.profile(), pytest.raises(rotoff.MeasureError, match="profiler is active"):
        model.measure(torch.randn(2, 4))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.grid
def test_measuring_changes_no_user_state(name: str) -> None:
    model, batch = fresh(name)
    x = batch()
    rotoff.Checkpointable(copy.deepcopy(model)).measure(x)  # what is made once in a process
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.full_like(p, 3.0)
    state = copy.deepcopy(model.state_dict())
    tensors = x if isinstance(x, tuple) else (x,)
    generator, given = torch.get_rng_state(), [t.detach().clone() for t in tensors]
    buffers = [id(b) for b in model.buffers()]
    wrapped = rotoff.Checkpointable(model)
    live = live_bytes()
    wrapped.measure(x)
    assert live_bytes() == live
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(t, old) for t, old in zip(tensors, given, strict=True))
    assert all(t.grad is None for t in tensors)
    assert [id(b) for b in model.buffers()] == buffers
    assert all(torch.equal(a, b) for a, b in zip(state.values(), model.state_dict().values(), strict=True))
    assert all(p.grad is None or bool((p.grad == 3).all()) for p in model.parameters())
    wrapped.close()


def test_measuring_holds_one_stage_at_a_time() -> None:
    def peak(layers: int) -> int:
        model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(layers)])
        x = torch.randn(4096, 64)
        from rotoff.profile.memory import allocator as allocations

        recorded = allocations.record
        try:  # one profiler at a time: the outer one watches, the inner ones say nothing

            def silent(run: Any, device: Any) -> Any:
                return run(), AllocationLog((Allocation(0, 0, "backward"), Allocation(0, 0, "begun")))

            allocations.record = silent
            meter_costs = rotoff.Checkpointable(model)
            return peak_bytes(lambda: meter_costs.measure(x))
        finally:
            allocations.record = recorded

    stage = 4096 * 64 * 4
    assert peak(12) <= peak(3) + stage // 8
    # a_i-1, two outputs of a stage's modules, three gradients; parameters and generator states are a few kilobytes
    assert peak(12) <= 6 * stage + (16 << 10)


class Wide(nn.Module):
    """Saves 6 tensors of its input's bytes and more, most of which can be made again."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x).sigmoid())).exp().sin()


class Written(nn.Module):
    """A forward of its own around its blocks."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for n, block in enumerate(self.blocks):
            x = block(x) * (n + 1)
        return x.square()


@pytest.mark.parametrize("forms", [False, True])
@pytest.mark.parametrize("kind", [nn.Sequential, Written])
@pytest.mark.grid
def test_measuring_recorded_models_and_forms_holds_one_stage(kind: type[nn.Module], forms: bool) -> None:
    x = torch.randn(1024, 64)

    def held(layers: int) -> tuple[int, rotoff.Profile]:
        blocks = [Wide() for _ in range(layers)]
        wrapped = rotoff.Checkpointable(kind(*blocks), forms=forms, stages=None if kind is nn.Sequential else blocks)
        most = most_held(lambda: wrapped.measure(x))
        wrapped.close()
        return most, wrapped.profile

    few, many = held(3), held(12)
    assert any(found.forms for found in many[1].forms) is forms
    assert len(many[1].stages) >= 10
    assert many[0] <= few[0] + x.nbytes // 8
    stages = many[1].chain.stages
    whole = (
        max(s.saved_bytes + s.output_bytes + s.grad_bytes + s.backward_transient_bytes for s in stages) + 2 * x.nbytes
    )
    assert many[0] <= 1.5 * whole  # and what the first run made, to compare with
    assert sum(s.saved_bytes for s in stages) > 4 * many[0]


class Broad(nn.Module):
    """Its output takes 16 times the bytes of its input, and it saves nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x * self.scale] * 16, dim=1)


def test_measuring_holds_an_output_once_beside_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_meter, "LONG", 0.0)  # the interpreter, which short stages run under, keeps it once more
    x = torch.randn(256, 64)
    blocks = nn.Sequential(nn.Linear(64, 64), Broad(), nn.Linear(1024, 64))
    wrapped = rotoff.Checkpointable(blocks, stages=list(blocks), cache_directory=None)
    output = 16 * x.nbytes
    assert most_held(lambda: wrapped.measure(x)) <= 2.75 * output
    assert wrapped.chain.stages[1].output_bytes == output
    wrapped.close()


class WritesDown(torch.autograd.Function):
    """Its backward writes into the gradient that it is given, as fused norms do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.fill_(float("nan"))


class Norm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return WritesDown.apply(x)


def test_a_backward_that_writes_into_its_gradient_leaves_the_values_alone() -> None:
    x = torch.ones(4, 4, requires_grad=True)
    run = Run(StageModule("norm", (Norm(),)), [x], lambda tensors: tensors[0], False, outputs=[torch.ones(4, 4)])
    with torch.enable_grad():
        stage_timing.time_stage(run, stage_timing.EarlyStop(), Repeats(2, 2), x.device, stage_timing.Timings())
    assert torch.equal(run.outputs[0], torch.ones(4, 4))


class PassesOn(nn.Module):
    """Hands its input on beside what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, self.lin(x)


class HoldsFirst(torch.autograd.Function):
    """Keeps its first input out of reach of autograd's hooks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.x = x
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, gradient * ctx.x


class Holds(nn.Module):
    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return HoldsFirst.apply(*pair)


def test_a_value_that_was_passed_on_before_it_is_held_is_charged() -> None:
    x = torch.randn(256, 64)
    blocks = nn.Sequential(nn.Linear(64, 64), PassesOn(), Holds(), nn.Linear(64, 64))
    wrapped = rotoff.Checkpointable(blocks, stages=list(blocks), cache_directory=None).measure(x)
    assert wrapped.profile.unmanaged_bytes == x.nbytes
    wrapped.close()


def test_allocation_log_contains_temporaries_and_marks() -> None:
    def run() -> torch.Tensor:
        x = torch.empty(1000)
        y = torch.empty(500)
        del x
        mark("middle")
        z = torch.empty(100)
        del y
        return z

    kept, log = record(run, torch.device("cpu"))
    assert log.peak() == 6000
    assert log.live() == {kept.untyped_storage().data_ptr(): 400}
    assert log.after("middle").peak() == 400
    assert [e.mark for e in log.events if e.mark] == ["middle"]


def test_progress_is_reported() -> None:
    told = []
    model = rotoff.Checkpointable(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    model.measure(torch.randn(2, 4), progress=lambda done, of, name: told.append((done, of, name)))
    assert told == [(0, 2, "0"), (1, 2, "1"), (2, 2, "")]


class Noted(nn.Module):
    """Counts its calls in a buffer, beside others that it does not use."""

    def __init__(self, unused: int) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        for n in range(unused):
            self.register_buffer(f"unused_{n}", torch.zeros(n + 1))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return (self.inner(x) + self.count).tanh()


def test_equal_stages_change_their_own_buffers() -> None:
    """What one of them was measured to change is that of the others, whatever buffers they have besides."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Noted(n) for n in (0, 2, 1, 0, 0)], nn.Linear(16, 1))
    x, plain = torch.randn(8, 16), copy.deepcopy(model)
    wrapped = rotoff.Checkpointable(model).measure(x)
    changed = [one.changed_buffers for one in wrapped.profile.behaviours if one.changed_buffers]
    assert [[id(module) for module, _ in found] for found in changed] == [[id(layer)] for layer in list(model)[:5]]
    wrapped.compute_sequence(wrapped.min_mem_limit("remat"), mode="remat")
    for run in (wrapped, plain):
        for _ in range(3):
            run(x).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert all(map(torch.equal, model.buffers(), plain.buffers()))
    wrapped.close()


def test_backward_is_timed_on_nonconstant_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device is faster on numbers that are, which training's never are."""
    real, given = stage_timing.backward, list[torch.Tensor]()

    def noted(edges: Any, gradients: Any, targets: Any) -> Any:
        given.extend(gradients)
        return real(edges, gradients, targets)

    monkeypatch.setattr(stage_timing, "backward", noted)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])
    rotoff.Checkpointable(model, cache_directory=None).measure(torch.randn(4, 16)).close()
    assert given
    assert all(len(gradient.unique()) > 1 for gradient in given)


@pytest.mark.parametrize("load", [0.0, 1e6])
def test_times_measured_beside_other_programs_are_marked(load: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    model, batch = fresh("residual")
    times = rotoff.Checkpointable(model, cache_directory=None).measure(batch()).chain.meta["times"]
    assert ("while the machine was busy (load 1000000.0 on" in times) == bool(load)
