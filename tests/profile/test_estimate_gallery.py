"""A sample of `benchmarks/estimate_bytes.py`: models of three libraries, estimated with no device and measured."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch
import torchvision_operators

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import estimate_bytes
from gallery_models import LIBRARIES


@pytest.mark.slow  # tests/profile/test_estimate.py has models of our own
@pytest.mark.parametrize(
    ("library", "name", "how"),
    [
        ("torchvision", "shufflenet_v2_x1_0", "float32"),
        ("transformers", "qwen3", "autocast"),
        ("transformers", "mixtral", "float32"),
    ],
)
def test_estimated_bytes_equal_measured(library: str, name: str, how: str) -> None:
    torchvision_operators.declare()
    for needed in ("torchvision", library):
        pytest.importorskip(needed)
    # the scratch memory of oneDNN's kernels for bfloat16, which the processor decides, is not estimated
    onednn = torch.backends.mkldnn.flags(enabled=how == "float32")
    with warnings.catch_warnings(), onednn:
        warnings.simplefilter("ignore")
        result = estimate_bytes.compare(*estimate_bytes.chains(LIBRARIES[library][name], how))
    assert result["stages"] >= 10
    assert result["values"][0] == 0.0, result["values"][1]
    assert abs(result["keep_all"]) <= 0.02
    assert abs(result["min_remat"]) <= 0.02
