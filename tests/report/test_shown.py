"""A plan as text, as a picture and as a trace file says what the machine says."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

import rotoff
from rotoff import Chain, ParameterGroup, Sequence, Stage, Trace, chrome_trace, render, simulate
from rotoff.cli import main
from rotoff.errors import OptionError
from rotoff.report.summary import in_words


def three(count: int = 3, **times: float) -> Chain:
    stage = Stage("", **{"forward_time": 1.0, "backward_time": 2.0} | times, output_bytes=100, saved_bytes=300)
    stages = tuple(replace(stage, name=f"block{i}") for i in range(1, count + 1))
    return Chain(stages, 100.0, 100.0, input_bytes=50, name="test")


def plan(text: str, **about: object) -> Sequence:
    return Sequence.from_text(re.split(r"[;\n] *", text.strip()), **about)


MOVING = plan(
    "F_all 1; offload abar 1; F_ck 2; free abar 1; F_all 3; B 3; prefetch abar 1; wait abar 1; F_all 2; B 2; B 1",
    mode="joint",
    mem_limit=2000,
)
GROUP = ParameterGroup((1,), 40, 40, 80, 3, 5, 7)
PLACED = Chain(
    tuple(Stage(f"s{i}", 2, 4, 10, 100, 10) for i in range(1, 7)),
    d2h_bandwidth=20,
    h2d_bandwidth=20,
    name="net",
    parameters=(
        *(replace(GROUP, stages=(i,), name=f"p{i}") for i in range(1, 6)),
        ParameterGroup((6,), 30, name="frozen"),
    ),
)
BARE = PLACED.without_parameters()
PLACING = plan(
    """prefetch w 6; F_all 1; wait w 2; F_all 2; prefetch w 3; wait w 3; F_all 3; drop w 3; F_all 4; prefetch w 5
    wait w 5; F_all 5; wait w 6; F_all 6; B 6; drop w 6; offload abar 1; B 5; offload g 5; drop w 5; H 5; prefetch w 3
    free g 5; prefetch o 4; B 4; wait o 4; U 4; offload o 4; free o 4; wait w 3; B 3; U 3; offload w 3; free w 3
    B 2; offload g 2; drop w 2; H 2; B 1; prefetch w 2; U 1; free g 2""",
    mode="by hand",
    mem_limit=2000,
    resident=["w 1", "o 1", "w 2", "o 3", "w 4"],
)
WORDS = {
    1: "resident",
    2: "updated on the host",
    3: "streamed",
    4: "state moved",
    5: "streamed, updated on the host",
    6: "streamed",
}


def measured() -> Trace:
    """A step of `MOVING` in which the compute took twice the time."""
    return simulate(three(forward_time=2.0, backward_time=4.0), MOVING)


def shown(chain: Chain, sequence: Sequence, width: int = 100, **options: object) -> str:
    return render(chain, sequence, width=width, **options)


# -- text


@pytest.mark.parametrize(("stages", "width"), [(3, 40), (50, 80), (50, 120), (300, 100)])
def test_a_plan_fits_one_screen(stages: int, width: int) -> None:
    moved = [i for i in range(2, stages - 1) if i % 3 == 0]
    ops = []
    for i in range(1, stages + 1):
        ops += [f"F_all {i}", *([f"offload abar {i}"] if i in moved else [])]
    ops += [f"free abar {i}" for i in moved]
    for i in range(stages, 0, -1):
        ops += [*([f"prefetch abar {i - 1}", f"wait abar {i - 1}"] if i - 1 in moved else []), f"B {i}"]
    sequence = Sequence.from_text(ops, mode="offload")
    lines = shown(three(stages), sequence, width).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= width
    assert " ".join(lines).endswith(in_words(sequence))


def test_lanes_show_what_fills_their_time() -> None:
    text, trace = shown(three(), MOVING, 40), simulate(three(), MOVING)
    (lane,) = [line[9:] for line in text.splitlines() if line.startswith(" compute")]
    for letter, seconds in (("R", trace.recompute_time), ("B", 6.0), ("F", 3.0), (".", trace.idle_time)):
        assert lane.count(letter) == pytest.approx(seconds / trace.makespan * 30, abs=1.5), letter
    assert "peak 950 B" in text and "limit 1.95 KiB" in text
    assert text.endswith("stages 1 moved, 2 recomputed")


def test_the_text_tells_parameters_apart() -> None:
    lines = shown(PLACED, PLACING).splitlines()
    lanes = {line[:9].strip(): {*line[9:]} - {" "} for line in lines if line[:9].strip()}
    assert lanes["compute"] >= {*"FBU."} and lanes["on host"] == {"H"}
    assert lanes["to host"] == {*"»>"} and "«" in lanes["to dev."]
    assert "▒" in "".join(lines) and "▒" not in shown(BARE, rotoff.keep_all(BARE))


# -- trace files


@pytest.mark.parametrize(("chain", "sequence"), [(three(), MOVING), (PLACED, PLACING)], ids=["moved", "placed"])
def test_a_trace_file_holds_every_operation_that_takes_time(chain: Chain, sequence: Sequence) -> None:
    trace = simulate(chain, sequence)
    events = json.loads(json.dumps(chrome_trace(chain, sequence)))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    timed = [event for event in trace.events if event.end > event.start]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    names = {"compute": "compute", "d2h": "device to host", "h2d": "host to device", "host": "updates on the host"}
    assert {*lanes.values()} == {name for lane, name in names.items() if chain.parameters or lane != "host"}
    for made, event in zip(slices, timed, strict=True):
        assert (made["name"], lanes[made["tid"]]) == (str(event.op), names[event.lane])
        assert made["ts"] == pytest.approx(event.start * 1e6)
        assert made["ts"] + made["dur"] == pytest.approx(event.end * 1e6)
    held = [{**event["args"], "host": 0} for event in events if event["ph"] == "C"]
    assert max(sum(one.values()) for one in held) == trace.peak_bytes
    of = {"device, parameters", "device, all else", "host"} if chain.parameters else {"device", "host"}
    assert all({*one} == of for one in held)


def test_a_trace_names_groups() -> None:
    made = {event["name"]: event for event in chrome_trace(PLACED, PLACING)["traceEvents"]}
    assert made["H 5"]["args"]["parameters"] == "p5"
    assert (made["offload g 5"]["cat"], made["offload g 5"]["args"]["parameters"]) == ("offload parameters", "p5")
    more = replace(PLACED, stages=PLACED.stages[:1], parameters=(GROUP,) * 3)  # than stages
    names = {event["name"] for event in chrome_trace(more, rotoff.keep_all(more))["traceEvents"]}
    assert {"U 1", "U 2", "U 3"} <= names


def test_the_command_line_takes_chains_with_parameters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chain, sequence, made = (str(tmp_path / f"{name}.json") for name in ("chain", "plan", "made"))
    PLACED.save(chain)
    PLACING.save(sequence)

    def out(*words: str) -> str:
        assert main(list(words)) == 0
        return capsys.readouterr().out

    assert "frozen" in (table := out("show", chain))
    assert "parameters 230 B, gradients 200 B, states 400 B: 830 B in all" in table
    assert "keeping everything takes 51 s" in table
    told = json.loads(out("show", chain, sequence, "--json"))
    assert {row["group"]: row["fate"] for row in told["parameters"]} == WORDS
    assert told["makespan"] == simulate(PLACED, PLACING).makespan
    out("solve", chain, "--mem-limit", "1500", "--policy", "streaming", "--option", "effort=0", "-o", made)
    assert "updated on the host" in out("show", chain, made)


# -- pictures


def test_a_timeline_has_the_limit_the_peak_and_all_that_happens() -> None:
    plot = pytest.importorskip("rotoff.plot")
    figure, trace = plot.timeline(three(), MOVING), simulate(three(), MOVING)
    curve, lanes = figure.axes
    lines = {line.get_label(): line for line in curve.get_lines()}
    assert [*lines] == ["device", "host", "limit, 1.95 KiB"]
    assert max(lines["device"].get_ydata()) == trace.peak_bytes
    assert max(lines["host"].get_ydata()) == trace.host_peak_bytes == 300
    assert (min(lines["device"].get_xdata()), max(lines["device"].get_xdata())) == (0.0, trace.makespan)
    assert [label.get_text() for label in lanes.get_yticklabels()] == ["compute", "device → host", "host → device"]
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    said = ["forward", "forward again (recompute)", "backward", "idle: compute waits for a copy"]
    assert words == [*said, "device → host", "host → device"]
    assert "mode joint" in figure.get_suptitle()
    assert len(plot.timeline(three(), rotoff.keep_all(three())).axes[1].get_yticklabels()) == 1
    placed = plot.timeline(PLACED, PLACING)
    assert [label.get_text() for label in placed.axes[1].get_yticklabels()][3:] == ["host"]
    words = [text.get_text() for text in placed.legends[0].get_texts()]
    assert {"update on the device", "update on the host", "device → host, parameters"} <= {*words}
    with pytest.raises(rotoff.InvalidSequenceError, match="op 0"):
        plot.timeline(three(), Sequence.from_text("B 3"))


def test_a_measured_step_stands_under_the_predicted_one() -> None:
    plot = pytest.importorskip("rotoff.plot")
    figure = plot.timeline(three(), MOVING, measured=measured())
    assert [axis.get_title(loc="left").split(":")[0] for axis in figure.axes[1:]] == ["predicted", "measured"]
    assert figure.axes[0].get_xlim()[1] >= measured().makespan
    labels = [line.get_label() for line in figure.axes[0].get_lines()]
    assert labels[:3] == ["device, predicted", "host", "device, measured"]


def test_step_time_against_bytes_shows_modes_and_the_bound() -> None:
    plot = pytest.importorskip("rotoff.plot")
    chain = three()
    made = rotoff.sweep(chain, refine=False)
    figure = plot.tradeoff(chain, made)
    lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
    for mode in ("joint", "remat", "offload"):
        drawn = list(zip(lines[mode].get_xdata(), lines[mode].get_ydata(), strict=True))
        assert drawn == [(row.limit, row.overhead) for row in made if row.mode == mode and row.makespan is not None]
    bound = lines["certified bound: nothing is faster"]
    for limit, over in zip(bound.get_xdata(), bound.get_ydata(), strict=True):
        assert over == pytest.approx(rotoff.lower_bound(chain, int(limit)) / chain.compute_time - 1)
    assert list(lines["keeping everything"].get_ydata()) == [0]
    top = figure.axes[0].get_ylim()[1]
    assert top > 0.02  # a difference of nothing looks like nothing
    slow = [row for row in made if row.overhead is not None and row.overhead <= 0.2]
    assert slow
    assert all(row.overhead < top for row in slow)  # 20 % more is never cut off
    with pytest.raises(OptionError, match="nothing in these rows fits"):
        plot.tradeoff(chain, rotoff.sweep(chain, [200], refine=False))


@pytest.mark.parametrize(("suffix", "starts"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_files_are_what_their_suffix_says_and_always_the_same(tmp_path: Path, suffix: str, starts: bytes) -> None:
    plot = pytest.importorskip("rotoff.plot")
    for name in ("one", "two"):
        plot.save(plot.timeline(three(), MOVING), tmp_path / (name + suffix))
    written = (tmp_path / ("one" + suffix)).read_bytes()
    assert written.startswith(starts)
    assert written == (tmp_path / ("two" + suffix)).read_bytes()
    if suffix == ".svg":
        texts = [one.text or "" for one in ElementTree.fromstring(written).iter("{http://www.w3.org/2000/svg}text")]
        assert "limit, 1.95 KiB" in texts  # text stays text: it can be searched and read aloud
    with pytest.raises(OptionError, match=r"end it in \.png, \.svg or \.pdf"):
        plot.save(plot.timeline(three(), MOVING), tmp_path / "picture.jpg")
