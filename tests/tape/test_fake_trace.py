"""The trace of fake tensors beside that of a step that runs: the same contents and cuts, peaks within 3 per cent."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import changing_models  # noqa: F401 - fills the table
import odd_models  # noqa: F401
import pytest
import torch
import torchvision_operators
from models import ALL, Does
from recorded_steps import recorded
from step_by_step import Row, seeded
from step_by_step import fresh as fresh_row
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map
from trunks import TABLE

import rotoff
from rotoff.core.chain import LinkRates
from rotoff.profile.estimate.devices import find
from rotoff.profile.estimate.fake_trace import fake_step
from rotoff.profile.tape_chain import begins_of, chain_of
from rotoff.profile.trace import Trace, trace_of
from rotoff.solver.plan_codes import keep_all

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

CPU = find("CPU")
GALLERY = {
    "torchvision": ["resnet18", "densenet121", "swin_t"],
    "timm": ["vit_tiny_patch16_224", "convnext_atto"],
    "transformers": ["llama", "gpt2", "bert", "t5"],
    "own": ["unet"],
}
ONEDNN = {  # peaks of plans over those of the step that runs, where oneDNN takes other temporaries than are known
    "convolutional": (1, 1.15),  # it does not copy images of 8 channels
    "convnext_atto": (0.15, 1),  # its depthwise and 2 x 2 convolutions take up to 20 copies of the weight
}
# whose kernels have no temporaries of their own
EXACT = dict.fromkeys(("residual", "frozen", "tied", "overwriting", "handed_on", "double"), (1, 1))
Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def fake_trace(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: rotoff.Device) -> Trace:
    return trace_of(fake_step(model, args, kwargs, device))


def alike(trace: Trace) -> Trace:
    """All operations take the same time, so that plans and forms depend on bytes alone."""
    ran = tuple(replace(op, seconds=1e-5) for op in trace.ran)
    return replace(trace, ran=ran, backward=tuple(replace(event, seconds=1e-6) for event in trace.backward))


def contents(trace: Trace) -> list[Any]:
    """What the operations made. A recorded step holds what its kernels make otherwise the second time."""
    return [replace(one, again=True) for one in trace.made]


def plans(chain: rotoff.Chain) -> list[rotoff.Sequence]:
    everything = keep_all(chain)
    most, least = rotoff.simulate(chain, everything).peak_bytes, rotoff.min_mem_limit(chain, "joint")
    middle = least + max(0, most - least) // 3
    return [
        everything,
        rotoff.solve(chain, rotoff.min_mem_limit(chain, "remat"), mode="remat", refine=False),
        rotoff.solve(chain, middle, mode="joint", refine=False),
    ]


def shares(fake: Trace, real: Trace) -> list[float]:
    """The expected peaks of three plans over those by the step that ran; the values of both chains are the same."""
    assert contents(fake) == contents(real)
    assert fake.saved == real.saved
    expected, chains = (
        chain_of(alike(real), LinkRates(1e9, 1e9, False), begins_of(alike(real))),
        chain_of(alike(fake), LinkRates(1e9, 1e9, False), begins_of(alike(fake))),
    )
    assert chains.layout == expected.layout
    for one, other in zip(chains.chain.stages, expected.chain.stages, strict=True):
        assert (one.output_bytes, one.saved_bytes) == (other.output_bytes, other.saved_bytes)
    return [max(chains.levels(plan)) / max(expected.levels(plan)) for plan in plans(expected.chain)]


def check(name: str, case: Case) -> None:
    fake = fake_trace(*case, CPU)
    recorded(*case)  # oneDNN and others set themselves up
    low, high = (ONEDNN | EXACT).get(name, (0.97, 1.03))
    found = shares(fake, recorded(*case))
    assert low <= min(found) and max(found) <= high, found


def times(count: int, value: Any) -> Any:
    """A batch `count` times as large."""
    return tree_map(
        lambda t: torch.cat([t.detach()] * count).requires_grad_(t.requires_grad) if torch.is_tensor(t) else t, value
    )


@pytest.mark.parametrize("count", [16, 48])
@pytest.mark.parametrize(
    "name",
    [  # oneDNN's recurrent kernels keep a workspace whose size only they know
        pytest.param(name, marks=[] if name in ("residual", "language", "handed_on") else pytest.mark.slow)
        for name in sorted(set(ALL) - {"recurrent"})
    ],
)
def test_fake_trace_has_the_bytes_of_a_recorded_step(name: str, count: int) -> None:
    torch.manual_seed(0)
    model, batch = ALL[name]()
    check(name, (model, (times(count, batch()),), {}))


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("library", "name"), [(library, name) for library, names in GALLERY.items() for name in names])
def test_fake_trace_has_the_bytes_of_models_of_the_gallery(library: str, name: str, count: int) -> None:
    torchvision_operators.declare()
    for needed in ("torchvision", library):
        if needed != "own":
            pytest.importorskip(needed)
    from gallery_models import LIBRARIES

    torch.manual_seed(0)
    model, args, kwargs = LIBRARIES[library][name]()
    check(name, (model.train(), times(count, args), times(count, kwargs)))


def odd_case(row: Row) -> Case:
    seeded()
    net = fresh_row(row)
    row.change(net, 0)
    return net, *row.call(0)


REFUSED = {"an evaluation between steps, that counts"}  # reads numbers of a tensor


@pytest.mark.slow
def test_odd_models_have_the_bytes_of_a_recorded_step_or_are_refused() -> None:
    """Their peaks may differ: generators' states and numbers that PyTorch wraps are large beside such small batches."""
    verdicts: dict[str, list[str]] = {"same": [], "other": [], "refused": []}
    for row in TABLE[::10]:
        try:
            real = recorded(*odd_case(row))
        except RuntimeError:
            assert row.may_refuse is not None, row.name
            continue
        try:
            fake = fake_trace(*odd_case(row), CPU)
        except rotoff.MeasureError:
            verdicts["refused"].append(row.name)
            continue
        same = contents(fake) == contents(real) and fake.saved == real.saved
        verdicts["same" if same else "other"].append(row.name)
    assert REFUSED.issuperset(verdicts["refused"]) and len(verdicts["other"]) <= 1, verdicts


def test_a_model_for_a_cuda_device_that_is_not_there_has_a_plan() -> None:
    """Dropout keeps a mask of bytes, fused attention its output and the logarithm of its rows' sums; sizes are
    multiples of the allocator's blocks."""

    attend = Does(lambda net, x: F.scaled_dot_product_attention(x, x, x, is_causal=True))
    x = torch.empty(2, 4, 64, 32, dtype=torch.bfloat16, device="meta", requires_grad=True)
    trace = fake_trace(
        nn.Sequential(*(nn.Sequential(attend, nn.Dropout(0.1)) for _ in range(6))), (x,), {}, find("H200")
    )
    block, numbers = sorted([x.nbytes, 4 * 2 * 4 * 64, x.nbytes, x.numel()]), 512
    assert sorted(one.nbytes for one in trace.made) == sorted([*block * 6, *[numbers] * 12])
    found = chain_of(trace, LinkRates(1e9, 1e9, False), begins_of(trace))
    plan = rotoff.solve(found.chain, rotoff.min_mem_limit(found.chain, "joint"), mode="joint")
    assert 0 < max(found.levels(plan)) < 0.75 * max(found.levels(keep_all(found.chain)))


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    with pytest.raises(rotoff.MeasureError, match="the model cannot be copied to be estimated"):
        fake_trace(Does(lambda net, x: x, drawn=iter(n for n in range(3))), (x,), {}, CPU)
    fake_trace(nn.Tanh(), (x,), {}, CPU)  # nothing is left behind
