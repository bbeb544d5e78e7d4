"""Bytes that `rotoff.estimate` gives with no device beside those of a step that ran on the CPU, for models of the
gallery; one line each.

    python benchmarks/estimate_bytes.py [--only name,name] [--json FILE]

For each model: the largest difference of a stage's values (output, saved, gradient), as a share of the larger of the
stage's own bytes and a hundredth of the peak; differences of the peak of keeping everything and of the smallest limits,
without smaller forms, which depend on times.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "tests" / "support")]

from gallery_models import LIBRARIES, Case  # noqa: E402
from recorded_steps import recorded_chain  # noqa: E402

import rotoff  # noqa: E402

VALUES = ("output_bytes", "saved_bytes", "grad_bytes")
TRANSIENTS = ("forward_transient_bytes", "checkpoint_transient_bytes", "backward_transient_bytes")
MODES = ("joint", "remat", "offload")


def in_bfloat16(build: Callable[[], Case]) -> Callable[[], Case]:
    def call() -> Case:
        model, args, kwargs = build()

        def cast(value: Any) -> Any:
            return value.bfloat16() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

        return model.bfloat16(), tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}

    return call


CASES = {  # names of the gallery's models, and how they are run
    "torchvision": "resnet18:float32 shufflenet_v2_x1_0:float32 swin_t:float32",
    "timm": "vit_tiny_patch16_224:float32 vit_tiny_patch16_224:bfloat16 convnext_atto:autocast levit_128s:float32",
    "transformers": "llama:float32 llama:bfloat16 qwen3:autocast gpt2:autocast bert:float32 t5:autocast"
    " mixtral:float32 wav2vec2:float32",
    "own": "unet:float32 unet:autocast",
}


def chains(build: Callable[[], Case], how: str) -> tuple[rotoff.Chain, rotoff.Chain]:
    """(of a step on the CPU, estimated) of a model run in "float32", "bfloat16" or under "autocast" of it."""
    torch.manual_seed(0)
    model, args, kwargs = (in_bfloat16(build) if how == "bfloat16" else build)()
    model.train()
    autocast: Any = torch.autocast("cpu", dtype=torch.bfloat16) if how == "autocast" else nullcontext()
    with autocast:
        found = recorded_chain(model, *args, **kwargs), rotoff.estimate(model, *args, device="CPU", **kwargs)
    measured, estimated = (
        replace(one, stages=tuple(replace(stage, forms=()) for stage in one.stages)) for one in found
    )
    return measured, estimated


def compare(measured: rotoff.Chain, estimated: rotoff.Chain) -> dict[str, Any]:
    """Shares by which estimated bytes differ from measured ones; the stages of both must be the same."""
    names = [s.name for s in measured.stages], [s.name for s in estimated.stages]
    if names[0] != names[1]:
        return {"stages": names}
    peaks = [rotoff.simulate(c, rotoff.keep_all(c)).peak_bytes for c in (measured, estimated)]
    result: dict[str, Any] = {"stages": len(measured), "keep_all": peaks[1] / peaks[0] - 1, "keep_all_bytes": peaks[0]}
    floor = peaks[0] / 100
    for fields in (VALUES, TRANSIENTS):
        worst = (0.0, "")
        for one, other in zip(measured.stages, estimated.stages, strict=True):
            for field in fields:
                a, b = getattr(one, field), getattr(other, field)
                worst = max(worst, (abs(b - a) / max(a, floor), f"{one.name}.{field}: {a} measured, {b} estimated"))
        result["values" if fields is VALUES else "transients"] = worst
    for mode in MODES:
        a, b = (rotoff.min_mem_limit(c, mode) for c in (measured, estimated))
        result[f"min_{mode}"] = b / a - 1
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results = []
    for library, (name, how) in ((key, row.split(":")) for key, rows in CASES.items() for row in rows.split()):
        if not options.only or name in options.only.split(","):
            found = compare(*chains(LIBRARIES[library][name], how))
            results.append({"library": library, "name": name, "how": how, **found})
            print(json.dumps(results[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "results": results}, indent=1))


if __name__ == "__main__":
    main()
