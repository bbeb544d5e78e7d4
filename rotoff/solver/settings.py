"""What people set elsewhere, as sequences of the machine: checkpointing by rule, and a fixed place for parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from ..core.chain import Chain
from ..core.sequence import B, F_all, F_ck, F_none, Op, Sequence, a, free, offload, prefetch, wait
from .placement import HOST_UPDATED, RESIDENT, STREAMED, STREAMED_HOST_UPDATED, Place, place
from .plan_codes import keep_all
from .policies.lowering import ENDLESS, lower
from .policies.placements import together

KEEP, CHECKPOINT, CHECKPOINT_ON_HOST, SAVED_ON_HOST = "keep", "checkpoint", "checkpoint on host", "saved on host"
ACTIVATIONS = (KEEP, CHECKPOINT, CHECKPOINT_ON_HOST, SAVED_ON_HOST)
ON_DEVICE, UPDATED_ON_HOST, ON_HOST, SWAPPED = "on device", "updated on host", "on host", "swapped"
PARAMETERS = (ON_DEVICE, UPDATED_ON_HOST, ON_HOST, SWAPPED)
NUMBERED = re.compile(r"(?:[^.]+\.)*?(?:[^.]*_)?\d+(?=\.|$)")


@dataclass(frozen=True)
class Setting:
    """How a step is made elsewhere.

    activations: "keep" all; "checkpoint" every block (`blocks_of`); "checkpoint on host", whose inputs of blocks leave
    and return one block ahead; "saved on host", where all that autograd saves does, one stage ahead
    (``torch.autograd.graph.save_on_cpu``).
    every: every how many blocks one is checkpointed.
    parameters: "on device"; "updated on host", as by ZeRO-Offload; "on host", and copied in for each use, as by FSDP2's
    `CPUOffloadPolicy`; or "swapped": the last `swapped` groups are copied in, with their states.
    """

    activations: str = KEEP
    every: int = 1
    parameters: str = ON_DEVICE
    swapped: int = 0

    def __str__(self) -> str:
        each = "every block" if self.every == 1 else f"one block in {self.every}"
        how = {
            KEEP: "",
            CHECKPOINT: f"checkpoint {each}",
            CHECKPOINT_ON_HOST: f"checkpoint {each}, to the host",
            SAVED_ON_HOST: "all saved tensors to the host",
        }
        where = {
            ON_DEVICE: "",
            UPDATED_ON_HOST: "ZeRO-Offload",
            ON_HOST: "all streamed",
            SWAPPED: f"block swap of {self.swapped}",
        }
        return " + ".join(filter(None, (where[self.parameters], how[self.activations]))) or "plain PyTorch"


def sequence_of(chain: Chain, setting: Setting, updates: str = "after") -> Sequence:
    """The step of `chain` with `setting`, whatever bytes it takes."""
    ops = tuple(_activations(chain, setting))
    if not chain.parameters:
        return Sequence(ops)
    made = place(chain, ops, _places(chain, setting), updates)
    return Sequence(together(made.ops), resident=made.resident) if setting.parameters == UPDATED_ON_HOST else made


def blocks_of(chain: Chain) -> list[tuple[int, int, bool]]:
    """First and last stage of each block, and whether it is one: consecutive stages within the same numbered module,
    the first in their names (``layers.3``). Stages of no numbered module are none, unless all are.

    Where stages reach from one block into the next, blocks begin at the stage's beginning or end, whichever makes the
    smaller checkpoints.
    """

    def cut(end: int) -> list[tuple[int, int, bool]]:
        found = [NUMBERED.match(stage.name.split("..")[end]) for stage in chain.stages]
        if not any(found):
            return [(i, i, True) for i in range(1, len(chain) + 1)]
        keys = [f"{n}" if match is None else match.group() for n, match in enumerate(found)]
        runs = [[n for n, _ in run] for _, run in groupby(enumerate(keys, 1), key=lambda one: one[1])]
        return [(run[0], run[-1], found[run[0] - 1] is not None) for run in runs]

    return min(
        (cut(0), cut(-1)), key=lambda blocks: sum(chain.output_bytes(i - 1) for i, _, is_one in blocks if is_one)
    )


def _activations(chain: Chain, setting: Setting) -> Iterator[Op]:
    plain = chain.without_parameters()
    if setting.activations == KEEP:
        yield from keep_all(plain).ops
        return
    if setting.activations == SAVED_ON_HOST:
        made = lower(plain, ENDLESS, range(1, len(chain)), release="next", ahead=1)
        assert made is not None  # within endless bytes
        yield from made.ops
        return
    blocks = blocks_of(chain)
    numbers = [n for n, (*_, is_one) in enumerate(blocks) if is_one]
    again = set(numbers[:: setting.every])
    moves = {n for n in again if n - 1 in again} if setting.activations == CHECKPOINT_ON_HOST else set()
    moves -= {len(blocks) - 1}  # it is needed at once
    for n, (first, last, _) in enumerate(blocks):
        if n in again:
            yield F_ck(first)
            if n in moves:
                yield offload(a(first - 1))
            yield from map(F_none, range(first + 1, last + 1))
        else:
            yield from map(F_all, range(first, last + 1))
        if n - 1 in moves:
            yield free(a(blocks[n - 1][0] - 1))
    for n in reversed(range(len(blocks))):
        first, last, _ = blocks[n]
        if n in moves:
            yield wait(a(first - 1))
        if n - 1 in moves:
            yield prefetch(a(blocks[n - 1][0] - 1))
        if n in again:
            yield from map(F_all, range(first, last + 1))
        yield from map(B, range(last, first - 1, -1))


def _places(chain: Chain, setting: Setting) -> list[Place]:
    count = len(chain.parameters)
    if setting.parameters == SWAPPED:
        return [RESIDENT] * (count - setting.swapped) + [STREAMED] * setting.swapped
    on_host = {
        ON_DEVICE: (RESIDENT, RESIDENT),
        UPDATED_ON_HOST: (HOST_UPDATED, RESIDENT),
        ON_HOST: (STREAMED_HOST_UPDATED, STREAMED),
    }
    updated, other = on_host[setting.parameters]
    return [other if group.host_update_time is None and group.grad_bytes else updated for group in chain.parameters]
