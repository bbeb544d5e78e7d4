"""The interpreter gives the plain model's bits, whatever legal sequence it runs."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from allocated import live_bytes, peak_bytes, settled_bytes
from models import ALL, fresh, plain, same, train
from planned_steps import smallest, step_peak, with_sequence
from random_programs import random_sequence
from thoroughness import seeds
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import rotoff


@pytest.mark.parametrize("name", ALL)
@pytest.mark.grid
def test_any_legal_sequence_gives_the_bits_of_the_plain_model(name: str) -> None:
    model, batch = fresh(name)
    wrapped = rotoff.Checkpointable(model).measure(batch())
    for seed in seeds(8):
        again, batch = fresh(name)
        wrapped.load_state_dict(again.state_dict())
        wrapped.zero_grad()
        sequence = random_sequence(wrapped.chain, seed)
        assert same(train(with_sequence(wrapped, sequence), batch), plain(name)), str(sequence)
    wrapped.close()


@pytest.mark.parametrize("mode", ["joint", "remat", "offload"])
@pytest.mark.parametrize("name", ALL)
@pytest.mark.grid
def test_every_mode_gives_the_bits_of_the_plain_model_within_its_limit(name: str, mode: str) -> None:
    expected = plain(name)
    model, batch = fresh(name)
    wrapped = rotoff.Checkpointable(model).measure(batch())
    least = smallest(wrapped, mode)
    everything = wrapped.keep_all_memory
    for limit in sorted({least, (least + everything) // 2, everything}):
        again, batch = fresh(name)
        model.load_state_dict(again.state_dict())
        wrapped.zero_grad()
        wrapped.compute_sequence(limit, mode=mode)
        assert wrapped.get_expected_memory() <= limit
        assert same(train(wrapped, batch), expected), f"{limit}\n{wrapped.sequence}"
        measured, predicted = step_peak(wrapped, batch), wrapped.get_expected_memory()
        assert measured <= predicted, f"measured {measured} > predicted {predicted} at {limit}\n{wrapped.sequence}"
    wrapped.close()


@pytest.mark.parametrize("name", ["residual", "convolutional", "tuples", "stateful"])
def test_nothing_stays_behind(name: str) -> None:
    """After a step, after a forward whose graph is dropped, and after a stage that raises."""
    model, batch = fresh(name)
    wrapped = rotoff.Checkpointable(model).measure(batch())
    with_sequence(wrapped, random_sequence(wrapped.chain, 5))
    x = batch()
    for p in wrapped.parameters():
        p.grad = torch.zeros_like(p)
    wrapped(x).sum().backward()
    before = live_bytes()
    wrapped(x).sum().backward()
    assert settled_bytes(before) == before
    wrapped(x)
    assert settled_bytes(before) == before


def test_a_call_that_raises_leaves_the_next_step_right() -> None:
    """In the forward and in the backward: each operation that PyTorch runs fails once."""
    expected = plain("residual")
    model, batch = fresh("residual")
    wrapped = rotoff.Checkpointable(model).measure(batch())
    for seed in range(3):
        with_sequence(wrapped, random_sequence(wrapped.chain, seed))
        x = batch()
        with Failing() as failing:
            wrapped(x).sum().backward()
        for n in range(1 + seed, failing.count + 1, 1 + failing.count // 6):
            again, batch = fresh("residual")
            model.load_state_dict(again.state_dict())
            wrapped.zero_grad()
            x = batch()
            before = live_bytes()
            with pytest.raises(MemoryError, match="injected"), Failing(n):
                wrapped(x).sum().backward()
            wrapped.zero_grad()
            torch.ones((), requires_grad=True).backward()  # autograd's queue keeps what a failed backward left in it
            assert settled_bytes(before) <= before
            torch.manual_seed(1)
            assert same(train(wrapped, batch), expected)


class Failing(TorchDispatchMode):
    """Makes operation `at` raise, of those that PyTorch runs within; counts them."""

    def __init__(self, at: int = 0) -> None:
        super().__init__()
        self.count, self.at = 0, at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count == self.at:
            raise MemoryError("injected")
        return func(*args, **(kwargs or {}))


def test_another_backward_needs_retain_graph_and_a_double_one_gives_the_bits_of_the_plain_model() -> None:
    model, batch = fresh("residual")
    plain = copy.deepcopy(model)
    wrapped = rotoff.Checkpointable(model).measure(batch())
    wrapped.compute_sequence(smallest(wrapped, "joint"))
    x = batch()
    output = wrapped(x).sum()
    output.backward()
    with pytest.raises((rotoff.ExecutionError, RuntimeError), match="retain_graph"):
        output.backward()
    found = []
    for one in (plain, wrapped):
        one.zero_grad()
        torch.manual_seed(1)
        gradients = torch.autograd.grad(one(x).sum(), list(one.parameters()), create_graph=True)
        torch.stack([gradient.square().sum() for gradient in gradients]).sum().backward()
        found.append([p.grad for p in one.parameters() if p.grad is not None])
    assert same(*found)


@pytest.mark.parametrize("mode", ["joint", "remat", "offload"])
@pytest.mark.parametrize("name", ["residual", "convolutional"])
@pytest.mark.grid
def test_a_backward_after_one_that_the_callers_error_stopped_gives_the_bits_of_the_plain_model(
    name: str, mode: str
) -> None:
    """Whichever stage the error stopped it in, twice in a row; without retain_graph, the next is refused."""

    def gradients(run: nn.Module, at: int, retain: bool = True) -> list[torch.Tensor]:
        left = [2]

        def stop(gradient: torch.Tensor) -> None:
            left[0] -= 1
            if left[0] >= 0:
                raise KeyError("of the caller")

        handle = model[at].register_forward_hook(lambda module, args, output: output.register_hook(stop) and None)
        torch.manual_seed(1)
        output = run(batch()).sum()
        handle.remove()
        for _ in range(2):
            with pytest.raises(KeyError, match="of the caller"):
                output.backward(retain_graph=retain)
        output.backward(retain_graph=True)
        output.backward()
        return [p.grad for p in run.parameters()]

    for at in range(len(fresh(name)[0])):
        model, batch = fresh(name)
        expected = gradients(model, at)
        model, batch = fresh(name)
        wrapped = rotoff.Checkpointable(model).measure(batch())
        wrapped.compute_sequence(smallest(wrapped, mode), mode=mode)
        assert same(gradients(wrapped, at), expected), at
        if at < len(model) - 1:
            with pytest.raises((rotoff.ExecutionError, RuntimeError, AssertionError), match="retain_graph"):
                gradients(wrapped, at, retain=False)
        wrapped.close()


@pytest.mark.parametrize("name", sorted({*ALL} - {"stateful"}))  # whose graph keeps what no hook sees
@pytest.mark.grid
def test_every_backward_through_one_graph_keeps_the_limit(name: str) -> None:
    """But for the gradient of the output, which is there while a later one makes the values again, and what is less
    than 1 KiB: statistics from before."""
    model, batch = fresh(name)
    wrapped = rotoff.Checkpointable(model).measure(batch())
    for mode in ("remat", "offload", "joint"):
        wrapped.compute_sequence(smallest(wrapped, mode), mode=mode)
        x = batch()
        (output := wrapped(x)).sum().backward()  # makes the parameters' gradients
        predicted, gradient = wrapped.get_expected_memory(), output.untyped_storage().nbytes() + 1024
        output = wrapped(x).sum()
        for last in (False, False, True):
            measured = peak_bytes(partial(output.backward, retain_graph=not last))
            assert measured <= predicted + gradient, f"{measured} > {predicted} + {gradient}\n{wrapped.sequence}"
    wrapped.close()


def test_changing_the_output_of_a_moved_stage_in_place_is_noticed() -> None:
    model, batch = fresh("residual")
    wrapped = rotoff.Checkpointable(model).measure(batch())
    L = len(wrapped.chain)
    text = [f"F_all {i}" for i in range(1, L + 1)] + [f"B {i}" for i in range(L, 0, -1)]
    text[L - 1 : L - 1] = ["offload abar 1", "free abar 1"]
    text[text.index("B 2") : text.index("B 2")] = ["prefetch abar 1", "wait abar 1"]
    with_sequence(wrapped, rotoff.Sequence.from_text(text))
    caught = []
    handle = model[0].register_forward_hook(lambda m, i, o: caught.append(o))
    hook = model[L - 2].register_forward_pre_hook(lambda m, i: print(caught[0].mul_(2).shape))
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        wrapped(batch()).sum().backward()
    handle.remove()
    hook.remove()


def test_gradients_of_a_part_only() -> None:
    """torch.autograd.grad for the last stage's parameters: the rest of the backward never happens, and nothing
    breaks."""
    model, batch = fresh("residual")
    x = batch()
    torch.manual_seed(4)
    expected = torch.autograd.grad(model(x).sum(), list(model[-2].parameters()))
    wrapped = rotoff.Checkpointable(model).measure(x)
    wrapped.compute_sequence(smallest(wrapped, "joint"))
    torch.manual_seed(4)
    got = torch.autograd.grad(wrapped(x).sum(), list(model[-2].parameters()))
    assert same(list(got), list(expected))


def test_what_is_made_again_in_the_forward_outlives_the_views_of_it() -> None:
    """Each stage's output goes, and is made again before the next stage takes views of it, which go before it does."""
    torch.manual_seed(0)
    model, x = (
        torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 3),
        torch.randn(2, 4, 16),
    )
    wrapped = rotoff.Checkpointable(model).measure(x)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    L = len(wrapped.chain)
    for again in range(1, L):
        forward = [f"F_all {i}" for i in range(1, again + 1)] + [f"drop abar {again}", f"F_ck {again}"]
        forward += [f"F_all {i}" for i in range(again + 1, L + 1)]
        back = [f"{op} {i}" for i in range(L, 0, -1) for op in (("F_all", "B") if i == again else ("B",))]
        wrapped.zero_grad()
        with_sequence(wrapped, rotoff.Sequence.from_text([*forward, *back]))(x).square().sum().backward()
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))
    wrapped.close()


def test_a_profiler_shows_the_operations_of_the_plan() -> None:
    model, batch = fresh("residual")
    wrapped = rotoff.Checkpointable(model).measure(batch())
    limit = (wrapped.min_mem_limit() + wrapped.keep_all_memory) // 2
    wrapped.compute_sequence(limit)
    value = batch()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        wrapped(value).sum().backward()
    shown = [event.name.removeprefix("rotoff: ") for event in profiler.events() if event.name.startswith("rotoff: ")]
    assert sorted(shown) == sorted(map(str, wrapped.sequence.ops))
    wrapped.close()
