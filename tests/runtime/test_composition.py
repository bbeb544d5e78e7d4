"""What people put around, on and into the stages of a model: the bits of the plain model under limits that force
moves."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Batch, Residual, fresh, same, train
from planned_steps import compare, sequential, smallest, with_sequence
from torch import nn

import rotoff


def blocks(width: int = 32, count: int = 4) -> list[nn.Module]:
    return [Residual(width) for _ in range(count)]


def residuals() -> tuple[nn.Sequential, Batch]:
    return sequential(nn.Linear(16, 32), *blocks(), nn.Linear(32, 8))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *gradients(model)]


# -- inside of stages


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (nn.Dropout, (16, 4)),
        (nn.AlphaDropout, (16, 4)),
        (nn.FeatureAlphaDropout, (16, 4)),
        (nn.Dropout1d, (8, 4, 6)),
        (nn.Dropout2d, (8, 4, 6, 6)),
        (nn.Dropout3d, (4, 4, 3, 3, 3)),
        (nn.RReLU, (16, 4)),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_dropout_of_all_kinds(kind: type[nn.Module], shape: tuple[int, ...]) -> None:
    compare(lambda: sequential(nn.PReLU(), kind(), nn.GELU(), kind(), nn.PReLU(), kind(), shape=shape), train)


def test_normalisations_with_parametrised_weights() -> None:
    def make() -> tuple[nn.Sequential, Batch]:
        weight = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
        orthogonal = nn.utils.parametrizations.orthogonal(nn.Linear(16, 16))
        norms = nn.Sequential(nn.BatchNorm1d(16), nn.Tanh()), nn.GroupNorm(4, 16), nn.BatchNorm1d(16, momentum=None)
        return sequential(
            nn.Linear(16, 16), weight, norms[0], spectral, norms[1], orthogonal, norms[2], nn.Linear(16, 4)
        )

    compare(make, train)


def test_a_loss_that_stages_leave_beside_their_output() -> None:
    """As mixtures of experts do: read after the forward, and again after the backward."""

    class Balanced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gates = self.linear(x).softmax(1)
            self.penalty = gates.square().mean()
            return x * gates

    def run(model: nn.Module, batch: Batch) -> list[torch.Tensor]:
        seen = []
        for _ in range(2):
            loss = model(batch()).square().mean()
            penalties = [m.penalty for m in model.modules() if isinstance(m, Balanced)]
            (loss + 0.1 * sum(penalties)).backward()
            seen += [p.detach().clone() for p in penalties]
        return seen + gradients(model)

    def make() -> tuple[nn.Sequential, Batch]:
        return sequential(nn.Linear(16, 16), Balanced(), nn.Dropout(), Balanced(), Balanced(), nn.Linear(16, 4))

    compare(make, run, sequences=0)
    model, batch = make()
    wrapped = rotoff.Checkpointable(model).measure(batch())
    text = "F_ck 1; F_ck 2; drop a 2; F_ck 2; F_all 3; F_all 4; F_all 5; F_all 6; B 6; B 5; B 4; B 3; F_all 2; B 2"
    with_sequence(wrapped, rotoff.Sequence.from_text([*text.split("; "), "F_all 1", "B 1"]))
    model, _ = make()
    wrapped.load_state_dict(model.state_dict())
    torch.manual_seed(3)
    expected = run(model, batch)
    torch.manual_seed(3)
    assert same(run(wrapped, batch), expected)  # stage 2 runs again in the forward, and leaves nothing new


def test_a_cache_that_grows_is_that_of_the_plain_model() -> None:
    class Cached(nn.Module):
        """Attends to all that it has ever seen, as decoders do that build a cache by default."""

        def __init__(self) -> None:
            super().__init__()
            self.key, self.cache = nn.Linear(8, 8), torch.zeros(0, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.cache = torch.cat([self.cache, self.key(x).detach()])
            return (self.key(x) @ self.cache.T).softmax(1) @ self.cache

    class History:
        def __init__(self) -> None:
            self.seen: list[torch.Tensor] = []

    class Appending(nn.Module):
        def forward(self, given: tuple[torch.Tensor, History]) -> tuple[torch.Tensor, History]:
            x, history = given
            history.seen.append(x.detach().tanh())
            seen = torch.cat(history.seen)
            return x * ((x @ seen.T).softmax(1) @ seen), history

    class First(nn.Module):
        def forward(self, given: tuple[torch.Tensor, History]) -> torch.Tensor:
            return given[0]

    class Start(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, History]:
            return self.linear(x), History()

    for make in (
        lambda: nn.Sequential(nn.Linear(16, 8), Cached(), nn.Linear(8, 8)),
        lambda: nn.Sequential(nn.Linear(16, 8), Start(), Appending(), First(), nn.Linear(8, 8)),
    ):
        torch.manual_seed(0)
        plain, x = make(), torch.randn(64, 16)
        wrapped = rotoff.Checkpointable(copy.deepcopy(plain)).measure(x)
        wrapped.compute_sequence(smallest(wrapped, "remat"), mode="remat")
        for _ in range(3):
            assert same(step(wrapped, x), step(plain, x))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.grid
def test_compiled_stages(backend: str) -> None:
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")

    def make() -> tuple[nn.Sequential, Batch]:
        model, batch = sequential(nn.Linear(16, 32), *blocks(count=2), nn.Tanh(), nn.Linear(32, 8))
        for n in (1, 2):
            model[n].dropout = nn.Identity()
        model[1].compile(backend=backend)
        model[2] = torch.compile(model[2], backend=backend)
        return model, batch

    compare(make, train)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_stage_that_counts_its_calls(in_place: bool) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = nn.Linear(16, 16), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return torch.tanh(self.linear(x)) * (1 + 0.1 * self.calls)

    torch.manual_seed(0)
    plain, x = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), Counts(), nn.Tanh(), nn.Linear(16, 4)), torch.randn(64, 16)
    model = copy.deepcopy(plain)
    if in_place:
        model[2].compile(backend="eager")
    else:
        model[2] = torch.compile(model[2], backend="eager")
    wrapped = rotoff.Checkpointable(model).measure(x)
    wrapped.compute_sequence(smallest(wrapped, "remat"), mode="remat")
    for _ in range(2):
        assert same(step(wrapped, x), step(plain, x))


def test_complex_numbers_expanded_and_overlapping_tensors() -> None:
    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phase = nn.Parameter(torch.randn(16, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.ifft(torch.fft.fft(x) * self.phase)

    class Expand(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            row = x.real.mean(0, keepdim=True).tanh().expand(64, 16)  # one row of bytes, saved as 64
            return torch.view_as_real(x * row).flatten(1)

    class Spread(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.sum(1, keepdim=True) * 0.1).expand(-1, 8)  # an output of stride 0

    class Windows(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 2).unfold(1, 4, 2)[:, :3] * 1.5

    compare(lambda: sequential(nn.Linear(16, 16), Waves(), Expand(), Spread(), Windows(), nn.Linear(4, 4)), train)


def test_integers_and_floats_between_stages() -> None:
    class Route(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
            return x.tanh(), x.argmax(1), 3

    class Gather(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(32, 32)

        def forward(self, given: tuple[torch.Tensor, torch.Tensor, int]) -> dict[str, Any]:
            x, where, times = given
            return {"x": x * self.table(where) * times, "where": (where + 1) % 32, "name": "gathered"}

    class Last(nn.Module):
        def forward(self, given: dict[str, Any]) -> torch.Tensor:
            return given["x"].gather(1, given["where"][:, None]) + given["x"].mean()

    compare(lambda: sequential(nn.Linear(16, 32), Route(), Gather(), Last(), nn.Linear(1, 4)), train)


def test_low_rank_adapters_added_in_place_over_frozen_weights() -> None:
    class Adapted(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.base = nn.Linear(width, width).requires_grad_(False)
            self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.base(x)
            y += self.up(self.down(x))
            return y

    def make() -> tuple[nn.Sequential, Batch]:
        head = [nn.Embedding(20, 16).requires_grad_(False), nn.Linear(16, 16).requires_grad_(False)]
        body = [m for _ in range(3) for m in (Adapted(16), nn.GELU())]
        return nn.Sequential(*head, *body, nn.Linear(16, 20).requires_grad_(False)), lambda: torch.randint(
            0, 20, (4, 8)
        )

    compare(make, train)


# -- hooks


def test_hooks_on_parameters_and_backward_hooks_on_stages() -> None:
    def run(model: nn.Module, batch: Batch) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        hooks = [p.register_hook(lambda g: g * 0.5) for p in model[1].parameters()]
        hooks.append(
            model[2].register_full_backward_hook(lambda m, gi, go: seen.extend([gi[0].clone(), go[0].clone()]))
        )
        hooks.append(model[3].register_full_backward_pre_hook(lambda m, go: (go[0] * 2,)))
        hooks += [
            p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone())) for p in model[3].parameters()
        ]
        result = train(model, batch, steps=2)
        for hook in hooks:
            hook.remove()
        return result + seen

    compare(residuals, run)


# -- around the model


def test_gradients_accumulated_over_micro_batches() -> None:
    def run(model: nn.Module, batch: Batch) -> list[torch.Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        seen = []
        for _ in range(2):
            for _ in range(3):
                (model(batch()).square().mean() / 3).backward()
            seen += gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        return seen + [p.detach().clone() for p in model.parameters()]

    compare(residuals, run)


class CastingInside(nn.Module):
    """Uses each weight several times, in one autocast region of its own or in one for each use."""

    def __init__(self, regions: int, cache: bool) -> None:
        super().__init__()
        self.cell, self.out = nn.Linear(32, 32), nn.Linear(32, 4)
        self.regions, self.cache = regions, cache

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.regions):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=self.cache):
                for _ in range(6 // self.regions):
                    x = torch.tanh(self.cell(x))
                x = x + self.cell(x) * self.cell.bias
        return self.out(x)


@pytest.mark.parametrize(("regions", "cache"), [(1, True), (2, True), (6, True), (2, False)])
@pytest.mark.grid
def test_weights_that_an_autocast_region_of_the_model_casts_once(regions: int, cache: bool) -> None:
    """The parts of their gradients are added in bfloat16 then; those of several regions, or without the cache, in
    float32."""
    plain = CastingInside(regions, cache)
    x = torch.randn(64, 32)
    wrapped = rotoff.Checkpointable(copy.deepcopy(plain), stages=12).measure(x)
    everything = wrapped.keep_all_memory
    for mode in ("joint", "remat", "offload"):
        for limit in (smallest(wrapped, mode), (smallest(wrapped, mode) + everything) // 2, everything):
            wrapped.compute_sequence(limit, mode=mode)
            grads = []
            for model in (plain, wrapped):
                model.zero_grad()
                model(x).float().square().mean().backward()
                grads.append([p.grad.clone() for p in model.parameters()])
            assert same(*grads), (mode, limit)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_a_gradient_scaler(dtype: torch.dtype) -> None:
    def run(model: nn.Module, batch: Batch) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=2)  # the first steps overflow
        seen = []
        for _ in range(4):
            with torch.autocast("cpu", dtype=dtype):
                loss = model(batch()).float().square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            seen += gradients(model)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=False)
            scaler.step(optimizer)
            scaler.update()
            seen.append(torch.tensor(scaler.get_scale()))
        return [torch.nan_to_num(t, nan=-7.0) for t in seen] + [p.detach().clone() for p in model.parameters()]

    def casting() -> torch.autocast:
        return torch.autocast("cpu", dtype=dtype)

    compare(residuals, run, casting)


def test_an_optimizer_in_backward() -> None:
    """Weights change as soon as their gradient is whole, while earlier stages have yet to be replayed."""

    def run(model: nn.Module, batch: Batch) -> list[torch.Tensor]:
        def step(p: torch.Tensor) -> None:
            with torch.no_grad():
                p -= 0.05 * p.grad
            p.grad = None

        hooks = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
        for _ in range(3):
            model(batch()).square().mean().backward()
        for hook in hooks:
            hook.remove()
        return [p.detach().clone() for p in model.parameters()]

    compare(residuals, run)
    compare(lambda: fresh("tied"), run)  # a gradient is whole only after its last use


def test_torch_autograd_grad_of_everything_and_of_the_input() -> None:
    def run(model: nn.Module, batch: Batch) -> list[torch.Tensor]:
        x = batch().requires_grad_()
        return list(torch.autograd.grad(model(x).square().mean(), [x, *model.parameters()]))

    def make() -> tuple[nn.Sequential, Batch]:
        model, batch = residuals()
        return model, lambda: batch().requires_grad_()

    compare(make, run)


def test_a_loss_of_an_intermediate_result_beside_the_last() -> None:
    """A forward hook takes a stage's output into the loss: the gradient enters there too."""

    def run(model: nn.Module, batch: Batch) -> list[torch.Tensor]:
        taken.clear()
        loss = model(batch()).square().mean()
        (loss + taken[0]).backward()
        return gradients(model)

    def make() -> tuple[nn.Sequential, Batch]:
        model, batch = residuals()
        model[2].register_forward_hook(lambda m, i, o: taken.append(o.square().mean()))
        return model, batch

    taken: list[torch.Tensor] = []
    compare(make, run)


COMPILED_INSIDE = """
import copy, torch, rotoff
from torch import nn
gelu = torch.compile(lambda x: nn.functional.gelu(x) * 2 + x, backend="eager")
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(64, 256), nn.Linear(256, 64), nn.LayerNorm(256)
    def forward(self, x):
        return x + self.b(self.norm(gelu(self.a(x))))
torch.manual_seed(0)
model, x = nn.Sequential(*[Block() for _ in range(5)]), torch.randn(256, 64)
plain = copy.deepcopy(model)
wrapped = rotoff.Checkpointable(model, cache_directory=None).measure(x)
assert all(stage.forms for stage in wrapped.chain.stages[:-1])
text = [f"F_sel {i} 1" for i in range(1, 5)] + ["F_all 5"] + [f"B {i}" for i in range(5, 0, -1)]
from rotoff.solver import policies
policies.POLICIES["given"] = lambda chain, mem_limit: rotoff.Sequence.from_text(text)
wrapped.compute_sequence(1 << 40, policy="given")
wrapped(x).sum().backward()
plain(x).sum().backward()
assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
"""


@pytest.mark.slow
def test_a_function_compiled_inside_a_module_has_nothing_of_ours_compiled() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(rotoff.__file__).parent.parent), "TORCH_LOGS": "recompiles"}
    command = [sys.executable, "-W", "always", "-c", COMPILED_INSIDE]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "__torch_dispatch__" not in done.stderr
