"""Parameters in what is shown: text, pictures, traces and the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import rotoff
from rotoff import Chain, ParameterGroup, Sequence, Stage, render, simulate
from rotoff.cli import main
from rotoff.report.summary import fates, group_fates, in_words

GROUP = ParameterGroup((1,), 40, 40, 80, 3, 5, 7)
CHAIN = Chain(
    tuple(Stage(f"s{i}", 2, 4, 10, 100, 10) for i in range(1, 7)),
    d2h_bandwidth=20,
    h2d_bandwidth=20,
    name="net",
    parameters=(
        *(replace(GROUP, stages=(i,), name=f"p{i}") for i in range(1, 6)),
        ParameterGroup((6,), 30, name="frozen"),
    ),
)
STEP = """
prefetch w 6; F_all 1; wait w 2; F_all 2; prefetch w 3; wait w 3; F_all 3; drop w 3; F_all 4; prefetch w 5; wait w 5
F_all 5; wait w 6; F_all 6; B 6; drop w 6; offload abar 1; B 5; offload g 5; drop w 5; H 5; prefetch w 3; free g 5
prefetch o 4; B 4; wait o 4; U 4; offload o 4; free o 4; wait w 3; B 3; U 3; offload w 3; free w 3
B 2; offload g 2; drop w 2; H 2; B 1; prefetch w 2; U 1; free g 2
"""
PLAN = Sequence.from_text(
    [op for line in STEP.strip().splitlines() for op in line.split("; ")],
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


def test_what_becomes_of_each_group() -> None:
    assert group_fates(PLAN) == WORDS
    assert in_words(PLAN).endswith(
        "parameters 1 resident; parameters 2 updated on the host; parameters 3, 6 streamed; parameters 4 state moved;"
        " parameters 5 streamed, updated on the host"
    )
    assert [*fates(PLAN).values()] == ["moved"] + ["kept"] * 5, "a group's number is no stage's"
    both = (
        "prefetch w 1; prefetch o 1; wait w 1; F_all 1; B 1; wait o 1; U 1; offload w 1; offload o 1; free w 1; free o"
        " 1"
    )
    assert group_fates(Sequence.from_text(both.split("; "))) == {1: "streamed, state moved"}


def test_the_text_tells_parameters_apart() -> None:
    text = render(CHAIN, PLAN, width=100, colour=False)
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert " ".join(text.split()).endswith(in_words(PLAN))
    assert set(rows["compute"].split()[1]) >= set("FBU.")
    assert set("".join(next(line for line in text.splitlines() if " to host " in line).split()[2:])) == set("»>")
    assert "«" in next(line for line in text.splitlines() if " to dev. " in line)
    assert set("".join(next(line for line in text.splitlines() if " on host " in line).split()[2:])) == {"H"}
    assert "▒" in text
    assert "\x1b[" in render(CHAIN, PLAN, colour=True)
    plain = render(CHAIN.without_parameters(), rotoff.keep_all(CHAIN.without_parameters()), colour=False)
    assert "▒" not in plain


def test_what_runs_into_the_next_step_is_shown_at_its_start() -> None:
    trace = simulate(CHAIN, PLAN)
    late = next(event for event in trace.events if str(event.op) == "prefetch w 2")
    assert late.end > trace.makespan
    spans = [(start, end) for event, start, end in trace.spans("h2d") if event == late]
    assert spans[-1][0] == pytest.approx(max(0.0, late.start - trace.makespan))
    assert spans[-1][1] == pytest.approx(late.end - trace.makespan)
    for lane in ("d2h", "h2d", "host"):
        found = trace.spans(lane)
        assert all(0 <= start <= end <= trace.makespan * (1 + 1e-9) for _, start, end in found)
        length = sum(event.end - event.start for event in trace.events if event.lane == lane)
        assert sum(end - start for _, start, end in found) == pytest.approx(length)


def test_the_timeline_has_a_lane_for_the_host() -> None:
    pytest.importorskip("matplotlib")
    from rotoff import plot
    from rotoff.plot import style
    from rotoff.plot.timeline import boxes
    from rotoff.report.expected_step import held

    trace = simulate(CHAIN, PLAN)
    assert {box.look for box in boxes(trace, "d2h")} == {style.OUTWARD, style.PARAMETERS_OUT}
    assert {box.look for box in boxes(trace, "host")} == {style.HOST_UPDATE}
    assert [box.label for box in boxes(trace, "compute") if box.look is style.UPDATE] == ["4", "3", "1"]
    assert {"w3", "o4"} <= {box.label for box in boxes(trace, "h2d")}
    assert max(parameters for *_, parameters in held(trace)) == max(event.parameter_memory for event in trace.events)
    figure = plot.timeline(CHAIN, PLAN)
    assert [label.get_text() for label in figure.axes[1].get_yticklabels()] == [
        "compute",
        "device → host",
        "host → device",
        "host",
    ]
    assert "over keeping everything" in figure.get_suptitle()


def test_a_trace_names_groups_and_their_bytes() -> None:
    events = rotoff.chrome_trace(CHAIN, PLAN)["traceEvents"]
    lanes = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    updates = [e for e in events if e["name"] == "H 5"]
    assert [e["tid"] for e in updates] == [lanes["updates on the host"]]
    assert updates[0]["args"]["parameters"] == "p5"
    copy = next(e for e in events if e["name"] == "offload g 5")
    assert (copy["cat"], copy["args"]["parameters"]) == ("offload parameters", "p5")
    counter = next(e for e in events if e["ph"] == "C")
    assert set(counter["args"]) == {"device, parameters", "device, all else", "host"}
    plain = CHAIN.without_parameters()
    assert "updates on the host" not in json.dumps(rotoff.chrome_trace(plain, rotoff.keep_all(plain)))


def test_a_trace_of_more_groups_than_stages() -> None:
    chain = replace(CHAIN, stages=CHAIN.stages[:1], parameters=(GROUP,) * 3)
    events = rotoff.chrome_trace(chain, rotoff.keep_all(chain))["traceEvents"]
    assert {"U 1", "U 2", "U 3"} <= {event["name"] for event in events}


def test_the_command_line_takes_chains_with_parameters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chain, plan = str(tmp_path / "chain.json"), str(tmp_path / "plan.json")
    CHAIN.save(chain)
    PLAN.save(plan)

    def out(*words: str, code: int = 0) -> str:
        assert main(list(words)) == code
        return capsys.readouterr().out

    assert "frozen" in out("show", chain)
    assert "parameters 230 B, gradients 200 B, states 400 B: 830 B in all" in out("show", chain)
    assert json.loads(out("show", chain, "--json"))["keep_all"]["makespan"] == 36 + 15
    told = json.loads(out("show", chain, plan, "--json"))["parameters"]
    assert {row["group"]: row["fate"] for row in told} == WORDS
    assert json.loads(out("show", chain, plan, "--json"))["makespan"] == simulate(CHAIN, PLAN).makespan
    out("show", chain, plan, "--updates", "after", code=1)
    made = str(tmp_path / "made.json")
    out("solve", chain, "--mem-limit", "1500", "--policy", "streaming", "--option", "effort=0", "-o", made)
    assert "updated on the host" in out("show", chain, made)
    assert "step" in out("show", chain, made, "--updates", "after")
    written = tmp_path / "trace.json"
    out("show", chain, made, "-o", str(written))
    assert json.loads(written.read_text(encoding="utf-8"))["traceEvents"]
