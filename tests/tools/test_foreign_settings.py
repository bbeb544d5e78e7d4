"""``rotoff.plan(settings=...)``: other tools' settings, what they take, and what is possible in the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

import rotoff
from rotoff.tools.foreign_settings import read_foreign

CPU = {"device": "cpu"}
ZERO = {"zero_optimization": {"stage": 2, "offload_optimizer": {**CPU, "pin_memory": True}}, "bf16": {"enabled": True}}
TRAINER = {"per_device_train_batch_size": 4, "gradient_checkpointing": True, "optim": "adamw_torch"}
AXOLOTL = {"base_model": "x", "micro_batch_size": 2, "gradient_checkpointing": "offload", "optimizer": "adamw_8bit"}
TITAN = {"training": {"local_batch_size": 8, "enable_cpu_offload": True}, "activation_checkpoint": {"mode": "full"}}


SELECTIVE = {"activation_checkpoint": {"mode": "selective"}}


def trainer(checkpointing: bool = True, **how: Any) -> dict[str, Any]:
    return {**TRAINER, "gradient_checkpointing": checkpointing, "gradient_checkpointing_kwargs": how}


@pytest.mark.parametrize(
    ("given", "kind", "says", "not_read"),
    [
        (ZERO, "DeepSpeed", "ZeRO-Offload", ["zero_optimization.offload_optimizer.pin_memory"]),
        ({"train_micro_batch_size_per_gpu": "auto"}, "DeepSpeed", "plain PyTorch", ["train_micro_batch_size_per_gpu"]),
        (TRAINER, "Trainer", "checkpoint every block", []),
        (
            trainer(offload=True, every_n_layers=2) | {"lr": 1},
            "Trainer",
            "checkpoint one block in 2, to the host",
            ["lr"],
        ),
        (trainer(False, offload=True), "Trainer", "plain PyTorch", ["gradient_checkpointing_kwargs.offload"]),
        (
            TRAINER | {"deepspeed": ZERO},
            "Trainer",
            "ZeRO-Offload + checkpoint every block",
            ["deepspeed.zero_optimization.offload_optimizer.pin_memory"],
        ),
        (AXOLOTL, "axolotl", "checkpoint every block, to the host", ["base_model", "optimizer"]),
        (TITAN, "torchtitan", "all streamed + checkpoint every block", []),
        (SELECTIVE, "torchtitan", "plain PyTorch", ["activation_checkpoint.mode"]),
        ([CPUOffloadPolicy(), MixedPrecisionPolicy()], "FSDP2", "all streamed", ["MixedPrecisionPolicy"]),
        (OffloadPolicy(), "FSDP2", "plain PyTorch", []),
    ],
)
def test_keys_are_read_or_said_not_to_be(given: Any, kind: str, says: str, not_read: list[str]) -> None:
    found = read_foreign(given)
    assert (found.kind, str(found.setting)) == (kind, says)
    assert {*found.not_read} == {*not_read}


def test_a_file_that_the_settings_name_is_read(tmp_path: Path) -> None:
    (tmp_path / "zero.json").write_text(json.dumps(ZERO))
    found = read_foreign(TRAINER | {"deepspeed": str(tmp_path / "zero.json")})
    assert str(found.setting) == "ZeRO-Offload + checkpoint every block" and found.said["master_weights"]


def test_what_is_none_of_these_is_refused(tmp_path: Path) -> None:
    (tmp_path / "wrong.json").write_text("{")
    for given, said in (
        ({"lr": 1}, "the settings name lr, which no known tool reads; give a Trainer's"),
        (3, "settings is 3; give a Trainer's"),
        ([], r"settings is \[\]; give"),
        (tmp_path / "wrong.json", "wrong.json is not json: Expecting property name"),
        (__file__, r"test_foreign_settings\.py is not yaml"),
    ):
        with pytest.raises(rotoff.OptionError, match=said):
            read_foreign(given)


def build() -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        layers = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(6)]
        return nn.Sequential(*layers), torch.empty(4096, 256)


def test_a_plan_in_the_same_bytes_is_faster_and_above_the_bound() -> None:
    model, x = build()
    found = rotoff.plan(model, x, settings=TRAINER, device="V100")
    now, best = found["now: checkpoint every block"], found.best
    assert best is not None and best.setting and now.fits and best.peak_bytes <= now.peak_bytes
    assert found.bound_time <= best.step_time < now.step_time
    assert found["plain PyTorch"].peak_bytes > now.peak_bytes and not found["plain PyTorch"].fits
    elsewhere = rotoff.plan(model, x, device="V100")["checkpoint every block"]
    assert (elsewhere.peak_bytes, elsewhere.step_time) == (now.peak_bytes, now.step_time)
    assert "Trainer, read: gradient_checkpointing = True" in found.notes[
        0
    ] and "that V100 as it is used now has" in str(found)
    assert "the settings have a batch of 4, the sample has 4096" in str(found)
    step = rotoff.plan(model, x, settings=TRAINER, device="V100", mem_limit="50 MiB")  # which says what is possible
    assert step.mem_limit == 50 << 20 and step["now: checkpoint every block"].peak_bytes < now.peak_bytes


def test_what_keeps_everything_leaves_nothing_to_gain() -> None:
    model, x = build()
    found = rotoff.plan(model, x, settings={**TRAINER, "gradient_checkpointing": False}, device="V100")
    assert found.best is found.steps[0] and found["now: plain PyTorch"].peak_bytes == found.best.peak_bytes


def test_optimizer_autocast_and_master_weights_are_those_of_the_settings() -> None:
    model, x = build()
    keep = {**TRAINER, "gradient_checkpointing": False}
    plain, half = (rotoff.plan(model, x, settings={**keep, "bf16": on}, device="V100") for on in (False, True))
    assert half.steps[0].peak_bytes < plain.steps[0].peak_bytes
    model, x = model.to(torch.bfloat16), x.to(torch.bfloat16)
    zero = {"bf16": {"enabled": True}, "zero_optimization": {}, "optimizer": {"type": "AdamW"}}
    held = rotoff.plan(model, x, settings=zero, device="V100")
    elements = sum(p.numel() for p in model.parameters())
    assert held.resident_bytes["adamw states"] == 12 * elements


def test_the_arguments_of_a_trainer_object_that_differ_from_the_default() -> None:
    fields = {name: SimpleNamespace(name=name, default=None) for name in ("lr", "seed", *TRAINER)}
    given = SimpleNamespace(**{**TRAINER, "lr": 1e-4, "seed": None}, __dataclass_fields__=fields)
    assert {*read_foreign(given).not_read} == {"lr"}
