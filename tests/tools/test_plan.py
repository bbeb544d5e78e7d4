"""``rotoff.plan``: what training within some bytes of a device would cost."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Does, Residual, up_and_down
from torch import nn

import rotoff
from rotoff.tools.planned_steps import usable_bytes

WIDTH = 256
JOINT, REMAT, OFFLOAD = "rotoff, mem_limit", "rotoff, mem_limit, mode remat", "rotoff, mem_limit, mode offload"
AFTER, DURING = "rotoff, device_limit", "rotoff, device_limit, updates during"


with torch.device("meta"):
    BLOCKS = nn.Sequential(*[Residual(WIDTH) for _ in range(6)], nn.Linear(WIDTH, 8))
    BATCH = torch.empty(8192, WIDTH)


def test_a_mem_limit_is_kept_and_the_bound_holds() -> None:
    found = rotoff.plan(BLOCKS, BATCH, mem_limit="240 MiB", device="V100")
    plain, joint, remat, offload = (found[name] for name in ("plain PyTorch", JOINT, REMAT, OFFLOAD))
    assert found.mem_limit == 240 * 2**20 < found.keep_all_bytes == plain.peak_bytes
    assert found.best is joint and not plain.fits and plain.overhead == 0
    for mode, row in (("joint", joint), ("remat", remat), ("offload", offload)):
        assert found.min_mem_limits[mode] <= row.peak_bytes <= found.mem_limit
        assert plain.step_time <= found.bound_time <= row.step_time
        assert row.overhead == pytest.approx(row.step_time / plain.step_time - 1)
    assert joint.step_time <= min(remat.step_time, offload.step_time)
    assert remat.host_bytes == 0 < offload.host_bytes
    assert (remat.moves, offload.moves) == ("recomputes", "activations")
    alone = rotoff.plan(BLOCKS, BATCH, mem_limit="240 MiB", device="V100", modes="remat")
    assert alone[REMAT] == remat and JOINT not in [row.name for row in alone]


def test_plans_of_a_link_that_costs_nothing_are_as_fast_as_the_bound() -> None:
    fast = rotoff.Device("fast link", 80 * 2**30, 1e12, {"float32": 1e12}, 1e12, 1e12)
    found = rotoff.plan(BLOCKS, BATCH, mem_limit="450 MiB", device=fast)
    assert found.bound_time == pytest.approx(found[JOINT].step_time, rel=5e-4)
    assert found.bound_time <= found[JOINT].step_time < found[REMAT].step_time
    assert "-0.0%" not in str(found)


@pytest.mark.slow
def test_what_is_resident_is_said() -> None:
    parameters = sum(p.nbytes for p in BLOCKS.parameters())
    found = rotoff.plan(BLOCKS, BATCH, device="RTX 4090", modes=["remat"])
    assert found.resident_bytes == {
        "parameters": parameters,
        "buffers": 0,
        "gradients": parameters,
        "adam states": 2 * parameters,
        "batch": BATCH.nbytes,
    }
    assert found.mem_limit == usable_bytes(24 * 2**30) - 4 * parameters - BATCH.nbytes  # all that is left
    beyond = rotoff.plan(BLOCKS, BATCH, mem_limit="24 GiB", device="RTX 4090", modes=["remat"])
    assert found.fits and beyond.mem_limit == found.mem_limit  # a limit above what is left asks for no more
    assert found.needed_bytes <= 4 * parameters + BATCH.nbytes + found.keep_all_bytes  # gradients come while values go
    assert found.needed_bytes >= 3 * parameters + BATCH.nbytes + found.keep_all_bytes
    plain = rotoff.plan(BLOCKS, BATCH, device="RTX 4090", modes=["remat"], optimizer="sgd")
    assert plain.mem_limit == found.mem_limit + 2 * parameters


def test_json_and_text(tmp_path: Path) -> None:
    found = rotoff.plan(BLOCKS, BATCH, mem_limit="240 MiB", device="V100", modes=["remat"])
    found.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    assert [(row["name"], row["step_time"]) for row in data["steps"]] == [(row.name, row.step_time) for row in found]
    assert data["best"]["name"] == REMAT and data["meta"]["times"].startswith("estimated")
    lines = str(found).splitlines()
    assert lines[0] == found.verdict
    assert lines[1].startswith("Sequential on V100 within a mem_limit of 240.00 MiB: parameters 12.")
    assert "gradients 12." in lines[1] and "adam states 24." in lines[1]
    assert lines[2] == "times are estimates, with the updates of adam"
    assert lines[-1] == "to paste: rotoff.attach(model, '240.0 MiB', mode='remat')"


def test_the_verdict_has_a_way_on() -> None:
    def asked(limit: int | str, device: str | rotoff.Device = "V100") -> rotoff.PlannedSteps:
        return rotoff.plan(BLOCKS, BATCH, mem_limit=limit, device=device, modes="remat")

    fits = asked("240 MiB")
    assert fits.verdict.startswith("fits with rotoff, mem_limit, mode remat, at 0.")
    assert f"plain PyTorch takes {rotoff.format_bytes(fits.keep_all_bytes)}, more than a mem_limit" in fits.verdict
    tight = asked("1 MiB")
    assert tight.verdict.startswith("DOES NOT FIT in 1.00 MiB; mem_limit may be from ")
    least, most = map(int, re.findall(r"\((\d+) bytes\)", tight.verdict))
    assert asked(least).verdict.startswith("fits") and asked(least)[REMAT].peak_bytes == least
    assert not asked(least - 1).fits and tight.min_mem_limits["remat"] == least
    assert asked(most).verdict.startswith("fits: plain PyTorch")
    assert asked(most + 1).mem_limit == most
    assert not tight.fits and not tight.to_dict()["fits"]
    small = asked("240 MiB", rotoff.Device("small", 2**26, 1e9, {"float32": 1e9}, 1e9, 1e9))
    assert "even the smallest limit" in small.verdict and "smaller batch" in small.verdict
    tiny = rotoff.plan(BLOCKS, BATCH, device=rotoff.Device("tiny", 2**20, 1e9, {"float32": 1e9}, 1e9, 1e9))
    assert tiny.best is None and re.search(r"on the host .* that tiny has .*: take a device with more", tiny.verdict)
    assert f"a device of {rotoff.format_bytes(tiny.min_device_bytes)}, more than" in tiny.verdict


class Named(nn.Module):
    """Takes named arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (self.layers(inputs) - targets).square().mean()


class OneDict(Named):
    """Takes a dict."""

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        return super().forward(batch["inputs"], batch["targets"])


@pytest.mark.parametrize("kind", [Named, OneDict])
def test_one_dict_is_the_named_arguments_or_the_argument_that_the_model_takes(kind: type[nn.Module]) -> None:
    model, batch = kind(), {"inputs": torch.randn(8, 16), "targets": torch.randn(8, 16)}
    assert rotoff.plan(model, batch, modes="remat").fits
    wrapped = rotoff.Checkpointable(model).measure(batch, repeats=1)
    wrapped.compute_sequence(wrapped.keep_all_memory)
    (wrapped(**batch) if kind is Named else wrapped(batch)).backward()
    assert len(wrapped.plans()) == 1


# -- everything placed


def wide(layers: int = 6) -> tuple[nn.Sequential, torch.Tensor]:
    """A model whose parameters outweigh its activations."""
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(layers))), torch.empty(64, 1024)


def applied(net: Any, x: torch.Tensor) -> torch.Tensor:
    """A forward of its own."""
    return net.layers(x).relu()


def device_of(mebibytes: int) -> rotoff.Device:
    return rotoff.Device("small", mebibytes * 2**20, 1e11, {"float32": 1e12}, 1e10, 1e10)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.grid
def test_what_does_not_fit_is_placed(own: bool) -> None:
    model, x = wide()
    model = Does(applied, layers=model) if own else model
    found = rotoff.plan(model, x, device=device_of(48), optimizer="adamw")  # 96 MiB of parameters, gradients, states
    assert found.mem_limit == 0 and found.min_device_bytes < 48 * 2**20
    assert not [row for row in found if row.name.startswith("rotoff, mem_limit")]
    for row in (found[AFTER], found[DURING]):
        assert found.bound_time <= row.step_time
        assert row.peak_bytes <= usable_bytes(48 * 2**20)
        assert row.host_bytes > 0
    assert "to paste: rotoff.attach(model, device_limit='45.1" in str(found)
    assert found.steps == rotoff.plan(model, x, device=device_of(48), optimizer="adamw").steps
    slower = rotoff.plan(model, x, device=device_of(48), optimizer="adamw", host_bandwidth=1e8)
    assert slower[DURING].step_time >= found[DURING].step_time


def test_the_smallest_device() -> None:
    model, x = wide(2)
    found = rotoff.plan(model, x, device=device_of(48))

    def fits(bytes_of_device: int) -> bool:
        device = rotoff.Device("small", bytes_of_device, 1e11, {"float32": 1e12}, 1e10, 1e10)
        return rotoff.plan(model, x, device=device).fits

    assert fits(found.min_device_bytes) and not fits(found.min_device_bytes - 2048)


def test_a_weight_that_autocast_casts_for_several_calls_stays() -> None:
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(6)))
    model = Does(lambda net, x: net.layers(net.layers(x)), layers=layers)

    def least() -> int:
        return rotoff.plan(model, torch.empty(64, 1024), device=device_of(400), optimizer="adamw").min_device_bytes

    everything = 16 * 6 * 1024**2
    with torch.autocast("cpu", torch.bfloat16):
        assert least() > everything
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert least() < everything / 2


def test_where_everything_fits_nothing_moves() -> None:
    model, x = wide(2)
    found = rotoff.plan(model, x, device=device_of(400))
    assert found.best is found["plain PyTorch"] and "nothing has to be set" in found.verdict
    assert not any(row.setting for row in found)


def test_frozen_layers_may_lie_on_the_host_and_have_no_update() -> None:
    model, x = wide(4)
    whole = rotoff.plan(model, x, device=device_of(400))
    model[:3].requires_grad_(False)
    after = rotoff.plan(model, x, device=device_of(400))
    assert after.min_device_bytes <= whole.min_device_bytes + x.nbytes
    less = rotoff.plan(model, x, device=device_of(after.min_device_bytes / 2**20 + 1))
    assert less.fits and less[AFTER].peak_bytes <= after.min_device_bytes + 2**20
    nearly = rotoff.plan(model, x, device=device_of(32))  # has room for all that is trained
    assert nearly[AFTER].step_time > after.steps[0].step_time and nearly[AFTER].host_bytes > 0  # copies take time
    assert nearly[DURING].step_time <= nearly[AFTER].step_time * 1.001
    assert not rotoff.plan(model, x, device=device_of(4)).fits


# -- the table


def lm(batch: int) -> tuple[nn.Module, torch.Tensor]:
    """Blocks in bfloat16 and a head, on the device "meta"."""
    with torch.device("meta"):
        layers = [
            nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(6)
        ]
        model = Does(applied, layers=nn.Sequential(*layers, nn.Linear(512, 4096))).to(torch.bfloat16)
        return model, torch.empty(batch, 128, 512, dtype=torch.bfloat16)


def test_no_row_beats_the_bound_and_moving_all_costs_the_link() -> None:
    found = rotoff.plan(*lm(8), device=device_of(120))
    rows = {row.name.split(" + ")[0]: row for row in found}
    assert all(row.step_time >= found.bound_time * (1 - 1e-9) for row in found if row.fits)
    assert found.best is not None and found.best.step_time <= min(row.step_time for row in found if row.fits) * 1.02
    plain, again = rows["plain PyTorch"], rows["checkpoint every block"]
    assert again.step_time > plain.step_time and again.peak_bytes < plain.peak_bytes
    parameters = sum(p.nbytes for p in lm(1)[0].parameters())
    assert rows["all streamed"].host_bytes >= 3 * parameters > rows["checkpoint every block"].host_bytes == 0
    assert rows["all saved tensors to the host"].host_bytes > 0


def test_one_run_has_one_peak() -> None:
    model, x = lm(8)
    alone = rotoff.plan(model, x, mem_limit="60 MiB", device="V100", modes="joint")
    assert alone.steps[0].peak_bytes == alone.keep_all_bytes
    whole = rotoff.plan(model, x, device="V100")
    assert whole.steps[0].peak_bytes == whole.needed_bytes


def test_master_weights_and_their_states_count_twelve_bytes_for_each_element() -> None:
    model, x = lm(8)
    elements = sum(p.numel() for p in model.parameters())
    plain, masters = (rotoff.plan(model, x, device="V100", master_weights=on) for on in (False, True))
    assert masters.resident_bytes["adam states"] == 12 * elements == plain.resident_bytes["adam states"] + 8 * elements
    more = masters.steps[0].peak_bytes - plain.steps[0].peak_bytes
    assert more == pytest.approx(8 * elements, rel=1e-2)
    assert "without float32 master weights" in str(plain) and "master weights in float32" in str(masters)


def both(net: Any, x: torch.Tensor, **_: object) -> dict[str, torch.Tensor]:
    """Returns logits beside a loss, and takes whatever else it is given."""
    logits = net.layers(x)
    return {"loss": logits.float().logsumexp(-1).mean(), "logits": logits}


def test_options_of_the_wrapper_are_options_of_plan_and_no_arguments_of_the_model() -> None:
    layers = nn.Sequential(*(up_and_down(64, 2048) for _ in range(8)), nn.Linear(64, 4096))
    model, x, how = Does(both, layers=layers), torch.empty(512, 64), {"modes": "remat", "device": "V100"}
    wrapped = rotoff.Checkpointable(model, backward_from="loss")
    found = rotoff.plan(model, x, mem_limit="13 MiB", backward_from="loss", **how)
    assert found.min_mem_limits == rotoff.plan(wrapped, x, mem_limit="13 MiB", **how).min_mem_limits
    without = rotoff.plan(model, x, mem_limit="13 MiB", **how)
    assert found.chain.grad_bytes(len(found.chain)) < without.chain.grad_bytes(len(without.chain))
    note = "the gradients of all 2 outputs are charged; if the backward starts from the loss alone, it takes less"
    assert note in str(without) and note not in str(found)
    tight = rotoff.plan(model, x, mem_limit=found.keep_all_bytes - 1, backward_from="loss", **how)
    assert tight.best is not None and tight.best.setting.endswith("backward_from='loss')")
    with pytest.raises(rotoff.OptionError, match="is a Checkpointable; give backward_from to it alone"):
        rotoff.plan(wrapped, x, backward_from="loss")
