"""The interpreter gives the plain model's bits, whatever legal sequence it runs, and from the step on that measures."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from allocated import peak_bytes
from models import ALL, Does, Residual, fresh, linears, several
from planned_steps import Beside, bits_and_bytes
from step_by_step import works
from torch import nn

import rotoff


@pytest.mark.parametrize("mode", ["joint", "remat", "offload"])
@pytest.mark.parametrize("name", ALL)
@pytest.mark.grid
def test_every_mode_gives_the_bits_of_the_plain_model_within_its_limit(name: str, mode: str) -> None:
    model, batch = fresh(name)
    bits_and_bytes(model, lambda: (batch(),), [mode], (0.0, 0.5, 1.0))


@pytest.mark.parametrize("mode", ["joint", "remat", "offload"])
@pytest.mark.parametrize("name", ["residual", "convolutional"])
@pytest.mark.grid
def test_a_backward_after_one_that_the_callers_error_stopped_gives_the_bits_of_the_plain_model(
    name: str, mode: str
) -> None:
    """Whichever stage the error stopped it in, twice in a row; without retain_graph, the next is refused."""
    left = [0]

    def stop(gradient: torch.Tensor) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise KeyError("of the caller")

    def stopped(output: torch.Tensor, _: Any = None, retain: bool = True) -> None:
        loss, left[0] = output.sum(), 2
        for _ in "ab":
            with pytest.raises(KeyError, match="of the caller"):
                loss.backward(retain_graph=retain)
        loss.backward(retain_graph=True)
        loss.backward()

    model, batch = fresh(name)
    beside = Beside(model, sample=(batch(),), backward=stopped).within(mode)
    for at in range(len(model)):
        handles = [
            one[at].register_forward_hook(lambda module, args, output: output.register_hook(stop) and None)
            for one in (beside.plain, beside.model)
        ]
        beside.step(x := batch())
        for run in (beside.plain, beside.planned) if at < len(model) - 1 else ():
            with pytest.raises((rotoff.ExecutionError, RuntimeError, AssertionError), match="retain_graph"):
                stopped(run(x), retain=False)
        for handle in handles:
            handle.remove()
    beside.planned.close()


LOSSES = {
    "has the output": lambda output: output.square().mean(),
    "saves as much": lambda output: nn.functional.cross_entropy(output, output.argmax(1)),
    "saves nothing": torch.mean,
}


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("loss", LOSSES)
def test_micro_batches_in_flight_rest_with_what_their_losses_hold(loss: str, share: float) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), *[Residual(32) for _ in range(4)], nn.Linear(32, 64))
    model = rotoff.Checkpointable(net).compute_sequence(1 << 40, in_flight=3)
    inputs = [torch.randn(192, 16) for _ in range(3)]

    def run() -> None:
        for one in [LOSSES[loss](model(x)) for x in inputs]:
            one.backward()

    LOSSES[loss](model(inputs[0])).backward()
    least = model.min_mem_limit("remat", in_flight=3)
    model.compute_sequence(int(least + share * (model.keep_all_memory - least)), mode="remat", in_flight=3)
    run()
    told = model.get_expected_memory()
    assert told * 0.95 <= peak_bytes(run) <= told <= (model.mem_limit or 0)
    model.close()


LIMITS: dict[str, tuple[Callable[[rotoff.Checkpointable], dict[str, Any]], int]] = {
    "keeps everything of one": (lambda model: {"mem_limit": model.keep_all_memory}, 2),
    "of a plan": (lambda model: {"mem_limit": model.min_mem_limit("remat"), "mode": "remat"}, 2),
    "of a device": (
        lambda model: {"device_limit": model.keep_all_memory, "optimizer": torch.optim.SGD(model.parameters())},
        2,
    ),
    "keeps everything of all": (lambda model: {"mem_limit": 1 << 40}, 0),
}


@pytest.mark.parametrize("name", LIMITS)
def test_more_steps_in_flight_than_the_limit_counts_on_are_said_once_for_each_number(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    options, said = LIMITS[name]
    x = torch.randn(256, 32)
    model = rotoff.Checkpointable(nn.Sequential(*linears(4))).measure(x, repeats=1)
    model.compute_sequence(**options(model), refine=False)
    for many in (1, 2, 2, 3, 1):
        sum(model(x).sum() for _ in range(many)).backward()
    assert caplog.text.count("between their forward and their backward at once") == said


@pytest.mark.parametrize("name", sorted({*ALL} - {"stateful"}))  # whose graph keeps what no hook sees
@pytest.mark.grid
def test_every_backward_through_one_graph_keeps_the_limit(name: str) -> None:
    """But for the gradient of the output, which is there while a later one makes the values again, and what is less
    than 1 KiB: statistics from before."""
    model, batch = fresh(name)
    wrapped = rotoff.Checkpointable(model).measure(batch())
    for mode in ("remat", "offload", "joint"):
        wrapped.compute_sequence(wrapped.min_mem_limit(mode), mode=mode)
        x = batch()
        (output := wrapped(x)).sum().backward()  # makes the parameters' gradients
        predicted, gradient = wrapped.get_expected_memory(), output.untyped_storage().nbytes() + 1024
        output = wrapped(x).sum()
        for last in (False, False, True):
            measured = peak_bytes(partial(output.backward, retain_graph=not last))
            assert measured <= predicted + gradient, f"{measured} > {predicted} + {gradient}\n{wrapped.sequence}"
    wrapped.close()


def test_what_is_made_again_in_the_forward_outlives_the_views_of_it() -> None:
    """Each stage's output goes, and is made again before the next stage takes views of it, which go before it does."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, 16)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 3)
    beside = Beside(model, sample=(x,))
    L = len(beside.planned.chain)
    for again in range(1, L):
        forward = [f"F_all {i}" for i in range(1, again + 1)] + [f"drop abar {again}", f"F_ck {again}"]
        forward += [f"F_all {i}" for i in range(again + 1, L + 1)]
        back = [f"{op} {i}" for i in range(L, 0, -1) for op in (("F_all", "B") if i == again else ("B",))]
        beside.following(rotoff.Sequence.from_text([*forward, *back])).step(x)
    beside.planned.close()


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


@pytest.mark.parametrize("stopped", [False, True])
def test_no_region_of_a_profile_is_open_after_a_backward(stopped: bool) -> None:
    """The profiler would write into memory that it has freed, when such a one ends within another profile."""
    model, batch = fresh("residual")
    wrapped = rotoff.Checkpointable(model).measure(batch())
    wrapped.compute_sequence((wrapped.min_mem_limit() + wrapped.keep_all_memory) // 2)

    def stop(*_: object) -> None:
        raise KeyError("of the caller")

    handles = [part.register_full_backward_hook(stop) for part in model if stopped]
    with torch.autograd.profiler.profile(use_cpu=True):
        output = wrapped(batch()).sum()
        with pytest.raises(KeyError) if stopped else nullcontext():
            output.backward(retain_graph=True)
    assert not any(type(thing) is torch.autograd.profiler.record_function for thing in gc.get_objects())
    for handle in handles:
        handle.remove()
    wrapped.close()


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.grid
def test_the_first_step_is_planned_and_on_its_course(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """A little above the smallest limit of a step of the loop."""
    model, batch = fresh(kind)
    probe = Beside(model, 1 << 40)
    probe.step(batch())
    beside = Beside(model, probe.within("joint", 0.2).limit)
    for _ in range(3):
        beside.step(batch())
    assert "another course" not in caplog.text
    assert len(beside.planned.plans()) == 1
    beside.planned.close()


def test_a_limit_that_is_too_small_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 8))

    def counted(net: Any, x: torch.Tensor) -> torch.Tensor:
        net.steps += 1
        return net.inner(x)

    whole, x = Does(counted, inner=model, steps=0), torch.randn(16, 8)
    run = rotoff.Checkpointable(whole).compute_sequence(1)
    run(x).sum().backward()  # the first step records itself
    before = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    drawn = torch.get_rng_state()
    with pytest.raises(rotoff.InfeasibleError):
        run(x)
    assert whole.steps == 1
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(before[name], tensor) for name, tensor in whole.state_dict().items())


def tied(net: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Uses one weight three times: twice as a table, and once in a linear layer, for which autocast casts it."""
    x = 3 * net.table(tokens)
    for n, layer in enumerate(net.layers):
        x = torch.tanh(layer(x)) + (0.7 * net.table(tokens.flip(0)) if n == 1 else 0)
    return nn.functional.cross_entropy(net.head(x).flatten(0, 1), tokens.flatten())


def test_gradients_of_a_weight_that_autocast_casts_are_added_up_in_the_plain_order() -> None:
    table, head, tokens = nn.Embedding(50, 64), nn.Linear(64, 50, bias=False), torch.randint(0, 50, (16, 32))
    head.weight = table.weight
    nn.init.normal_(table.weight, std=0.2)
    model = Does(tied, table=table, head=head, layers=linears(4, 64))

    def casting() -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16)

    limit = Beside(model, sample=(tokens,), around=casting).within("joint", 0.5).limit
    beside = Beside(model, limit, around=casting)
    for _ in range(3):
        beside.step(tokens)
    assert works(beside.planned.sequence)


# -- check=True notices where the device does not hold what the machine says


def test_keeping_everything_is_checked_too(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = fresh("residual")
    beside = Beside(model, sample=(batch(),), check=True).at(1 << 40)
    beside.step(batch())
    assert not caplog.records
    for one in (beside.plain, beside.model):
        one[2].dropout.forward = lambda x: x.tanh().tanh()
    beside.step(batch())
    assert "made other operations than the planned ones" in caplog.text


def branching(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Saves several times the bytes once it does more."""
    for layer in net.layers:
        x = x + layer(x)
        if net.more:
            x = torch.cat([x] * 8).sin().tanh().sin().view(8, *x.shape).mean(0)
    return x


def test_a_step_beyond_the_limit_off_course_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = Does(branching, layers=several(8, 16, 32), more=False)
    x = torch.randn(64, 16)
    wrapped = rotoff.Checkpointable(model, check=True).measure(x)
    limit = wrapped.min_mem_limit("remat")
    wrapped.compute_sequence(limit, mode="remat", refine=False)
    model.more = True
    wrapped(x).square().sum().backward()
    said = [record.getMessage() for record in caplog.records if "the device holds" in record.getMessage()]
    assert len(said) == 1
    assert f"the limit is {limit} " in said[0]
