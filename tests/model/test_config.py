"""One value for all settings, from a dict or a file, for `attach` and the callbacks."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Residual
from torch import nn

import rotoff
from rotoff.errors import LimitError, OptionError
from rotoff.tools.config import RotoffConfig


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Residual(16) for _ in range(4)])


def test_every_argument_of_the_class_and_of_its_plan_is_a_field() -> None:
    wanted = {*inspect.signature(rotoff.Checkpointable).parameters} - {"model"}
    wanted |= {*inspect.signature(rotoff.Checkpointable.compute_sequence).parameters} - {"self", "up_to", "optimizer"}
    assert wanted <= {*inspect.signature(RotoffConfig).parameters}
    for name in wanted - {"mem_limit", "process_group", "options"}:  # with the same default
        for function in (rotoff.Checkpointable, rotoff.Checkpointable.compute_sequence):
            found = inspect.signature(function).parameters.get(name)
            assert found is None or found.default == getattr(RotoffConfig(), name), name


@pytest.mark.parametrize("suffix", ["yaml", "yml", "json"])
def test_a_file_trains_as_the_arguments_do(suffix: str, tmp_path: Path) -> None:
    said = {"mem_limit": "500 KiB", "mode": "remat", "stages": 3, "options": {"refine": False}}
    path = tmp_path / f"train.{suffix}"
    if suffix == "json":
        path.write_text(json.dumps(said))
    else:
        yaml = pytest.importorskip("yaml")
        path.write_text(yaml.safe_dump({"lr": 0.1, "rotoff": said}))
    config = RotoffConfig.load(path)
    assert RotoffConfig.from_dict(config.to_dict()) == config
    assert config.to_dict() == said
    x = torch.randn(256, 16)
    found = []
    for given, more in ((config, {}), ("500 KiB", {"mode": "remat", "stages": 3, "refine": False})):
        model = net()
        planned = rotoff.attach(model, given, **more)
        torch.manual_seed(1)
        model(x).square().mean().backward()
        assert not any(op.kind is rotoff.OpKind.OFFLOAD for op in planned.sequence)
        told = planned.mem_limit, planned.mem_slots, planned.sequence.mode, len(planned.chain)
        found.append((told, [p.grad for p in model.parameters()]))
    assert found[0][0] == found[1][0]
    assert all(map(torch.equal, found[0][1], found[1][1]))


@pytest.mark.parametrize("mode", ["offload", "joint"])  # which is the default
def test_an_argument_beside_it_counts_more(mode: str) -> None:
    x = torch.randn(8, 16)
    planned = rotoff.attach(net(), RotoffConfig(mem_limit=1000, mode="remat"), mode=mode)
    with pytest.raises(rotoff.InfeasibleError, match=f"in mode {mode}; the limit is 1000 B"):
        planned.measure(x).display()


def test_nothing_said_is_automatic_and_a_device_limit_places() -> None:
    assert RotoffConfig().arguments() == {"mem_limit": "auto"}
    model = net()
    optimizer = torch.optim.SGD(model.parameters())
    placed = rotoff.attach(model, RotoffConfig(device_limit="1 GiB"), optimizer=optimizer)
    assert placed.mem_limit == 2**30


def test_of_two_limits_none_is_dropped() -> None:
    model, config = net(), RotoffConfig(mem_limit="500 KiB", mode="remat")
    optimizer = torch.optim.SGD(model.parameters())
    for given in ("1 MiB", config):
        with pytest.raises(LimitError, match="device_limit is '2 MiB'; give one of them"):
            rotoff.attach(model, given, optimizer=optimizer, device_limit="2 MiB")
    assert rotoff.attach(model=model, mem_limit="2 MiB").mem_limit == 2**21


@pytest.mark.parametrize("settings", [RotoffConfig(mem_limit="1 MiB"), {"mem_limit": "1 MiB"}, "train.yaml"])
def test_settings_in_place_of_a_limit_are_sent_to_attach(settings: object) -> None:
    with pytest.raises(LimitError, match=r"go to rotoff\.attach\(model, config\)") as caught:
        rotoff.Checkpointable(net()).compute_sequence(settings)
    assert "mem_slots" not in str(caught.value)


@pytest.mark.parametrize("optimizer", ["adam", torch.optim.Adam, {}, [None]])
def test_what_is_no_optimizer_is_refused(optimizer: object) -> None:
    with pytest.raises(OptionError, match=r"optimizer is .*; give a torch.optim.Optimizer of the model's parameters"):
        rotoff.Checkpointable(net()).compute_sequence(device_limit="2 MiB", optimizer=optimizer)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ("mem_limt: 6 GiB", "names mem_limt; known names are mem_limit"),
        ("- 6 GiB", "give names and values"),
        ("{mem_limit", "c.yaml is not yaml: while parsing"),
        ("options: fast", "options is 'fast'; give names and values"),
        ("[" * 5000, "c.yaml is not yaml: maximum recursion depth"),
        ("&a [*a]", "give names and values"),
    ],
)
def test_a_file_that_is_none_says_so(said: str, sentence: str, tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "c.yaml").write_text(said)
    with pytest.raises(OptionError, match=sentence) as caught:
        RotoffConfig.load(tmp_path / "c.yaml")
    assert str(tmp_path / "c.yaml") in str(caught.value)
    assert "\n" not in str(caught.value)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"mem_limit": "6 GiBi"}, "unknown unit"),
    ({"mem_limit": "1 GiB", "device_limit": "2 GiB"}, "give one of them"),
    ({"mem_slots": "many"}, "mem_slots is 'many'; give a whole number"),
    ({"in_flight": 0}, "in_flight is 0"),
    ({"device_limit": "1 GiB", "updates": "never"}, "updates is 'never'; give 'during' or 'after'"),
    ({"device_limit": "1 GiB", "policy": "vdnn"}, "policy is 'vdnn'; with a device_limit give a mode alone"),
    ({"host_directory": 5}, "host_directory is 5; give the path of a directory"),
    ({"check": "maybe"}, "check is 'maybe'; give true or false"),
    ({"options": {"modee": "remat"}}, "modee is not an option; .*; did you mean mode"),
    ({"stages": [1, 2]}, "stages names 1, which is no module"),
    ({"backward_from": b"loss"}, "backward_from is b'loss'; give the key"),
]


@pytest.mark.parametrize(("said", "sentence"), BAD[:-2])  # of the others, only a model or Python can tell
def test_a_bad_value_of_a_file_is_refused_with_the_name_of_the_file(
    said: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "train.json"
    path.write_text(json.dumps(said))
    with pytest.raises((LimitError, OptionError), match=rf"train\.json: .*{sentence}"):
        RotoffConfig.load(path)


@pytest.mark.parametrize(("said", "sentence"), BAD)
def test_a_bad_value_is_refused_where_the_model_is_attached(said: dict[str, Any], sentence: str) -> None:
    model = net()
    with pytest.raises((LimitError, OptionError), match=sentence):
        rotoff.attach(model, RotoffConfig(**said))
    assert "forward" not in vars(model)


def test_a_file_of_a_trainer_with_merged_settings(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    text = "base: &base {lr: 1, seed: 2, 1: a, '1': b}\ntrain: {<<: *base, lr: 3}\n"
    text += "rotoff: {mem_limit: AUTO, mode: remat}\n"
    (tmp_path / "c.yaml").write_text(text)
    assert RotoffConfig.load(tmp_path / "c.yaml").mode == "remat"
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(OptionError, match=r"c\.yaml is not yaml: .* can't decode"):
        RotoffConfig.load(tmp_path / "c.yaml")


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, other = net(), torch.optim.AdamW(net().parameters())
    with pytest.raises(OptionError, match=r"optimizer is AdamW, which updates no parameter of the model"):
        rotoff.Checkpointable(model).compute_sequence(device_limit="2 MiB", optimizer=other)
    with pytest.raises(LimitError, match="device_limit is '2 MiBi'"):
        rotoff.Checkpointable(model).compute_sequence(device_limit="2 MiBi", optimizer=other)
