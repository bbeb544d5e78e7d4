"""A sample of the gallery (`make gallery`): models of three libraries as they are, trained at half of what keeping
everything needs, bit for bit as the plain model."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torchvision_operators

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gallery
from gallery_models import LIBRARIES

SAMPLE = [("torchvision", "mobilenet_v3_small"), ("own", "unet")]
FURTHER = [
    ("transformers", "qwen3"),
    ("torchvision", "shufflenet_v2_x1_0"),
    ("timm", "levit_128s"),
    ("timm", "mobilenetv4_conv_small"),
    ("transformers", "t5"),
]


@pytest.mark.parametrize(
    ("library", "name"), [*SAMPLE, *(pytest.param(*one, marks=pytest.mark.slow) for one in FURTHER)]
)
def test_a_model_as_it_is(library: str, name: str) -> None:
    torchvision_operators.declare()
    for needed in ("torchvision", library) if library != "own" else ():
        pytest.importorskip(needed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = gallery.attempt(LIBRARIES[library][name], refine=False)
    assert result["equal"]
    assert result["measured"] <= result["predicted"] <= result["limit"]
    assert result["stages"] >= 10
    assert result["passed"]


@pytest.mark.parametrize("name", ["unet", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_another_size_in_every_step(name: str) -> None:
    library = next(library for library, found in LIBRARIES.items() if name in found)
    if library != "own":
        torchvision_operators.declare()
        pytest.importorskip(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = gallery.attempt_varying(LIBRARIES[library][name], refine=False)
    assert result["equal"]
    assert max(result["peaks"]) <= result["limit"]
    assert len({*result["peaks"]}) > 2
