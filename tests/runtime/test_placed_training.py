"""Training with everything placed: parameters, gradients and optimizer states on the device or on the host, with the
plain model's bits."""

from __future__ import annotations

import copy
import functools
import gc
import io
import itertools
import re
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from allocated import in_file, own_again, peak_bytes
from forced_plans import adamw, added_up, alike, force, least, place, runner_of, twins, within
from models import ALL, Does, linears, same, several
from placed_loops import (
    OPTIMIZERS,
    STEPS,
    Make,
    changed_within,
    frozen_later,
    in_bfloat16,
    left,
    loop,
    penalised,
    result,
    usual,
)
from placed_models import MODELS, SIZED, adapted, drawn
from random_programs import mutants
from torch import nn
from torch.optim import Optimizer
from torch.overrides import _get_current_function_mode_stack

import rotoff
from rotoff.core.chain import LinkRates
from rotoff.core.sequence import w
from rotoff.profile.tape_profile import TapeProfile
from rotoff.runtime.links.host_file import HostFile
from rotoff.runtime.placed import updates as updates_of
from rotoff.runtime.placed.group_updates import GroupUpdates
from rotoff.runtime.placed.placement import Placement
from rotoff.runtime.tape_placed import Lent

UPDATES = pytest.mark.parametrize("updates", ["after", "during"])


def trained(
    name: str, make: Make, step: Any, share: float, anew: bool = False, updates: str = "after", **options: Any
) -> Any:
    """The model after five steps, which leave what those of the plain model leave. share: of the way from the least limit
    to everything. anew: whether steps are measured and planned anew meanwhile."""
    net, batch = drawn(name)
    plan = functools.partial(place if anew else force, **options)
    pairs = twins(net, batch(), updates=updates, share=share, make=make, plan=plan)
    assert same(*left(pairs, step, batch))
    return pairs[1][1]


# -- what trains


def parts_of_one(model: Any, optimizers: Any, n: int, batch: Any) -> torch.Tensor:
    """All gradients lie in one tensor of the caller's, who clears and scales that."""
    parameters = list(model.parameters())
    if n == 0:
        optimizers[0].whole = torch.zeros(sum(p.numel() for p in parameters))
        for p, part in zip(parameters, optimizers[0].whole.split([p.numel() for p in parameters]), strict=True):
            p.grad = part.view_as(p)
    optimizers[0].whole.zero_()
    model(batch()).float().square().mean().backward()
    optimizers[0].whole.mul_(0.5)
    optimizers[0].step()
    return optimizers[0].whole.clone()


def zeroed_late(model: Any, optimizers: Any, n: int, batch: Any) -> torch.Tensor:
    loss = model(batch()).float().square().mean()
    optimizers[0].zero_grad()
    loss.backward()
    optimizers[0].step()
    return sum(p.grad.sum() for p in model.parameters())


def scaled(model: Any, optimizers: Any, n: int, batch: Any) -> torch.Tensor:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127 if n == 1 else 4.0)  # one step is left out
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(batch()).float().square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizers[0])
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizers[0])
    scaler.update()
    optimizers[0].zero_grad()
    return loss.detach()


def scheduled(model: Any, optimizers: Any, n: int, batch: Any) -> torch.Tensor:
    if n == 0:
        optimizers[0].schedule = torch.optim.lr_scheduler.StepLR(optimizers[0], 2, 0.1)
    loss = usual(model, optimizers, n, batch)
    optimizers[0].schedule.step()
    return loss


def exchanged(model: Any, optimizers: Any, n: int, batch: Any) -> torch.Tensor:
    """Averaged weights take the place of the model's for a look, by another tensor."""
    loss = usual(model, optimizers, n, batch)
    own = [p.data for p in model.parameters()]
    for p in model.parameters():
        p.data = p.data * 0.5
    looked = looked_up(model, model, batch()).sum()
    for p, data in zip(model.parameters(), own, strict=True):
        p.data = data
    model.parameters().__next__().data = own[0] + 0.01
    return loss + looked


def other_shapes(model: Any, optimizers: Any, n: int, batch: Any) -> torch.Tensor:
    return usual(model, optimizers, n, (lambda: batch()[: 2 + n % 2]))


def watched(model: Any, optimizers: Any, n: int, batch: Any) -> torch.Tensor:
    """Hooks on the optimizer's steps look at gradients and parameters, and one of them fails."""
    seen: list[torch.Tensor] = []

    def look(optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            seen.extend(t.detach().sum() for p in group["params"] for t in (p, p.grad))
        if n == 2 and len(seen) == 2 * len(list(model.parameters())):
            raise RuntimeError("of the caller's")

    handles = optimizers[0].register_step_pre_hook(look), optimizers[0].register_step_post_hook(look)
    try:
        usual(model, optimizers, n, batch)
    except RuntimeError:
        optimizers[0].zero_grad()
    for handle in handles:
        handle.remove()
    return torch.stack(seen)


def by_closure(model: Any, optimizers: Any, n: int, batch: Any) -> torch.Tensor:
    """It is called once."""
    x, losses = batch(), []

    def closure() -> torch.Tensor:
        optimizers[0].zero_grad()
        losses.append(model(x).float().square().mean())
        losses[-1].backward()
        return losses[-1]

    told = optimizers[0].step(closure)
    assert len(losses) == 1
    return told.detach()


class Around(Optimizer):
    """Steps another optimizer, as Lookahead does."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def around(model: Any, optimizers: Any, n: int, batch: Any) -> torch.Tensor:
    return usual(model, [Around(optimizers[0])], n, batch)


def thawed(model: Any, optimizers: Any, n: int, batch: Any) -> torch.Tensor:
    """Before the backward, as a GAN does with its discriminator around the loss of its generator; in another step,
    frozen."""
    few = [p for k, p in enumerate(model.parameters()) if k % 3 == 0]

    def need(gradients: bool) -> None:
        for p in few:
            p.requires_grad_(gradients)

    need(n != 1)
    loss = model(batch()).float().square().mean()
    need(n != 2)
    loss.backward()
    optimizers[0].step()
    optimizers[0].zero_grad()
    need(True)
    return loss.detach()


def taken_over(model: Any, optimizers: Any, n: int, batch: Any) -> torch.Tensor:
    """By a new optimizer with the states of the former one, which `load_state_dict` does not copy."""
    if n == 3:
        new = torch.optim.AdamW(model.parameters(), lr=1e-3)
        new.load_state_dict(optimizers[0].state_dict())
        optimizers[0] = new
    return usual(model, optimizers, n, batch)


def planned_anew(model: Any, optimizers: Any, n: int, batch: Any) -> torch.Tensor:
    """Once the optimizer has its states."""
    if n == 2 and isinstance(model, rotoff.Checkpointable):
        place(model, optimizers, 0.3)
    return usual(model, optimizers, n, batch)


@torch.no_grad()
def turn(parameters: Any) -> None:
    for one in parameters:
        if one.dim() == 2:
            one.copy_(one.flip(0))


turned = loop("turned", stepped=lambda model, *_: turn(model.parameters()))
turned_states = loop(
    "turned_states",
    stepped=lambda model, own, n: turn(t for state in own[0].state.values() for t in state.values()),
)


def reading(times: tuple[int, ...]) -> Any:
    """A step whose model reads its parameters as often as `times` says; the gradients of all uses are added up."""

    def again(model: nn.Module, optimizers: list[Optimizer], n: int, batch: Callable[[], Any]) -> torch.Tensor:
        next(one for one in model.modules() if hasattr(one, "times")).times = times[n]
        return usual(model, optimizers, n, batch)

    again.__name__ = f"reading {times}"
    return again


BOTH = (by_closure, penalised, around, thawed)  # with updates during the backward, too
OWN = (
    zeroed_late, parts_of_one, scaled, scheduled, exchanged, watched, other_shapes, taken_over, turned, turned_states, by_closure, around, thawed,
)  # fmt: skip
OFTEN = [reading((2, 3, 2, 3, 3)), reading((3, 2, 3, 4, 4))]  # than planned
NAMES = {in_bfloat16: "mapped", **dict.fromkeys(OFTEN, "repeats")}
SHARES = {scaled: 0.6, changed_within: 0.0, planned_anew: 0.3, in_bfloat16: 0.3}  # autocast keeps casts of the weights
ANEW = scaled, frozen_later, thawed, other_shapes, changed_within, in_bfloat16
Row = tuple[str, Any, float, dict[str, Any]]  # the optimizer, the step, the share of the room, options
ROWS: list[Row] = [
    *((name, usual, 0.2, {"updates": updates}) for name in OPTIMIZERS for updates in ("after", "during")),
    *(("AdamW", step, SHARES.get(step, 0.2), {}) for step in (*STEPS, *OWN, in_bfloat16)),
    *(("AdamW", step, 0.2, {"updates": "during"}) for step in BOTH),
    *(("AdamW", usual, share, {"host": True}) for share in (0.0, 0.4)),
    *(("AdamW", step, share, {}) for step in OFTEN for share in (0.0, 0.3)),
    ("Adafactor", planned_anew, 0.3, {}),  # with states of other shapes
]


@pytest.mark.parametrize(
    ("optimizer", "step", "share", "options"),
    [
        pytest.param(*row, id=f"{row[1].__name__}-{row[0]}-{row[2]}-{' '.join(map(str, row[3].values()))}")
        for row in ROWS
    ],
)
@pytest.mark.grid(every=8)
def test_what_surrounds_a_step(optimizer: str, step: Any, share: float, options: dict[str, Any]) -> None:
    name, make = NAMES.get(step, "language"), OPTIMIZERS[optimizer]
    model = trained(name, make, step, share, anew=step in ANEW, **options)
    assert "host" not in options or any(op.kind.value == "H" for op in model.sequence)  # over the file's pages


def in_any_order(chain: rotoff.Chain, updates: str) -> rotoff.Sequence:
    """What a random walk makes of a plan, by steps that are legal: what moves, when, and what stays between steps."""
    plan = within(chain, 0.3, updates)
    data = plan.to_dict() | {"resident": list(plan.resident)}
    walk, legal = mutants(data, len(chain.parameters), Random(0)), None
    for _ in range(150):
        step = walk.send(legal)
        try:
            rotoff.simulate(chain, rotoff.Sequence.from_dict(step), updates=updates)
            data, legal = step, True
        except rotoff.RotoffError:
            legal = False
    return rotoff.Sequence.from_dict(data)


def small_forms_move(chain: rotoff.Chain, updates: str) -> rotoff.Sequence:
    """A plan that keeps and moves the smallest forms, as if to make the rest again took no time."""
    stages = (replace(s, forms=tuple(replace(f, backward_time=s.backward_time) for f in s.forms)) for s in chain.stages)
    return within(replace(chain, stages=tuple(stages)), 0.1, updates)


# Not foretold: what a matrix exponential takes, which depends on its numbers.
FORETOLD = {*MODELS, "mlp", "language", "tied"} - {"parametrized"}


@UPDATES
@pytest.mark.parametrize(
    "solve", [0.0, 0.4, in_any_order, small_forms_move], ids=["least", "more", "in any order", "small forms"]
)
@pytest.mark.parametrize("name", [*MODELS, *ALL])
@pytest.mark.grid(every=8)
def test_steps_by_any_plan_have_the_plain_bits_in_at_most_the_predicted_bytes(
    name: str, solve: Any, updates: str
) -> None:
    def step(run: Any, optimizers: list[Optimizer], x: Any, n: int) -> torch.Tensor:
        torch.manual_seed(n)
        out = run(x)  # which the caller holds during the backward
        loss = out.float().square().mean()
        loss.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        return loss.detach()

    found = []
    for planned in (False, True):
        net, batch = drawn(name)
        x, optimizers = batch(), adamw([p for p in net.parameters() if p.requires_grad])
        run: Any = rotoff.Checkpointable(net, stages=12) if planned else net
        if planned:
            run.compute_sequence(device_limit="1 TiB", optimizer=optimizers, updates=updates)
            run.training = True  # also where the model is in eval mode
        losses = []
        for n in range(6):
            losses.append(step(run, optimizers, torch.utils._pytree.tree_map(torch.clone, x), n))
            if planned and not n:
                force(run, optimizers, solve, updates=updates)
        found.append([*losses, *result(net, optimizers), torch.get_rng_state()])
    assert same(*found)
    assert [course.strayed for course in runner_of(run)] == [0]
    if name in FORETOLD:
        measured = peak_bytes(
            lambda: [step(run, optimizers, x, n) for n in range(3)], before=lambda: own_again(net, optimizers)
        )
        assert measured + x.nbytes <= run.get_expected_memory()
    run.close()


@pytest.mark.parametrize("name", ["language", "adapted", "spectral", "stateful"])
def test_updates_during_the_backward(name: str) -> None:
    """Each parameter is updated when the backward has ended; its gradient is gone, and reads NaN in no memory."""

    def within(model: nn.Module, optimizers: list[Optimizer], n: int, batch: Callable[[], Any]) -> torch.Tensor:
        loss = model(batch()).float().square().mean()
        loss.backward()
        if isinstance(model, rotoff.Checkpointable):
            inner = {id(p) for group in model._plan.placed.groups for p in group.parameters}
            left = [p.grad for p in model.parameters() if id(p) in inner and p.grad is not None]
            assert all(grad.isnan().all() for grad in left)
            with pytest.raises(RuntimeError, match="invalid python storage"):
                left[0].untyped_storage().data_ptr()
            assert left
        optimizers[0].step()
        optimizers[0].zero_grad(set_to_none=n % 2 == 0)
        return loss.detach()

    trained(name, adamw, within, 0.0, updates="during")


def test_a_step_gets_its_arguments() -> None:
    make = OPTIMIZERS["of a base class"]

    def shared(model: nn.Module, optimizers: list[Optimizer], n: int, batch: Callable[[], Any]) -> torch.Tensor:
        loss = model(batch()).float().square().mean()
        loss.backward()
        if n % 2:
            optimizers[0].step(lambda: loss, share=0.5)
        else:
            optimizers[0].step(share=0.25)
        optimizers[0].zero_grad()
        return loss.detach()

    trained("language", make, shared, 0.2)
    with pytest.raises(rotoff.ExecutionError, match="gets arguments"):
        trained("language", make, shared, 0.2, updates="during")


def if_planned(act: Callable[[Any, Any], object]) -> Callable[[Any, Any], object]:
    return lambda model, own: act(model, own) if isinstance(model, rotoff.Checkpointable) else None


CHANGES: dict[str, Callable[[Any, Any], object]] = {
    "a factor": lambda model, own: own[0].param_groups[-1].update(lr=0.005),
    "a schedule": lambda model, own: torch.optim.lr_scheduler.StepLR(own[0], 1, 0.5).step(),
    "parameters": lambda model, own: model.load_state_dict({k: 0.5 * v for k, v in model.state_dict().items()}),
    "another plan": if_planned(lambda model, own: place(model, own, 0.5)),
    "no plan": if_planned(lambda model, own: model.compute_sequence("1 GiB")),
}


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler:UserWarning")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.grid
def test_a_change_between_backward_and_step(change: str) -> None:
    """The step follows it, or is refused where the backward has updated the parameters already."""

    def change_once(model: Any, optimizers: list[Optimizer], n: int) -> None:
        if n == 1:
            CHANGES[change](model, optimizers)

    changed = loop("changed", change_once)
    trained("language", adamw, changed, 0.2)
    with pytest.raises(rotoff.ExecutionError, match="than the backward did|comes between a backward and"):
        trained("language", adamw, changed, 0.2, updates="during")


def test_a_parameter_of_two_optimizers() -> None:
    def both(parameters: list[nn.Parameter]) -> list[Optimizer]:
        return [*adamw(parameters), torch.optim.SGD(parameters[::2], lr=0.01, momentum=0.9)]

    trained("language", both, usual, 0.2)
    with pytest.raises(rotoff.OptionError, match="several optimizers"):
        trained("language", both, usual, 0.2, anew=True, updates="during")


def heads() -> nn.Module:
    """A trunk with two heads, which steps use in turn."""
    return Does(
        lambda net, x, head: net.heads[head](net.trunk(x)), trunk=nn.Sequential(*several(4, 32, 64)), heads=linears(2)
    )


@UPDATES
@pytest.mark.parametrize("name", ["AdamW", "SGD with momentum", "decay in the gradient"])
@pytest.mark.grid(every=3)
def test_a_zero_gradient_of_what_a_step_does_not_use_is_one(name: str, updates: str) -> None:
    """Momentum and weight decay go on."""
    x = torch.randn(16, 32)
    pairs = twins(heads(), x, 0, updates=updates, share=0.5, make=OPTIMIZERS[name], plan=place)
    for n in range(6):
        for _, run, (optimizer,) in pairs:
            run(x, n % 2).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        assert alike(pairs), n


def skips(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Other layers in each step."""
    for n, layer in enumerate(net.layers):
        if (net.step + n) % 4:
            x = x + torch.tanh(layer(x))
    return x


@pytest.mark.filterwarnings("error:.*ended early:RuntimeWarning")
@UPDATES
def test_a_backward_may_end_before_the_first_stage(updates: str) -> None:
    x = torch.randn(32, 32)
    pairs = twins(Does(skips, layers=linears(6), step=1), x, updates=updates)
    for n in range(8):
        for net, run, optimizers in pairs:
            net.step = n + 2
            added_up(run, optimizers, x)
    assert alike(pairs)


def wider(net: Any, x: torch.Tensor) -> torch.Tensor:
    """What it saves grows with the numbers that it gets, up to all of a row."""
    for layer in net.layers:
        seen = x[x[:, 0] > 0]
        x = x + torch.tanh(layer(x)) + torch.tanh(layer(seen)).exp().mean()
    return x


@UPDATES
def test_what_is_kept_and_what_data_makes_larger_lie_apart_on_the_host(updates: str) -> None:
    """Both take host bytes that were not planned, in the same step."""
    few, many, kept = torch.randn(256, 32), torch.rand(256, 32), []
    few[:, 0] = -few[:, 0].abs()
    few[:32, 0] = 1
    pairs = twins(Does(wider, layers=linears(6)), few, updates=updates)
    for n in range(6):
        for net, run, own in pairs:
            for p in net.parameters() if n > 1 else ():
                kept.append(p.data)
                p.data = p.data.clone()
            added_up(run, own, many if n % 3 == 2 else few)
    assert alike(pairs)


@UPDATES
def test_gradients_that_no_given_optimizer_updates_are_the_callers(updates: str) -> None:
    net, batch = drawn("language")
    x = batch()

    def both(every: list[nn.Parameter]) -> list[Optimizer]:
        return [torch.optim.AdamW(every[::2], lr=0.01), torch.optim.SGD(every[1::2], lr=0.1)]

    def of_the_first(run: Any, optimizers: list[Optimizer], share: float, updates: str) -> None:
        force(run, optimizers[:1], share, updates=updates)

    pairs = twins(net, x, updates=updates, make=both, plan=of_the_first)
    for n in range(4):
        for _, run, optimizers in pairs:
            torch.manual_seed(n)
            run(x).float().square().mean().backward()
            for optimizer in optimizers[: 1 + n % 2]:
                optimizer.step()
                optimizer.zero_grad()
        theirs, expected = (
            [p.new_zeros(()) if p.grad is None else p.grad for p in optimizers[1].param_groups[0]["params"]]
            for _, _, optimizers in pairs
        )
        assert same(theirs, expected)
    assert alike(pairs)


def test_gradients_cleared_to_zero_around_a_size_that_fits_as_it_is() -> None:
    """Its step runs without a plan, autograd adds to what is left of the gradients, and a planned step follows."""
    plain = nn.Sequential(*[nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)) for _ in range(6)])
    model, x = rotoff.Checkpointable(copy.deepcopy(plain)), torch.randn(512, 64)
    make = OPTIMIZERS["AdamW foreach"]  # zeroes all at once
    twin, optimizers = make(list(plain.parameters())), make(list(model.parameters()))
    model.measure(x).compute_sequence(device_limit=2_600_000, optimizer=optimizers, updates="during")
    assert not model._plan.keeps_all
    for n, rows in enumerate((2, 512, 512, 2, 512, 2)):
        for one, own in ((model, optimizers), (plain, twin)):
            if n == 5:  # between forward and backward
                loss = one(x[:rows]).square().mean()
                own[0].zero_grad(set_to_none=False)
            else:
                own[0].zero_grad(set_to_none=False)
                loss = one(x[:rows]).square().mean()
            loss.backward()
            own[0].step()
        assert not n or model._plan.keeps_all == (rows == 2)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    optimizers[0].zero_grad()
    model(x).square().mean().backward()
    optimizers[0].step()
    with pytest.raises(rotoff.ExecutionError, match="have not been cleared"):
        model(x[:2]).square().mean().backward()


def test_a_step_that_another_took_the_place_of_is_right() -> None:
    net, x = layers()
    pairs = twins(net, x, share=0.1, plan=place)
    for _, run, own in pairs:
        first = run(x).sum()
        run(x).sum().backward()
        first.backward()
        own[0].step()
        waiting = run(x).sum()
        for p in run.parameters():
            p.grad = torch.ones_like(p)
        own[0].step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            waiting.backward()
        own[0].zero_grad()
        added_up(run, own, x)
    assert alike(pairs)


def test_a_smaller_limit_after_updates_that_kept_everything() -> None:
    """What was on the host before them is not what the parameters are."""
    net, x = layers()
    model = rotoff.Checkpointable(copy.deepcopy(net))
    optimizers = adamw(list(model.parameters()))
    model.compute_sequence(device_limit="1 TiB", optimizer=optimizers)  # nothing is measured yet
    pairs = [(net, net, adamw(list(net.parameters()))), (model, model, optimizers)]
    for n in range(3):
        for _, run, own in pairs:
            run(x).sum().backward()
            added_up(run, own, x)
        if n == 0:
            model.compute_sequence(device_limit=model.keep_all_memory - 1, optimizer=optimizers, refine=False)
        assert alike(pairs)


def test_an_early_exit_returns_the_results_of_all_blocks_so_far() -> None:
    """The plan has operations left that drop values which the caller holds."""

    def exits(net: Any, x: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for base, down, up in list(zip(net.base, net.down, net.up, strict=True))[: net.until]:
            x = x + torch.tanh(base(x))
            found.append(up(down(x)))
        return found

    net, x = adapted(does=exits), torch.randn(16, 64)
    net.until = 5
    pairs = twins(net, x)
    for until in (5, 4, 3, 2):
        for net, _, _ in pairs:
            net.until = until
        assert same(*([t.detach() for t in run(x)] for _, run, _ in pairs))


def test_a_frozen_discriminator_keeps_the_marks_of_its_own_step() -> None:
    """Its gradients are cleared before its next backward that has any, and not before the generator's."""
    x = torch.randn(16, 32)
    both = [
        twins(nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)]), x, updates="during",
              share=0.5, plan=place)
        for _ in "ab"
    ]  # fmt: skip
    for (_, generator, (of_generator,)), (net, discriminator, (of_discriminator,)) in zip(*both, strict=True):
        for _ in range(3):
            with torch.no_grad():
                made = generator(x)
            of_discriminator.zero_grad()
            discriminator(made).square().mean().backward()
            of_discriminator.step()
            net.requires_grad_(False)
            of_generator.zero_grad()
            discriminator(generator(x)).mean().backward()
            of_generator.step()
            net.requires_grad_(True)
    assert all(map(alike, both))


# -- bytes


def peaks(
    name: str,
    updates: str,
    shares: tuple[float, ...],
    measured: bool = False,
    backwards: int = 1,
    clear: Callable[[Optimizer], object] = Optimizer.zero_grad,
    make: Make = adamw,
) -> list[tuple[int, int, int]]:
    """Measured and expected bytes of steps, and the limit: shares of the way from the smallest to that of everything.
    measured: whether `measure` has shown what a step takes, or a step of the loop. backwards: of each step. clear: what
    the loop does with the gradients after the update."""
    model, batch = drawn(name, SIZED)
    x = batch()
    wrapped = rotoff.Checkpointable(model)
    output = model(x).detach()
    towards = torch.randn_like(output).flatten()
    order = sorted(range(output.dim()), key=output.stride, reverse=True)

    def backward() -> None:
        """Of a loss that takes nothing beside the gradient of the output, which is held."""
        y = wrapped(x)
        torch.dot(y.permute(order).flatten(), towards).backward()

    def step() -> None:
        for _ in range(backwards):
            backward()
        optimizers[0].step()
        clear(optimizers[0])

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizers = make(trained)
    options: dict[str, Any] = {"refine": False, "updates": updates}
    if measured:
        wrapped.measure(x, repeats=1)
        model.zero_grad()
    else:
        wrapped.compute_sequence(device_limit="1 TiB", optimizer=optimizers)
        step()
        optimizers = make(trained)  # whose first update is to come
    options["optimizer"] = optimizers
    smallest, found = least(wrapped, **options), []
    wrapped.compute_sequence(device_limit="1 TiB", **options)
    whole = wrapped.keep_all_memory
    for limit in [int(smallest + share * (whole - (share < 1) - smallest)) for share in shares]:
        wrapped.compute_sequence(device_limit="1 TiB", optimizer=optimizers)  # all comes back

        def plan(limit: int = limit) -> None:
            own_again(model, optimizers)
            wrapped.compute_sequence(device_limit=limit, **options)

        measured_bytes = peak_bytes(lambda: [step() for _ in range(3)], before=plan) + x.nbytes
        found.append((measured_bytes, wrapped.get_expected_memory(), limit))
    return found


@pytest.mark.parametrize(("updates", "share"), [("after", 0.2), ("during", 0.2), ("after", 1.0)])
@pytest.mark.parametrize("name", SIZED)
@pytest.mark.grid(every=6)
def test_the_predicted_peak_is_the_measured_one(name: str, updates: str, share: float) -> None:
    """The allocator's account of whole steps, the first update included, and of what lies in private memory between
    them: all of that is made within the account. Nothing is above the prediction, and it is at most 5 % too much."""
    ((measured, expected, _),) = peaks(name, updates, (share,))
    assert 0.95 * expected <= measured <= expected


@UPDATES
@pytest.mark.parametrize(("name", "optimizer"), [("narrow", "SGD"), *((name, "AdamW") for name in SIZED)])
@pytest.mark.grid(every=4)
def test_no_limit_is_exceeded(name: str, optimizer: str, updates: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies take long, so whatever nothing waits for is there too long."""
    read = HostFile.read

    def slowly(file: HostFile, into: memoryview, offset: int) -> None:
        time.sleep(0.002)
        read(file, into, offset)

    monkeypatch.setattr(HostFile, "read", slowly)
    found = peaks(name, updates, (0.0, 0.1, 0.5), measured=True, make=OPTIMIZERS[optimizer])
    assert all(measured <= expected <= limit for measured, expected, limit in found), found


TO_ZERO = functools.partial(Optimizer.zero_grad, set_to_none=False)


@pytest.mark.parametrize(
    ("backwards", "clear"), [(3, Optimizer.zero_grad), (1, bool), (2, TO_ZERO)], ids=["added", "kept", "zero"]
)
@pytest.mark.parametrize("name", SIZED)
@pytest.mark.grid(every=5)
def test_gradients_that_a_step_finds_take_no_more_bytes(name: str, backwards: int, clear: Any) -> None:
    """Those of the backwards before lie on the host when the next one begins. Where everything fits, they stay."""
    *planned, (measured, _, whole) = peaks(name, "after", (0.0, 0.2, 1.0), backwards=backwards, clear=clear)
    assert all(measured <= expected <= limit for measured, expected, limit in planned), planned
    assert 0.95 * whole <= measured <= whole


@pytest.mark.parametrize("held", [True, False])
def test_an_output_that_the_loop_holds_while_the_next_forward_runs_is_said(
    held: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It comes on top of the plan, as in plain PyTorch."""
    model, batch = drawn("deep", SIZED)
    x, optimizers = batch(), adamw(list(model.parameters()))
    wrapped = rotoff.Checkpointable(model).measure(x, repeats=1)
    model.zero_grad()
    limit = least(wrapped, optimizer=optimizers, refine=False)
    wrapped.compute_sequence(device_limit="1 TiB", optimizer=optimizers)

    def steps() -> None:
        for n in range(4):
            y = wrapped(x)
            y.backward(torch.ones_like(y))
            if not held:
                del y
            if n % 2:
                optimizers[0].step()
                optimizers[0].zero_grad()

    def plan() -> None:
        own_again(model, optimizers)
        wrapped.compute_sequence(device_limit=limit, optimizer=optimizers, refine=False)

    with caplog.at_level("WARNING", "rotoff"):
        measured = peak_bytes(steps, before=plan) + x.nbytes
    told = [record.message for record in caplog.records]
    over = [float(re.search(r"exceeded by ([\d.]+) KiB", one)[1]) for one in told]  # type: ignore[index]
    assert len(over) == held
    assert measured <= limit + 1024 * sum(over)
    assert (measured > limit) == held


# -- what is there, and what is refused


def layers() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6))), torch.randn(32, 64)


def small(**options: Any) -> tuple[rotoff.Checkpointable, list[Optimizer], torch.Tensor]:
    net, x = layers()
    wrapped = rotoff.Checkpointable(net, **options).measure(x, repeats=1)
    return wrapped, adamw(list(net.parameters())), x


def placed(share: float, **options: Any) -> tuple[rotoff.Checkpointable, list[Optimizer], torch.Tensor]:
    model, optimizers, x = small()
    place(model, optimizers, share, **options)
    return model, optimizers, x


def during(share: float = 0.1) -> tuple[rotoff.Checkpointable, list[Optimizer], torch.Tensor]:
    return placed(share, updates="during")


def test_parameters_stay_the_callers_and_lie_where_the_plan_says() -> None:
    net, x = nn.Sequential(*(nn.Linear(40, 40) for _ in range(6))), torch.randn(8, 40)
    before = list(net.parameters())  # biases of 160 bytes, which are no multiple of 64
    model, optimizers = rotoff.Checkpointable(net).measure(x, repeats=1), adamw(before)
    place(model, optimizers, 0.1)
    plan = model._plan.placed
    for _ in range(2):
        assert all(p is q for p, q in zip(model.parameters(), before, strict=True))
        away = in_file()
        for k, group in enumerate(plan.groups, start=1):
            assert {away(p) for p in group.parameters} == {w(k) not in plan.resident}
        model(x).square().mean().backward()
        assert all(p.grad is not None for p in before)
        optimizers[0].step()
        away = in_file()
        states = [t for p in before for t in optimizers[0].state[p].values() if t.numel() > 1]
        assert sum(map(away, states)) >= len(states) // 2
    # safetensors takes a tensor in a larger storage for a part of another one
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in before)


def test_with_room_for_everything_nothing_is_done() -> None:
    model, optimizers, x = small()
    model.compute_sequence(device_limit="1 TiB", optimizer=optimizers)
    assert model._plan.keeps_all
    assert not optimizers[0]._optimizer_step_pre_hooks
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())
    seen: list[Any] = []

    def look(*_: object) -> None:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        seen.append((_get_current_function_mode_stack(), torch._C._len_torch_dispatch_stack(), hooks))

    handle = model[3].register_forward_hook(look)
    model(x)
    handle.remove()
    assert seen == [([], 0, None)]
    model.compute_sequence(device_limit=model.keep_all_memory, optimizer=optimizers)
    assert model._plan.keeps_all
    model.compute_sequence(device_limit=model.keep_all_memory - 1, optimizer=optimizers, refine=False)
    assert not model._plan.keeps_all
    added_up(model, optimizers, x)
    model.compute_sequence(device_limit="1 TiB", optimizer=optimizers)  # all comes back
    assert not any(map(in_file(), model.parameters()))
    assert not optimizers[0]._optimizer_step_pre_hooks


@pytest.mark.parametrize("mode", ["joint", "offload"])
def test_the_smallest_limit_is_named_and_works(mode: str) -> None:
    model, optimizers, x = small()
    with pytest.raises(
        rotoff.InfeasibleError, match="parameters, gradients and optimizer states needs at least"
    ) as refused:
        model.compute_sequence(device_limit="1 KiB", optimizer=optimizers, mode=mode)
    model.compute_sequence(device_limit=refused.value.min_mem_limit, optimizer=optimizers, mode=mode, refine=False)
    added_up(model, optimizers, x)


def distorted(profile: TapeProfile, seed: int) -> TapeProfile:
    """`profile` as a busy machine might have measured it."""
    random = Random(seed)

    def by(several: Any) -> Any:
        return tuple(replace(one, seconds=one.seconds * 10 ** random.uniform(-1.5, 1.5)) for one in several)

    trace = profile.trace
    rates = LinkRates(*(10 ** random.uniform(7.5, 10.5) for _ in range(2)), False)
    return replace(profile, trace=replace(trace, ran=by(trace.ran), backward=by(trace.backward)), rates=rates)


@UPDATES
@pytest.mark.parametrize("name", ["first frozen", "tied", "convolutions"])
@pytest.mark.grid(every=4)
def test_what_is_feasible_does_not_depend_on_times(name: str, updates: str) -> None:
    model, batch = drawn(name, SIZED)
    wrapped = rotoff.Checkpointable(model).measure(batch(), repeats=1)
    optimizers = adamw([p for p in model.parameters() if p.requires_grad])
    options: dict[str, Any] = {"optimizer": optimizers, "refine": False, "updates": updates}
    measured, found = wrapped.compute_sequence(device_limit="1 TiB", **options).profile, list[int]()
    for seed in range(2):
        for course in runner_of(wrapped):
            course.profile = distorted(measured, seed)
        found.append(least(wrapped, **options))
        wrapped.compute_sequence(device_limit=found[0], **options)
        with pytest.raises(rotoff.InfeasibleError):
            wrapped.compute_sequence(device_limit=found[0] - 1, **options)
    assert len(set(found)) == 1


class Total(torch.optim.SGD):
    """Scales by something of all parameters together."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        norm = sum(p.grad.norm() for group in self.param_groups for p in group["params"] if p.grad is not None)
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / norm)


class Counting(torch.optim.SGD):
    """Counts steps for all parameters together."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1


def recorded(m: Any, o: Any) -> None:
    place(m, o, 0.2)
    with m.record_step():
        m(torch.randn(32, 64))


def checked(m: Any, o: Any) -> None:
    model, optimizers, _ = small(check=True)
    model.compute_sequence(device_limit=10**6, optimizer=optimizers)


REFUSED = {
    "both limits": (lambda m, o: m.compute_sequence(10**6, device_limit=10**6, optimizer=o), "give one of them: mem_limit"),
    "none": (lambda m, o: m.compute_sequence(), "give one of them: mem_limit"),
    "no optimizer": (lambda m, o: m.compute_sequence(device_limit=10**6), "needs the optimizer"),
    "optimizer": (lambda m, o: m.compute_sequence(10**6, optimizer=o), "needs a device_limit"),
    "no such": (lambda m, o: m.compute_sequence(device_limit=10**6, optimizer="adamw"), "give a torch.optim.Optimizer"),
    "policy": (lambda m, o: m.compute_sequence(device_limit=10**6, optimizer=o, policy="vdnn"), "policy"),
    "updates": (lambda m, o: m.compute_sequence(device_limit=10**6, optimizer=o, updates="before"), "'before'"),
    "LBFGS": (lambda m, o: m.compute_sequence(device_limit=1, optimizer=torch.optim.LBFGS(m.parameters())), "LBFGS"),
    "total": (lambda m, o: m.compute_sequence(device_limit=1, optimizer=Total(m.parameters(), lr=1)), "does not update each parameter by itself"),
    "counting": (lambda m, o: m.compute_sequence(device_limit=1, optimizer=Counting(m.parameters(), lr=1)), "does not update each parameter by itself"),
    "check": (checked, "check=True"),
    "recording": (recorded, "record_step"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    model, optimizers, x = small()
    ask, said = REFUSED[name]
    with pytest.raises((rotoff.OptionError, rotoff.LimitError), match=said):
        ask(model, optimizers)
    added_up(model, optimizers, x)


def back(model: Any, x: torch.Tensor) -> None:
    model(x).sum().backward()


def flat(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    whole = torch.zeros(sum(p.numel() for p in model.parameters()))
    for p, part in zip(model.parameters(), whole.split([p.numel() for p in model.parameters()]), strict=True):
        p.grad = part.view_as(p)
    back(model, x)


def halved_in_between(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    loss = model(x).sum()
    model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()})
    loss.backward()


AT_ONCE = "clipping needs all gradients at once"
ALL_GRADIENTS = {
    "clip_grad_norm_": (lambda m, o, x: (back(m, x), nn.utils.clip_grad_norm_(m.parameters(), 1.0)), AT_ONCE),
    "clip_grad_value_": (lambda m, o, x: (back(m, x), nn.utils.clip_grad_value_(m.parameters(), 1.0)), AT_ONCE),
    "GradScaler": (lambda m, o, x: torch.amp.GradScaler("cpu").scale(m(x).sum()), "a GradScaler needs all gradients"),
    "accumulation": (lambda m, o, x: (back(m, x), back(m, x)), "comes between a backward and optimizer.step"),
    "gradients before": (lambda m, o, x: ([setattr(p, "grad", torch.ones_like(p)) for p in m.parameters()], m(x)),
                         "gradients before the backward"),
    "no zero_grad": (lambda m, o, x: [(back(m, x), o.step()) for _ in "ab"], "have not been cleared"),
    "clipping by hand": (lambda m, o, x: (back(m, x), [p.grad.mul_(0.1) for p in m.parameters() if p.grad is not None]),
                         AT_ONCE),
    "filled with zeros": (lambda m, o, x: (back(m, x), [p.grad.fill_(0) for p in m.parameters() if p.grad is not None]),
                          'fill_ would change a gradient that updates="during" has used up'),
    "eval before the step": (lambda m, o, x: (back(m, x), looked_up(m, m, x)), "comes between a backward and optimizer.step"),
    "cleared before the step": (lambda m, o, x: (back(m, x), o.zero_grad(), o.step()), "were cleared between the backward and"),
    "another optimizer": (lambda m, o, x: (back(m, x), torch.optim.SGD(m.parameters(), lr=0.1).step()),
                          "has used up gradients of this optimizer's parameters"),
    "halved in between": (halved_in_between, "modified by an inplace operation"),
    "a part of a gradient of all": (flat, "gradients before the backward"),
    "a second step": (lambda m, o, x: (back(m, x), o.step(), o.step()), r"a second optimizer.step\(\) after one backward"),
}  # fmt: skip


@pytest.mark.parametrize("name", ALL_GRADIENTS)
@pytest.mark.grid
def test_what_needs_all_gradients_is_refused_where_updates_come_during_the_backward(name: str) -> None:
    use, said = ALL_GRADIENTS[name]
    model, optimizers, x = during()
    other = nn.Linear(4, 4)
    with pytest.raises(RuntimeError, match=said):
        use(model, optimizers[0], x)
    nn.utils.clip_grad_norm_(other.parameters(), 1.0)  # which another model may do
    torch.amp.GradScaler("cpu").scale(other(torch.ones(2, 4)).sum()).backward()
    with suppress(rotoff.ExecutionError):
        optimizers[0].step()
    optimizers[0].zero_grad()
    added_up(model, optimizers, x)
    model.compute_sequence(device_limit="1 TiB", optimizer=optimizers)
    model(x).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.amp.GradScaler("cpu").scale(model(x).sum())


@UPDATES
def test_steps_in_hooks_of_parameters_are_refused(updates: str) -> None:
    """As in the tutorial of updates in the backward, which rotoff does by itself."""
    net, x = nn.Sequential(*[nn.Linear(48, 48) for _ in range(5)]), torch.randn(16, 48)
    net[4].weight = net[0].weight
    _, (model, run, own) = twins(net, x, updates=updates, make=lambda p: [torch.optim.SGD([one], lr=0.1) for one in p])
    steps = dict(zip(model.parameters(), own, strict=True))
    handles = [p.register_post_accumulate_grad_hook(lambda p: steps[p].step()) for p in steps]
    with pytest.raises(rotoff.ExecutionError, match='leave it out there.*plan with updates="during"'):
        run(x).sum().backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    added_up(run, own, x)


@pytest.mark.parametrize("closes", [True, False])
def test_a_model_that_goes_before_the_step_has_been_updated(closes: bool) -> None:
    model, optimizers, x = during()
    (net,) = model.children()
    model(x).sum().backward()
    with pytest.warns(RuntimeWarning, match="which finds nothing left to do") if closes else nullcontext():
        if closes:
            model.close()
    del model
    gc.collect()
    updated = [p.detach().clone() for p in net.parameters()]
    optimizers[0].step()
    assert same(list(net.parameters()), updated)


@pytest.mark.parametrize("then", ["close", "plan", "delete"])
def test_no_later_step_takes_marks_for_gradients(then: str) -> None:
    model, optimizers, x = during()
    (net,) = model.children()
    model(x).sum().backward()
    optimizers[0].step()
    if then == "close":
        model.close()
    elif then == "plan":
        model.compute_sequence("1 GiB")
        model(x)
    del model
    gc.collect()
    other = torch.optim.SGD(net.parameters(), lr=0.1)
    for optimizer in (other, optimizers[0]):
        with pytest.raises(rotoff.ExecutionError, match=r"call zero_grad\(\) before its step"):
            optimizer.step()
    optimizers[0].zero_grad()
    added_up(net, [other], x)
    assert not any(p.isnan().any() for p in net.parameters())


def test_a_model_with_marks_is_collected() -> None:
    model, optimizers, x = during()
    optimizers[0].model = model  # type: ignore[attr-defined]
    model(x).sum().backward()
    optimizers[0].step()
    gone = weakref.ref(model)
    del model, optimizers
    gc.collect()
    assert gone() is None


def mapped_anew(parameter: nn.Parameter) -> torch.Tensor:
    """What another process would have of it."""
    handle = parameter.untyped_storage()._share_fd_cpu_()
    return parameter.new_empty(0).set_(torch.UntypedStorage._new_shared_fd_cpu(*handle), 0, parameter.shape)


@UPDATES
@pytest.mark.slow
def test_what_shares_a_parameter_s_memory_and_does_not_follow_it_is_warned_of(updates: str) -> None:
    behind = 0
    for when, share in itertools.product(("never", "before", "by a process", "at each step"), (0.1, 0.3, 0.6)):
        model, optimizers, x = small()
        shares = {"before": torch.Tensor.detach, "by a process": mapped_anew}.get(when)
        others = [shares(p) for p in model.parameters()] if shares is not None else []
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            place(model, optimizers, share, updates=updates)
            for _ in range(2):
                if when == "at each step":
                    others = [p.detach() for p in model.parameters()]
                added_up(model, optimizers, x)
        said = {(str(w.message), w.lineno) for w in seen if "shares the memory" in str(w.message)}
        assert len(said) <= (when != "never")  # of which Python shows one by itself
        for p, other in zip(model.parameters(), others, strict=False):
            if not torch.equal(p, other):
                behind += 1
                assert said
    assert behind


def test_copies_are_plain_models_of_their_own() -> None:
    model, optimizers, x = placed(0.1)
    added_up(model, optimizers, x)
    other = copy.deepcopy(model)
    assert not any(map(in_file(), other.parameters()))
    assert all(map(torch.equal, other.parameters(), model.parameters()))
    assert torch.equal(other(x), model(x))
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    assert saved.tell() < 2 * sum(p.nbytes for p in model.parameters())


# -- faults


@contextmanager
def failing(at: int, error: BaseException, places: list[tuple[Any, str]]) -> Iterator[Any]:
    """Within, call number `at` of all at those places raises `error`; gives the count of them."""
    calls = itertools.count()

    def counted(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any) -> Any:
            if next(calls) == at:
                raise error
            return function(*args)

        return call

    with ExitStack() as stack:
        for owner, name in places:
            stack.enter_context(mock.patch.object(owner, name, counted(getattr(owner, name))))
        yield calls


COPIES = [(HostFile, "read"), (HostFile, "write")]
ENDED = {"after": r"optimizer.step\(\)", "during": "a backward that updates parameters"}
CALLS = [(Placement, "operate"), (Lent, "bring"), (updates_of, "own_step"), (GroupUpdates, "_update_on_device")]


@UPDATES
@pytest.mark.parametrize("kind", [OSError, MemoryError, KeyboardInterrupt])
@pytest.mark.grid
def test_an_error_at_any_copy_or_operation(kind: Any, updates: str) -> None:
    """Parameters that no update was begun of are as they were, the others whole; the caller is told; and the next step
    trains as the plain model does. A disk that is full is an error of its copies."""
    model, optimizers, x = small()
    force(model, optimizers, 0.2, updates=updates)
    added_up(model, optimizers, x)

    def plainly() -> list[nn.Parameter]:
        """What a step of the plain model makes of the present parameters and states."""
        plain = copy.deepcopy(model._model)
        twin = adamw(list(plain.parameters()))
        twin[0].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        added_up(plain, twin, x)
        return list(plain.parameters())

    reached = 0
    for at in itertools.count(0, 2 if kind is OSError else 1):
        rows = [(p, p.detach().clone(), new) for p, new in zip(model.parameters(), plainly(), strict=True)]
        error, told = kind(28, "injected"), []
        with failing(at, error, COPIES if kind is OSError else CALLS) as calls:
            try:
                added_up(model, optimizers, x)
            except BaseException as caught:
                assert caught is error or "injected" in str(caught)
                told = [note for note in getattr(caught, "__notes__", ()) if "updated" in note]
        if next(calls) <= at:
            break
        optimizers[0].zero_grad()
        assert all(torch.equal(p, old) or torch.equal(p, new) for p, old, new in rows)
        changed = sum(not torch.equal(p, old) for p, old, _ in rows)
        if 0 < changed < len(rows) and sys.version_info >= (3, 11):
            assert re.search(
                rf"{ENDED[updates]} ended early; of the parameters of AdamW it had updated {changed};", told[0]
            )
            reached += 1
        after = plainly()
        added_up(model, optimizers, x)
        assert all(map(torch.equal, model.parameters(), after))
    assert at > (10 if kind is OSError else 20)
    assert reached > (0 if kind is OSError else 5)


def test_a_backward_that_fails_elsewhere_after_updates_warns() -> None:
    """In a hook of the caller's, say, whose error nobody of rotoff sees."""
    model, optimizers, x = during(0.6)
    before = [p.detach().clone() for p in model.parameters()]

    def fails(*_: object) -> None:
        raise RuntimeError("of the caller's")

    handle = model[0][0].weight.register_hook(fails)
    loss = model(x).sum()
    with pytest.raises(RuntimeError, match="of the caller's"):
        loss.backward()
    handle.remove()
    changed = [not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
    assert any(changed)
    assert not all(changed)
    for p in model.parameters():
        p.grad = None
    with pytest.warns(RuntimeWarning, match=rf"it had updated {sum(changed)}; .*, and those numbered 0, 1.* are not"):
        model(x)
    optimizers[0].zero_grad()
    added_up(model, optimizers, x)


# -- frozen parameters, forwards without gradients, states that come later


def test_frozen_first_layers_lie_on_the_host() -> None:
    """The smallest limit is that of a model that is trained as a whole, but for their output. Thawed, they are placed
    as all others."""
    model, batch = drawn("first frozen")
    x, optimizers = batch(), adamw(list(model.parameters()))
    wrapped = rotoff.Checkpointable(model).measure(x, repeats=1)
    limit = place(wrapped, optimizers, 0.0)
    added_up(wrapped, optimizers, x)
    with pytest.raises(rotoff.InfeasibleError):
        wrapped.compute_sequence(device_limit=limit, optimizer=optimizers, host_limit=0, refine=False)
    whole, _ = drawn("first frozen")
    trained_whole = rotoff.Checkpointable(whole.requires_grad_()).measure(x, repeats=1)
    assert limit <= place(trained_whole, adamw(list(whole.parameters())), 0.0) + x.nbytes
    model.requires_grad_()
    place(wrapped, optimizers, 0.0)
    before = [p.clone() for p in model.parameters()]
    added_up(wrapped, optimizers, x)
    assert not any(map(torch.equal, before, model.parameters()))


@UPDATES
def test_states_of_parameters_that_were_frozen_lie_on_the_host(updates: str) -> None:
    net, x = layers()
    own = adamw(list(net.parameters()))
    for _ in range(2):
        added_up(net, own, x)
    net[:3].requires_grad_(False)
    model = rotoff.Checkpointable(net).measure(x, repeats=1)
    options: dict[str, Any] = {"optimizer": own, "refine": False, "updates": updates}
    model.compute_sequence(device_limit=int(1.2 * least(model, **options)), **options)

    def start() -> None:
        own_again(net, own)
        added_up(model, own, x)

    states = own[0].state[net[0][0].weight]
    average = states["exp_avg"].clone()
    steps = peak_bytes(lambda: [added_up(model, own, x) for _ in range(2)], before=start)
    assert steps + x.nbytes <= model.get_expected_memory()
    assert torch.equal(states["exp_avg"], average)


def looked_up(run: nn.Module, net: nn.Module, x: torch.Tensor) -> Any:
    with torch.no_grad():
        return run(x)


def inferred(run: nn.Module, net: nn.Module, x: torch.Tensor) -> Any:
    with torch.inference_mode():
        return run(x).sum().item()


def unneeded(run: nn.Module, net: nn.Module, x: torch.Tensor) -> Any:
    return run(x)


def differentiated(run: nn.Module, net: nn.Module, x: torch.Tensor) -> Any:
    x = x.clone().requires_grad_()
    run(x).square().sum().backward()
    return x.grad


def in_turns(run: nn.Module, net: nn.Module, x: torch.Tensor) -> Any:
    return differentiated(run.eval(), net, x) + differentiated(run.train(), net, x) + looked_up(run, net, x)


def reloaded_later(run: nn.Module, net: nn.Module, x: torch.Tensor) -> Any:
    before = looked_up(run, net, x)
    run.load_state_dict({name: 0.5 * value for name, value in run.state_dict().items()})
    return before + looked_up(copy.deepcopy(run), net, x) - looked_up(run, net, x)


def closed(run: Any, net: nn.Module, x: torch.Tensor) -> Any:
    before = looked_up(run, net, x)
    if run is not net:
        run.close()
    return before + looked_up(run, net, x)


@pytest.mark.parametrize("use", [in_turns, inferred, unneeded, reloaded_later, closed], ids=lambda use: use.__name__)
@pytest.mark.grid(every=3)
def test_a_frozen_model_needs_no_optimizer(use: Any) -> None:
    """A teacher, a reference or a reward model: its parameters lie on the host, and nothing is updated."""
    layers = [nn.Sequential(nn.Linear(32, 128), nn.BatchNorm1d(128), nn.GELU(), nn.Linear(128, 32)) for _ in range(6)]
    plain, x = nn.Sequential(*layers).requires_grad_(False), torch.randn(16, 32)
    net = copy.deepcopy(plain)
    model = rotoff.Checkpointable(net).compute_sequence(device_limit="110 KiB", refine=False)
    for _ in range(3):
        assert same([torch.as_tensor(use(model, net, x))], [torch.as_tensor(use(plain, plain, x))])
    assert same(result(net, []), result(plain, []))
    assert use is closed or sum(map(in_file(), net.parameters())) > 8  # of 36


@pytest.mark.parametrize("in_place", [False, True])
def test_a_frozen_model_keeps_its_limit(in_place: bool) -> None:
    """Also where a plan would find no room; thawed, it asks for the optimizer."""
    net, x = nn.Sequential(*(nn.Linear(96, 96) for _ in range(8))).requires_grad_(False), torch.randn(8, 96)
    planned = rotoff.attach(net) if in_place else rotoff.Checkpointable(net)
    planned.compute_sequence(device_limit="20 KiB")
    model = net if in_place else planned
    looked_up(model, net, x)
    assert peak_bytes(lambda: looked_up(model, net, x), before=lambda: own_again(net, [])) + x.nbytes <= 20 << 10
    planned.compute_sequence(device_limit=1024)
    with pytest.raises(rotoff.InfeasibleError, match="a forward without gradients needs at least") as refused:
        looked_up(model, net, torch.randn(9, 96))
    for enough in (refused.value.min_mem_limit, "1 MiB"):
        planned.compute_sequence(device_limit=enough)
        looked_up(model, net, torch.randn(9, 96))
    assert not any(map(in_file(), net.parameters()))
    net[4].requires_grad_()
    with pytest.raises(rotoff.OptionError, match="needs the optimizer.*since 2 parameters need gradients"):
        model(x)


@pytest.mark.parametrize("trains", [True, False])
def test_a_forward_without_gradients_keeps_the_limit_of_training(trains: bool) -> None:
    """Its own code holds more than a planned step does: what the plan keeps on the device between steps makes room."""
    net, batch = drawn("first frozen")
    (twin, _, others), (model, run, own) = twins(net, x := batch(), plan=place)
    limit = run.mem_limit

    def after_steps() -> None:
        own_again(model, own)
        run.compute_sequence(device_limit=limit, optimizer=own, refine=False)
        added_up(run.train(), own, x)
        run.train(trains)

    assert peak_bytes(lambda: looked_up(run, model, x), before=after_steps) + x.nbytes <= limit
    added_up(twin, others, x)
    twin.train(trains)(x)
    for one, optimizers in ((run, own), (twin, others)):
        added_up(one.train(), optimizers, x)
        looked_up(one.eval(), one, x)
        added_up(one.train(), optimizers, x)
    assert same(result(model, own), result(twin, others))


def test_a_forward_without_gradients_says_that_it_exceeds_the_limit_of_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net, batch = drawn("first frozen")
    _, (model, run, own) = twins(net, x := batch(), updates="during", plan=place)
    added_up(run, own, x)
    with caplog.at_level("WARNING", "rotoff"):
        for _ in range(3):
            looked_up(run, model, torch.cat([x] * 4))
    (told,) = (record.message for record in caplog.records)
    found = re.search(r"needs at least .* \((\d+) bytes\).*the device_limit is .* \((\d+) bytes\)", told)
    assert found is not None
    assert int(found[1]) > run.mem_limit == int(found[2])


def test_gradients_of_a_step_off_its_course_go_to_the_host() -> None:
    net, batch = drawn("repeats")
    _, (model, run, _) = twins(net, x := batch(), plan=place)
    next(one for one in model.modules() if hasattr(one, "times")).times = 3
    run(x).square().mean().backward()
    assert run._steps.latest.strayed
    assert all(map(in_file(), (p.grad for p in model.parameters())))


def longer(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Makes one more operation after one of its layers."""
    for n, layer in enumerate(net.layers):
        x = x + layer(x)
        x = x.sin() if n == net.more else x
    return x


@pytest.mark.parametrize("updates", ["after", "during"])
@pytest.mark.parametrize(("rows", "width", "inner"), [(4, 128, 512), (512, 32, 64)])
def test_a_step_off_its_course_keeps_a_limit_near_the_smallest(rows: int, width: int, inner: int, updates: str) -> None:
    """Weights come when an operation reads them, and what the plan was prefetching goes."""
    torch.manual_seed(0)
    net, x = Does(longer, layers=several(4, width, inner), more=None), torch.randn(rows, width)
    (plain, _, others), (model, run, own) = twins(net, x, updates=updates, share=0.01, plan=place)
    added_up(plain, others, x)
    added_up(run, own, x)
    for plain.more in (0, 3):
        model.more = plain.more
        peak = peak_bytes(lambda: added_up(run, own, x), before=lambda: own_again(model, own))
        assert run._steps.latest.strayed
        assert peak + x.nbytes <= run.mem_limit
        added_up(plain, others, x)
        assert same(result(model, own), result(plain, others))


@pytest.mark.parametrize(("trains", "updates"), [(False, "after"), (True, "after"), (True, "during")])
def test_a_teacher_beside_its_student(trains: bool, updates: str) -> None:
    """Each under a limit, frozen or trained by the same optimizer; in some steps the gradients of the student go through
    the teacher."""
    plain = (
        nn.Sequential(*several(6, 64, 128)).requires_grad_(trains).train(trains),
        nn.Sequential(*several(4, 64, 128)),
    )
    twin, x = copy.deepcopy(plain), torch.randn(16, 64)
    teacher, student = (rotoff.Checkpointable(net) for net in twin)
    own = [adamw([p for net in nets for p in net.parameters() if p.requires_grad]) for nets in (plain, twin)]
    options: Any = {"refine": False, "optimizer": own[1], "updates": updates}
    teacher.compute_sequence(
        device_limit="600 KiB" if trains else "330 KiB", **(options if trains else {"refine": False})
    )
    student.compute_sequence(device_limit="500 KiB", **options)
    for n in range(4):
        for (above, below), (optimizer,) in zip((plain, (teacher, student)), own, strict=True):
            result_of = above(below(x)) if n % 2 else below(x) - looked_up(above, above, x)
            result_of.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert teacher._plan.placed is not None and student._plan.placed is not None
    assert same(result(nn.ModuleList(twin), own[1]), result(nn.ModuleList(plain), own[0]))


def test_a_state_made_later_is_said_and_placed_by_the_next_plan() -> None:
    """Also where the parameter has had a place, without room for the state."""
    model, _, x = small()
    own = [torch.optim.SGD(model.parameters(), lr=0.01)]
    place(model, own, 0.2)
    added_up(model, own, x)
    own[0].param_groups[0]["momentum"] = 0.9
    with pytest.warns(RuntimeWarning, match="keeps 'momentum_buffer' for its parameters, which it did not when"):
        added_up(model, own, x)
    smallest, plain = least(model, optimizer=own, refine=False), copy.deepcopy(model._model)
    twin = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9)
    twin.load_state_dict(copy.deepcopy(own[0].state_dict()))

    def plan() -> None:
        own_again(model, own)
        model.compute_sequence(device_limit=smallest, optimizer=own, refine=False)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measured = peak_bytes(lambda: [added_up(model, own, x) for _ in range(3)], before=plan) + x.nbytes
    assert measured <= model.get_expected_memory()
    for _ in range(3):
        added_up(plain, [twin], x)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
