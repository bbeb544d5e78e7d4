"""A plan in the terminal, its words and its trace file say what the machine says."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import rotoff
from rotoff.report.summary import in_words
from rotoff.report.terminal import has_colour

STAGE = {"forward_time": 1.0, "backward_time": 2.0, "output_bytes": 100, "saved_bytes": 300}


def chain(stages: int) -> rotoff.Chain:
    made = tuple(rotoff.Stage(f"block{i}", **STAGE) for i in range(1, stages + 1))
    return rotoff.Chain(made, 100.0, 100.0, input_bytes=50, name="test")


MOVING = rotoff.Sequence.from_text(
    "F_all 1\noffload abar 1\nF_ck 2\nfree abar 1\nF_all 3\nB 3\nprefetch abar 1\nwait abar 1\nF_all 2\nB 2\nB 1",
    mode="joint",
    mem_limit=2000,
)


@pytest.mark.parametrize(("stages", "width"), [(3, 40), (50, 80), (50, 120), (300, 100)])
def test_a_plan_fits_one_screen(stages: int, width: int) -> None:
    c = chain(stages)
    if stages == 3:
        plan = MOVING
    else:
        moved = [i for i in range(2, stages - 1) if i % 3 == 0]
        ops = []
        for i in range(1, stages + 1):
            ops += [f"F_all {i}", *([f"offload abar {i}"] if i in moved else [])]
        ops += [f"free abar {i}" for i in moved]
        for i in range(stages, 0, -1):
            ops += [*([f"prefetch abar {i - 1}", f"wait abar {i - 1}"] if i - 1 in moved else []), f"B {i}"]
        plan = rotoff.Sequence.from_text(ops, mode="offload")
    lines = rotoff.render(c, plan, width=width, colour=False).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= width
    assert " ".join(lines).endswith(in_words(plan))


def test_lanes_show_what_fills_their_time() -> None:
    c = chain(3)
    text = rotoff.render(c, MOVING, width=40, colour=False)
    trace = rotoff.simulate(c, MOVING)
    (lane,) = [line[9:] for line in text.splitlines() if line.startswith(" compute")]
    columns = 30
    for letter, seconds in (("R", trace.recompute_time), ("B", 6.0), ("F", 3.0), (".", trace.idle_time)):
        assert lane.count(letter) == pytest.approx(seconds / trace.makespan * columns, abs=1.5), letter
    assert "peak 950 B" in text
    assert "limit 1.95 KiB" in text
    assert text.endswith("stages 1 moved, 2 recomputed")
    assert "\x1b" not in text


def test_colour_only_adds_to_the_text() -> None:
    coloured = rotoff.render(chain(3), MOVING, width=60, colour=True)
    plain = rotoff.render(chain(3), MOVING, width=60, colour=False)
    assert [line.rstrip() for line in re.sub(r"\x1b\[\d+m", "", coloured).splitlines()] == plain.splitlines()
    assert "\x1b[33m" in coloured


def test_colour_is_the_terminals_and_the_users_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert has_colour(Terminal())
    assert not has_colour(io.StringIO())
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert has_colour(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not has_colour(Terminal())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.delenv("FORCE_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not has_colour(Terminal())


def test_a_trace_file_holds_every_operation_that_takes_time() -> None:
    c = chain(3)
    trace = rotoff.simulate(c, MOVING)
    data = json.loads(json.dumps(rotoff.chrome_trace(c, MOVING)))
    slices = [event for event in data["traceEvents"] if event["ph"] == "X"]
    timed = [event for event in trace.events if event.end > event.start]
    assert [s["name"] for s in slices] == [str(event.op) for event in timed]
    for made, event in zip(slices, timed, strict=True):
        assert made["ts"] == pytest.approx(event.start * 1e6)
        assert made["ts"] + made["dur"] == pytest.approx(event.end * 1e6)
        assert made["tid"] == {"compute": 1, "d2h": 2, "h2d": 3}[event.lane]
    counters = [event["args"]["device"] for event in data["traceEvents"] if event["ph"] == "C"]
    assert max(counters) == trace.peak_bytes
    lanes = {event["args"]["name"] for event in data["traceEvents"] if event["name"] == "thread_name"}
    assert lanes == {"compute", "device to host", "host to device"}


def measured(c: rotoff.Chain) -> rotoff.Trace:
    """A step of `MOVING` in which the compute took twice the time."""
    slower = [replace(stage, forward_time=2.0, backward_time=4.0) for stage in c.stages]
    return rotoff.simulate(replace(c, stages=tuple(slower)), MOVING)


def test_a_trace_file_shows_a_measured_step_beside_the_predicted_one(tmp_path: Path) -> None:
    c = chain(3)
    rotoff.save_chrome_trace(tmp_path / "step.json", c, MOVING, measured=measured(c))
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    ends = {pid: max(e["ts"] + e["dur"] for e in events if e["ph"] == "X" and e["pid"] == pid) for pid in (1, 2)}
    assert ends[1] == pytest.approx(rotoff.simulate(c, MOVING).makespan * 1e6)
    assert ends[2] == pytest.approx(measured(c).makespan * 1e6)


def test_a_measured_step_is_shown_in_place_of_the_predicted_one() -> None:
    c = chain(3)
    predicted, shown = (rotoff.render(c, MOVING, width=100, colour=False, measured=m) for m in (None, measured(c)))
    assert predicted.splitlines()[0] != shown.splitlines()[0]
    assert f"{measured(c).makespan:g} s" in " ".join(shown.split())
    assert f"{measured(c).makespan:g} s" not in " ".join(predicted.split())
