"""What people put around a planned model: copies and pickles, compilers, hooks of all modules, another planned
model."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Does, Residual, same
from step_by_step import works
from torch import nn
from torch.utils.checkpoint import checkpoint

import rotoff
from rotoff.tools.attach import attached


def blocks() -> nn.Sequential:
    return nn.Sequential(*[Residual(16) for _ in range(4)], nn.Linear(16, 4))


def in_turn(net: Any, x: torch.Tensor) -> torch.Tensor:
    for block in net.blocks:
        x = block(x)
    return x


def net_of_blocks() -> nn.Module:
    """No ``nn.Sequential``."""
    return Does(in_turn, blocks=blocks())


def planned(model: nn.Module) -> rotoff.Checkpointable:
    wrapped = rotoff.Checkpointable(model).measure(torch.randn(32, 16))
    return wrapped.compute_sequence(wrapped.min_mem_limit("remat"), mode="remat")


def gradients(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    for p in model.parameters():
        p.grad = None
    model(torch.randn(32, 16)).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def saved(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = [copy.deepcopy, saved, lambda model: pickle.loads(pickle.dumps(model))]


@pytest.mark.parametrize(
    "copied",
    [*COPIES, lambda model: torch.optim.swa_utils.AveragedModel(model).module],
    ids=["deepcopy", "torch.save", "pickle", "averaged"],
)
def test_a_copy_has_the_limit_and_a_plan_of_its_own(copied: Callable[[nn.Module], rotoff.Checkpointable]) -> None:
    model = planned(blocks())
    expected = gradients(model)
    twin = copied(model)
    assert list(twin.state_dict()) == list(model.state_dict())
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()  # nothing is shared
    assert same(gradients(twin), expected)
    assert twin.mem_limit == model.mem_limit
    assert [str(op) for op in twin.sequence] == [str(op) for op in rotoff.keep_all(twin.chain)] or works(twin.sequence)
    assert twin.get_expected_memory() <= twin.mem_limit


@pytest.mark.parametrize("copied", COPIES, ids=["deepcopy", "torch.save", "pickle"])
def test_a_deep_copy_of_an_attached_model_is_attached_and_a_pickled_one_is_plain(
    copied: Callable[[nn.Module], nn.Module],
) -> None:
    net = net_of_blocks()
    planner = rotoff.attach(net, "60 KiB")
    expected = gradients(net)
    twin = copied(net)
    assert same(gradients(twin), expected)
    if copied is not copy.deepcopy:
        assert attached(twin) is None
        rotoff.attach(twin, "60 KiB")
        assert same(gradients(twin), expected)
    theirs = attached(twin)
    assert theirs is not None
    assert theirs is not planner
    assert theirs.get_expected_memory() <= planner.mem_limit  # so it has been planned


@pytest.mark.parametrize(("make", "backend"), [(net_of_blocks, "eager"), (blocks, "aot_eager")])
@pytest.mark.grid
def test_a_compiler_around_it_leaves_planned_steps_alone(make: Callable[[], nn.Module], backend: str) -> None:
    net = make()
    model = planned(net)
    compiled = torch.compile(model, backend=backend)
    expected = gradients(net)
    assert same(gradients(compiled), expected)
    compiled.eval()
    net.eval()
    x = torch.randn(3, 16)
    assert torch.equal(compiled(x), net(x))


def test_what_is_planned_already_is_not_planned_again() -> None:
    model = planned(blocks())
    with pytest.raises(
        rotoff.MeasureError, match="a rotoff.Checkpointable already; for another limit call its compute_sequence"
    ):
        rotoff.Checkpointable(model)
    with pytest.raises(rotoff.MeasureError, match="'1' of the model is planned by rotoff already; plan the outermost"):
        rotoff.Checkpointable(nn.Sequential(nn.Linear(16, 16), model))
    inner = net_of_blocks()
    rotoff.attach(inner, "60 KiB")
    with pytest.raises(rotoff.MeasureError, match="'0' of the model is planned by rotoff already"):
        rotoff.attach(nn.Sequential(inner, nn.Linear(4, 4)), "60 KiB")


@pytest.mark.parametrize("reentrant", [False, True])
def test_within_somebodys_checkpoint_it_is_as_the_plain_model(reentrant: bool) -> None:
    net = blocks()
    model, x = planned(net), torch.randn(32, 16, requires_grad=True)
    found = []
    for one in (net, model, model):
        torch.manual_seed(1)
        net.zero_grad()
        checkpoint(one, x, use_reentrant=reentrant).square().mean().backward()
        found.append([p.grad.clone() for p in net.parameters()])
    assert same(found[0], found[1]) and same(found[0], found[2])


TRANSFORMS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "grad": lambda model, x: torch.func.grad(lambda given: model(given).sum())(x),
    "vjp": lambda model, x: torch.func.vjp(model, x)[1](x.cos())[0],
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x.cos(),)),
    "vmap": lambda model, x: torch.func.vmap(model)(x),
    "gradients of each sample": lambda model, x: torch.func.vmap(
        torch.func.grad(lambda weights, row: torch.func.functional_call(model, weights, row).sum()), in_dims=(None, 0)
    )({name: p.detach() for name, p in model.named_parameters()}, x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_inside_a_transform_of_torch_func_the_plain_model_runs(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model, x = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)]), torch.randn(32, 16)
    expected, trained = TRANSFORMS[name](model, x), gradients(model)
    wrapped = planned(model)
    for _ in range(2):
        got = TRANSFORMS[name](wrapped, x)
        assert same(list(got.values()), list(expected.values())) if isinstance(got, dict) else same([*got], [*expected])
    assert caplog.text.count("inside torch.func") == 1
    assert same(gradients(wrapped), trained)
