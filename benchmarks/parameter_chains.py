"""Transformers with their parameters as chains, dense or mixtures of experts, from the numbers of data sheets alone.

One group of parameters for each stage: the embedding, each block, the head. Bytes of half precision; the optimizer is
Adam, which reads parameters, gradients and two states and writes parameters and states. Its time is that traffic over a
memory's rate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rotoff import Chain, ParameterGroup, Stage

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
    tied: bool = False,
    name: str = "",
) -> Chain:
    """A transformer whose blocks hold 4 * width² parameters of attention and ``experts`` times ``2 * width * inner``
    others.

    Args:
        inner: width of the feed-forward part, of two matrices; 4 * width where left out. A gated one of three has 3/2
            of it.
        experts, active: how many there are, and how many a token passes.
        gradient, state: bytes of a parameter's gradient and of its optimizer states.
        frozen: the share of the blocks, from the first on, whose parameters are not trained.
        tied: whether the head uses the embedding's parameters.
    """
    tokens, inner = sequence * batch, 4 * width if inner is None else inner
    hidden = tokens * width * ELEMENT
    attention, expert = 4 * width**2, 2 * width * inner
    flops = (
        2 * tokens * (attention + active * expert) + 2 * tokens * sequence * width
    )  # a causal attention computes half
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
        return replace(
            whole,
            grad_bytes=count * gradient,
            state_bytes=count * state,
            update_time=traffic / machine.memory,
            host_update_time=on_host,
        )

    inside = [
        group((i + 2,), f"block{i}", attention + experts * expert, trained=i >= frozen * blocks) for i in range(blocks)
    ]
    last = len(stages)
    outside = [group((1, last), "embed", ends)] if tied else [group((1,), "embed", ends)]
    groups = [*outside, *inside, *([] if tied else [group((last,), "head", ends)])]
    return Chain(
        tuple(stages),
        machine.link,
        machine.link,
        input_bytes=tokens * 8,
        duplex=machine.duplex,
        name=name or f"transformer-{blocks}x{width}",
        parameters=tuple(groups),
    )


def gpt_7b() -> Chain:
    """6.7 billion parameters, 4,096 tokens: 53.6 GB of parameters, gradients and states."""
    return transformer(RTX_4090, 32, 4096, 4096, name="gpt-6.7b")


def gpt_1b() -> Chain:
    """1.3 billion parameters, 4 x 2,048 tokens: 10.7 GB."""
    return transformer(OLDER, 24, 2048, 2048, batch=4, name="gpt-1.3b")


def gpt_13b() -> Chain:
    """13 billion parameters, 4,096 tokens: 104 GB."""
    return transformer(RTX_4090, 40, 5120, 4096, name="gpt-13b")


def mixture_of_experts() -> Chain:
    """24 blocks of 8 experts, 2 of them active: 7.3 billion parameters, of which 2.5 are used by a token."""
    return transformer(RTX_4090, 24, 2048, 2048, batch=4, experts=8, active=2, name="moe-24x8")


def half_frozen() -> Chain:
    """6.7 billion parameters, the first half of the blocks frozen; head and embedding are one."""
    return transformer(RTX_4090, 32, 4096, 4096, frozen=0.5, tied=True, name="gpt-6.7b-half-frozen")
