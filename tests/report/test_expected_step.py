"""One plan, one set of numbers: the log, the text, the picture and the trace file tell the user's limit, the peak in
its terms and the expected step."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from models import Residual
from torch import nn

import rotoff


@pytest.fixture
def model() -> rotoff.Checkpointable:
    torch.manual_seed(0)
    net = nn.Sequential(*[Residual(32) for _ in range(6)])
    return rotoff.Checkpointable(net, cache_directory=None).measure(torch.randn(256, 32), repeats=1)


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
    assert f"predicted peak {peak}," in caplog.text
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


def test_a_measured_step_is_drawn_in_the_same_terms(model: rotoff.Checkpointable) -> None:
    model.compute_sequence(model.keep_all_memory // 2, refine=False)
    with model.record_step() as recorded:
        model(torch.randn(256, 32)).sum().backward()
    events = rotoff.chrome_trace(model.chain, model.sequence, measured=recorded.trace)["traceEvents"]
    held = {pid: [e["args"]["device"] for e in events if e["ph"] == "C" and e["pid"] == pid] for pid in (1, 2)}
    assert held[1] == held[2]
