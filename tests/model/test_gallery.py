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


@pytest.mark.parametrize(("library", "name"), [("torchvision", "mobilenet_v3_small"), ("own", "unet")])
def test_a_model_as_it_is(library: str, name: str) -> None:
    torchvision_operators.declare()
    if library != "own":
        pytest.importorskip(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = gallery.attempt(LIBRARIES[library][name], refine=False)
    assert result["equal"]
    assert result["measured"] <= result["predicted"] <= result["limit"]
    assert result["stages"] >= 10
    assert result["passed"]


def test_another_size_in_every_step() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = gallery.attempt_varying(LIBRARIES["own"]["unet"], refine=False)
    assert result["equal"]
    assert max(result["peaks"]) <= result["limit"]
    assert len({*result["peaks"]}) > 2
