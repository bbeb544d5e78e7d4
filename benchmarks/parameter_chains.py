"""Transformers with their parameters as chains, dense or mixtures of experts, from the numbers of data sheets alone.

One group of parameters for each stage: the embedding, each block, the head. Bytes of half precision; the optimizer is
Adam, which reads parameters, gradients and two states and writes parameters and states. Its time is that traffic over a
memory's rate.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial

from rotoff import Chain, ParameterGroup, Stage
from rotoff.core.parameters import in_parts

ELEMENT = 2  # bytes of a number in bfloat16
SAVED = 17  # tensors of a block's width that autograd saves in it, where attention saves no matrix


@dataclass(frozen=True)
class Machine:
    """What a data sheet says. flops: sustained, a second. link, memory, host: bytes a second of the link (each way), of
    the device's memory, and of the host's while the link is busy."""

    flops: float
    link: float
    memory: float
    host: float | None
    duplex: bool = True


RTX_4090 = Machine(140e12, 24e9, 1e12, 40e9)
OLDER = Machine(60e12, 12e9, 600e9, 40e9)
LAPTOP = Machine(25e12, 6e9, 300e9, 10e9)
H100 = Machine(450e12, 50e9, 3e12, 200e9)
GH200 = Machine(500e12, 400e9, 3.5e12, 400e9)


def transformer(
    machine: Machine,
    blocks: int,
    width: int,
    sequence: int,
    batch: int = 1,
    vocabulary: int = 32_000,
    inner: int | None = None,
    experts: int = 1,
    active: int = 1,
    gradient: int = ELEMENT,
    state: int = 2 * ELEMENT,
    frozen: float = 0.0,
    adapters: float = 0.0,
    tied: bool = False,
    name: str = "",
) -> Chain:
    """A transformer whose blocks hold 4 * width² parameters of attention and ``experts`` times ``2 * width * inner``
    others. A block's tensors are in several groups where they are large, as `rotoff` makes them.

    Args:
        inner: width of the feed-forward part, of two matrices; 4 * width where left out. A gated one of three has 3/2
            of it.
        experts, active: how many there are, and how many a token passes.
        gradient, state: bytes of a parameter's gradient and of its optimizer states.
        frozen: the share of the blocks, from the first on, whose parameters are not trained.
        adapters: size of a second group that every block trains, as a share of the first; embedding and head are then
            frozen.
        tied: whether the head uses the embedding's parameters.
    """
    tokens, inner = sequence * batch, 4 * width if inner is None else inner
    hidden = tokens * width * ELEMENT
    attention, expert = 4 * width**2, 2 * width * inner
    # a causal attention computes half
    flops = 2 * tokens * (attention + active * expert) + 2 * tokens * sequence * width
    moved = {"forward_transient_bytes": 2 * hidden, "backward_transient_bytes": 4 * hidden}
    time = flops / machine.flops
    saved = round((SAVED - 9 + 9 * active * inner / (4 * width)) * hidden)
    stages = [Stage("embed", 2 * hidden / machine.memory, 4 * hidden / machine.memory, hidden, hidden)]
    stages += [Stage(f"block{i}", time, 2 * time, hidden, saved, **moved) for i in range(blocks)]
    logits, head = tokens * vocabulary * ELEMENT, 2 * tokens * width * vocabulary / machine.flops
    stages.append(Stage("head", head, 2 * head, 4, logits, grad_bytes=4, backward_transient_bytes=logits))
    ends = vocabulary * width

    def group(numbers: tuple[int, ...], label: str, count: int, trained: bool = True) -> ParameterGroup:
        whole = ParameterGroup(numbers, count * ELEMENT, name=label)
        if not trained:
            return whole
        traffic = count * (2 * ELEMENT + gradient + 2 * state)
        on_host = None if machine.host is None else traffic / machine.host
        sizes = {"grad_bytes": count * gradient, "state_bytes": count * state}
        return replace(whole, **sizes, update_time=traffic / machine.memory, host_update_time=on_host)

    tensors = [width**2] * 4 + [width * inner] * 2 * experts
    all_of_them = blocks * sum(tensors) + ends * (1 if tied else 2)
    parts = in_parts(tensors, tensors, all_of_them)
    inside = [
        group((i + 2,), f"block{i}", sum(part), trained=i >= frozen * blocks) for i in range(blocks) for part in parts
    ]
    last = len(stages)
    if adapters:
        count = round(adapters * (attention + experts * expert))
        inside += [group((i + 2,), f"adapter{i}", count) for i in range(blocks)]
    outside = [group((1, last) if tied else (1,), "embed", ends, trained=not adapters)]
    groups = [*outside, *inside, *([] if tied else [group((last,), "head", ends, trained=not adapters)])]
    link, name = (machine.link, machine.link), name or f"transformer-{blocks}x{width}"
    made = Chain(tuple(stages), *link, input_bytes=tokens * 8, duplex=machine.duplex, name=name)
    return replace(made, parameters=tuple(groups))


def convolutional() -> Chain:
    """A VGG-16 in single precision, of which the head holds nine tenths of the parameters and the first layers most
    activations."""
    machine, batch, image, before, stages, groups = OLDER, 128, 224, 3, [], []
    side = image
    layers = [(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)]
    heads = [512 * (image // 32) ** 2, 4096, 4096, 1000]

    def add(name: str, flops: float, made: int, kept: int, count: int) -> None:
        time = flops / machine.flops * 4 + 3 * kept / machine.memory
        stages.append(Stage(name, time, 2 * time, made, kept, None, made // 4, None, made))
        sizes, times = (4 * count, 4 * count, 8 * count), (28 * count / machine.memory, 28 * count / machine.host)
        groups.append(ParameterGroup((len(stages),), *sizes, *times, 0, name))

    for width, count in layers:
        for n in range(count):
            flops, made = 18 * batch * side**2 * before * width, 4 * batch * side**2 * width
            side = side // 2 if n + 1 == count else side
            out = 4 * batch * side**2 * width
            add(f"conv{width}.{n}", flops, out, 2 * made + (out if out < made else 0), 9 * before * width)
            before = width
    for wide, narrow in zip(heads, heads[1:], strict=False):
        add(f"head{narrow}", 2 * batch * wide * narrow, 4 * batch * narrow, 8 * batch * narrow, wide * narrow)
    inputs = 12 * batch * image**2
    return Chain(tuple(stages), machine.link, machine.link, inputs, name="vgg-16", parameters=tuple(groups))


def drawn(seed: int, stages: int) -> Chain:
    """Sizes and times over two orders of magnitude; links and host of any speed; one group in six is tied, frozen, or
    never updated on the host."""
    rng, made, groups = random.Random(seed), [], []
    link = 10 ** rng.uniform(9.8, 11.2)
    host = link * 10 ** rng.uniform(-0.3, 0.7)
    for i in range(1, stages + 1):
        output, time, count = int(10 ** rng.uniform(6, 7.7)), 10 ** rng.uniform(-3, -1.7), int(10 ** rng.uniform(6, 8))
        saved = int(output * rng.uniform(1, 8))
        made.append(Stage(f"random{i}", time, 2 * time, output, saved, None, output // 2, None, output))
        numbers, kind = (i,), rng.randrange(6)
        if kind == 0:
            numbers = tuple(sorted({i, rng.randint(1, stages)}))
        group = ParameterGroup(numbers, 2 * count, name=f"random{i}")
        if kind != 1:
            group = replace(group, grad_bytes=2 * count, state_bytes=4 * count, update_time=14e-12 * count)
            group = replace(group, host_update_time=None if kind == 2 else 14 * count / host)
        groups.append(group)
    return Chain(
        tuple(made), link, link, 10**6, duplex=seed % 2 == 0, name=f"random-{stages}", parameters=tuple(groups)
    )


def grid() -> list[Chain]:
    """0.3 to 30 billion parameters, links of 6 to 400 GB/s, hosts of 10 to 400 GB/s or none."""
    made, large = transformer, partial(transformer, RTX_4090, 32, 4096, 4096)
    small = {"batch": 4, "name": "gpt-1.3b"}
    experts = {"experts": 8, "active": 2}
    return [
        made(LAPTOP, 24, 1024, 1024, batch=8, name="gpt-0.3b"),
        made(OLDER, 24, 2048, 2048, **small),
        made(replace(OLDER, host=None), 24, 2048, 2048, **{**small, "tied": True, "name": "gpt-1.3b-tied-no-host"}),
        large(name="gpt-6.7b"),
        large(frozen=0.5, tied=True, name="gpt-6.7b-half-frozen"),
        made(RTX_4090, 40, 5120, 4096, name="gpt-13b"),
        made(H100, 48, 7168, 4096, batch=2, name="gpt-30b"),
        made(GH200, 48, 7168, 4096, batch=2, gradient=4, state=12, name="gpt-30b-fp32-states"),
        made(RTX_4090, 24, 2048, 2048, batch=4, **experts, name="moe-24x8"),
        made(replace(H100, host=None), 32, 4096, 4096, inner=8192, **experts, name="moe-20b-no-host"),
        made(RTX_4090, 32, 4096, 2048, frozen=1.0, adapters=0.01, name="lora-6.7b"),
        made(LAPTOP, 40, 5120, 2048, frozen=1.0, adapters=0.002, name="lora-13b"),
        convolutional(),
        drawn(1, 12),
        drawn(2, 24),
    ]
