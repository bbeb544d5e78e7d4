"""State of a model that its forward reads and changes: what is no reason to measure again, and what is refused before it
is done. How such models train is in the table of test_changing_models.py (`state_models`)."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator

import pytest
import torch
from planned_steps import smallest
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from trunks import LENGTH, WIDTH, Block, Trunk, made_of

import rotoff


def batch() -> torch.Tensor:
    return torch.randn(LENGTH, WIDTH)


def measured(model: nn.Module) -> rotoff.Checkpointable:
    return rotoff.Checkpointable(model, cache_directory=None, check=True).measure(batch())


def in_sequence(block: type[nn.Module]) -> nn.Module:
    return nn.Sequential(*[block() for _ in range(4)])


KINDS = [pytest.param(lambda block: made_of(block)(), id="recorded"), pytest.param(in_sequence, id="sequential")]


# -- right, whatever the forward does


def as_the_plain_model(model: nn.Module, steps: int = 3) -> None:
    """Measure and train `model` and a copy: measuring leaves it as it was, and all steps give the plain bits."""
    twin = copy.deepcopy(model)
    run = measured(model)
    before = zip(model.state_dict().items(), twin.state_dict().values(), strict=True)
    assert [name for (name, mine), other in before if not torch.equal(mine, other)] == []
    run.compute_sequence(smallest(run, "remat"), mode="remat", refine=False)
    for _ in range(steps):
        x, outputs = batch(), []
        for net in (twin, run):
            outputs.append(net(x))
            outputs[-1].square().sum().backward()
        assert torch.equal(*outputs)
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, other)
        assert (mine.grad is None) is (other.grad is None)
        assert mine.grad is None or torch.equal(mine.grad, other.grad)
    run.close()


class Teacher(Block):
    """Changes a parameter in its forward."""

    way = ""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.embedding = nn.Embedding(WIDTH, WIDTH, max_norm=0.5 if self.way == "max_norm" else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x * self.mean.clone()) + self.embedding(torch.arange(LENGTH))
        with torch.no_grad():
            if self.way == "itself":
                self.mean.mul_(0.9)
            elif self.way == "data":
                self.mean.data.copy_(x.mean(0))
            elif self.way == "new data":
                self.mean.data = x.mean(0)
            elif self.way == "item":
                self.mean[0] = 2
            elif self.way == "foreach":
                torch._foreach_mul_([self.mean], 0.9)
            elif self.way == "out":
                torch.mul(self.mean, 2, out=self.mean)
        return y


@pytest.mark.parametrize("way", ["itself", "data", "new data", "item", "foreach", "out", "max_norm"])
def test_parameters_that_a_forward_changes(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Teacher, "way", way)
    torch.manual_seed(0)
    as_the_plain_model(made_of(Teacher)())


class Packs(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with rounding():
            return super().forward(x)


def rounding() -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float())


class Differentiates(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad((z**3).sum(), z)
        return super().forward(x) + 0.01 * gradient


@pytest.mark.parametrize("block", [Packs, Differentiates])
def test_forwards_with_hooks_or_a_backward_of_their_own(block: type[Block]) -> None:
    torch.manual_seed(0)
    as_the_plain_model(made_of(block)())


def test_a_step_within_saved_tensor_hooks_of_the_caller() -> None:
    x = batch()
    run = measured(Trunk())
    run.compute_sequence(smallest(run, "remat"), mode="remat", refine=False)
    with save_on_cpu():
        run(x).sum().backward()
    run.close()


# -- threads


@pytest.fixture
def _untouched() -> Iterator[None]:
    call, apply = nn.Module.__call__, torch.autograd.Function.__dict__["apply"]
    yield
    assert nn.Module.__call__ is call
    assert torch.autograd.Function.__dict__["apply"] is apply


@pytest.mark.usefixtures("_untouched")
def test_models_may_be_measured_on_several_threads() -> None:
    failed: list[BaseException] = []
    done: list[rotoff.Checkpointable] = []

    def work() -> None:
        try:
            done.append(measured(Trunk()))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    for run in done:
        run.compute_sequence(smallest(run, "remat"), mode="remat", refine=False)
        run(batch()).sum().backward()
        run.close()


class Table(nn.Module):
    """A table without gradients, of which the forward reads views; nothing in that depends on the input."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        table = torch.randn(20, 16)
        if kind == "parameter":
            self.table = nn.Parameter(table, requires_grad=False)
        elif kind == "buffer":
            self.register_buffer("table", table)
        else:
            self.table = table

    def forward(self) -> torch.Tensor:
        grid = self.table[:16].reshape(1, 4, 4, -1).permute(0, 3, 1, 2)
        return F.interpolate(grid, size=(8, 8), mode="bilinear").flatten()[: LENGTH * WIDTH].view(LENGTH, WIDTH)


class Biased(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.tables = nn.ModuleList(Table(kind) for _ in range(5))
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for table, block in zip(self.tables, self.blocks, strict=True):
            x = block(x + table())
        return x


@pytest.mark.parametrize("mode", ["remat", "offload", "joint"])
@pytest.mark.parametrize("kind", ["parameter", "buffer", "attribute"])
@pytest.mark.grid
def test_tables_whose_views_no_stage_reads_keep_their_content(kind: str, mode: str) -> None:
    torch.manual_seed(0)
    model = Biased(kind)
    twin = copy.deepcopy(model)
    run = measured(model)
    run.compute_sequence(int(1.2 * smallest(run, mode)), mode=mode, refine=False)
    for _ in range(3):
        x = batch()
        for net in (twin, run):
            net.zero_grad()
            net(x).square().sum().backward()
        assert all(
            map(torch.equal, (p.grad for p in twin.blocks.parameters()), (p.grad for p in model.blocks.parameters()))
        )
    assert all(torch.equal(a.table, b.table) for a, b in zip(twin.tables, model.tables, strict=True))
    run.close()


class Growing(nn.Module):
    """Resizes a buffer in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for n, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if n == 2:
                with torch.no_grad():
                    self.seen.resize_(len(self.seen) + 1)
                    self.seen[-1] = x.mean()
                x = x * (1 + self.seen.mean())
        return x


@pytest.mark.parametrize("mode", ["joint", "remat", "offload"])
def test_measuring_undoes_what_a_forward_resizes(mode: str) -> None:
    torch.manual_seed(0)
    plain, x = Growing(), torch.randn(64, 16)
    model = copy.deepcopy(plain)
    wrapped = rotoff.Checkpointable(model, cache_directory=None).measure(x)
    assert model.seen.shape == (0,)
    wrapped.compute_sequence(wrapped.min_mem_limit(mode) + 2000, mode=mode, refine=False)
    for _ in range(3):
        for one in (plain, wrapped):
            one(x).square().mean().backward()
    assert torch.equal(model.seen, plain.seen)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    wrapped.close()
