"""Systems that look at a network's layers: vDNN++, the naive overlap, SuperNeurons."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.chains import chains, text
from superneurons_layers import alexnet, chain_of, checkpoints, resnet
from thoroughness import examples

from rotoff import Chain, InfeasibleError, OptionError, Stage, keep_all, simulate, solve
from rotoff.solver.policies.moving_sets import heavy_stages
from rotoff.solver.policies.overlap import operations as overlap_operations
from rotoff.solver.policies.superneurons import layer_bytes, operations

pytestmark = pytest.mark.full_search


def uniform(L: int, bandwidth: float = 10.0) -> Chain:
    return Chain(tuple(Stage("", 1.0, 2.0, 10, 20) for _ in range(L)), bandwidth, bandwidth, input_bytes=10)


# -- heavy stages


def test_convolutions_are_known_by_name_and_others_by_their_time():
    named = Chain(tuple(Stage(name, 1, 1, 1, 1) for name in ("features.0.conv1", "relu", "Conv2d", "fc")), 1, 1)
    assert heavy_stages(named) == [1, 3]
    timed = Chain(tuple(Stage("", time, 1, 1, 1) for time in (5, 1, 4, 1)), 1, 1)
    assert heavy_stages(timed) == [1, 3]


# -- vDNN++


def test_synchronous_vdnn_golden():
    """Each forward waits for the copy of the one before; each backward brings in what the next one needs."""
    made = solve(uniform(4), 10**6, policy="vdnn++", what="all", synchronous=True)
    assert text(made) == (
        "F_all 1, offload abar 1, F_all 2, offload abar 2, free abar 1, F_all 3, offload abar 3, free abar 2, F_all 4, "
        "prefetch abar 2, B 4, prefetch abar 1, wait abar 2, B 3, wait abar 1, B 2, B 1"
    )


@examples(40)
@given(chains(least=2), st.sampled_from(["all", "convolutions"]))
def test_asynchronous_is_never_slower_than_synchronous(chain, what):
    limit = (
        2 * simulate(chain, keep_all(chain)).peak_bytes + sum(s.saved_bytes + s.output_bytes for s in chain.stages) + 1
    )
    made = [
        solve(chain, limit, policy="vdnn++", what=what, synchronous=sync).meta["makespan"] for sync in (False, True)
    ]
    assert made[0] <= made[1] + 1e-9


def test_vdnn_plus_plus_leaves_alone_what_fits():
    assert text(solve(uniform(3), 10**6, policy="vdnn++")) == text(keep_all(uniform(3)))
    with pytest.raises(OptionError, match="what is 'some'"):
        solve(uniform(3), 10**6, policy="vdnn++", what="some")


# -- the naive overlap of 001


@examples(60)
@given(chains(least=2), st.data())
def test_overlap_costs_what_is_not_hidden(chain, data):
    """ "The overhead is given by the sum of the difference in the computation and data transfer time at each layer"."""
    L = len(chain)
    layers = data.draw(st.sets(st.integers(1, L - 1)))
    chain = Chain(chain.stages, chain.d2h_bandwidth, chain.h2d_bandwidth, chain.input_bytes, duplex=True)
    stage = chain.stage
    idle = 0.0
    for i in layers:
        idle += max(0.0, stage(i).saved_bytes / chain.d2h_bandwidth - stage(i + 1).forward_time)
        hidden = stage(i + 2).backward_time if i + 2 <= L else 0.0
        idle += max(0.0, stage(i).saved_bytes / chain.h2d_bandwidth - hidden)
    beside = simulate(chain, overlap_operations(L, layers)).makespan
    assert beside == pytest.approx(chain.compute_time + idle)
    in_turn = simulate(chain, overlap_operations(L, layers, parallel=False)).makespan
    moved = sum(stage(i).saved_bytes for i in layers)
    assert in_turn == pytest.approx(chain.compute_time + moved / chain.d2h_bandwidth + moved / chain.h2d_bandwidth)


# -- SuperNeurons


TABLE_1 = {  # network: layers, batch, (speed-centric, memory-centric, cost-aware)
    "AlexNet": (alexnet(), 200, (14, 23, 17)),
    "ResNet50": (resnet((3, 4, 6, 3)), 32, (84, 118, 85)),
    "ResNet101": (resnet((3, 4, 23, 3)), 32, (169, 237, 170)),
}


@pytest.mark.parametrize("network", TABLE_1)
def test_table_1_counts_of_recomputations(network):
    layers, batch, expected = TABLE_1[network]
    chain = chain_of(layers, batch)
    counts = []
    for technique in ("speed-centric", "memory-centric", "cost-aware"):
        ops = operations(chain, 1 << 40, technique, checkpoints(layers))
        counts.append(sum(event.recompute for event in simulate(chain, ops).events))
    assert tuple(counts) == expected


@pytest.mark.parametrize("network", TABLE_1)
@pytest.mark.grid
def test_the_peak_is_that_of_one_layer(network):
    """peak_m = max(l_i), but for the loss's bytes, which the caller holds."""
    layers, batch, _ = TABLE_1[network]
    chain = chain_of(layers, batch)
    l_peak = max(layer_bytes(chain, i) for i in range(1, len(chain) + 1))
    with pytest.raises(InfeasibleError) as caught:
        solve(chain, l_peak - 1, policy="superneurons", checkpoints=checkpoints(layers))
    assert caught.value.min_mem_limit <= l_peak + chain.output_bytes(len(chain)) + 256
    made = solve(chain, caught.value.min_mem_limit, policy="superneurons", checkpoints=checkpoints(layers))
    assert made.meta["source"] == "superneurons, cost-aware"


def test_superneurons_golden():
    """Two convolutions with two cheap layers between: the second form of their segment costs one forward more."""
    stages = tuple(Stage(name, 1.0, 1.0, 10, 10) for name in ("conv1", "bn1", "relu1", "conv2"))
    chain = Chain(stages, 10.0, 10.0)
    assert text(operations(chain, 10**6, "speed-centric", [1, 4])) == (
        "F_all 1, F_ck 2, F_none 3, F_all 4, drop a 3, F_all 2, F_all 3, B 4, B 3, B 2, B 1"
    )
    assert text(operations(chain, 10**6, "memory-centric", [1, 4])) == (
        "F_all 1, F_ck 2, F_none 3, F_all 4, drop a 3, F_ck 2, F_all 3, drop a 2, B 4, F_all 2, B 3, B 2, B 1"
    )


def test_the_least_recently_used_leaves_first():
    made = solve(uniform(5), 120, policy="superneurons", technique="cache", checkpoints=[1, 2, 3, 4])
    moved = [str(op) for op in made if op.kind.value == "offload"]
    assert moved == sorted(moved)
    assert moved[0] == "offload abar 1"
    with pytest.raises(OptionError, match="technique is 'magic'"):
        solve(uniform(3), 100, policy="superneurons", technique="magic")


def test_a_checkpoint_that_left_to_make_room_is_not_freed_again():
    sizes = ((60, 0, 50), (40, 10, 0), (50, 50, 50), (30, 50, 50))
    stages = tuple(Stage("", 1.0, 1.0, 10, saved, None, forward, None, back) for saved, forward, back in sizes)
    chain, how = Chain(stages, 10.0, 10.0), {"policy": "superneurons", "technique": "pool", "checkpoints": [1, 4]}
    with pytest.raises(InfeasibleError) as caught:
        solve(chain, 175, **how)
    assert simulate(chain, solve(chain, caught.value.min_mem_limit, **how)).peak_bytes <= caught.value.min_mem_limit
