"""`rotoff doctor` on the CPU from end to end, and the verdicts of its checks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import rotoff
from rotoff.cli import main
from rotoff.tools import doctor
from rotoff.tools.doctor import ATTENTION, CHECKS, FAILED, OK, SHARES, Finding, Report

NAMES = [check.__name__.replace("_", " ") for check in CHECKS]
CPU, GPU = map(torch.device, ("cpu", "cuda"))
OF_LOAD = ("planned steps",)  # whose verdicts depend on what else runs


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model in a hundredth of its bytes."""
    monkeypatch.setattr(doctor, "SIZES", ((0, (3, 32, 2, 16, 2)),))


def examined(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The report in a file, and its checks by name."""
    data = json.loads(path.read_text())
    return data, {check["check"]: check for check in data["checks"]}


def test_a_cpu_from_end_to_end(
    tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    assert main(["doctor", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    data, checks = examined(tmp_path / "doctor.json")
    assert (data["format"], data["version"], data["rotoff"]) == ("rotoff.doctor", 4, rotoff.__version__)
    assert (data["device"], [*checks]) == ("cpu", NAMES)
    assert {name for name, check in checks.items() if check["verdict"] != OK} <= {*OF_LOAD}
    for check in checks.values():
        assert set(check) == {"check", "verdict", "sentence", "figures", "error", "seconds"}
        assert f"{check['verdict']:<9}  {check['check']}: {check['sentence']}" in said
    assert said.splitlines()[-1].startswith("WORKS")
    found = {name: check["figures"] for name, check in checks.items()}
    assert found["machine"]["host_total"] >= found["machine"]["host_room"] > 0
    assert found["planned steps"]["link"]["d2h_bandwidth"] > 0
    rows = found["planned steps"]["rows"]
    assert [row["share"] for row in rows] == [1.0, 0.7, 0.45]
    assert rows[0]["asked"] > rows[1]["asked"] > rows[2]["asked"]
    assert all(row["asked"] <= row["predicted_bytes"] <= row["limit"] for row in rows)
    assert all(row["measured"] > 0 for row in rows)
    assert [row["updates"] for row in found["optimizer steps"]["rows"]] == ["after", "during"]
    assert all(row["bit_for_bit"] for row in rows + found["optimizer steps"]["rows"])
    assert [path.name for path in tmp_path.iterdir()] == ["doctor.json"]
    assert torch.get_num_threads() == threads


def test_a_check_that_raises_is_said_and_the_others_still_run(
    tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("it is broken\nin two lines")

    monkeypatch.setattr(rotoff.Checkpointable, "measure", broken)
    out = tmp_path / "found.json"
    assert main(["doctor", "--device", "cpu", "--json", "-o", str(out)]) == 1
    assert json.loads(capsys.readouterr().out) == json.loads(out.read_text())
    data, checks = examined(out)
    assert ([*checks], data["verdict"]) == (NAMES, FAILED)
    assert [name for name, check in checks.items() if check["verdict"] == FAILED] == NAMES[1:]
    assert checks["planned steps"]["sentence"].startswith("RuntimeError: it is broken; ")
    assert "in two lines" in checks["planned steps"]["error"]


def test_what_was_found_before_an_interrupt_is_on_disk(
    tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(rotoff.Checkpointable, "measure", interrupted)
    assert main(["doctor", "--device", "cpu", "-o", str(tmp_path / "doctor.json")]) == 130
    assert "rotoff: interrupted" in capsys.readouterr().err
    data, checks = examined(tmp_path / "doctor.json")
    assert data["verdict"] == FAILED and [*checks] == NAMES[:1]


def test_a_torch_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Broken:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "torch":
                raise OSError("libcudnn.so.9: cannot open shared object file")

    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "torch")
    assert main(["doctor"]) == 2
    assert capsys.readouterr().err == "rotoff doctor: libcudnn.so.9: cannot open shared object file\n"


# -- verdicts


def test_the_tested_versions_are_those_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    (low, newest), (high, last) = doctor.TESTED
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'torch = ["torch>={low}.{newest},<{high}.{last + 1}"]' in text
    for version, verdict in (("2.11.0", OK), ("2.15.1+cu130", OK), ("2.10.2", ATTENTION), ("3.0.0a0", ATTENTION)):
        monkeypatch.setattr(torch, "__version__", version)
        assert doctor.machine(CPU).verdict == verdict


SAME, OTHER = {"bit_for_bit": True, "largest": 0.0}, {"bit_for_bit": False}


def stepped(of: Any = CPU, repeated: Any = SAME, rate: float = 20, **row: Any) -> Finding:
    """What is found in planned steps of which one is that `row`. rate: of the link to the host, in GB/s."""
    usual = {
        "limit": 100,
        "predicted_bytes": 90,
        "asked": 90,
        "measured_ratio": 1.0,
        "predicted_ratio": 1.0,
        "plain": 1.0,
    }
    steps = [{**SAME, **usual, "share": share} for share in SHARES]
    steps[1] |= row
    return doctor.steps_found(of, {"d2h_bandwidth": 24e9, "h2d_bandwidth": 1e9 * rate}, repeated, steps)


VERDICTS: list[tuple[Finding, str, str]] = [
    (stepped(GPU), OK, "copies to the host 24 GB/s, back 20 GB/s"),
    (stepped(GPU, rate=3), ATTENTION, "slow for a GPU"),
    (stepped(CPU, rate=3), OK, "back 3 GB/s"),
    (stepped(), OK, "gradients of a plain step bit for bit; measured of predicted: 90 B of 90 B"),
    (stepped(**OTHER, largest=1e-9), FAILED, "not the same at limits 70%"),
    (stepped(GPU, **OTHER, largest=1e-6), OK, "of a plain step up to rounding"),
    (stepped(GPU, **OTHER, largest=1e-3), FAILED, "not the same at limits 70%"),
    (stepped(GPU, **OTHER, largest=None), FAILED, "not the same at limits 70%"),
    (stepped(CPU, {**OTHER, "largest": 1.0}), FAILED, "no step can be repeated here"),
    (stepped(asked=130), FAILED, "a step exceeds its limit"),
    (stepped(asked=50), ATTENTION, "not as predicted"),
    (stepped(asked=95), ATTENTION, "not as predicted"),
    (stepped(retries=2), ATTENTION, "ran out 2 times"),
    (stepped(measured_ratio=1.1), OK, ""),
    (stepped(measured_ratio=1.3), ATTENTION, "times are more than 15% off"),
    (stepped(predicted_ratio=1.5), ATTENTION, "times are more than 15% off"),
]


@pytest.mark.parametrize("row", range(len(VERDICTS)))
def test_what_figures_say(row: int) -> None:
    finding, verdict, said = VERDICTS[row]
    assert finding.verdict == verdict and said in finding.sentence


@pytest.mark.parametrize(
    ("verdicts", "said"),
    [
        ({}, "WORKS"),
        ({"machine": ATTENTION, "planned steps": ATTENTION}, "WORKS (but see machine, planned steps)"),
        ({"machine": ATTENTION, "planned steps": FAILED}, "DO NOT USE (send doctor.json)"),
    ],
)
def test_the_last_line(verdicts: dict[str, str], said: str) -> None:
    report = Report("cpu", [Finding(verdicts.get(name, OK), "", check=name) for name in NAMES])
    assert report.conclusion("doctor.json") == said
    del report.findings[-1]
    assert report.conclusion("doctor.json") == "DO NOT USE (send doctor.json)"
