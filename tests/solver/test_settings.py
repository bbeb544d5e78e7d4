"""What people set elsewhere, as sequences: each is legal on any chain, and does what its name says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.chains import chains, groups

from rotoff import Chain, OpKind, Stage, simulate
from rotoff.solver.settings import ACTIVATIONS, KEEP, PARAMETERS, Setting, blocks_of, sequence_of


def named(*names: str) -> Chain:
    return Chain(tuple(Stage(name, 1.0, 2.0, 10, 30) for name in names), 100.0, 100.0, input_bytes=5)


LAYERS = named("embed", *(f"layers.{n}.{part}" for n in range(4) for part in ("attn", "mlp")), "head")


@pytest.mark.parametrize("activations", ACTIVATIONS)
@given(chains(), st.integers(1, 3))
def test_each_is_legal_and_runs_a_forward_twice_at_most(activations: str, chain: Chain, every: int) -> None:
    trace = simulate(chain, sequence_of(chain, Setting(activations, every)))
    runs = [event.op.stage for event in trace.events if event.op.kind.value.startswith("F_")]
    assert max(map(runs.count, runs)) <= 2
    assert (trace.recompute_time == 0) or activations.startswith("checkpoint")


@pytest.mark.parametrize("parameters", PARAMETERS)
@given(st.data(), chains(), st.sampled_from(ACTIVATIONS))
def test_parameters_are_placed_around_them(
    parameters: str, data: st.DataObject, chain: Chain, activations: str
) -> None:
    chain = data.draw(groups(chain))
    setting = Setting(activations, parameters=parameters, swapped=len(chain.parameters) // 2)
    trace = simulate(chain, sequence_of(chain, setting), updates="after")
    assert trace.makespan > 0 or chain.compute_time == 0


def test_blocks_are_numbered_modules_and_what_is_outside_of_them_is_kept() -> None:
    assert blocks_of(LAYERS) == [(1, 1, False), (2, 3, True), (4, 5, True), (6, 7, True), (8, 9, True), (10, 10, False)]
    assert blocks_of(named("down", "up")) == [(1, 1, True), (2, 2, True)]
    astride = named("conv..block_0", "block_0.mlp..block_1", "block_1.mlp..head")
    assert [(first, last) for first, last, _ in blocks_of(astride)] in ([(1, 1), (2, 2), (3, 3)], [(1, 1), (2, 3)])
    trace = simulate(LAYERS, sequence_of(LAYERS, Setting("checkpoint")))
    assert trace.recompute_time == 8.0  # two stages of each of four blocks
    assert simulate(LAYERS, sequence_of(LAYERS, Setting("checkpoint", every=2))).recompute_time == 4.0


def test_a_checkpoint_on_the_host_is_there_between_its_two_uses() -> None:
    kept, moved = (simulate(LAYERS, sequence_of(LAYERS, Setting(how))) for how in ("checkpoint", "checkpoint on host"))
    assert (kept.host_peak_bytes, moved.host_peak_bytes) == (0, 30)  # the first block's is the caller's
    turn = [next(e.memory for e in one.events if e.op.kind is OpKind.B) for one in (kept, moved)]
    assert turn[1] == turn[0] - 20  # one of them is on its way back
    everything = simulate(LAYERS, sequence_of(LAYERS, Setting("saved on host")))
    assert everything.host_peak_bytes == 9 * 30
    assert simulate(LAYERS, sequence_of(LAYERS, Setting(KEEP))).d2h_bytes == 0
