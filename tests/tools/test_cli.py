"""The command line: every command, JSON in and out, exit codes, and sentences instead of tracebacks."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

import rotoff
from rotoff.cli import main

STAGE = {"forward_time": 0.1, "backward_time": 0.2, "output_bytes": 2**20, "saved_bytes": 4 * 2**20}
CHAIN = rotoff.Chain(tuple(rotoff.Stage(f"s{i}", **STAGE) for i in range(8)), 1e8, 1e8, input_bytes=2**20, name="eight")
COMMANDS = ("profile", "plan", "audit", "largest", "solve", "sweep", "show", "doctor")
QUICK = ["--option", "refine=false"]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a chain and a plan for it, made the current one."""
    monkeypatch.chdir(tmp_path)
    CHAIN.save("chain.json")
    assert main(["solve", "chain.json", "--mem-limit", "20 MiB", "-o", "sequence.json", *QUICK]) == 0
    return tmp_path


def out(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """What a command prints to standard output; its exit code must be `code`."""
    capsys.readouterr()
    assert main(list(arguments)) == code, capsys.readouterr().err
    return capsys.readouterr().out


def error(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    """The one line that a failing command prints to standard error."""
    capsys.readouterr()
    assert main(list(arguments)) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert "Traceback" not in said.err
    return said.err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(capsys: pytest.CaptureFixture[str], command: str) -> None:
    text = out(capsys, command, "--help")
    example = text.split("example:\n")[1]
    assert example.strip().startswith(f"rotoff {command}")


def test_solve_writes_what_the_machine_accepts(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = rotoff.Sequence.load("sequence.json")
    trace = rotoff.simulate(CHAIN, made, "20 MiB")
    text = out(capsys, "solve", "chain.json", "--mem-limit", "20MiB", *QUICK)
    assert "mode joint" in text
    assert rotoff.format_bytes(trace.peak_bytes) in text
    data = json.loads(out(capsys, "solve", "chain.json", "--mem-limit", "20MiB", "--mode", "remat", "--json", *QUICK))
    assert data["mode"] == "remat"
    assert not any(op.startswith("offload") for op in data["ops"])


def test_a_chain_may_come_from_standard_input() -> None:
    def ran(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rotoff", *arguments]
        return subprocess.run(command, input=text, capture_output=True, text=True, cwd=Path(rotoff.__file__).parents[1])

    good = ran(json.dumps(CHAIN.to_dict()), "solve", "-", "--mem-limit", "20MiB", "--json", *QUICK)
    assert json.loads(good.stdout)["format"] == "rotoff.sequence"
    for text, said in (("nothing", "is not JSON"), ("[" * 100_000, "is not JSON"), ("{}", "not a chain")):
        bad = ran(text, "show", "-")
        assert bad.returncode == 2 and said in bad.stderr and "Traceback" not in bad.stderr


def test_letters_that_cannot_be_printed_are_replaced(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(printed, encoding="ascii"))
    assert main(["show", "chain.json", "sequence.json"]) == 0
    assert b"forward again" in printed.getvalue()


def test_sweep_has_a_row_for_every_limit_and_mode(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("sweep", "chain.json", "--mem-limit", "16MiB", "18MiB")
    data = json.loads(out(capsys, *asked, "--json", *QUICK))
    assert data["min_mem_limits"] == {mode: rotoff.min_mem_limit(CHAIN, mode) for mode in rotoff.core.sequence.MODES}
    rows = {(row["mode"], row["limit"] >> 20): row for row in data["rows"]}
    assert [*rows] == [(mode, limit) for mode in ("joint", "remat", "offload") for limit in (16, 18)]
    assert rows["joint", 18]["makespan"] <= min(row["makespan"] for (_, limit), row in rows.items() if limit == 18)
    bound = rows["joint", 18]["bound"]
    assert bound == rotoff.lower_bound(CHAIN, 18 * 2**20) <= rows["joint", 18]["makespan"] * (1 + 1e-9)
    lines = out(capsys, *asked, "--modes", "remat,joint", "--policies", "vdnn,chen", *QUICK).splitlines()
    assert [line.split()[2] for line in lines[1:9:2]] == ["remat", "joint", "vdnn", "chen"]
    assert f"smallest limit: remat {rotoff.format_bytes(rotoff.min_mem_limit(CHAIN, 'remat'))}, joint" in lines[-1]
    out(capsys, *asked, "-o", "rows.csv", *QUICK)
    assert (files / "rows.csv").read_text().splitlines()[0].startswith("limit,mode,makespan")
    assert out(capsys, "sweep", "chain.json", "--mem-limit", "2 MiB", code=1).count("does not fit") == 3


def test_show(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sequence = rotoff.Sequence.load("sequence.json")
    text, trace = out(capsys, "show", "chain.json", "sequence.json"), rotoff.simulate(CHAIN, sequence)
    assert text.strip() == rotoff.render(CHAIN, sequence)
    data = json.loads(out(capsys, "show", "chain.json", "sequence.json", "--json"))
    assert [row["name"] for row in data["stages"]] == [stage.name for stage in CHAIN.stages]
    assert (data["makespan"], data["peak_bytes"]) == (trace.makespan, trace.peak_bytes)
    assert [event["op"] for event in data["events"]] == [str(event.op) for event in trace.events]
    said = error(capsys, "show", "chain.json", "sequence.json", "--mem-limit", "8MiB", code=1)
    assert "more than the limit of 8388608" in said
    table = out(capsys, "show", "chain.json").splitlines()
    assert len(table) == 1 + 8 + 3
    assert "100 ms" in table[1] and "4.00 MiB" in table[1]


def test_show_draws_and_exports(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert out(capsys, "show", "chain.json", "sequence.json", "-o", "plan.json").endswith("written to plan.json\n")
    assert json.loads((files / "plan.json").read_text())["traceEvents"]
    assert "need a sequence" in error(capsys, "show", "chain.json", "-o", "plan.json")
    pytest.importorskip("matplotlib")
    out(capsys, "show", "chain.json", "sequence.json", "-o", "plan.png")
    out(capsys, "show", "chain.json", "sequence.json", "-o", "plan.svg")
    out(capsys, "sweep", "chain.json", "--mem-limit", "16MiB", "24MiB", "-o", "sweep.png", *QUICK)
    assert (files / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert (files / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (files / "plan.svg").read_bytes()
    sentence = "nowhere/picture.svg: No such file or directory"
    assert sentence in error(capsys, "show", "chain.json", "sequence.json", "-o", "nowhere/picture.svg")


MODELS = """
import torch
from torch import nn

def build():
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)]), torch.randn(64, 32)

def broken():
    raise RuntimeError("no such weights")

def wrong():
    return nn.Linear(2, 2)

def sized(n):
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    return model.to("meta"), torch.empty(n, 64, device="meta")
"""


@pytest.fixture
def models(files: Path) -> str:
    """The module with `MODELS`, in the current folder."""
    pytest.importorskip("torch")
    (files / "cli_models.py").write_text(MODELS)
    return "cli_models"


def test_profile_measures_or_estimates_what_a_function_returns(
    models: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build = f"{models}:build"
    for target in (build, f"{files / models}.py:build"):
        data = json.loads(out(capsys, "profile", target, "--json", "-o", "measured.json"))
        made = rotoff.Chain.load("measured.json")
        assert made == rotoff.Chain.from_dict(data)
        assert (len(made), made.name, made.input_bytes) == (8, "Sequential", 64 * 32 * 4)
    text = out(capsys, "profile", build)
    assert "Sequential: 8 stages" in text and "end where calls of" in text
    fewer = json.loads(out(capsys, "profile", build, "--stages", "2", "--json"))
    assert len(fewer["stages"]) < 8
    elsewhere = json.loads(out(capsys, "profile", build, "--device", "H200", "--json"))
    assert [row["output_bytes"] for row in elsewhere["stages"]] == [stage.output_bytes for stage in made.stages]
    assert elsewhere["meta"]["times"].startswith("estimated")
    cut = json.loads(out(capsys, "profile", build, "--device", "H200", "--stages", "2", "--json"))
    assert [row["saved_bytes"] for row in cut["stages"]] == [row["saved_bytes"] for row in fewer["stages"]]
    plan = "plan", build, "--device", "A100", "--mem-limit"
    found = json.loads(out(capsys, *plan, "128 KiB", "--optimizer", "sgd", "--json"))
    assert [*found["min_mem_limits"]] == ["joint", "remat", "offload"]
    assert found["mem_limit"] == 128 * 1024 >= max(row["peak_bytes"] for row in found["steps"] if row["fits"])
    assert "joint" in out(capsys, *plan, "128 KiB", "--stages", "4")
    assert "DOES NOT FIT" in out(capsys, *plan, "1 KiB", code=1)
    found = json.loads(out(capsys, "plan", build, "--mesh", "fsdp=4", "--link", "1e9", "--modes", "remat", "--json"))
    mesh = found["mesh"]
    assert (mesh["axes"], mesh["ranks"], mesh["link"]) == ("fsdp=4", 4, 0.8e9)


def test_audit_and_largest(models: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "ds.json").write_text('{"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}')
    found = json.loads(out(capsys, "audit", f"{models}:build", "ds.json", "--device", "T4", "--json"))
    assert found["steps"][1]["name"] == "now: ZeRO-Offload"
    command = "largest", f"{models}:sized", "--device", "T4", "--mem-limit", "4 MiB", "--step", "512"
    found = json.loads(out(capsys, *command, "--json"))
    assert found["size"] % 512 == 0 and found["refused"] == found["size"] + 512
    assert found["planned"]["fits"]
    assert f"{found['size']} works; {found['refused']} cannot work" in out(capsys, *command)
    out(capsys, *command[:-3], "1 KiB", code=1)


WRONG = {
    "solve nowhere.json --mem-limit 1GiB": "nowhere.json: No such file or directory",
    "solve sequence.json --mem-limit 1GiB": 'the field "format" must be "rotoff.chain"',
    "solve chain.json --mem-limit lots": "mem_limit is 'lots'",
    "solve chain.json --mem-limit 0.5": "a number without a unit",
    "solve chain.json --mem-limit 1GiB --option mem_slots=0": "mem_slots is 0",
    "solve chain.json --mem-limit 20MiB --option a=1": "a is not an argument of solve",
    "solve chain.json --mem-limit 20MiB --policy chen --option a=1": "has no option 'a'",
    "solve chain.json": "required: --mem-limit",
    "sweep chain.json --policies fast": "policy is 'fast'",
    "sweep chain.json --modes fast": "mode is 'fast'; modes are 'joint', 'remat', 'offload'",
    "show chain.json -o picture.jpg": "'picture.jpg' must end in .png, .svg, .pdf or .json",
    "solve chain.json --mem-limit 1GiB --option refine": "'refine' is not NAME=VALUE",
    "show - -": "only one of the two",
    "": "required: COMMAND",
    "profile cli_models:build --device T4 --backward-from 0,loss": "backward_from names 'loss', but the model returns a",
    "profile cli_models:build --device abacus": "device is 'abacus'",
    "profile cli_models:broken": "RuntimeError: no such weights (--traceback",
    "profile cli_models:wrong": "it must return (model, sample)",
    "profile cli_models:build2": "no function 'build2'",
    "profile no_such_module_at_all:build": "No module named",
    "profile cli_models": "is not MODULE:FUNCTION",
    "audit cli_models:build nothing.json": "nothing.json",
    "largest cli_models:build": "TypeError: build() takes 0 positional arguments but 1 was given",
    "doctor --device tpu": "device is 'tpu'; give one such as",
    "doctor --device meta": "device is 'meta'; rotoff runs steps on cpu and cuda",
    "doctor -o nowhere/doctor.json": "nowhere/doctor.json: No such file or directory",
}


@pytest.mark.parametrize("command", WRONG)
def test_wrong_input_is_a_sentence_and_an_exit_code(
    models: str, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert WRONG[command] in error(capsys, *command.split())


def test_nothing_fits_is_1_and_a_traceback_is_on_demand(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "needs at least" in error(capsys, "solve", "chain.json", "--mem-limit", "3 MiB", code=1)
    with pytest.raises(FileNotFoundError):
        main(["solve", "nowhere.json", "--mem-limit", "1GiB", "--traceback"])
