"""One plan, one set of numbers: the log, the text, the picture and the trace file tell the user's limit, the peak in
its terms and the expected step."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Residual
from torch import nn

import rotoff
from rotoff.cli import main


@pytest.fixture
def model() -> rotoff.Checkpointable:
    torch.manual_seed(0)
    net = nn.Sequential(*[Residual(32) for _ in range(6)])
    return rotoff.Checkpointable(net, cache_directory=None).measure(torch.randn(256, 32))


@pytest.mark.parametrize("share", [0.5, 0.7, 1.0])
def test_log_text_picture_and_trace_agree(
    share: float, model: rotoff.Checkpointable, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, logger="rotoff"):
        model.compute_sequence(int(share * model.keep_all_memory), refine=False)
    model.display()
    text = capsys.readouterr().out.replace("\n", " ")
    peak = rotoff.format_bytes(model.get_expected_memory())
    over = model.get_expected_makespan() / model.profile.chain.compute_time - 1
    assert f"peak {peak} of {rotoff.format_bytes(model.mem_limit)}" in text
    assert f"({round(100 * over, 1) + 0.0:+.1f} %)" in text
    assert f"predicted peak {peak}," in caplog.text or (share == 1 and f"everything takes {peak}," in caplog.text)
    trace = rotoff.chrome_trace(model.chain, model.sequence)["traceEvents"]
    assert max(e["args"]["device"] for e in trace if e["ph"] == "C") == model.get_expected_memory()
    plot = pytest.importorskip("rotoff.plot")
    figure = plot.timeline(model.chain, model.sequence)
    assert peak in figure._suptitle.get_text()
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert f"limit, {rotoff.format_bytes(model.mem_limit)}" in legend


def test_what_is_expected_goes_with_the_plan_to_its_file_and_not_to_other_plans(
    model: rotoff.Checkpointable, tmp_path: Path
) -> None:
    model.compute_sequence(model.keep_all_memory // 2, refine=False)
    chain, plan = model.chain, model.sequence
    plan.save(tmp_path / "plan.json")
    loaded = rotoff.Sequence.load(tmp_path / "plan.json")
    shown = rotoff.render(chain, plan, width=100, colour=False)
    assert rotoff.render(chain, loaded, width=100, colour=False) == shown
    assert json.loads((tmp_path / "plan.json").read_text())["meta"]["expected"]["mem_limit"] == model.mem_limit
    faster = replace(chain, stages=tuple(replace(s, forward_time=s.forward_time / 2) for s in chain.stages))
    bare = replace(plan, meta={})
    for other in (plan, bare):
        assert rotoff.render(faster, other, width=100, colour=False) == rotoff.render(
            faster, bare, width=100, colour=False
        )


BAD: list[Any] = [None, 5, "x", [], {}, True, -1, math.nan, 10**400, "1 GiB", [None]]
FIELDS = ("mem_limit", "peak_bytes", "memory")


def test_damaged_figures_are_as_none(
    model: rotoff.Checkpointable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands then show the simulated step, as of a plan without figures."""
    model.compute_sequence(model.keep_all_memory // 2, refine=False)
    chain, plan = model.chain, model.sequence
    said = plan.meta["expected"]
    damaged = [*BAD, {"machine": said["machine"]}, *({**said, name: one} for name in FIELDS for one in BAD)]
    damaged += [{k: v for k, v in said.items() if k != name} for name in FIELDS]
    damaged += [{**said, "memory": [one, *said["memory"][1:]]} for one in BAD]
    damaged += [{**said, "memory": [*said["memory"], 1]}, {**said, "machine": {}}]
    right = [{**said, "mem_limit": 5}, {**said, "mem_limit": None}, {**said, "peak_bytes": 5}]
    right += [{**said, "memory": [5, *said["memory"][1:]]}]
    without = rotoff.render(chain, replace(plan, meta={}), width=100, colour=False)
    chain.save(tmp_path / "chain.json")
    for one in damaged:
        replace(plan, meta={"expected": one}).save(tmp_path / "plan.json")
        loaded = rotoff.Sequence.load(tmp_path / "plan.json")
        files = [str(tmp_path / name) for name in ("chain.json", "plan.json")]
        code = main(["show", *files, "-o", str(tmp_path / "trace.json")])
        if loaded.meta["expected"] not in right:
            assert code == 0 and rotoff.render(chain, loaded, width=100, colour=False) == without, one
    capsys.readouterr()


def test_a_measured_step_is_drawn_in_the_same_terms(model: rotoff.Checkpointable) -> None:
    model.compute_sequence(model.keep_all_memory // 2, refine=False)
    with model.record_step() as recorded:
        model(torch.randn(256, 32)).sum().backward()
    events = rotoff.chrome_trace(model.chain, model.sequence, measured=recorded.trace)["traceEvents"]
    held = {pid: [e["args"]["device"] for e in events if e["ph"] == "C" and e["pid"] == pid] for pid in (1, 2)}
    assert held[1] == held[2]
