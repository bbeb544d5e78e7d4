"""What people put around, on and into the stages of a model: the bits of the plain model under limits that force
moves."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from allocated import peak_bytes
from models import Residual, same, several
from planned_steps import Beside, bits_and_bytes, drawn
from torch import nn

import rotoff

MODES = "remat", "offload", "joint"


@pytest.mark.parametrize(
    ("kind", "shape"),
    [(nn.Dropout, (16, 4)), (nn.FeatureAlphaDropout, (16, 4)), (nn.Dropout3d, (4, 4, 3, 3, 3)), (nn.RReLU, (16, 4))],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_dropout_of_all_kinds(kind: type[nn.Module], shape: tuple[int, ...]) -> None:
    net = nn.Sequential(nn.PReLU(), kind(), nn.GELU(), kind(), nn.PReLU(), kind())
    bits_and_bytes(net, drawn(*shape), MODES)


def parametrised(*more: nn.Module) -> nn.Module:
    weight = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
    norms = nn.Sequential(nn.BatchNorm1d(16), nn.Tanh()), nn.GroupNorm(4, 16), nn.BatchNorm1d(16, momentum=None)
    return nn.Sequential(nn.Linear(16, 16), weight, norms[0], spectral, norms[1], *more, norms[2], nn.Linear(16, 4))


def test_normalisations_with_parametrised_weights() -> None:
    bits_and_bytes(parametrised(), drawn(64, 16), MODES)


@pytest.mark.parametrize("what", ["bits", "bytes"])
def test_an_orthogonal_weight(what: str) -> None:
    beside = Beside(parametrised(nn.utils.parametrizations.orthogonal(nn.Linear(16, 16))), sample=drawn(64, 16)())
    for mode in MODES:
        getattr(beside.within(mode), "step" if what == "bits" else "check")(*drawn(64, 16)())


@pytest.mark.parametrize(
    "backend", ["inductor", *(pytest.param(one, marks=pytest.mark.slow) for one in ("eager", "aot_eager"))]
)
def test_compiled_stages(backend: str) -> None:
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")

    def made() -> nn.Module:
        torch.manual_seed(0)
        blocks = [nn.Sequential(Residual(32), nn.BatchNorm1d(32)) for _ in range(6)]
        for n, block in enumerate(blocks):
            if n % 2:
                block.compile(backend=backend)
            else:
                blocks[n] = torch.compile(block, backend=backend)
        return nn.Sequential(nn.Linear(16, 32), *blocks, nn.Linear(32, 8))

    found = bits_and_bytes(made(), drawn(64, 16), MODES, fresh=made).planned
    assert found.min_mem_limit() < (0.9 if backend == "eager" else 0.6) * found.keep_all_memory


def test_autocast_with_a_gradient_scaler() -> None:
    """Whose first steps overflow."""
    plain, x = (
        nn.Sequential(nn.Linear(16, 32), *[Residual(32) for _ in range(4)], nn.Linear(32, 8)),
        torch.randn(64, 16),
    )
    model, seen = copy.deepcopy(plain), []
    wrapped = rotoff.Checkpointable(model)
    with torch.autocast("cpu", dtype=torch.float16):
        wrapped.measure(x)
    wrapped.compute_sequence(wrapped.min_mem_limit())
    for run in (plain, wrapped):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=2)
        optimizer, found = torch.optim.SGD(run.parameters(), lr=0.05), []
        for n in range(4):
            torch.manual_seed(n)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = run(x).float().square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            found += [torch.nan_to_num(p.grad, nan=-7.0) for p in run.parameters()]
            nn.utils.clip_grad_norm_(run.parameters(), 1.0, error_if_nonfinite=False)
            scaler.step(optimizer)
            scaler.update()
        seen.append([*found, *run.parameters(), torch.tensor(scaler.get_scale())])
    assert same(*seen)


def test_casts_that_the_caller_has_while_the_loss_is_made_are_charged() -> None:
    """An open region of autocast keeps them."""
    model, x = nn.Sequential(*several(5, 64, 256)), torch.randn(256, 64)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.mse_loss(run(x).float(), torch.zeros(256, 64))
        loss.backward()

    run = rotoff.Checkpointable(model).compute_sequence(1 << 40)
    step()
    run.compute_sequence(run.min_mem_limit(), refine=False)
    assert peak_bytes(step) <= run.get_expected_memory() <= run.mem_limit
    run.close()
