"""A recorded step tells how long its operations took; rotor's names plan what they planned there."""

from __future__ import annotations

import pytest
import torch
from models import fresh

import rotoff
from rotoff.core.sequence import COMPUTES, OpKind
from rotoff.errors import MeasureError


def planned(fraction: float = 0.5, **options: object) -> tuple[rotoff.Checkpointable, torch.Tensor]:
    model, batch = fresh("residual")
    x = batch()
    wrapped = rotoff.Checkpointable(model, forms=False).measure(x)  # recompute means whole forwards here
    everything = wrapped.keep_all_memory
    return wrapped.compute_sequence(int(everything * fraction), refine=False, **options), x


def test_a_recorded_step_has_every_operation_in_its_lanes() -> None:
    model, x = planned()
    with model.record_step() as recorded:
        model(x).sum().backward()
    trace = recorded.trace
    predicted = rotoff.simulate(model.chain, model.sequence)
    assert [event.op for event in trace.events] == list(model.sequence)
    assert [event.memory for event in trace.events] == [event.memory for event in predicted.events]
    compute = [event for event in trace.events if event.lane == "compute"]
    assert compute[0].start == 0
    for before, after in zip(compute, compute[1:], strict=False):
        assert before.start <= before.end <= after.start
    assert all(event.end > event.start for event in compute if event.op.kind in COMPUTES)
    issued = {}
    for event in trace.events:
        assert event.end >= event.start >= 0
        if event.op.kind is OpKind.OFFLOAD:
            issued[event.op.value] = event.end
        elif event.op.kind is OpKind.PREFETCH:
            assert event.start >= issued[event.op.value]  # the file has one lane
    assert trace.makespan == max(event.end for event in trace.events)
    busy = sum(event.end - event.start for event in compute if event.op.kind in COMPUTES)
    assert trace.idle_time == pytest.approx(trace.makespan - busy)
    moved = [event for event in trace.events if event.lane != "compute"]
    assert moved or trace.recompute_time > 0


def test_recording_changes_no_gradient_and_ends_with_its_block() -> None:
    model, x = planned()
    torch.manual_seed(1)
    with model.record_step() as recorded:
        model(x).sum().backward()
        recorded_gradients = [p.grad.clone() for p in model.parameters()]
        events = recorded.trace.events
        model.zero_grad()
        torch.manual_seed(1)
        model(x).sum().backward()  # a second step is not recorded
    assert recorded.trace.events == events
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), recorded_gradients, strict=True))


def test_what_was_not_run_has_no_trace() -> None:
    model, x = planned()
    with model.record_step() as recorded:
        pass
    with pytest.raises(MeasureError, match="no planned step has run"):
        _ = recorded.trace
    with model.record_step() as recorded:
        model(x)
    with pytest.raises(MeasureError, match="has not run its backward"):
        _ = recorded.trace


def test_rotors_names(capsys: pytest.CaptureFixture[str]) -> None:
    model, x = planned()
    L = len(model.chain)
    assert model.mem_slots == 50
    assert model.mem_limit == model.keep_all_memory // 2
    model.check_sequence()
    model.display()
    assert "mode joint" in capsys.readouterr().out
    assert model.compute_pytorch_sequence() is model
    assert list(model.sequence) == list(rotoff.keep_all(model.chain))
    assert model.mem_limit is None
    model.compute_seq_sequence(2)
    recomputed = {op.stage for op in model.sequence if op.kind in (OpKind.F_CK, OpKind.F_NONE)}
    assert recomputed == set(range(1, L // 2 + 1))
    model.compute_seq_sequence()
    assert model.sequence.mode == "chen"
    model.compute_homogeneous_sequence(model.keep_all_memory * 2 // 3)
    assert model.sequence.mode == "revolve"
    assert model.get_expected_memory() <= model.mem_limit
    model.compute_min_sequence()
    assert model.get_expected_makespan() > model.chain.compute_time
    assert sum(op.stage == 1 and op.kind is not OpKind.B for op in model.sequence) == L
    model(x).sum().backward()
