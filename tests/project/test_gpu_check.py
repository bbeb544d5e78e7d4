"""scripts/gpu_check.sh without a GPU, from end to end: stand-ins for python3 and `timeout` note what they are asked
for, write what the real ones would, and run out of time where a test wants it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.sh"
PYTHON = """#!/bin/sh
[ "$1" = - ] && { cat >/dev/null; echo "$REASON"; exit 0; }
[ "$1" = scripts/gpu_summary.py ] && PYTHONPATH=$STUB exec "$REAL" "$@"
[ "$1" = scripts/host_room.py ] && { echo "1.0 GiB"; echo "12.5 GiB"; exit 0; }
[ "$1" = -c ] && exit 0
echo "$@" >>"$NOTES"
echo "host memory $ROTOFF_HOST_MEMORY, tests end $(($ROTOFF_TESTS_END - $(date +%s)))" >>"$NOTES.environment"
[ -e "$OUT/summary.json" ] && cp "$OUT/summary.json" "$OUT/then/$(wc -l <"$NOTES").json"
case "$*" in
    *build_ext*) exit "${BUILD:-0}" ;;
    *"-m pytest"*) previous=; for one in "$@"; do [ "$previous" = --junitxml ] && cp "$NOTES.xml" "$one"; previous=$one; done
        exit "${TESTS:-0}" ;;
    *"--suite cuda"* | *reach.py* | *placed_peers*) exit "${CODE:-0}" ;;
esac
"""
TIMEOUT = """#!/bin/sh
while case "$1" in -*) true ;; *) false ;; esac; do shift 2; done
limit=$1; shift
echo "$limit $*" >>"$NOTES.limits"
all="$*"; IFS="|"
for late in ${RUNS_OUT:-nothing at all}; do case "$all" in *"$late"*) exit 124 ;; esac; done
exec "$@"
"""
TORCH = """
from types import SimpleNamespace as _
__version__, version = "2.11", _(cuda="13.0")
cuda = _(is_available=lambda: True, device_count=lambda: 1, get_device_properties=lambda n: _(name="stand-in", total_memory=8))
backends = _(cudnn=_(version=lambda: 1))
"""
PASSED = '<testsuites><testsuite tests="2" failures="0" errors="0" skipped="1">'
PASSED += '<testcase classname="a" name="b"><properties><property name="GB/s" value="50"/></properties></testcase>'
PASSED += "</testsuite></testsuites>"

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@dataclass
class Ended:
    """What the script did. commands: given to python3, but for questions; limits: in seconds; then: summary.json at
    each command."""

    code: int
    said: str
    commands: list[str]
    environment: list[str]
    limits: list[int]
    summary: dict[str, Any]
    then: dict[int, dict[str, Any]]

    def codes(self) -> dict[str, int]:
        return {name: step["exit_code"] for name, step in self.summary["steps"].items()}


def check(tmp_path: Path, *arguments: str, xml: str = PASSED, **environment: str) -> Ended:
    """Run the script into tmp_path/out."""
    tools, notes, out = tmp_path / "tools", tmp_path / "notes", tmp_path / "out"
    tools.mkdir(exist_ok=True)
    for old in tmp_path.glob("notes*"):
        old.unlink()
    shutil.rmtree(out / "then", ignore_errors=True)
    (out / "then").mkdir(parents=True)
    for name, text in (("python", PYTHON), ("timeout", TIMEOUT), ("nvidia-smi", "#!/bin/sh\necho NVIDIA, stand-in\n")):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (tmp_path / "notes.xml").write_text(xml)
    (tools / "torch.py").write_text(TORCH)
    told = {"PYTHON": str(tools / "python"), "REAL": sys.executable, "NOTES": str(notes), "OUT": str(out), "REASON": ""}
    told["STUB"] = str(tools)
    without = {name: value for name, value in os.environ.items() if name not in ("ROTOFF_HOST_MEMORY", "SECONDS")}
    done = subprocess.run(
        ["bash", str(SCRIPT), *([str(out), *arguments] if arguments != ("none",) else [])],
        capture_output=True,
        text=True,
        env={**without, **told, "PATH": f"{tools}:{os.environ['PATH']}", **environment},
        timeout=120,
        check=False,
    )

    def lines(path: Path) -> list[str]:
        return path.read_text().splitlines() if path.exists() else []

    def read(path: Path) -> Any:
        return json.loads(path.read_text()) if path.exists() else {}

    return Ended(
        done.returncode,
        done.stdout + done.stderr,
        lines(notes),
        lines(tmp_path / "notes.environment"),
        [int(line.split()[0]) for line in lines(tmp_path / "notes.limits")],
        read(out / "summary.json"),
        {int(path.stem): read(path) for path in (out / "then").iterdir()},
    )


STEPS = {
    "first": ["build", "warm_up", "probe", "doctor", "alone"],
    "tests": ["build", "warm_up", "tests", "prediction", "interpreter_cost", "compare_modes"],
    "grid": ["build", "grid"],
    "reach": ["build", "reach"],
    "placed": ["build", "placed"],
}
SAYS = {"build": "build_ext", "alone": "cuda and alone", "tests": "cuda and not alone", "warm_up": "gpu_warm_up"}
SAYS |= {"grid": "grid.run", "placed": "placed_peers"}


@pytest.mark.parametrize("mode", list(STEPS))
@pytest.mark.grid
def test_without_a_device_nothing_is_run(tmp_path: Path, mode: str) -> None:
    ended = check(tmp_path, mode, REASON="torch finds no CUDA device")
    assert ended.code == 3
    assert "Nothing was checked: torch finds no CUDA device." in ended.said
    assert ended.commands == []


@pytest.mark.parametrize("arguments", [["none"], ["other"], ["first", "more"], ["tests", "more"]])
def test_wrong_usage(tmp_path: Path, arguments: list[str]) -> None:
    ended = check(tmp_path, *arguments)
    assert ended.code == 2
    assert "usage:" in ended.said
    assert ended.commands == []


@pytest.mark.parametrize("mode", list(STEPS))
@pytest.mark.grid
def test_each_step_is_on_disk_before_the_next_begins(tmp_path: Path, mode: str) -> None:
    ended = check(tmp_path, mode)
    assert ended.code == 0, ended.said
    assert list(ended.codes()) == STEPS[mode]
    assert set(ended.codes().values()) == {0}
    for command, name in zip(ended.commands, STEPS[mode], strict=True):
        assert SAYS.get(name, name) in command
    for n in range(1, len(STEPS[mode]) + 1):
        assert list(ended.then[n]["steps"]) == STEPS[mode][: n - 1]
    assert ended.summary["ok"]
    assert (tmp_path / "out" / "clocks.csv").exists()


@pytest.mark.parametrize("mode", list(STEPS))
@pytest.mark.grid
def test_where_the_time_of_steps_runs_out_the_others_still_run(tmp_path: Path, mode: str) -> None:
    """Every second one, then those between."""
    for n in range(1, min(3, len(STEPS[mode]))):
        late, folder = STEPS[mode][n::2], tmp_path / str(n)
        folder.mkdir()
        ended = check(folder, mode, RUNS_OUT="|".join(SAYS.get(name, name) for name in late))
        assert ended.code == 1
        assert ended.codes() == {name: 124 if name in late else 0 for name in STEPS[mode]}
        assert not ended.summary["ok"]
        assert "stopped after its" in (folder / "out" / "log.txt").read_text()


@pytest.mark.parametrize(
    ("mode", "code", "fails"),
    [*((mode, 1, {"BUILD": "1"}) for mode in STEPS), ("first", 124, {"RUNS_OUT": SAYS["build"]})],
)
@pytest.mark.grid
def test_a_build_that_fails_stops_the_call(tmp_path: Path, mode: str, code: int, fails: dict[str, str]) -> None:
    ended = check(tmp_path, mode, **fails)
    assert ended.code == 1
    assert ended.codes() == {"build": code}
    assert len(ended.commands) == (code == 1)  # in the other case `timeout` did not begin it
    assert "Nothing else was run: the extension cannot be built." in ended.said


BUDGETS = {"first": 270, "tests": 480, "grid": 570, "reach": 570, "placed": 570}


@pytest.mark.parametrize("mode", list(STEPS))
@pytest.mark.grid
def test_a_call_keeps_its_time_whatever_its_steps_take(tmp_path: Path, mode: str) -> None:
    """bash counts the seconds of a call from what SECONDS says at its start."""
    ended = check(tmp_path, mode, SECONDS="200")
    assert ended.code == 0
    assert all(limit <= BUDGETS[mode] - 200 for limit in ended.limits)


@pytest.mark.parametrize("mode", list(STEPS))
@pytest.mark.grid
def test_a_call_whose_time_is_up_begins_nothing_more(tmp_path: Path, mode: str) -> None:
    ended = check(tmp_path, mode, SECONDS=str(BUDGETS[mode] - 4))
    assert ended.code == 1
    assert ended.commands == []
    assert ended.codes() == {"build": 124}
    assert f"the {BUDGETS[mode]} s of this call are over" in ended.said


def test_steps_in_a_row_keep_within_a_call_where_each_takes_all_its_time() -> None:
    text = SCRIPT.read_text()
    for mode, steps in STEPS.items():
        asked = [re.search(rf"\brun(?:_tests)? {name} (\d+)", text) for name in steps]
        limits = [int(found.group(1)) for found in asked if found]
        assert len(limits) == len(steps)
        before_last = sum(limits[:-1])
        # with the first look at torch and the host; the last takes what is left
        assert before_last + 30 <= BUDGETS[mode]


def test_tests_that_had_no_time_have_failed(tmp_path: Path) -> None:
    message = "Failed: the time that this run was given is over"
    xml = f"""<testsuites><testsuite tests="3" failures="1" errors="2" skipped="0">
        <testcase classname="a" name="ran"/>
        <testcase classname="a" name="late"><error message="{message}">{message}</error></testcase>
        <testcase classname="a" name="later"><error message="{message}">{message}</error></testcase>
        <testcase classname="a" name="wrong"><failure message="assert 1 == 2">at line 7</failure></testcase>
        </testsuite></testsuites>"""
    ended = check(tmp_path, xml=xml, TESTS="1")
    alone = ended.summary["steps"]["alone"]
    assert ended.code == 1
    assert alone["no_time"] == ["a.late", "a.later"]
    assert list(alone["failed"]) == ["a.wrong"]
    assert "NO TIME for 2 tests: a.late, a.later" in ended.said
    assert "FAILED a.wrong: assert 1 == 2" in ended.said


@pytest.mark.slow
def test_a_test_without_time_fails(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("def test_one(): pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    command += ["-c", os.devnull, "--confcutdir", str(tmp_path), str(tmp_path / "test_one.py"), "-p", "conftest"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "ROTOFF_TESTS_END": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 1
    assert "the time that this run was given is over" in done.stdout


def test_tests_that_all_skip_have_shown_nothing(tmp_path: Path) -> None:
    ended = check(tmp_path, xml='<testsuites><testsuite tests="4" failures="0" errors="0" skipped="4"/></testsuites>')
    assert ended.code == 1
    assert ended.codes()["alone"] == 5


@pytest.mark.slow
def test_figures_of_tests_are_kept_and_a_second_call_adds_to_the_first(tmp_path: Path) -> None:
    check(tmp_path, "first")
    ended = check(tmp_path, "tests")
    assert list(ended.codes()) == ["build", "warm_up", "probe", "doctor", "alone", *STEPS["tests"][2:]]
    assert ended.summary["steps"]["alone"]["figures"] == {"b: GB/s": "50"}
    assert ended.said.count("b: GB/s: 50") == 1
    log = (tmp_path / "out" / "log.txt").read_text()
    assert log.index(" first: ") < log.index(" tests: ")


def test_tests_stop_beginning_before_their_time_is_up(tmp_path: Path) -> None:
    ended = check(tmp_path, "first")
    said = ended.environment[STEPS["first"].index("alone")]
    assert 60 < int(said.split("tests end ")[1]) <= 75  # of 90


def test_the_host_is_asked_what_it_has_unless_somebody_says(tmp_path: Path) -> None:
    assert all("host memory 12.5 GiB," in line for line in check(tmp_path, "first").environment)
    said = check(tmp_path, "grid", ROTOFF_HOST_MEMORY="100 GiB")
    assert all("host memory 100 GiB," in line for line in said.environment)
    assert said.summary["host_memory"] == "100 GiB"


def test_what_comes_back_is_few_files(tmp_path: Path) -> None:
    text = SCRIPT.read_text()
    always = {"log.txt", "summary.json", "clocks.csv"}
    for mode in ("first", "tests"):
        part = text.split(f'if [ "$mode" = {mode} ]')[1].split("\nfi\n")[0]
        made = set(re.findall(r'"\$out/([a-z_]+\.json)"', part)) | {
            f"{name}.xml" for name in re.findall(r"run_tests (\w+)", part)
        }
        assert len(made | always) <= 8


@pytest.mark.parametrize(("code", "returned"), [(0, 0), (3, 4), (1, 1)])
@pytest.mark.grid
def test_the_grid_is_run_in_the_given_folder_and_says_whether_to_call_again(
    tmp_path: Path, code: int, returned: int
) -> None:
    ended = check(tmp_path, "grid", "resnet101", "unet", CODE=str(code))
    out = (tmp_path / "out").resolve()
    assert ended.code == returned
    assert ("run this again" in ended.said) == (code == 3)
    grid = ended.commands[1]
    assert grid.startswith("-m benchmarks.grid.run --suite cuda ")
    assert f"--start benchmarks/results/grid_cuda.json --out {out}/grid_cuda.json" in grid
    assert grid.endswith("--workloads resnet101 unet")
    assert len(ended.commands) == 2  # no page without a file


def test_the_grid_is_that_of_one_language_model_without_compilation_unless_asked(tmp_path: Path) -> None:
    plain = check(tmp_path, "grid").commands[1]
    assert plain.endswith("--workloads gpt-1.3b")
    assert "--compiled" not in plain
    assert "--limits" not in plain
    asked = check(tmp_path, "grid", "vit-l", LIMITS="60 30", COMPILED="1").commands[1]
    assert " --limits 60 30 --compiled --start " in asked


def test_the_grids_page(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "grid_cuda.json").write_text("{}")
    ended = check(tmp_path, "grid", CODE="3")
    assert ended.code == 4
    expected = f"-m benchmarks.grid.report {out.resolve()}/grid_cuda.json --out {out.resolve()}/results.md"
    assert ended.commands[-1] == expected


def test_reach_is_executed_on_the_device(tmp_path: Path) -> None:
    ended = check(tmp_path, "reach", "vgg16")
    assert ended.code == 0
    assert ended.commands[1].startswith("benchmarks/reach.py --run ")
    assert ended.commands[1].endswith("--only vgg16")


@pytest.mark.parametrize(("code", "returned"), [(0, 0), (3, 4), (1, 1)])
@pytest.mark.grid
def test_placed_steps_beside_the_peers_go_on_in_another_call(tmp_path: Path, code: int, returned: int) -> None:
    ended = check(tmp_path, "placed", "7b", "vit-g", CODE=str(code))
    assert ended.code == returned
    assert ("run this again" in ended.said) == (code == 3)
    (command,) = ended.commands[1:]
    assert command.startswith("-m benchmarks.placed_peers --minutes ")
    assert command.endswith("placed.json --workloads 7b vit-g")
