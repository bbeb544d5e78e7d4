"""`rotoff doctor` on the CPU, from end to end, and with each of its checks failing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rotoff
from rotoff.cli import main
from rotoff.core.simulator import Event, Trace
from rotoff.runtime.links import bandwidth, host_file, pinned
from rotoff.runtime.links.file import FileLink
from rotoff.tools.doctor import examination, host_tier, machine, model, training
from rotoff.tools.doctor.examination import CHECKS, examine, find_device
from rotoff.tools.doctor.findings import ATTENTION, FAILED, OK, Finding, Report
from rotoff.tools.doctor.model import Size, SmallModel

CPU = torch.device("cpu")
TINY = Size(layers=3, width=32, heads=2, context=16, batch=2)
MEASURED = CHECKS[CHECKS.index("small model") :]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model and the file in a hundredth of their bytes."""
    monkeypatch.setattr(model, "SIZES", (TINY,))
    monkeypatch.setattr(host_tier, "FILE", 1 << 20)
    monkeypatch.setattr(host_tier, "COPIED", {"cpu": 1 << 20})


@pytest.fixture
def small(tiny: None) -> Any:
    made = SmallModel(CPU, 0.0, 1)
    yield made
    made.close()


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def checks(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {check["check"]: check for check in data["checks"]}


# -- from end to end


@pytest.mark.parametrize("size", [TINY, pytest.param(model.SIZES[-1], marks=pytest.mark.slow)])
def test_a_cpu_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], size: Size
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model, "SIZES", (size,))
    monkeypatch.setattr(training, "OFF", 10.0)  # other tests may run beside this one
    monkeypatch.setattr(training, "LATE", 1.0)
    monkeypatch.setattr(host_tier, "BESIDE", (0.0, float("inf")))
    monkeypatch.setattr(machine, "LOADED", float("inf"))
    threads = torch.get_num_threads()
    assert main(["doctor", "--device", "cpu", "--seconds", "0"]) == 0
    said = capsys.readouterr().out
    data = read(tmp_path / "doctor.json")
    assert (data["format"], data["version"], data["rotoff"]) == ("rotoff.doctor", 1, rotoff.__version__)
    assert (data["device"], data["complete"], data["verdict"]) == ("cpu", True, "ok")
    assert [check["check"] for check in data["checks"]] == list(CHECKS)
    for check in data["checks"]:
        assert set(check) == {"check", "verdict", "sentence", "figures", "error", "seconds"}
        assert f"{check['verdict']:<9}  {check['check']}: {check['sentence']}" in said
    found = {name: check["figures"] for name, check in checks(data).items()}
    assert found["versions"]["torch"] == torch.__version__
    assert found["memory"]["host"]["total"] >= found["memory"]["host"]["available"] > 0
    assert found["host bytes"]["nbytes"] == host_tier.FILE
    assert all(found["bandwidth"][which] > 0 for which in ("out", "in", "out_beside_in", "in_beside_out"))
    assert found["small model"]["smallest_limit"] < found["small model"]["keep_all_bytes"]
    for name in ("peak bytes", "step time"):
        assert [row["share"] for row in found[name]["rows"]] == [1.0, 0.7, 0.45]
        assert all(row["predicted"] > 0 for row in found[name]["rows"])
    peaks = found["peak bytes"]["rows"]
    assert peaks[0]["limit"] == found["small model"]["keep_all_bytes"]
    assert peaks[0]["asked"] > peaks[1]["asked"] > peaks[2]["asked"]
    assert all(row["asked"] <= row["predicted"] <= row["limit"] for row in peaks)
    assert all(row["bit_for_bit"] for row in found["gradients"]["rows"])
    assert all(row["pairs"] >= training.PAIRS for row in found["step time"]["rows"])
    assert found["overlap"]["moved"] > 0
    assert 0 <= found["overlap"]["measured"] <= 1
    assert torch.get_num_threads() == threads
    assert [row["kind"] for row in found["odd steps"]["rows"]] == ["bfloat16", "a skipped block"]
    assert [row["updates"] for row in found["optimizer steps"]["rows"]] == [None, "after", "during"]
    for row in found["odd steps"]["rows"] + found["optimizer steps"]["rows"][1:]:
        assert row["bit_for_bit"]
    assert "13 ok, 0 attention, 0 failed" in said
    assert said.splitlines()[-1] == "WORKS"
    assert [path.name for path in tmp_path.iterdir()] == ["doctor.json"]


@pytest.mark.slow
def test_json_alone_is_printed_where_asked(tiny: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.json"
    main(["doctor", "--device", "cpu", "--seconds", "0", "--json", "-o", str(out)])
    assert json.loads(capsys.readouterr().out) == read(out)


# -- what a check raises


SOURCES = {
    "versions": (machine, "processor"),
    "memory": (machine, "available_bytes"),
    "host bytes": (host_tier, "choose_directory"),
    "bandwidth": (host_tier, "measure_bandwidth"),
    "small model": (model, "Checkpointable"),
    "peak bytes": (model, "record"),
    "step time": (training.statistics, "median"),
    "overlap": (training, "hidden"),
    "optimizer steps": (SmallModel, "trained"),
}


@pytest.mark.parametrize("name", [*SOURCES, "host waits", "gradients", "odd steps"])
@pytest.mark.grid
def test_a_check_that_raises_is_said_and_the_others_run(
    tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    if name in ("versions", "memory", "host bytes", "bandwidth", "peak bytes", "small model", "optimizer steps"):
        where, what = SOURCES[name]
    else:  # these need what others need too
        where, what = training, name.replace(" ", "_")

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("it is broken\nin two lines")

    monkeypatch.setattr(where, what, broken)
    assert main(["doctor", "--device", "cpu", "--seconds", "0", "-o", str(tmp_path / "doctor.json")]) == 1
    data = read(tmp_path / "doctor.json")
    found = checks(data)
    assert list(found) == list(CHECKS)
    assert (data["verdict"], data["complete"]) == (FAILED, True)
    failed = {check for check, finding in found.items() if finding["verdict"] == FAILED}
    assert failed == ({name} if name != "small model" else set(MEASURED))
    assert found[name]["sentence"].startswith("RuntimeError: it is broken; ")
    assert "in two lines" in found[name]["error"]
    assert f"{name}: RuntimeError: it is broken" in capsys.readouterr().out
    for other in failed - {name}:
        assert found[other]["sentence"] == "not checked, since 'small model' failed"


@pytest.mark.slow
def test_what_was_found_before_an_interrupt_is_on_disk(
    tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: SmallModel) -> Finding:
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "peak_bytes", interrupted)
    threads = torch.get_num_threads()
    assert main(["doctor", "--device", "cpu", "--seconds", "0", "-o", str(tmp_path / "doctor.json")]) == 130
    assert "rotoff: interrupted" in capsys.readouterr().err
    data = read(tmp_path / "doctor.json")
    assert not data["complete"]
    assert list(checks(data)) == list(CHECKS[: CHECKS.index("peak bytes")])
    assert torch.get_num_threads() == threads


# -- what is refused


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "tpu"], "device is 'tpu'; it is cpu, cuda, or one of several such as cuda:1"),
        (["--device", "cuda:x"], "device is 'cuda:x'; it is"),
        (["--device", "meta"], "device is 'meta'; it is"),
        (["--seconds", "many"], "'many' is no number of seconds from 0 to 3600"),
        (["--seconds", "-1"], "'-1' is no number of seconds from 0 to 3600"),
        (["--seconds", "nan"], "'nan' is no number of seconds"),
        (
            ["-o", "nowhere/doctor.json"],
            "rotoff doctor: nowhere/doctor.json cannot be written (No such file or directory); name another file with",
        ),
    ],
)
def test_wrong_usage_is_one_sentence_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(examination, "examine", lambda *_: pytest.fail("it was begun"))
    assert main(["doctor", *arguments]) == 2
    spoken = capsys.readouterr()
    assert said in spoken.err
    assert spoken.out == ""
    assert not (tmp_path / "doctor.json").exists()


def test_a_folder_that_may_not_be_written_to_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "doctor.json").mkdir()
    assert main(["doctor", "-o", str(tmp_path / "doctor.json")]) == 2
    assert str(tmp_path / "doctor.json") in capsys.readouterr().err


@pytest.mark.parametrize("build", [None, "13.0"])
def test_cuda_that_is_not_there(monkeypatch: pytest.MonkeyPatch, build: str | None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", build)
    with pytest.raises(
        rotoff.OptionError, match="is built without CUDA" if build is None else "finds no GPU; see whether"
    ):
        find_device("cuda")
    assert find_device(None) == CPU


def test_one_of_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert find_device(None) == find_device("cuda") == torch.device("cuda", 0)
    assert find_device("cuda:1") == torch.device("cuda", 1)
    assert find_device("cpu") == find_device("cpu:0") == CPU
    with pytest.raises(rotoff.OptionError, match="torch finds 2: the last is cuda:1"):
        find_device("cuda:2")


def test_a_torch_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Broken:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "torch":
                raise OSError("libcudnn.so.9: cannot open shared object file")

    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "torch")
    assert main(["doctor"]) == 2
    assert (
        "torch cannot be imported (OSError libcudnn.so.9: cannot open shared object file); " in capsys.readouterr().err
    )


def test_without_torch_it_is_one_sentence(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from rotoff.cli import main; sys.exit(main(['doctor']))"
    told = {**os.environ, "PYTHONPATH": str(Path(rotoff.__file__).parent.parent)}
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=told, check=False
    )
    assert ran.returncode == 2
    assert ran.stderr == "rotoff doctor: the checks train a model, which needs torch: pip install torch\n"
    assert list(tmp_path.iterdir()) == []


# -- verdicts


@pytest.mark.parametrize(
    ("version", "verdict"), [("2.11.0", OK), ("2.15.1+cu130", OK), ("2.10.2", ATTENTION), ("3.0.0a0", ATTENTION)]
)
def test_a_torch_that_was_not_tested(monkeypatch: pytest.MonkeyPatch, version: str, verdict: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    finding = machine.versions(CPU)
    assert finding.verdict == verdict
    assert ("tested with torch 2.11 to 2.15" in finding.sentence) == (verdict == ATTENTION)


def test_the_tested_versions_are_those_of_the_package() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    (low, newest), (high, last) = machine.TESTED
    assert f'torch = ["torch>={low}.{newest},<{high}.{last + 1}"]' in text


@pytest.mark.parametrize(
    ("free", "host", "verdict", "said"),
    [
        (70, 40, OK, "free of"),
        (40, 40, ATTENTION, "other processes hold the rest"),
        (70, 2, ATTENTION, "ROTOFF_HOST_MEMORY"),
    ],
)
def test_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch, free: int, host: int, verdict: str, said: str) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free << 30, 80 << 30))
    monkeypatch.setattr(machine, "available_bytes", lambda: host << 30)
    finding = machine.memory(torch.device("cuda", 0))
    assert finding.verdict == verdict
    assert said in finding.sentence


def test_pages_that_the_driver_does_not_register(monkeypatch: pytest.MonkeyPatch) -> None:
    class Segment:
        def __init__(self, address: int) -> None:
            self._address = address

        def close(self) -> None:
            pass

    taken: list[int] = []

    def pin(nbytes: int, _: torch.device) -> list[Segment]:
        taken.append(nbytes)
        return [Segment(1), Segment(address)]

    monkeypatch.setattr(host_tier, "pin", pin)
    monkeypatch.setattr(host_tier, "available_bytes", lambda: 4 << 30)
    came = [True, True, False]
    monkeypatch.setattr(host_tier, "device_bytes_across", lambda *_: came.pop(0))
    for address, verdict in ((1, OK), (0, ATTENTION), (1, FAILED)):
        finding = host_tier.host_bytes(torch.device("cuda", 0))
        assert finding.verdict == verdict
        assert finding.figures["registered"] == 1 + address
    assert taken == [1 << 30] * 3  # a quarter of what is free


def test_a_slow_link_to_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"out": 3e9, "in": 12e9, "out_beside_in": 2e9, "in_beside_out": 9e9}
    monkeypatch.setattr(host_tier, "bandwidths", lambda *_: rates)
    finding = host_tier.bandwidth(torch.device("cuda", 0))
    assert finding.verdict == ATTENTION
    assert "out 3 GB/s, in 12 GB/s; both at once 2 GB/s and 9 GB/s" in finding.sentence


@pytest.mark.parametrize(("out", "beside"), [(24e9, 0.4e9), (24e9, 60e9), (5e15, 5e15), (24e9, float("inf"))])
def test_bandwidths_that_cannot_be_right(monkeypatch: pytest.MonkeyPatch, out: float, beside: float) -> None:
    rates = {"out": out, "in": out, "out_beside_in": beside, "in_beside_out": beside}
    monkeypatch.setattr(host_tier, "bandwidths", lambda *_: rates)
    for device in (CPU, torch.device("cuda", 0)):
        finding = host_tier.bandwidth(device)
        assert (finding.verdict, "that cannot be right" in finding.sentence) == (ATTENTION, True)


@pytest.mark.parametrize(("load", "verdict"), [(0.4, OK), (3.0, ATTENTION)])
def test_a_busy_machine_is_told_so(monkeypatch: pytest.MonkeyPatch, load: float, verdict: str) -> None:
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 2)
    assert machine.load().verdict == verdict


@pytest.mark.parametrize(
    ("verdicts", "said"),
    [
        ({}, "WORKS"),
        ({"memory": ATTENTION}, "WORKS"),
        ({"overlap": ATTENTION, "load": ATTENTION}, "WORKS, SLOWER THAN PREDICTED (see load, overlap)"),
        ({"overlap": ATTENTION, "gradients": FAILED}, "DO NOT USE (send doctor.json)"),
    ],
)
def test_the_last_line(verdicts: dict[str, str], said: str) -> None:
    report = Report("cpu", [Finding(verdicts.get(name, OK), "", check=name) for name in CHECKS], complete=True)
    assert report.conclusion("doctor.json") == said
    report.complete = False
    assert report.conclusion("doctor.json") == "DO NOT USE (send doctor.json)"


def test_both_directions_of_a_file_share_its_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two directions of equal copies on one lane, of which each has half of the time."""
    monkeypatch.setattr(host_file, "IN_RAM", frozenset())
    link = FileLink(tmp_path)
    clock = iter(range(1000))
    monkeypatch.setattr("rotoff.runtime.links.file.time.perf_counter", lambda: float(next(clock)))
    out, back = bandwidth.both_at_once(link, 1000, copies=4)
    link.close()
    assert not link.timed
    # of 8 copies of a second, with a second between each two: from the first one in to the last one out there are three
    # of each kind
    assert out == back == pytest.approx(3 * 1000 / 11)


def changed(by: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned steps have gradients that are changed by `by`."""
    real = SmallModel.gradients

    def gradients(self: SmallModel, run: nn.Module) -> list[torch.Tensor]:
        return [by(g) if run is self.planned else g for g in real(self, run)]

    monkeypatch.setattr(SmallModel, "gradients", gradients)


@pytest.mark.parametrize(
    "by", [lambda g: 1.001 * g, lambda g: g * float("nan"), lambda g: g * float("inf"), lambda g: g + 1e-9]
)
@pytest.mark.grid
def test_other_gradients_than_the_plain_models(
    small: SmallModel, monkeypatch: pytest.MonkeyPatch, by: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    changed(by, monkeypatch)
    finding = training.gradients(small)
    assert finding.verdict == FAILED
    assert "at limits 100%, 70%, 45%" in finding.sentence
    json.dumps(finding.figures, allow_nan=False)


@pytest.mark.parametrize("by", [lambda g: 1.1 * g, lambda g: g * float("nan"), lambda g: g + 1e-9])
def test_other_gradients_in_odd_steps(
    small: SmallModel, monkeypatch: pytest.MonkeyPatch, by: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    changed(by, monkeypatch)
    finding = training.odd_steps(small)
    assert finding.verdict == FAILED
    assert "with bfloat16, a skipped block" in finding.sentence


def test_other_parameters_after_updates(small: SmallModel, monkeypatch: pytest.MonkeyPatch) -> None:
    real = SmallModel.trained

    def trained(self: SmallModel, updates: str | None) -> Any:
        found, figures = real(self, updates)
        return [p + 0.01 * (updates == "during") for p in found], figures

    monkeypatch.setattr(SmallModel, "trained", trained)
    assert training.optimizer_steps(small).verdict == FAILED


def test_gradients_to_rounding_are_enough_on_a_gpu(small: SmallModel, monkeypatch: pytest.MonkeyPatch) -> None:
    changed(lambda g: g * (1 + 1e-6), monkeypatch)
    small.planned  # noqa: B018 - is measured on the CPU
    small.device = torch.device("cuda", 0)
    finding = training.gradients(small)
    assert finding.verdict == OK
    assert "those of a plain step to 1.0e-06 of the largest element" in finding.sentence
    changed(lambda g: g * (1 + 1e-3), monkeypatch)
    assert training.gradients(small).verdict == FAILED


def test_a_machine_that_computes_no_step_twice(small: SmallModel, monkeypatch: pytest.MonkeyPatch) -> None:
    real = SmallModel.gradients
    noise = torch.Generator()
    monkeypatch.setattr(
        SmallModel, "gradients", lambda *call: [g + torch.rand(g.shape, generator=noise) for g in real(*call)]
    )
    finding = training.gradients(small)
    assert finding.verdict == FAILED
    assert "no step can be repeated here" in finding.sentence


@pytest.mark.parametrize(
    ("more", "verdict", "said"),
    [
        ({"asked": 1.3}, FAILED, "a step exceeds its limit"),
        ({"asked": 0.5}, ATTENTION, "not as predicted"),
        ({"given": 1.1, "slack": 2**30}, OK, "expandable_segments"),
        ({"given": 1.1, "slack": 0}, ATTENTION, "more than it leaves unsplit"),
    ],
)
@pytest.mark.grid
def test_bytes_beside_the_limit(
    small: SmallModel, monkeypatch: pytest.MonkeyPatch, more: dict[str, float], verdict: str, said: str
) -> None:
    """more: times the limit (bytes, of the slack), in place of what is measured."""

    def peak(self: SmallModel, _: nn.Module) -> dict[str, int]:
        limit, predicted = self.planned.mem_limit or 0, self.planned.get_expected_memory()
        return {"asked": predicted} | {k: int(v if k == "slack" else v * limit) for k, v in more.items()}

    monkeypatch.setattr(SmallModel, "peak", peak)
    finding = training.peak_bytes(small)
    assert finding.verdict == verdict
    assert said in finding.sentence


@pytest.mark.parametrize(("slower", "verdict"), [(1.0, OK), (1.1, OK), (1.3, ATTENTION), (0.7, ATTENTION)])
@pytest.mark.grid
def test_seconds_beside_the_predicted_ones(
    small: SmallModel, monkeypatch: pytest.MonkeyPatch, slower: float, verdict: str
) -> None:
    def timed(self: SmallModel, run: nn.Module) -> float:
        plain = self.planned.profile.chain.compute_time
        return plain if run is self.model else slower * self.planned.get_expected_makespan()

    monkeypatch.setattr(SmallModel, "timed", timed)
    finding = training.step_time(small)
    assert finding.verdict == verdict
    assert all(row["ratio_error"] == pytest.approx(slower - 1) for row in finding.figures["rows"])
    assert all(row["pairs"] == training.PAIRS for row in finding.figures["rows"])


def event(text: str, lane: str, start: float, end: float) -> Event:
    return Event(rotoff.parse(text), lane, start, end, 0, 0, False)


def test_copies_hidden_behind_compute() -> None:
    work = [event("F_all 1", "compute", 0, 2), event("F_all 2", "compute", 3, 4)]
    copies = [event(str(rotoff.Op(rotoff.OpKind.OFFLOAD, 1)), "d2h", 1, 5)]
    trace = Trace(5, 0, 0, (*work, *copies), 1, 0, 0, 0)
    assert training.hidden(trace) == pytest.approx(2 / 4)
    assert training.hidden(Trace(5, 0, 0, tuple(work), 0, 0, 0, 0)) == 1


def test_copies_that_are_less_hidden_than_predicted(small: SmallModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "LATE", -0.01)  # any plan hides no more than all
    monkeypatch.setattr(training, "hidden", lambda _: 1.0)
    finding = training.overlap(small)
    assert finding.verdict == ATTENTION
    assert (
        "100% of the copies' time is hidden behind compute (100% in the best of 3 steps), 100% predicted"
        in finding.sentence
    )


@pytest.mark.filterwarnings("ignore:called a synch", "ignore:something else")  # of steps in which nobody counts
def test_waits_of_the_host_beside_a_plain_step(small: SmallModel, monkeypatch: pytest.MonkeyPatch) -> None:
    small.planned  # noqa: B018 - is measured on the CPU
    small.device = torch.device("cuda", 0)
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    finding = training.host_waits(small)
    assert (finding.verdict, finding.sentence) == (OK, "as many as in a plain step: 0")
    assert modes == ["warn", "default"] * 3

    def wait(*_: Any) -> None:
        for text in ("called a synchronizing CUDA operation (Triggered internally)", "something else"):
            warnings.warn(text, stacklevel=1)

    hook = small.planned.register_forward_hook(wait)
    finding = training.host_waits(small)
    hook.remove()
    assert finding.verdict == ATTENTION
    assert finding.sentence.startswith(f"1 more than in a plain step, at {__file__}:")
    assert [row["waits"] for row in finding.figures["rows"]] == [0, 1, 1]


def test_the_size_goes_by_speed_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    large, medium, least = model.SIZES
    assert SmallModel(CPU, 0, 1).size == least
    for free, per_second, size in (
        (80, 5e13, large),
        (6, 5e13, medium),
        (80, 5e12, medium),
        (1, 5e13, least),
        (80, 5e10, least),
    ):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free << 30, 80 << 30))
        monkeypatch.setattr(model, "speed", lambda _, per_second=per_second: per_second)
        assert SmallModel(gpu, 0, 1).size == size


def test_the_worst_verdict_is_the_reports() -> None:
    report = Report("cpu")
    assert report.verdict == OK
    for verdict in (OK, ATTENTION, OK):
        report.findings.append(Finding(verdict, ""))
    assert (report.verdict, report.count(OK)) == (ATTENTION, 2)
    report.findings.insert(0, Finding(FAILED, ""))
    assert report.verdict == FAILED


def test_each_check_is_told_of_as_it_ends(tiny: None) -> None:
    told: list[tuple[int, str]] = []
    report = examine(CPU, 0.0, lambda report, finding: told.append((len(report.findings), finding.check)))
    assert told == list(enumerate(CHECKS, 1))
    assert report.complete


def test_a_limit_on_addresses_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (8 << 30, 8 << 30))
    assert "and at most 8.00 GiB of addresses for this process" in machine.memory(CPU).sentence
    assert pinned.available_bytes() is not None


@pytest.mark.slow
def test_a_default_device_without_bytes_changes_no_check(tiny: None) -> None:
    with torch.device("meta"):
        report = examine(CPU, 0.0)
    assert {"small model", "gradients"} <= {one.check for one in report.findings if one.verdict == OK}
