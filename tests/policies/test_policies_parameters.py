"""Systems that place parameters by rule: within the limit or refused, and each as its source has it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rotoff import (
    Chain,
    OpKind,
    OptionError,
    ParameterGroup,
    Sequence,
    Stage,
    keep_all,
    simulate,
    solve,
)

pytestmark = pytest.mark.full_search

BLOCK = Stage("block", 0.010, 0.020, 10_000_000, 100_000_000, None, 5_000_000, None, 20_000_000)
GROUP = ParameterGroup((1,), 80_000_000, 80_000_000, 160_000_000, 0.0005, 0.014)
CHAIN = Chain(
    (BLOCK,) * 8, 24e9, 24e9, input_bytes=1000, parameters=tuple(replace(GROUP, stages=(i,)) for i in range(1, 9))
)


def made(policy: str, limit: int | str = "1.2 GB", chain: Chain = CHAIN, **options: object) -> Sequence:
    sequence = solve(chain, limit, policy=policy, effort=False, **options)
    assert sequence.mode == policy
    return sequence


def when(sequence: Sequence, *kinds: OpKind) -> list[int]:
    return [n for n, op in enumerate(sequence) if op.kind in kinds]


def test_zero_offload_waits_for_all_updates_and_all_parameters() -> None:
    sequence = made("zero-offload")
    assert sequence.resident == [f"w {k}" for k in range(1, 9)]
    assert {op.kind for op in sequence} >= {OpKind.H} and not when(sequence, OpKind.U)
    back = [n for n, op in enumerate(sequence) if op.kind is OpKind.PREFETCH and op.of == "w"]
    arrivals = [n for n, op in enumerate(sequence) if op.kind is OpKind.WAIT and op.of == "w"]
    assert max(when(sequence, OpKind.B)) < min(when(sequence, OpKind.H)) <= max(when(sequence, OpKind.H)) < min(back)
    assert max(arrivals) < min(when(sequence, OpKind.F_ALL, OpKind.F_CK, OpKind.F_NONE))
    assert len(back) == len(arrivals) == 8


def test_torchaos_gradients_stay_unless_they_are_offloaded() -> None:
    kept, gone = made("torchao-offload", "4 GB"), made("torchao-offload", "4 GB", offload_gradients=True)
    assert [op.of for op in kept[-8:]] == ["g"] * 8
    held = [simulate(CHAIN, one).events[max(when(one, OpKind.B))].memory for one in (kept, gone)]
    assert held[0] - held[1] >= 6 * GROUP.grad_bytes
    late = simulate(CHAIN, kept).makespan
    assert late <= simulate(CHAIN, made("zero-offload", "4 GB")).makespan


def test_streaming_leaves_nothing_on_the_device() -> None:
    sequence = made("streaming")
    assert sequence.resident == []
    assert simulate(CHAIN, sequence).peak_bytes <= 1.2e9
    assert not when(sequence, OpKind.U)
    here = replace(CHAIN, parameters=tuple(replace(group, host_update_time=None) for group in CHAIN.parameters))
    assert not when(made("streaming", chain=here), OpKind.H)


def test_block_swap_streams_the_last_layers() -> None:
    sequence = made("block-swap", "2 GB", blocks=5)
    assert sequence.resident == [f"{v} {k}" for k in (1, 2, 3) for v in "wo"]
    best = made("block-swap", "2 GB")
    assert best.meta["makespan"] <= sequence.meta["makespan"]
    assert best.meta["source"].endswith("of 8 swapped")
    for blocks in (9, -1, True, 1.5):
        with pytest.raises(OptionError, match="give a whole number from 0 to 8"):
            made("block-swap", "2 GB", blocks=blocks)


@pytest.mark.parametrize("updates", ["during", "after"])
def test_by_hand_is_no_slower_than_what_it_tries(updates: str) -> None:
    best = made("by-hand", updates=updates).meta["makespan"]
    for other in ("streaming", "zero-offload"):
        assert best <= made(other, updates=updates).meta["makespan"] * (1 + 1e-9)
    everything = simulate(CHAIN, keep_all(CHAIN)).makespan
    assert made("by-hand", 10**10, updates=updates).meta["makespan"] <= everything * (1 + 1e-9)


def test_each_policy_says_what_it_is_for() -> None:
    with pytest.raises(OptionError, match="policy 'vdnn' plans only activations; give chain.without_parameters"):
        solve(CHAIN, "2 GB", policy="vdnn")
    with pytest.raises(OptionError, match="policy 'by-hand' places parameters, and the chain has none"):
        solve(CHAIN.without_parameters(), "2 GB", policy="by-hand")
