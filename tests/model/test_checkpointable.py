"""The wrapper behaves as the model does, and plans when it should."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import Does, fresh, same, several
from step_by_step import works
from torch import nn

import rotoff


def test_state_dict_and_names_are_the_models() -> None:
    model, _ = fresh("mlp")
    keys, names = list(model.state_dict()), [name for name, _ in model.named_parameters()]
    wrapped = rotoff.Checkpointable(model)
    assert list(wrapped.state_dict()) == keys
    assert [name for name, _ in wrapped.named_parameters()] == names
    assert [name for name, _ in wrapped.named_buffers()] == [name for name, _ in model.named_buffers()]
    outer = nn.ModuleDict({"net": wrapped})
    assert list(outer.state_dict()) == [f"net.{key}" for key in keys]
    assert [name for name, _ in outer.named_parameters()] == [f"net.{name}" for name in names]
    other, _ = fresh("mlp")
    with torch.no_grad():
        other[0].weight.fill_(7)
    assert wrapped.load_state_dict(other.state_dict()).missing_keys == []
    assert bool((model[0].weight == 7).all())
    assert outer.load_state_dict(outer.state_dict()).unexpected_keys == []
    assert other.load_state_dict(wrapped.state_dict()).missing_keys == []


def test_attributes_and_items_are_the_models() -> None:
    model, _ = fresh("mlp")
    model.note = "mine"
    wrapped = rotoff.Checkpointable(model)
    assert wrapped.note == "mine"
    assert wrapped[0] is model[0]
    assert len(wrapped) == len(model)
    assert wrapped and rotoff.Checkpointable(nn.Linear(1, 1))  # which has no length
    assert list(wrapped) == list(model)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        wrapped.nothing_like_it  # noqa: B018


def scaled() -> Any:
    parts = {"blocks": nn.Sequential(*several(4, 8, 32)), "head": nn.Linear(8, 8), "scale": 1.0}
    return Does(lambda net, x: net.head(net.blocks(x)) * net.scale * getattr(net, "alpha", 1.0), **parts)


def changed(model: nn.Module) -> nn.Module:
    """`model` after settings, modules and parameters of it were set."""
    torch.manual_seed(3)
    model.scale = 3.0
    model.alpha = 2.0
    model.head = nn.Linear(8, 2)
    return model


def test_what_is_set_reaches_the_model() -> None:
    torch.manual_seed(0)
    plain = scaled()
    model = copy.deepcopy(plain)
    wrapped = rotoff.Checkpointable(model).measure(torch.randn(32, 8))
    wrapped.compute_sequence(wrapped.min_mem_limit("remat"), mode="remat")
    x = torch.randn(32, 8)
    for change in (lambda model: model, changed):
        assert torch.equal(change(wrapped)(x), change(plain)(x))
    assert works(wrapped.sequence)
    assert (model.scale, model.alpha) == (3.0, 2.0)
    assert model.head is wrapped.head
    assert wrapped.state_dict().keys() == plain.state_dict().keys()
    assert [name for name, _ in wrapped.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert torch.equal(copy.deepcopy(wrapped)(x), plain(x))
    nn.SyncBatchNorm.convert_sync_batchnorm(wrapped)  # adds each module to its parent anew
    assert model.head is wrapped.head and torch.equal(wrapped(x), plain(x))


def test_what_is_deleted_and_registered_is_the_models() -> None:
    model = scaled()
    keys = set(model.state_dict())
    wrapped = rotoff.Checkpointable(model)
    wrapped.register_buffer("seen", torch.ones(2))
    wrapped.register_buffer("cache", torch.ones(2), persistent=False)
    wrapped.register_parameter("gain", nn.Parameter(torch.ones(2)))
    wrapped.bias = nn.Parameter(torch.ones(2))
    wrapped.add_module("added", nn.Linear(1, 1, bias=False))
    wrapped.register_module("more", nn.Linear(1, 1, bias=False))
    added = {"seen", "gain", "bias", "added.weight", "more.weight"}
    assert set(wrapped.state_dict()) == set(model.state_dict()) == keys | added
    assert wrapped.load_state_dict(model.state_dict()).missing_keys == []
    for name in ("seen", "cache", "gain", "bias", "added", "more", "scale", "head"):
        delattr(wrapped, name)
        assert not hasattr(model, name)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        del wrapped.nothing_like_it


def test_what_is_its_own_stays_its_own() -> None:
    class Named(rotoff.Checkpointable):
        def __init__(self, model: nn.Module) -> None:
            self.before = 1
            super().__init__(model)
            self.after = 2

    model = scaled()
    wrapped = Named(model)
    assert (wrapped.before, wrapped.after, model.after) == (1, 2, 2)
    assert not hasattr(model, "before")
    wrapped.training = False
    wrapped.forward = model.forward
    assert model.training and "forward" not in vars(model)
    with pytest.raises(AttributeError):
        wrapped.mem_limit = 3


def test_eval_and_no_grad_run_the_model_itself() -> None:
    model, batch = fresh("mlp")
    wrapped = rotoff.Checkpointable(model).compute_sequence(1)  # a limit that no step fits
    x = batch()
    wrapped.eval()
    assert not model.training
    assert torch.equal(wrapped(x), model(x))
    wrapped.train()
    assert model.training
    with torch.no_grad():
        assert wrapped(x).grad_fn is None
    wrapped(x).sum().backward()  # it is recorded
    with pytest.raises(rotoff.InfeasibleError):
        wrapped(x)


def teach(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Changes a parameter, a buffer and the batch in place."""
    x.mul_(0.5)
    net.teacher.weight.data.lerp_(net.student[0].weight.data[:16], 0.1)
    with torch.no_grad():
        net.teacher.bias[0] += 1
    return net.student(net.norm(x)) - net.teacher(x)


def test_measuring_changes_nothing_even_between_a_forward_and_its_backward() -> None:
    torch.manual_seed(0)
    student = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    model = Does(teach, teacher=nn.Linear(16, 16).requires_grad_(False), norm=nn.BatchNorm1d(16), student=student)
    plain, wrapped = copy.deepcopy(model), rotoff.Checkpointable(model)
    x = torch.randn(32, 16)
    y = x.clone()
    wrapped.measure(x).compute_sequence(wrapped.min_mem_limit("remat"), mode="remat")
    assert torch.equal(x, y) and same([*model.state_dict().values()], [*plain.state_dict().values()])
    for _ in range(2):
        loss, other = wrapped(x).square().sum(), plain(y).square().sum()
        wrapped.measure(x)
        for one in (loss, other):
            one.backward()
        assert same([p.grad for p in model.student.parameters()], [p.grad for p in plain.student.parameters()])
        assert torch.equal(x, y) and same([*model.state_dict().values()], [*plain.state_dict().values()])
    wrapped.close()


def test_figures_are_of_the_last_measurement_and_not_of_a_step_of_training_before_it() -> None:
    model, batch = fresh("residual")
    wrapped = rotoff.Checkpointable(model).measure(batch())
    before = wrapped.keep_all_memory
    wrapped.compute_sequence(wrapped.min_mem_limit())
    block, model[1] = model[1], nn.Identity()
    wrapped(batch()).sum().backward()  # is recorded, since its operations are others
    model[1] = block
    assert wrapped.measure(batch()).keep_all_memory == before


def test_auto_takes_what_is_free() -> None:
    model, batch = fresh("residual")
    wrapped = rotoff.Checkpointable(model).compute_sequence("auto")
    assert wrapped.mem_limit is not None
    assert wrapped.mem_limit > 1 << 20
    wrapped(batch()).sum().backward()


def test_a_model_where_nothing_needs_a_gradient_just_runs() -> None:
    model = nn.Sequential(nn.Tanh(), nn.Softmax(dim=1))
    x = torch.randn(4, 4)
    wrapped = rotoff.Checkpointable(model).compute_sequence(1 << 20)
    assert torch.equal(wrapped(x), model(x))
    y = x.clone().requires_grad_()
    wrapped(y).sum().backward()
    assert y.grad is not None


def test_training_without_a_limit_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = rotoff.Checkpointable(nn.Linear(4, 4))
    for _ in range(2):
        model(torch.randn(2, 4)).sum().backward()
    assert caplog.text.count("has no limit; call compute_sequence(mem_limit)") == 1
    caplog.clear()
    silent = rotoff.Checkpointable(nn.Linear(4, 4)).eval()
    silent(torch.randn(2, 4))
    with torch.no_grad():
        silent.train()(torch.randn(2, 4))
    silent.compute_pytorch_sequence()
    silent(torch.randn(2, 4)).sum().backward()
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_graph_of_the_backward_which_no_plan_counts_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = fresh("residual")
    wrapped = rotoff.Checkpointable(model).measure(batch())
    wrapped.compute_sequence(wrapped.min_mem_limit("remat"), mode="remat", refine=False)
    for graph in (False, True, True):
        loss = wrapped(batch()).square().sum()
        (gradient,) = torch.autograd.grad(loss, [model[0].weight], create_graph=graph)
        assert caplog.text.count("create_graph=True makes a graph that keeps what it has read") == graph
        if graph:
            gradient.square().sum().backward()
