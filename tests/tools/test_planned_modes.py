"""``rotoff.plan``: what training within some bytes of a device would cost."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from models import Residual
from torch import nn

import rotoff
from rotoff.tools.planned_modes import usable_bytes

WIDTH = 256


@pytest.fixture(scope="module")
def blocks() -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(*[Residual(WIDTH) for _ in range(6)], nn.Linear(WIDTH, 8))


@pytest.fixture(scope="module")
def batch() -> torch.Tensor:
    return torch.empty(8192, WIDTH, device="meta")


def test_the_table_holds_what_the_machine_says(blocks: nn.Sequential, batch: torch.Tensor) -> None:
    found = rotoff.plan(blocks, batch, mem_limit="240 MiB", device="V100")
    assert [row.mode for row in found] == ["joint", "remat", "offload"]
    assert found.mem_limit == 240 * 2**20 < found.keep_all_bytes
    for row in found:
        assert row.min_mem_limit <= found.mem_limit
        assert row.peak_bytes is not None and row.peak_bytes <= found.mem_limit
        assert row.step_time is not None and row.bound_time is not None
        assert found.keep_all_time <= row.bound_time <= row.step_time
        assert row.overhead == pytest.approx(row.step_time / found.keep_all_time - 1)
    assert found["joint"].step_time <= min(found["remat"].step_time, found["offload"].step_time)
    assert found["remat"].host_bytes == 0 < found["offload"].host_bytes


def test_a_plan_as_fast_as_its_compute_needs_no_further_bound(
    blocks: nn.Sequential, batch: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> float:
        raise AssertionError("the ascent takes a second, and this bound is known")

    monkeypatch.setattr("rotoff.planning.step_planner.least_time_of", refuse)
    fast = rotoff.Device("fast link", 80 * 2**30, 1e12, {"float32": 1e12}, 1e12, 1e12)
    found = rotoff.plan(blocks, batch, mem_limit="450 MiB", device=fast)
    assert found.mem_limit < found.keep_all_bytes
    joint, remat = found["joint"], found["remat"]
    assert joint.step_time is not None and remat.step_time is not None
    assert joint.bound_time == pytest.approx(joint.step_time, rel=5e-4)
    assert joint.bound_time <= joint.step_time < remat.step_time
    assert remat.bound_time == joint.bound_time
    assert "-0.0%" not in str(found)


def test_the_smallest_limit_is_the_smallest(blocks: nn.Sequential, batch: torch.Tensor) -> None:
    least = rotoff.plan(blocks, batch, mem_limit="240 MiB", device="V100", modes=["remat"])["remat"].min_mem_limit
    at = rotoff.plan(blocks, batch, mem_limit=least, device="V100", modes=["remat"])["remat"]
    assert at.peak_bytes == least
    below = rotoff.plan(blocks, batch, mem_limit=least - 1, device="V100", modes=["remat"])["remat"]
    assert (below.step_time, below.min_mem_limit) == (None, least)
    assert "DOES NOT FIT" in str(rotoff.plan(blocks, batch, mem_limit=least - 1, device="V100", modes=["remat"]))


@pytest.mark.slow
def test_what_is_resident_is_said(blocks: nn.Sequential, batch: torch.Tensor) -> None:
    parameters = sum(p.nbytes for p in blocks.parameters())
    found = rotoff.plan(blocks, batch, device="RTX 4090", modes=["remat"])
    assert found.resident_bytes == {
        "parameters": parameters,
        "buffers": 0,
        "gradients": parameters,
        "adam states": 2 * parameters,
        "batch": batch.nbytes,
    }
    assert found.mem_limit == usable_bytes(24 * 2**30) - 4 * parameters - batch.nbytes  # all that is left
    assert found.fits and found["remat"].overhead == 0
    beyond = rotoff.plan(blocks, batch, mem_limit="24 GiB", device="RTX 4090", modes=["remat"])
    assert (beyond.mem_limit, beyond.rows) == (
        found.mem_limit,
        found.rows,
    )  # a limit above what is left asks for no more
    assert found.needed_bytes <= 4 * parameters + batch.nbytes + found.keep_all_bytes  # gradients come while values go
    assert found.needed_bytes >= 3 * parameters + batch.nbytes + found.keep_all_bytes
    plain = rotoff.plan(blocks, batch, device="RTX 4090", modes=["remat"], optimizer="sgd")
    assert plain.mem_limit == found.mem_limit + 2 * parameters


def test_json_and_text(blocks: nn.Sequential, batch: torch.Tensor, tmp_path: Path) -> None:
    found = rotoff.plan(blocks, batch, mem_limit="240 MiB", device="V100", modes=["remat"])
    found.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["modes"][0]["step_time"] == found["remat"].step_time
    assert data["meta"]["times"].startswith("estimated")
    lines = str(found).splitlines()
    assert lines[0] == found.verdict
    assert lines[1].startswith("Sequential on V100 within a mem_limit of 240.00 MiB: parameters 12.")
    assert lines[2] == "times are estimates, with the updates of adam"
    assert lines[-1] == "to paste: rotoff.attach(model, '240.0 MiB', mode='remat')"
    assert [row["name"] for row in data["steps"]] == [row.name for row in found.steps]


def test_the_verdict_comes_first_with_the_parts_and_a_way_on(blocks: nn.Sequential, batch: torch.Tensor) -> None:
    fits = rotoff.plan(blocks, batch, mem_limit="240 MiB", device="V100", modes="remat")
    assert fits.verdict.startswith("fits with rotoff, mem_limit, mode remat, at 0.")
    assert "gradients 12." in str(fits) and "adam states 24." in str(fits)
    assert f"plain PyTorch takes {rotoff.format_bytes(fits.keep_all_bytes)}, more than a mem_limit" in fits.verdict
    tight = rotoff.plan(blocks, batch, mem_limit="1 MiB", device="V100", modes="remat")
    assert tight.verdict.startswith("DOES NOT FIT in 1.00 MiB; mem_limit may be from ")
    least, most = map(int, re.findall(r"\((\d+) bytes\)", tight.verdict))
    assert rotoff.plan(blocks, batch, mem_limit=least, device="V100", modes="remat").verdict.startswith("fits")
    assert rotoff.plan(blocks, batch, mem_limit=most, device="V100", modes="remat").verdict.startswith(
        "fits: plain PyTorch"
    )
    assert rotoff.plan(blocks, batch, mem_limit=most + 1, device="V100", modes="remat").mem_limit == most
    assert not tight.fits and not tight.to_dict()["fits"]
    small = rotoff.Device("small", 2**26, 1e9, {"float32": 1e9}, 1e9, 1e9)
    alone = rotoff.plan(blocks, batch, mem_limit="240 MiB", device=small, modes="remat")
    assert "even the smallest limit" in alone.verdict and "smaller batch" in alone.verdict
    with pytest.raises(
        rotoff.LimitError, match=r"tiny has .* parameters 12\..*adam states 24\..*take a device with more"
    ):
        rotoff.plan(blocks, batch, device=rotoff.Device("tiny", 2**20, 1e9, {"float32": 1e9}, 1e9, 1e9))


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
    wrapped = rotoff.Checkpointable(model, cache_directory=None).measure(batch, repeats=1)
    wrapped.compute_sequence(wrapped.keep_all_memory)
    (wrapped(**batch) if kind is Named else wrapped(batch)).backward()
    assert len(wrapped.plans()) == 1


def test_a_limit_that_only_the_plain_model_keeps_has_a_bound_as_well() -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    found = rotoff.plan(net, torch.empty(1024, 64), mem_limit="4 MiB", device="T4", modes="joint")
    assert found.keep_all_bytes <= found.mem_limit
    assert found["joint"].bound_time == found["joint"].step_time == found.keep_all_time


def test_one_mode_may_stand_by_itself(blocks: nn.Sequential, batch: torch.Tensor) -> None:
    (row,) = rotoff.plan(blocks, batch, mem_limit="240 MiB", device="V100", modes="remat").rows
    assert row.mode == "remat"


def test_bad_questions(blocks: nn.Sequential, batch: torch.Tensor) -> None:
    with pytest.raises(rotoff.OptionError, match="device is 'abacus'; known ones are"):
        rotoff.plan(blocks, batch, device="abacus")
    with pytest.raises(rotoff.OptionError, match="optimizer is 'magic'; known ones are sgd, momentum, adam"):
        rotoff.plan(blocks, batch, optimizer="magic")
    for wrong in (["remat", "guess"], "guess", None):
        with pytest.raises(rotoff.OptionError, match="modes are 'joint', 'remat', 'offload'"):
            rotoff.plan(blocks, batch, modes=wrong)
    with pytest.raises(rotoff.OptionError, match=r"optimizer is \['adam'\]; known ones are sgd"):
        rotoff.plan(blocks, batch, optimizer=["adam"])
    with pytest.raises(rotoff.OptionError, match="mem_slots is '50'; give a whole number"):
        rotoff.plan(blocks, batch, mem_slots="50")
    with pytest.raises(rotoff.OptionError, match="cache_directory is 3; give a directory"):
        rotoff.plan(blocks, batch, cache_directory=3)
    for name in ("plan", "estimate"):
        with pytest.raises(rotoff.MeasureError, match=r"the model is a str; give a torch.nn.Module"):
            getattr(rotoff, name)("gpt2", batch)
    with pytest.raises(rotoff.OptionError, match="modes is empty"):
        rotoff.plan(blocks, batch, modes=())
    with pytest.raises(rotoff.LimitError, match="looks like a fraction"):
        rotoff.plan(blocks, batch, mem_limit=0.5)
    tiny = rotoff.Device("tiny", 2**20, 1e9, {"float32": 1e9}, 1e9, 1e9)
    with pytest.raises(rotoff.LimitError, match="nothing is left for a step"):
        rotoff.plan(blocks, batch, device=tiny)


# -- everything placed


def wide(layers: int = 6) -> tuple[nn.Sequential, torch.Tensor]:
    """A model whose parameters outweigh its activations."""
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(layers))), torch.empty(64, 1024)


def device_of(mebibytes: int) -> rotoff.Device:
    return rotoff.Device("small", mebibytes * 2**20, 1e11, {"float32": 1e12}, 1e10, 1e10)


class Applied(nn.Module):
    """A forward of its own around `layers`."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).relu()


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.grid
def test_what_does_not_fit_is_placed(applied: bool) -> None:
    model, x = wide()
    model = Applied(model) if applied else model
    found = rotoff.plan(model, x, device=device_of(48), optimizer="adamw")  # 96 MiB of parameters, gradients, states
    assert (found.mem_limit, found.fits) == (0, False)
    assert [row.step_time for row in found] == [None] * 3
    after, during = found.placed
    assert (after.updates, during.updates) == ("after", "during")
    for row in found.placed:
        assert row.bound_time <= row.step_time
        assert row.peak_bytes <= usable_bytes(48 * 2**20)
        assert row.host_bytes > 0
        assert row.min_device_bytes < 48 * 2**20
        assert row.largest_batch > 64
    assert found.to_dict()["placed"][0]["step_time"] == after.step_time
    assert "to paste: rotoff.attach(model, device_limit='45.1" in str(found)
    assert found.placed == rotoff.plan(model, x, device=device_of(48), optimizer="adamw").placed
    slower = rotoff.plan(model, x, device=device_of(48), optimizer="adamw", host_bandwidth=1e8).placed
    assert slower[1].step_time >= during.step_time


def test_the_smallest_device_and_a_large_batch() -> None:
    model, x = wide(2)
    (row, _) = rotoff.plan(model, x, device=device_of(48)).placed

    def fits(bytes_of_device: int, batch: int) -> bool:
        device = rotoff.Device("small", bytes_of_device, 1e11, {"float32": 1e12}, 1e10, 1e10)
        try:
            sample = torch.empty(batch, 1024, device="meta")
            return rotoff.plan(model, sample, device=device).placed[0].step_time is not None
        except rotoff.LimitError:
            return False

    assert fits(row.min_device_bytes, 64) and not fits(row.min_device_bytes - 2048, 64)
    assert fits(48 * 2**20, row.largest_batch) and not fits(48 * 2**20, 8 * row.largest_batch)


@pytest.mark.slow
def test_the_largest_batch_is_that_of_any_sample() -> None:
    """At a small batch, the gradient of a weight is most of what a backward holds; no batch changes its bytes."""

    def block() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(2048), nn.Linear(2048, 8192), nn.SiLU(), nn.Linear(8192, 2048))

    model = Applied(nn.Sequential(*(block() for _ in range(12))).to("meta").to(torch.bfloat16))

    def planned(batch: int) -> rotoff.PlacedStep:
        sample = torch.empty(batch, 2048, dtype=torch.bfloat16, device="meta")
        return rotoff.plan(model, sample, device=device_of(2400)).placed[0]

    first, second = planned(2048).largest_batch, planned(8192).largest_batch
    assert second == pytest.approx(first, rel=0.001)
    assert planned(first).step_time is not None
    with pytest.raises(rotoff.LimitError):
        planned(round(1.01 * first))


def test_a_weight_that_autocast_casts_for_several_calls_stays() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(6)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(self.layers(x))

    def least() -> int:
        (row, _) = rotoff.plan(Twice(), torch.empty(64, 1024), device=device_of(400), optimizer="adamw").placed
        return row.min_device_bytes

    everything = 16 * 6 * 1024**2
    with torch.autocast("cpu", torch.bfloat16):
        assert least() > everything
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert least() < everything / 2


def test_where_everything_fits_nothing_moves() -> None:
    model, x = wide(2)
    for row in rotoff.plan(model, x, device=device_of(400)).placed:
        assert row.host_bytes == 0
        assert row.bound_time <= row.step_time
        assert row.largest_batch > 64


def test_frozen_first_layers_may_lie_on_the_host() -> None:
    model, x = wide(4)
    (whole, _) = rotoff.plan(model, x, device=device_of(400)).placed
    model[:3].requires_grad_(False)
    (after, _) = rotoff.plan(model, x, device=device_of(400)).placed
    assert after.min_device_bytes <= whole.min_device_bytes + x.nbytes
    (less, _) = rotoff.plan(model, x, device=device_of(after.min_device_bytes / 2**20 + 1)).placed
    assert less.step_time is not None and less.peak_bytes <= after.min_device_bytes + 2**20
    (nearly, _) = rotoff.plan(model, x, device=device_of(32)).placed  # has room for all that is trained
    assert nearly.step_time > after.step_time and nearly.host_bytes > after.host_bytes == 0  # copies take time


def test_frozen_parameters_have_no_update() -> None:
    model, x = wide(4)
    for parameter in model[:3].parameters():
        parameter.requires_grad_(False)
    (after, during) = rotoff.plan(model, x, device=device_of(32)).placed
    assert after.step_time is not None and during.step_time <= after.step_time * 1.001
    with pytest.raises(rotoff.LimitError, match="on the host a device needs at least"):
        rotoff.plan(model, x, device=device_of(4))
    with pytest.raises(rotoff.OptionError, match="host_bandwidth is 0; give bytes per second above 0"):
        rotoff.plan(model, x, device=device_of(32), host_bandwidth=0)


# -- the table


def lm(batch: int) -> tuple[nn.Module, torch.Tensor]:
    """Blocks in bfloat16 and a head, on the device "meta"."""
    with torch.device("meta"):
        layers = [
            nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(6)
        ]
        model = Applied(nn.Sequential(*layers, nn.Linear(512, 4096))).to(torch.bfloat16)
        return model, torch.empty(batch, 128, 512, dtype=torch.bfloat16)


@pytest.mark.slow
def test_the_largest_batch_of_each_row_fits_and_a_larger_one_does_not() -> None:
    rows = {row.name: row for row in rotoff.plan(*lm(8), device=device_of(240)).steps}
    assert {"plain PyTorch", "checkpoint every block", "all saved tensors to the host"} < {*rows}
    for name in ("plain PyTorch", "checkpoint every block", "all saved tensors to the host"):
        most = rows[name].largest_batch
        assert most is not None
        for batch, fits in ((most, True), (most + 1 + most // 50, False)):
            (row,) = (row for row in rotoff.plan(*lm(batch), device=device_of(240)).steps if row.name == name)
            assert row.fits is fits


@pytest.mark.slow
def test_the_largest_batch_of_the_table_is_what_largest_finds() -> None:
    found = rotoff.plan(*lm(8), device=device_of(48))
    assert found.placed[0].largest_batch == rotoff.largest(lm, device=device_of(48)).size


def test_no_row_beats_the_bound_and_moving_all_costs_the_link() -> None:
    found = rotoff.plan(*lm(8), device=device_of(120))
    rows = {row.name.split(" + ")[0]: row for row in found.steps}
    assert all(row.step_time >= found.bound_time * (1 - 1e-9) for row in found.steps if row.fits)
    assert (
        found.best is not None and found.best.step_time <= min(row.step_time for row in found.steps if row.fits) * 1.02
    )
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
    assert {whole.steps[0].peak_bytes} == {row.peak_bytes for row in whole.placed} == {whole.needed_bytes}


def test_master_weights_and_their_states_count_twelve_bytes_for_each_element() -> None:
    model, x = lm(8)
    elements = sum(p.numel() for p in model.parameters())
    plain, masters = (rotoff.plan(model, x, device="V100", master_weights=on) for on in (False, True))
    assert masters.resident_bytes["adam states"] == 12 * elements == plain.resident_bytes["adam states"] + 8 * elements
    more = masters.steps[0].peak_bytes - plain.steps[0].peak_bytes
    assert more == pytest.approx(8 * elements, rel=1e-2)
    assert "without float32 master weights" in str(plain) and "master weights in float32" in str(masters)
    with pytest.raises(rotoff.OptionError, match="master_weights is 1; give true or false"):
        rotoff.plan(model, x, master_weights=1)


class Both(nn.Module):
    """Returns logits beside a loss, and takes whatever else it is given."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(64, 2048), nn.GELU(), nn.Linear(2048, 64)) for _ in range(8)]
        self.layers = nn.Sequential(*blocks, nn.Linear(64, 4096))

    def forward(self, x: torch.Tensor, **_: object) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": logits.float().logsumexp(-1).mean(), "logits": logits}


def test_options_of_the_wrapper_are_options_of_plan_and_no_arguments_of_the_model() -> None:
    model, x = Both(), torch.empty(512, 64)
    wrapped = rotoff.Checkpointable(model, backward_from="loss")
    found = rotoff.plan(model, x, mem_limit="13 MiB", backward_from="loss", device="V100")
    assert [row.min_mem_limit for row in found] == [
        row.min_mem_limit for row in rotoff.plan(wrapped, x, mem_limit="13 MiB", device="V100")
    ]
    without = rotoff.plan(model, x, mem_limit="13 MiB", device="V100")
    assert found.chain.grad_bytes(len(found.chain)) < without.chain.grad_bytes(len(without.chain))
    tight = rotoff.plan(model, x, mem_limit=found.keep_all_bytes - 1, backward_from="loss", device="V100")
    assert tight.best is not None and tight.best.setting.endswith("backward_from='loss')")
    with pytest.raises(rotoff.OptionError, match="is a Checkpointable; give backward_from to it alone"):
        rotoff.plan(wrapped, x, backward_from="loss")
