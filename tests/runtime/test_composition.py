"""What people put around, on and into the stages of a model: the bits of the plain model under limits that force
moves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from allocated import peak_bytes
from models import Batch, Residual, train
from planned_steps import compare, sequential
from torch import nn

import rotoff


def blocks(width: int = 32, count: int = 4) -> list[nn.Module]:
    return [Residual(width) for _ in range(count)]


def residuals() -> tuple[nn.Sequential, Batch]:
    return sequential(nn.Linear(16, 32), *blocks(), nn.Linear(32, 8))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


# -- inside of stages


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (nn.Dropout, (16, 4)),
        (nn.FeatureAlphaDropout, (16, 4)),
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


# -- hooks


# -- around the model


def test_autocast_with_a_gradient_scaler() -> None:
    def run(model: nn.Module, batch: Batch) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=2)  # the first steps overflow
        seen = []
        for _ in range(4):
            with torch.autocast("cpu", dtype=torch.float16):
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
        return torch.autocast("cpu", dtype=torch.float16)

    compare(residuals, run, casting)


def test_casts_that_the_caller_has_while_the_loss_is_made_are_charged() -> None:
    """An open region of autocast keeps them."""
    layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(5)]
    model, x = nn.Sequential(*layers), torch.randn(256, 64)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.mse_loss(run(x).float(), torch.zeros(256, 64))
        loss.backward()

    run = rotoff.Checkpointable(model, cache_directory=None).compute_sequence(1 << 40)
    step()
    run.compute_sequence(run.min_mem_limit(), refine=False)
    assert peak_bytes(step) <= run.get_expected_memory() <= run.mem_limit
    run.close()


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
