"""Pictures show what the machine says, can be told apart in grey, and are written as files that are what they claim."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

import rotoff
from rotoff.errors import OptionError

pytest.importorskip("matplotlib")

from rotoff import plot
from rotoff.plot import style
from rotoff.plot.timeline import boxes
from rotoff.report.expected_step import held

STAGE = {"forward_time": 1.0, "backward_time": 2.0, "output_bytes": 100, "saved_bytes": 300}
CHAIN = rotoff.Chain(
    tuple(rotoff.Stage(f"s{i}", **STAGE) for i in range(1, 4)), 100.0, 100.0, input_bytes=50, name="three"
)
MOVING = rotoff.Sequence.from_text(
    "F_all 1\noffload abar 1\nF_all 2\nF_all 3\nfree abar 1\nB 3\nprefetch abar 1\nwait abar 1\nB 2\nB 1",
    mode="joint",
    mem_limit=1300,
)
RECOMPUTING = rotoff.Sequence.from_text("F_ck 1\nF_all 2\nF_all 3\nB 3\nB 2\nF_all 1\nB 1")


def test_the_compute_lane_is_every_operation_and_the_idle_time_between() -> None:
    trace = rotoff.simulate(CHAIN, MOVING)
    found = boxes(trace, "compute")
    assert sum(box.end - box.start for box in found) == pytest.approx(trace.makespan)
    idle = [box for box in found if box.look is style.IDLE]
    assert sum(box.end - box.start for box in idle) == pytest.approx(trace.idle_time)
    assert trace.idle_time > 0
    assert [box.label for box in boxes(trace, "d2h")] == ["1"]
    assert [(b.start, b.end) for b in boxes(trace, "h2d")] == [
        (e.start, e.end) for e in trace.events if e.lane == "h2d"
    ]


def test_the_curve_reaches_the_peak_and_no_more() -> None:
    trace = rotoff.simulate(CHAIN, MOVING)
    times, device, host, parameters = zip(*held(trace), strict=True)
    assert not any(parameters)
    assert list(times) == sorted(times)
    assert (times[0], times[-1]) == (0.0, trace.makespan)
    assert max(device) == trace.peak_bytes
    assert max(host) == trace.host_peak_bytes == 300


def test_a_timeline_has_the_limit_and_all_that_happens() -> None:
    figure = plot.timeline(CHAIN, MOVING)
    curve, lanes = figure.axes
    assert [line.get_label() for line in curve.get_lines()] == ["device", "host", "limit, 1.27 KiB"]
    assert [label.get_text() for label in lanes.get_yticklabels()] == ["compute", "device → host", "host → device"]
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == [style.FORWARD.words, style.BACKWARD.words, style.IDLE.words, "device → host", "host → device"]
    hatches = {c.get_hatch() for c in lanes.collections}
    assert style.IDLE.hatch in hatches
    assert "mode joint" in figure.get_suptitle()


def test_nothing_moved_needs_no_lanes_for_copies() -> None:
    assert len(plot.timeline(CHAIN, RECOMPUTING).axes[1].get_yticklabels()) == 1


def test_a_measured_step_stands_under_the_predicted_one() -> None:
    stages = tuple(rotoff.Stage(s.name, 2.0, 4.0, s.output_bytes, s.saved_bytes) for s in CHAIN.stages)
    slower = rotoff.Chain(stages, 50.0, 50.0, input_bytes=50)
    measured = rotoff.simulate(slower, MOVING)
    figure = plot.timeline(CHAIN, MOVING, measured=measured)
    assert len(figure.axes) == 3
    assert [axis.get_title(loc="left").split(":")[0] for axis in figure.axes[1:]] == ["predicted", "measured"]
    assert figure.axes[0].get_xlim()[1] >= measured.makespan
    labels = [line.get_label() for line in figure.axes[0].get_lines()]
    assert labels[:3] == ["device, predicted", "host", "device, measured"]


def test_a_sequence_that_the_machine_refuses_is_not_drawn() -> None:
    with pytest.raises(rotoff.InvalidSequenceError, match="op 0"):
        plot.timeline(CHAIN, rotoff.Sequence.from_text("B 3"))


def test_step_time_against_bytes_shows_modes_and_the_bound() -> None:
    made = rotoff.sweep(CHAIN, refine=False)
    figure = plot.tradeoff(CHAIN, made)
    lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
    for mode in ("joint", "remat", "offload"):
        drawn = list(zip(lines[mode].get_xdata(), lines[mode].get_ydata(), strict=True))
        assert drawn == [(row.limit, row.makespan) for row in made if row.mode == mode and row.makespan is not None]
    bound = lines["certified bound: nothing is faster"]
    for limit, seconds in zip(bound.get_xdata(), bound.get_ydata(), strict=True):
        assert seconds == rotoff.lower_bound(CHAIN, int(limit))
    assert list(lines["keeping everything"].get_ydata()) == [CHAIN.compute_time]
    top = figure.axes[0].get_ylim()[1]
    assert top > CHAIN.compute_time * 1.02  # a difference of nothing looks like nothing
    slow = [row for row in made if row.makespan is not None and row.makespan <= 1.2 * CHAIN.compute_time]
    assert slow
    assert all(row.makespan < top for row in slow)  # 20 % more is never cut off
    with pytest.raises(OptionError, match="nothing in these rows fits"):
        plot.tradeoff(CHAIN, rotoff.sweep(CHAIN, [200], refine=False))


@pytest.mark.parametrize(("suffix", "starts"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_files_are_what_their_suffix_says_and_always_the_same(tmp_path: Path, suffix: str, starts: bytes) -> None:
    for name in ("one", "two"):
        plot.save(plot.timeline(CHAIN, MOVING), tmp_path / (name + suffix))
    written = (tmp_path / ("one" + suffix)).read_bytes()
    assert written.startswith(starts)
    assert written == (tmp_path / ("two" + suffix)).read_bytes()
    if suffix == ".svg":
        texts = [
            element.text or "" for element in ElementTree.fromstring(written).iter("{http://www.w3.org/2000/svg}text")
        ]
        assert "limit, 1.27 KiB" in texts  # text stays text: it can be searched and read aloud


def test_another_suffix_is_refused() -> None:
    with pytest.raises(OptionError, match=r"end it in \.png, \.svg or \.pdf"):
        plot.save(plot.timeline(CHAIN, MOVING), "picture.jpg")
