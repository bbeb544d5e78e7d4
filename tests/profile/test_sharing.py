"""Skip connections that several values carry: the machine charges each, what a step is expected to hold counts their
storages once."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean

import pytest
import torch
from planned_steps import smallest, step_peak, with_sequence
from random_programs import random_sequence
from skip_models import Gated, UNet
from torch import nn

import rotoff
from rotoff.planning.memory_account import simulated_bytes
from rotoff.planning.sharing import shared_bytes
from rotoff.profile.memory.skips import Skip

STAGE = rotoff.Stage("s", 1.0, 1.0, output_bytes=100, saved_bytes=300)
CHAIN = rotoff.Chain((STAGE,) * 4, 100.0, 100.0, input_bytes=100)
CARRIED = Skip(1, 3, 10, ((0,), (0,), (0,)), ((), (), (), ()), 10)  # made by stage 1, in the outputs of 1 to 3


def shared(text: str) -> dict[str, int]:
    ops = rotoff.Sequence.from_text(text.split("; ")).ops
    found = shared_bytes(CHAIN, [CARRIED], rotoff.Sequence(ops))
    assert len(found) == len(ops)
    return {f"{n} {op}": nbytes for n, (op, nbytes) in enumerate(zip(ops, found, strict=True)) if nbytes}


def test_carried_storage_is_shared_between_values() -> None:
    # F_all 3: of its input's and its output's no byte is taken off, of abar 1's 10 are
    kept = shared("F_all 1; F_all 2; F_all 3; F_all 4; B 4; B 3; B 2; B 1")
    assert kept == {"2 F_all 3": 10, "3 F_all 4": 20, "4 B 4": 20, "5 B 3": 10}


def test_prefetched_and_recomputed_values_own_their_storage() -> None:
    moved = shared(
        "F_all 1; F_all 2; offload abar 2; F_all 3; free abar 2; F_all 4; B 4; prefetch abar 2; wait abar 2; B 3; B 2;"
        " B 1"
    )
    assert moved == {
        "2 offload abar 2": 10,
        "3 F_all 3": 10,
        "4 free abar 2": 20,
        "5 F_all 4": 10,  # abar 1 and abar 3
        "6 B 4": 10,
        "7 prefetch abar 2": 10,  # it lies apart
        "8 wait abar 2": 10,
    }
    again = shared("F_ck 1; F_all 2; F_all 3; F_all 4; B 4; B 3; drop a 1; F_ck 1; B 2; F_all 1; B 1")
    assert again["2 F_all 3"] == 10
    assert "7 F_ck 1" not in again  # a new one, beside that of abar 2


@pytest.mark.parametrize(
    ("make", "draw"),
    [(UNet, lambda: torch.randn(4, 3, 32, 32)), (Gated, lambda: torch.randn(256, 16))],
    ids=["unet", "gated"],
)
@pytest.mark.grid
def test_expected_memory_is_between_measured_and_charged(
    make: Callable[[], nn.Module], draw: Callable[[], torch.Tensor]
) -> None:
    torch.manual_seed(0)
    wrapped = rotoff.Checkpointable(make()).measure(draw())
    assert wrapped.profile.skips
    charged, expected = [], []

    def look() -> None:
        measured, predicted = step_peak(wrapped, draw), wrapped.get_expected_memory()
        assert measured <= predicted, f"{measured} > {predicted}\n{wrapped.sequence}"
        expected.append(predicted / measured)
        charged.append(simulated_bytes(wrapped.profile, wrapped._plan) / measured)

    for seed in range(6):
        with_sequence(wrapped, random_sequence(wrapped.chain, seed, wildness=0.5))
        look()
    for mode in ("joint", "remat", "offload"):
        least = smallest(wrapped, mode)
        wrapped.compute_sequence((least + wrapped.keep_all_memory) // 2, mode=mode, refine=False)
        look()
    wrapped.close()
    assert mean(charged) > 1.1
    assert mean(expected) - 1 <= (mean(charged) - 1) / 2
    assert mean(expected) <= 1.06
