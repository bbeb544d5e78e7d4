"""Predicted bytes against measured ones, on all models of the tests, where stages are large beside the generators'
states."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from allocated import peak_bytes
from models import ALL, fresh
from planned_steps import Loss, smallest, step_peak, with_sequence
from random_programs import random_sequence
from thoroughness import seeds
from torch import nn
from torch.utils.checkpoint import checkpoint

import rotoff
from rotoff.runtime.links import file
from rotoff.runtime.links.file import FileLink, FileTicket
from rotoff.runtime.links.host_file import HostFile

TIMES = 16  # larger than the models' own batches


def many(name: str) -> tuple[torch.nn.Module, Any]:
    """The model `name`, and a way to draw a batch `TIMES` as large as its own."""
    model, batch = fresh(name)

    def joined(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(parts).detach().requires_grad_(parts[0].requires_grad)

    def draw() -> Any:
        batches = [batch() for _ in range(TIMES)]
        if isinstance(batches[0], tuple):
            return tuple(joined(list(parts)) for parts in zip(*batches, strict=True))
        return joined(batches)

    return model, draw


@pytest.mark.parametrize("name", ALL)
@pytest.mark.grid
def test_sequences_hold_at_most_predicted_bytes(name: str) -> None:
    model, draw = many(name)
    wrapped = rotoff.Checkpointable(model).measure(draw())
    for seed in seeds(4):
        with_sequence(wrapped, random_sequence(wrapped.chain, seed, wildness=0.75))
        measured, predicted = step_peak(wrapped, draw), wrapped.get_expected_memory()
        assert measured <= predicted, f"{measured} > {predicted}\n{wrapped.sequence}"
    wrapped.close()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.grid
def test_sequences_under_autocast_hold_at_most_predicted_bytes(name: str) -> None:
    """Which keeps a cast of every weight from its first use on: as much as large weights take beside a small batch."""
    model, draw = fresh(name)
    wrapped = rotoff.Checkpointable(model)
    with casting():
        wrapped.measure(draw())
    limits = [(mode, smallest(wrapped, mode)) for mode in ("joint", "remat", "offload")]
    for mode, limit in [*limits, ("joint", wrapped.keep_all_memory)]:
        wrapped.compute_sequence(limit, mode=mode, mem_slots=20, refine=False)
        assert casting_peak(wrapped, draw) <= wrapped.get_expected_memory() <= limit, (mode, limit)
    for seed in seeds(4):
        with_sequence(wrapped, random_sequence(wrapped.chain, seed, wildness=0.75))
        measured, predicted = casting_peak(wrapped, draw), wrapped.get_expected_memory()
        assert measured <= predicted, f"{measured} > {predicted}\n{wrapped.sequence}"
    wrapped.close()


def casting() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def casting_peak(model: torch.nn.Module, draw: Any) -> int:
    """As `step_peak`, of a step whose forward alone is under autocast."""
    x = draw()
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    with casting():
        unit = torch.ones((), dtype=model(x).dtype)

    def step() -> None:
        with casting():
            output = model(x)
        Loss.apply(output).backward(unit)

    return peak_bytes(step)


class Overwriting(nn.Module):
    """Changes the batch in place: through a view of it, and before it is used."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(4))
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x[1:].mul_(2)
        return self.blocks(x)


@pytest.mark.parametrize("mode", ["joint", "remat", "offload"])
def test_the_copy_of_a_batch_that_the_forward_changes_is_charged(mode: str) -> None:
    draw = partial(torch.randn, 32, 64)
    wrapped = rotoff.Checkpointable(Overwriting()).measure(draw())
    least = wrapped.min_mem_limit(mode)
    for limit in (least, 6 * least // 5):
        wrapped.compute_sequence(limit, mode=mode, refine=False)
        assert step_peak(wrapped, draw) <= wrapped.get_expected_memory() <= limit


class Hooked(nn.Module):
    """Each result has a hook of the model's own, which makes another gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient * 1.5)
        return x


@pytest.mark.parametrize("mode", ["joint", "remat", "offload"])
def test_gradients_of_the_models_own_hooks_are_not_held_while_a_stage_is_recomputed(mode: str) -> None:
    model = rotoff.Checkpointable(Hooked(), cache_directory=None).measure(torch.randn(256, 64))
    model.compute_sequence(smallest(model, mode), mode=mode, refine=False)
    assert step_peak(model, lambda: torch.randn(256, 64)) <= model.get_expected_memory()


@pytest.mark.parametrize("times", [2, 3, 6])
def test_gradients_of_shared_parameters_and_sums_are_charged(times: int) -> None:
    tied = nn.Linear(256, 256)
    wrapped = rotoff.Checkpointable(nn.Sequential(*(nn.Sequential(tied, nn.Tanh()) for _ in range(times))))
    wrapped.measure(torch.randn(4, 256))
    for mode in ("joint", "remat"):
        wrapped.compute_sequence(smallest(wrapped, mode), mode=mode)
        measured = step_peak(wrapped, lambda: torch.randn(4, 256))
        assert measured <= wrapped.get_expected_memory() <= 1.05 * measured
        assert measured > 3 * tied.weight.nbytes


@pytest.mark.slow
def test_predicted_bytes_are_close_to_measured_on_average() -> None:
    """Of every model: keeping everything, and each mode half-way between the smallest limit and that."""
    ratios = {}
    for name in ALL:
        model, draw = many(name)
        wrapped = rotoff.Checkpointable(model).measure(draw())
        everything = wrapped.keep_all_memory
        for mode in ("joint", "remat", "offload", "everything"):
            limit = everything
            if mode == "everything":
                wrapped.compute_sequence(limit)
            else:  # these plans are as good as any in bytes, and found sooner
                limit = (smallest(wrapped, mode) + everything) // 2
                wrapped.compute_sequence(limit, mode=mode, mem_slots=20, refine=False)
            predicted, measured = wrapped.get_expected_memory(), step_peak(wrapped, draw)
            assert measured <= predicted <= limit, (name, mode)
            ratios[name, mode] = predicted / measured
        wrapped.close()
    assert sum(ratios.values()) / len(ratios) <= 1.05, ratios
    # most: an input of the chain that no backward needs, and the copy that keeping everything need not make of the
    # batch
    assert max(ratios.values()) <= 1.3, ratios


def test_predicted_host_bytes_equal_those_of_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written where on the host, against the prediction."""
    ends: list[int] = []
    copy_out = FileLink.copy_out

    def watched(self: FileLink, sources: Any, offset: int) -> FileTicket:
        ends.append(offset + sum(source.numel() for source in sources))
        return copy_out(self, sources, offset)

    monkeypatch.setattr(FileLink, "copy_out", watched)
    ratios = []
    for name in ("residual", "convolutional", "handed_on"):
        model, draw = many(name)
        wrapped = rotoff.Checkpointable(model).measure(draw())
        for mode in ("joint", "offload"):
            wrapped.compute_sequence(smallest(wrapped, mode), mode=mode)
            predicted = wrapped.get_expected_host_memory()
            wrapped.close()
            ends.clear()
            wrapped(draw()).sum().backward()
            assert max(ends, default=0) <= predicted
            if predicted:
                ratios.append(predicted / max(ends))
        wrapped.close()
    assert len(ratios) >= 3
    assert sum(ratios) / len(ratios) <= 1.05, ratios


class ForNothing(nn.Module):
    """Computes for nothing, of tables and of values that other stages have made."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.outer(torch.arange(128.0), torch.arange(32.0))
        table, shift = angles.cos(), (0.1 * angles).sin()
        for n, block in enumerate(self.blocks):
            x = block(x + shift).tanh()
            if n == 1:
                (x.mean() * table).sum()
                del table
        return x.square().mean()


class Means(nn.Module):
    """The gradients of its means are parts of one storage; a gradient of what it makes of its input is computed."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, means = x[:, None], []
        x.requires_grad_()
        for up, down in zip(self.up, self.down, strict=True):
            wide = up(x).sin()
            x = (x + down(wide)).tanh()
            means.append(x.mean())
        return x.square().mean() + sum(means)


class Frozen(Means):
    """Its first layers are frozen, and a hook lets gradients through them, as adapters on a frozen model need."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(32, 32).requires_grad_(False)
        self.table.register_forward_hook(lambda module, given, output: output.requires_grad_())
        self.up[:2].requires_grad_(False)
        self.down[:2].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.table(x))


class Beside(Means):
    """An encoder without gradients belongs to no stage, and runs after the first stage has begun. In each of its layers
    a dropout does nothing, and another one draws."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.encoder = nn.ModuleList(Added() for _ in range(3)).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, y = self.first(x), x
        for layer in self.encoder:
            wide = nn.functional.dropout(nn.functional.gelu(layer.up(y)), 0.0)
            y = y + nn.functional.dropout(layer.down(wide), 0.1)
            del wide
        return super().forward(first + y)


@pytest.mark.parametrize("make", [ForNothing, Means, Frozen, Beside])
@pytest.mark.grid
def test_frame_locals_are_charged_and_unused_results_freed(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(128, 32)
    wrapped = rotoff.Checkpointable(model, cache_directory=None, stages=8).measure(x)
    for mode in ("remat", "offload", "joint"):
        least, most = wrapped.min_mem_limit(mode), wrapped.keep_all_memory
        for limit in (least, (least + most) // 2):
            wrapped.compute_sequence(limit, mode=mode, refine=False)
            for _ in range(2):
                for p in model.parameters():
                    p.grad = torch.zeros_like(p) if p.requires_grad else None
                assert peak_bytes(lambda: wrapped(x).backward()) <= wrapped.get_expected_memory() <= limit, mode
    wrapped.close()


class Added(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Checkpoints(nn.Module):
    """Which note the state of the generator, and recompute."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for n, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=n % 2 == 0)
        return x.square().mean()


def test_own_checkpoints_are_ignored_also_if_everything_fits() -> None:
    model, x = Checkpoints(), torch.randn(16, 32)
    wrapped = rotoff.Checkpointable(model, cache_directory=None).measure(x)
    wrapped.compute_sequence(wrapped.keep_all_memory)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    assert peak_bytes(lambda: wrapped(x).backward()) <= wrapped.get_expected_memory()


class Narrow(nn.Module):
    """Autocast within the model keeps the cast of each weight until its region ends, whatever a plan drops."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with casting():
            for block in self.blocks:
                x = x + block(x)
        return x.float().square().mean()


def peaks(wrapped: rotoff.Checkpointable, step: Callable[[], object]) -> Iterator[tuple[int, int]]:
    """Check the step's peak in each mode at three limits; yields the expected and the measured one."""
    for mode in ("remat", "offload", "joint"):
        least, most = wrapped.min_mem_limit(mode), wrapped.keep_all_memory
        for limit in (least, (least + most) // 2, most):
            wrapped.compute_sequence(limit, mode=mode, refine=False)
            for p in wrapped.parameters():
                p.grad = torch.zeros_like(p)
            expected, measured = wrapped.get_expected_memory(), peak_bytes(step)
            assert measured <= expected <= limit, (mode, limit)
            yield expected, measured


@pytest.mark.parametrize("shared", [False, True])
def test_casts_of_inner_autocast_are_charged(shared: bool) -> None:
    model, x = Narrow(), torch.randn(64, 64)
    if shared:
        model.blocks[3] = model.blocks[0]
    wrapped = rotoff.Checkpointable(model, cache_directory=None, stages=8).measure(x)
    for expected, measured in peaks(wrapped, lambda: wrapped(x).backward()):
        assert shared or expected <= 1.05 * measured + 2**13
    wrapped.close()


class Returning(nn.Module):
    """Uses a block again in the same region of autocast and outside of it; the sum of the gradients of its casts
    waits between the first two."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.first, self.again = (
            nn.Sequential(nn.Linear(width, 128), nn.GELU(), nn.Linear(128, width)) for _ in range(2)
        )
        self.last = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with casting():
            y = self.first(x)
        x = y.float() * 0.5 + x
        with casting():
            y = torch.tanh(self.again(torch.tanh(self.again(x))))
        x = y.float() * 0.5 + x
        x = self.last(self.again(self.first(x))) * 0.5 + x
        return x.square().mean()


@pytest.mark.parametrize("seconds", [0.0, 0.005], ids=["at-once", "late"])
def test_sums_of_gradients_of_casts_are_charged(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    write = HostFile.write

    def late(self: HostFile, data: memoryview, offset: int) -> None:
        time.sleep(seconds)  # a copy may still run when the forward ends
        write(self, data, offset)

    monkeypatch.setattr(HostFile, "write", late)
    monkeypatch.setattr(file, "AT_ONCE", 0)
    torch.manual_seed(0)
    model, x = Returning(), torch.randn(24, 48)
    wrapped = rotoff.Checkpointable(model, cache_directory=None).measure(x)
    for _ in peaks(wrapped, lambda: wrapped(x).backward()):
        pass
    wrapped.close()


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.gate(x).sigmoid() * self.up(x)).float()


@pytest.mark.parametrize("first", [False, True], ids=["measured", "first-step"])
def test_a_region_that_is_off_keeps_the_casts_of_those_within(first: bool) -> None:
    model, x = Narrow(), torch.randn(128, 32)
    model.blocks = nn.ModuleList(Gated() for _ in range(5))

    def step() -> None:
        with torch.autocast("cpu", enabled=False):
            loss = wrapped(x)
        loss.backward()

    wrapped = rotoff.Checkpointable(model, cache_directory=None)
    if first:
        wrapped.compute_sequence(250_000)
        step()
    else:
        with torch.autocast("cpu", enabled=False):
            wrapped.measure(x)
    assert len(list(peaks(wrapped, step))) == 9
    wrapped.close()


def test_a_replay_in_the_forward_leaves_no_cast_of_its_input() -> None:
    model, x = Narrow(), torch.randn(64, 64)
    wrapped = rotoff.Checkpointable(model, cache_directory=None, stages=8).measure(x)
    L = len(wrapped.chain)
    ops = [f"F_all {i}" for i in range(1, L)]
    n = L - 2
    ops[n:n] = [f"offload abar {n}", f"free abar {n}", f"F_ck {n}"]
    ops += [f"F_all {L}", f"B {L}", f"B {L - 1}", f"prefetch abar {n}", f"wait abar {n}", f"B {n}"]
    ops += [f"B {i}" for i in range(n - 1, 0, -1)]
    with_sequence(wrapped, rotoff.Sequence.from_text("\n".join(ops)))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    assert peak_bytes(lambda: wrapped(x).backward()) <= wrapped.get_expected_memory()
    wrapped.close()


def linears(inside: int, outside: int, many: int = 6) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(inside, outside) for _ in range(many))


class Apart(nn.Module):
    """Calls that read each other reach no output; a local variable holds their graph."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = linears(64, 256, 8), linears(256, 64, 8)
        self.key, self.value = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for n in range(6):
            if n == 2:
                key, value = self.key(x), self.value(x)
                unused = key * value + self.down[7](nn.functional.gelu(self.up[7](key * value)))  # noqa: F841
                x = x + torch.tanh(self.value(x) * key) * value
            x = x + self.down[n](nn.functional.gelu(self.up[n](x)))
        return x.square().mean()


class Siamese(nn.Module):
    """Uses its weights twice."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(
            *(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.tower(x) * self.tower(y)).sum()


class Alternating(nn.Module):
    """Has several regions of autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = linears(64, 256), linears(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for n, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=n % 2 == 1):
                x = x + down(nn.functional.gelu(up(x)))
        return x.float().square().mean()


@pytest.mark.parametrize(
    ("make", "sizes", "stages"), [(Apart, [512], 16), (Siamese, [128, 128], None), (Alternating, [512], None)]
)
def test_small_limits_hold(make: Callable[[], nn.Module], sizes: list[int], stages: int | None) -> None:
    torch.manual_seed(0)
    xs = [torch.randn(size, 64) for size in sizes]
    wrapped = rotoff.Checkpointable(make(), cache_directory=None, stages=stages, check=True).measure(*xs)
    for p in wrapped.parameters():
        p.grad = torch.zeros_like(p)
    for mode, room in (("remat", 0.0), ("remat", 0.3), ("joint", 0.0), ("joint", 0.15), ("joint", 0.5)):
        least = smallest(wrapped, mode)
        limit = least + int(room * (wrapped.keep_all_memory - least))
        wrapped.compute_sequence(limit, mode=mode, refine=False)
        wrapped(*xs).backward()
        assert peak_bytes(lambda: wrapped(*xs).backward()) <= limit, (mode, room)
    wrapped.close()
