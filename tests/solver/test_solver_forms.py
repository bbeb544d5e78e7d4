"""Smaller forms are a choice more: no plan is slower for them, and on blocks of language models plans are much
faster."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.chains import chains
from thoroughness import examples

import rotoff
from rotoff import Chain, Form, Stage
from rotoff.solver.bounds import min_mem_limit

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from solver_chains import heterogeneous, with_forms  # after the path that it lies on

pytestmark = pytest.mark.full_search


def without_forms(chain: Chain) -> Chain:
    return replace(chain, stages=tuple(replace(stage, forms=()) for stage in chain.stages))


@pytest.mark.parametrize("mode", ["joint", "remat", "offload"])
@examples(12)
@given(chain=chains(least=2, most=8), part=st.floats(0.1, 0.95))
def test_forms_never_make_a_plan_slower(mode: str, chain: Chain, part: float) -> None:
    plain = without_forms(chain)
    least = max(1, min_mem_limit(plain, mode))
    peak = rotoff.simulate(plain, rotoff.solver.keep_all(plain)).peak_bytes
    limit = int(least + part * max(0, peak - least))
    with_forms = rotoff.solve(chain, limit, mode=mode, refine=0.1)
    before = rotoff.solve(plain, limit, mode=mode, refine=0.1)
    assert min_mem_limit(chain, mode) <= least
    assert with_forms.meta["makespan"] <= before.meta["makespan"] * (1 + 1e-12)
    assert rotoff.simulate(chain, with_forms, limit).makespan == pytest.approx(with_forms.meta["makespan"], rel=1e-12)
    assert rotoff.lower_bound(chain, limit) <= with_forms.meta["makespan"] * (1 + 1e-9)


def language_blocks(L: int = 12) -> Chain:
    """Blocks of a decoder of width w in bfloat16: bytes in units of one activation, times of an accelerator's data
    sheet.

    Saved: two norms, qkv, attention, the sum after it, the wide product and its activation (1 + 3 + 1 + 1 + 1 + 4 + 4),
    the masks of two dropouts (1), and the output. Forms leave out what takes no matrix product; then the products too.
    """
    tokens, width, flops, bandwidth = 8 * 1024, 1024, 150e12, 1.5e12
    unit = 2 * tokens * width
    product, element = 2 * tokens * width * width / flops, unit / bandwidth
    attention = 4 * tokens * 1024 * width / 2 / flops
    whole = 17 * unit
    cheap = 2 * element * 2 + 8 * element  # both norms and the activation
    forward = 12 * product + attention + cheap + 6 * element
    backward = 2 * forward + attention / 2

    def form(kept: int, seconds: float) -> Form:
        return Form(kept * unit, backward + seconds, (17 - kept) * unit, (21 - kept) * unit)

    least = form(1, cheap + 8 * product + attention + 3 * element)
    forms = (form(11, cheap), form(7, cheap + 4 * product), form(4, cheap + 7 * product), least)
    block = Stage("block", forward, backward, unit, whole, backward_transient_bytes=4 * unit, forms=forms)
    return Chain((block,) * L, 50e9, 50e9, input_bytes=unit)


@pytest.mark.parametrize(
    ("mode", "share", "most"), [("remat", 0.6, 0.45), ("remat", 0.45, 0.65), ("remat", 0.3, 0.75), ("joint", 0.45, 0.4)]
)
@pytest.mark.grid(every=8)
def test_language_blocks_lose_much_of_their_overhead(mode: str, share: float, most: float) -> None:
    """Bounds on the overhead with forms over that without: with no link, and with one."""
    chain = language_blocks()
    plain = without_forms(chain)
    limit = int(share * rotoff.simulate(plain, rotoff.solver.keep_all(plain)).peak_bytes)
    with_forms, before = (
        rotoff.solve(c, limit, mode=mode, refine=0.2).meta["makespan"] / chain.compute_time - 1 for c in (chain, plain)
    )
    assert with_forms <= most * before


@pytest.mark.parametrize(
    ("stages", "part"), [(30, 0.35), *(pytest.param(70, part, marks=pytest.mark.slow) for part in (0.25, 0.35))]
)
@pytest.mark.slow
def test_joint_is_as_fast_as_recompute_where_nothing_can_move(stages: int, part: float) -> None:
    """Bytes need hours on this link, and both are near the bound."""
    chain = replace(with_forms(heterogeneous(11, stages)), d2h_bandwidth=1e3, h2d_bandwidth=1e3)
    limit = int(part * rotoff.simulate(chain, rotoff.solver.keep_all(chain)).peak_bytes)
    joint, remat = (rotoff.solve(chain, limit, mode=mode).meta["makespan"] for mode in ("joint", "remat"))
    assert joint <= remat <= rotoff.lower_bound(chain, limit) + 0.01 * chain.compute_time
