"""Steps on tapes by plans: the bits of the plain model, at most the predicted bytes, and nothing left behind."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import changing_models  # noqa: F401 - fills the table
import odd_models  # noqa: F401
import pytest
import state_models  # noqa: F401
import torch
from allocated import peak_bytes
from models import ALL
from on_tape import TAPES, planned_verdict, within
from random_programs import random_sequence
from step_by_step import MODES, Row
from thoroughness import seeds
from torch import nn
from torch.utils._pytree import tree_leaves
from trunks import TABLE, Block, Long, drawn

import rotoff
from rotoff.planning.tape_planner import least_limit, plan
from rotoff.planning.tape_runner import TapeRunner
from rotoff.profile.recorded_step import RecordedStep
from rotoff.runtime.execution_plan import compile_sequence

TIMES = 16  # larger than the models' own batches


def cases() -> list[Any]:
    """Every tenth row in one of the modes; slowly, all in all."""
    found = []
    for n, row in enumerate(TABLE):
        one = MODES[n % 3]
        found.append(pytest.param(row, [one], id=row.name, marks=[pytest.mark.slow] if n % 10 else []))
        others = [mode for mode in MODES if mode != one]
        found.append(pytest.param(row, others, id=f"{row.name}, in the other modes", marks=pytest.mark.slow))
    return found


@pytest.mark.parametrize("new_tape", TAPES)
@pytest.mark.parametrize(("row", "modes"), cases())
def test_what_changes_between_steps_trains_by_plans(row: Row, modes: list[str], new_tape: Any) -> None:
    for mode in modes:
        said = planned_verdict(row, mode, new_tape)
        assert said == "equal" or (row.may_refuse is not None and "error: RuntimeError" in said), (mode, said)


def train(run: Any, args: Any) -> torch.Tensor:
    torch.manual_seed(1)
    out = run(*args)
    parts = [t.float().square().mean() for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
    loss = torch.stack(parts).sum()
    loss.backward()
    return loss.detach()


def gradients(net: nn.Module) -> list[torch.Tensor | None]:
    found = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    for p in net.parameters():
        if p.grad is not None:
            p.grad.zero_()
    return found


def same(a: list[Any], b: list[Any]) -> bool:
    return all((x is None) == (y is None) and (x is None or torch.equal(x, y)) for x, y in zip(a, b, strict=True))


def drawn_batch(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """The model `name`, and a batch `TIMES` as large as its own."""
    torch.manual_seed(0)
    model, batch = ALL[name]()
    parts = [batch() for _ in range(TIMES)]
    several = [part if isinstance(part, tuple) else (part,) for part in parts]
    joined = tuple(torch.cat(one).detach().requires_grad_(one[0].requires_grad) for one in zip(*several, strict=True))
    return model, joined if not isinstance(parts[0], tuple) else (joined,)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.grid
def test_any_sequence_has_the_plain_bits_and_at_most_the_predicted_bytes(name: str) -> None:
    net, args = drawn_batch(name)
    before = {n: b.clone() for n, b in net.named_buffers()}

    def again() -> None:
        for n, b in net.named_buffers():
            b.copy_(before[n])

    train(net, args)  # makes gradients, whose bytes are not the step's
    gradients(net)
    again()
    train(net, args)
    expected = gradients(net)
    run = TapeRunner(net, 1 << 50, stages=20)
    again()
    train(run, args)
    assert same(gradients(net), expected)
    run.plan_recorded()
    (course,) = run.courses.values()
    found = [course.found]
    asked = [(within(share, mode)(found), mode) for mode in MODES for share in (0, 0.4)]
    asked = [(limit, mode) for limit, mode in asked if limit < course.expected_bytes]  # or the model runs as it is
    plans = [plan(found, limit, mode, refine=False)[1] for limit, mode in asked]
    assert all(max(course.found.levels(one)) <= limit for one, (limit, _) in zip(plans, asked, strict=True))
    for sequence in [*plans, *(random_sequence(course.found.chain, seed, wildness=0.75) for seed in seeds(4))]:
        course.plan = compile_sequence(course.found.chain, sequence)
        again()
        train(run, args)
        assert same(gradients(net), expected), f"{sequence}"
        again()
        measured = peak_bytes(lambda: train(run, args))
        gradients(net)
        assert measured <= course.expected_bytes, f"{sequence}"
    run.close()


def test_predicted_bytes_are_close_on_average() -> None:
    shares = []
    for name in ALL:
        net, args = drawn_batch(name)
        run = TapeRunner(net, within(0.2), stages=20, refine=False)
        for _ in range(2):
            train(run, args)
            gradients(net)
        (course,) = run.courses.values()
        shares.append(course.expected_bytes / peak_bytes(lambda: train(run, args)))  # noqa: B023
        run.close()
    assert min(shares) >= 1 and sum(shares) / len(shares) < 1.12, shares


@pytest.mark.parametrize("name", ALL)
def test_the_plain_step_is_foretold_to_the_byte_and_runs_as_it_is(name: str) -> None:
    net, args = drawn_batch(name)
    run = TapeRunner(net, 1 << 50, stages=20)
    train(run, args)
    gradients(net)
    run.plan_recorded()
    (course,) = run.courses.values()
    measured = peak_bytes(lambda: train(run, args))
    assert isinstance(run.last, RecordedStep)  # the last one that was followed
    assert measured <= course.expected_bytes <= 1.01 * measured
    run.close()


@pytest.mark.parametrize("mode", MODES)
def test_the_smallest_limit_is_met_and_one_byte_less_is_refused(mode: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*[Block() for _ in range(8)])
    run = TapeRunner(net, 1 << 50)
    train(run, (drawn(0),))
    run.plan_recorded()
    (course,) = run.courses.values()
    found = [course.found]
    least = least_limit(found, mode)
    for limit in (least, least + 1000, 2 * least):
        _, sequence = plan(found, limit, mode, refine=False)
        assert max(course.found.levels(sequence)) <= limit
    with pytest.raises(rotoff.InfeasibleError, match=f"{least} bytes") as error:
        plan(found, least - 1, mode, refine=False)
    assert error.value.min_mem_limit == least
    run.close()


@pytest.mark.parametrize("new_tape", TAPES)
def test_a_planned_step_frees_everything_without_garbage_collection(new_tape: Any) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*[Block() for _ in range(6)])
    run = TapeRunner(net, within(0.2), refine=False, new_tape=new_tape)
    gc.disable()
    try:
        for kept in (True, True, True, False):
            out = run(drawn(0))
            tape = weakref.ref(run.last)  # type: ignore[arg-type]
            run.last = None
            if kept:
                out.sum().backward()
            del out
            run.plan_recorded()
            assert tape() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("new_tape", TAPES)
def test_an_error_in_the_forward_or_backward_leaves_the_next_step_right(new_tape: Any) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*[Block() for _ in range(6)])
    train(net, (drawn(0),))
    expected = gradients(net)
    run = TapeRunner(net, within(0.2), refine=False, new_tape=new_tape)

    class Stop(Exception):
        pass

    def stop(*_: Any) -> None:
        raise Stop

    for n in range(4):
        hook = net[3].register_forward_hook(stop)
        with pytest.raises(Stop):
            train(run, (drawn(0),))
        hook.remove()
        hook = net[3].up.weight.register_hook(stop)
        with pytest.raises(Stop):
            train(run, (drawn(0),))
        hook.remove()
        gradients(net)
        train(run, (drawn(0),))
        assert same(gradients(net), expected), n


@pytest.mark.parametrize("new_tape", TAPES)
def test_a_forward_off_its_course_is_right_and_planned_when_it_recurs(new_tape: Any) -> None:
    class Skips(Long):
        skip = False

        def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
            return torch.sin(x) * 2 if self.skip and n == 4 else x

    torch.manual_seed(0)
    net = Skips()
    run = TapeRunner(net, within(0.2, "remat"), "remat", refine=False, new_tape=new_tape)
    for n in range(8):
        net.skip = n >= 3
        train(net, (drawn(n),))
        expected = gradients(net)
        train(run, (drawn(n),))
        assert same(gradients(net), expected), n
    (course,) = run.courses.values()
    assert not course.strayed and run.last is not None and run.last.replayed  # by a plan again
