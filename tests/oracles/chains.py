"""Random chains for hypothesis: small, heterogeneous, with zeros, forms, odd transients and links of all speeds."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

from hypothesis import strategies as st

from rotoff import Chain, Form, Op, ParameterGroup, Stage

SIZES = st.one_of(st.just(0), st.integers(1, 20), st.integers(1, 300))
TIMES = st.one_of(st.just(0.0), st.integers(1, 40).map(lambda x: x / 8))


@st.composite
def stages(draw: st.DrawFn, forms: bool = True) -> Stage:
    """One stage."""
    output = draw(SIZES)
    saved = output + draw(SIZES)
    extra = {}
    if draw(st.booleans()):
        names = ("grad_bytes", "forward_transient_bytes", "checkpoint_transient_bytes", "backward_transient_bytes")
        extra = {name: draw(SIZES) for name in names}
    made = []
    for _ in range(draw(st.integers(0, 2)) if forms else 0):
        size = draw(st.integers(output, saved))
        made.append(Form(size, draw(TIMES), draw(SIZES), draw(SIZES)))
    forward = draw(TIMES)
    backward = draw(TIMES)
    tail = forward * draw(st.sampled_from([0.0, 0.0, 0.25, 0.5, 1.0]))
    return Stage("", forward, backward, output, saved, forms=tuple(made), tail_time=tail, **extra)


@st.composite
def chains(draw: st.DrawFn, least: int = 1, most: int = 8, forms: bool = True) -> Chain:
    """A chain of `least` to `most` stages."""
    count = draw(st.integers(least, most))
    made = [draw(stages(forms)) for _ in range(count)]
    speeds = st.sampled_from([1.0, 10.0, 60.0, 1000.0])
    ends = {"input_bytes": draw(SIZES), "input_grad_bytes": draw(SIZES)}
    return Chain(tuple(made), draw(speeds), draw(speeds), duplex=draw(st.booleans()), **ends)


@st.composite
def busy(draw: st.DrawFn, chain: Chain) -> Chain:
    """`chain` with a link whose directions may slow each other down, alike or not, by less than half or more."""
    shares = st.sampled_from([None, 1.0, 0.75, 0.6, 0.5, 0.3])
    alone = {"d2h": chain.d2h_bandwidth, "h2d": chain.h2d_bandwidth}
    return replace(
        chain,
        **{
            f"{way}_bidirectional_bandwidth": None if share is None else rate * share
            for way, rate, share in ((way, rate, draw(shares)) for way, rate in alone.items())
        },
    )


@st.composite
def groups(draw: st.DrawFn, chain: Chain) -> Chain:
    """`chain` with a group of parameters for most stages: some tied, some frozen, some without a state, some never
    updated on the host."""
    L, made = len(chain), []
    for i in range(1, L + 1):
        kind = draw(st.sampled_from(["none", "frozen", "stateless", "plain", "plain", "plain"]))
        if kind == "none":
            continue
        stages = {i} | ({draw(st.integers(1, L))} if draw(st.integers(0, 3)) == 0 else set())
        size = draw(st.integers(1, 60))
        costs = {} if kind == "frozen" else {"grad_bytes": size, "update_time": draw(TIMES)}
        if costs and draw(st.booleans()):
            costs.update(host_update_time=draw(TIMES), update_transient_bytes=draw(SIZES))
        if kind == "plain":
            costs.update(state_bytes=draw(st.integers(1, 200)))
        order = draw(st.permutations(sorted(stages)))
        made.append(ParameterGroup(tuple(order), size if draw(st.integers(0, 9)) else 0, **costs))
    return replace(chain, parameters=tuple(made))


def uneven(seed: int, stages: int) -> Chain:
    """Outputs from 1 to 100 MB, saved sets up to nine times that, times over two orders of magnitude."""
    rng = random.Random(seed)
    found = []
    for i in range(stages):
        output = int(10 ** rng.uniform(6, 8))
        saved = output + int(output * rng.uniform(0, 8))
        forward = 10 ** rng.uniform(-4, -2)
        backward = forward * rng.uniform(1, 3)
        extra = [int(output * rng.random()), int(saved * rng.random()), int(saved * rng.random())]
        found.append(Stage(f"{i}", forward, backward, output, saved, output, *extra))
    return Chain(tuple(found), 10e9, 10e9, input_bytes=found[0].output_bytes)


def text(sequence: Iterable[Op]) -> str:
    return ", ".join(str(op) for op in sequence)
