"""Questions that are refused at once, in a sentence with the value and the cure."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import rotoff
from rotoff.errors import LimitError, MeasureError, OptionError

with torch.device("meta"):
    MODEL, X = nn.Sequential(nn.Linear(4, 4)), torch.empty(64, 4)


def sized(n: int) -> tuple[nn.Module, torch.Tensor]:
    return MODEL, torch.empty(n, 4, device="meta")


plan = partial(rotoff.plan, MODEL, X)
PIPELINE = {"pipeline": 2, "microbatches": 8}
MODES = "modes are 'joint', 'remat', 'offload'"
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (plan, {"device": "abacus"}, "device is 'abacus'; known ones are"),
    (plan, {"optimizer": "magic"}, "optimizer is 'magic'; known ones are sgd, momentum, adam"),
    (plan, {"optimizer": ["adam"]}, r"optimizer is \['adam'\]; known ones are sgd"),
    *((plan, {"modes": wrong}, MODES) for wrong in (["remat", "guess"], "guess", None)),
    (plan, {"modes": ()}, "modes is empty"),
    (plan, {"host_bandwidth": 0}, "host_bandwidth is 0; give bytes per second above 0"),
    (plan, {"master_weights": 1}, "master_weights is 1; give true or false"),
    (plan, {**PIPELINE, "microbatches": 7}, "microbatches is 7; it does not divide a batch of 64"),
    (plan, {**PIPELINE, "ranks_per_link": 0}, "ranks_per_link is 0; give a whole number"),
    (plan, {**PIPELINE, "schedule": "ZBV"}, "schedule is 'ZBV'; it is one of GPipe, 1F1B, Interleaved1F1B"),
    (plan, {"chunks": 2}, "chunks=2 is for a pipeline"),
    (plan, {"mesh": "fsdp=8", "pipeline": 2}, "mesh='fsdp=8' and pipeline=2: a plan is for one of them"),
    (plan, {"mesh": "fsdp=8", "link": 0}, "link is 0; give bytes per second above 0"),
    (plan, {"link": 1e9}, "link=1000000000.0 is for a mesh; give one, too"),
    (
        plan,
        {"mesh": "dp=8"},
        "mesh is 'dp=8'; give the number of ranks on one or both of the axes fsdp and tp, such as",
    ),
    (plan, {"mesh": "fsdp=0"}, "mesh is 'fsdp=0'; give the number of ranks"),
    (plan, {"mesh": "fsdp=2,fsdp=2"}, "mesh is 'fsdp=2,fsdp=2'; give the number of ranks"),
    (rotoff.largest, {"build": lambda n: MODEL}, r"build\(1\) returned Sequential; it must return \(model, sample\)"),
    (rotoff.largest, {"build": MODEL}, "build is a Sequential; give a function of a size"),
    (rotoff.largest, {"build": sized, "step": 0}, "step is 0; give a whole number of at least 1"),
    (rotoff.largest, {"build": sized, "step": 4, "most": 3}, "most is 3, and sizes are multiples of 4"),
    (rotoff.largest, {"build": sized, "optimizer": "lion"}, "optimizer is 'lion'; known ones are sgd"),
]


@pytest.mark.parametrize(("ask", "options", "sentence"), REFUSED, ids=[str(n) for n in range(len(REFUSED))])
def test_a_wrong_option_is_named_with_its_cure(ask: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(OptionError, match=sentence):
        ask(**options)


def test_what_is_no_model_or_no_limit_is_said() -> None:
    for ask in (rotoff.plan, rotoff.estimate):
        with pytest.raises(MeasureError, match=r"the model is a str; give a torch.nn.Module"):
            ask("gpt2", X)
    with pytest.raises(LimitError, match="looks like a fraction"):
        plan(mem_limit=0.5)
