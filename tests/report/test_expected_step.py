"""One plan, one set of numbers: the log, the text, the picture and the trace file tell the user's limit, the peak in
its terms and the expected step."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Residual
from torch import nn

import rotoff
from rotoff.cli import main
from rotoff.core.figures import percent


@pytest.fixture
def model() -> rotoff.Checkpointable:
    torch.manual_seed(0)
    net = nn.Sequential(*[Residual(32) for _ in range(6)])
    return rotoff.Checkpointable(net).measure(torch.randn(256, 32))


def planned(model: rotoff.Checkpointable, how: Any) -> None:
    """Plan as `how` says: in a share of keeping everything, for several micro-batches, or with the parameters."""
    if how == "in flight":
        model.compute_sequence(int(1.5 * model.keep_all_memory), refine=False, in_flight=3)
    elif isinstance(how, float):
        model.compute_sequence(int(how * model.keep_all_memory), refine=False)
    else:
        optimizer = torch.optim.AdamW(model.parameters())
        model.compute_sequence(device_limit=how, optimizer=optimizer, refine=False)


@pytest.mark.parametrize("how", [0.5, 0.7, 1.0, "in flight", "1 MiB", "1 GiB"])
def test_log_text_table_picture_and_trace_agree(
    how: Any, model: rotoff.Checkpointable, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, logger="rotoff"):
        planned(model, how)
    model.display()
    text = " ".join(capsys.readouterr().out.split())
    peak, seconds, host = model.get_expected_memory(), model.get_expected_makespan(), model.get_expected_host_memory()
    (row,) = model.plans()
    everything = sum(group.update_time for group in model.chain.parameters) + model.chain.compute_time
    assert row.overhead == pytest.approx(seconds / everything - 1, abs=1e-9)
    assert (row.memory, row.makespan) == (peak, seconds)
    machine = rotoff.simulate(model.chain, model.sequence).makespan
    assert (seconds > machine) is (how not in (1.0, "1 GiB")), (
        "following a plan costs time, the model as it is does not"
    )
    said = percent(row.overhead)
    assert f"peak {rotoff.format_bytes(peak)} of {rotoff.format_bytes(model.mem_limit)}" in text
    assert ("with the batch" in text) is (how in ("1 MiB", "1 GiB")), "a mem_limit does not count it"
    assert f"({said})" in text
    assert (f"host {rotoff.format_bytes(host)}" in text) is (host > 0)
    assert f"keeping everything takes {rotoff.format_bytes(model.keep_all_memory)}" in caplog.text or how == "1 GiB"
    if "planned" in caplog.text:
        assert f"predicted peak {rotoff.format_bytes(peak)}, step {seconds:.4g} s ({said} over" in caplog.text
    trace = rotoff.chrome_trace(model.chain, model.sequence)
    figures = {"mem_limit": model.mem_limit, "peak_bytes": peak, "host_bytes": host, "overhead": row.overhead}
    assert figures.items() <= trace["otherData"].items()
    held = [{**e["args"], "host": 0} for e in trace["traceEvents"] if e["ph"] == "C"]
    assert max(sum(one.values()) for one in held) == peak
    plot = pytest.importorskip("rotoff.plot")
    figure = plot.timeline(model.chain, model.sequence)
    title = figure.get_suptitle()
    assert rotoff.format_bytes(peak) in title and f"({said} over keeping everything)" in title
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert f"limit, {rotoff.format_bytes(model.mem_limit)}" in legend


@pytest.mark.parametrize("parameters", [(), (rotoff.ParameterGroup((2,), 40, 40, 80, 3, 5, 7),)])
def test_a_row_of_a_sweep_says_what_the_text_of_its_plan_says(
    parameters: tuple[rotoff.ParameterGroup, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = tuple(rotoff.Stage(f"s{i}", 1.0, 2.0, 100, 300) for i in range(5))
    chain = rotoff.Chain(stages, 100.0, 100.0, input_bytes=50, parameters=parameters)
    chain.save(tmp_path / "chain.json")
    made = rotoff.sweep(chain, modes="joint", refine=False)
    assert any(row.overhead for row in made)
    for row, sequence in zip(made, made.sequences, strict=True):
        assert sequence is not None and row.overhead is not None
        text = " ".join(rotoff.render(chain, sequence, width=100).split())
        assert f"({percent(row.overhead)}) · peak {rotoff.format_bytes(row.peak_bytes)} of" in text
        assert f" of {rotoff.format_bytes(row.limit)} with the batch" in text
        sequence.save(tmp_path / "plan.json")
        assert main(["show", str(tmp_path / "chain.json"), str(tmp_path / "plan.json"), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["overhead"], told["peak_bytes"], told["mem_limit"]) == (row.overhead, row.peak_bytes, row.limit)


def test_what_is_expected_goes_with_the_plan_to_its_file_and_not_to_other_plans(
    model: rotoff.Checkpointable, tmp_path: Path
) -> None:
    model.compute_sequence(model.keep_all_memory // 2, refine=False)
    chain, plan = model.chain, model.sequence
    plan.save(tmp_path / "plan.json")
    loaded = rotoff.Sequence.load(tmp_path / "plan.json")
    shown = rotoff.render(chain, plan, width=100)
    assert rotoff.render(chain, loaded, width=100) == shown
    assert json.loads((tmp_path / "plan.json").read_text())["meta"]["expected"]["mem_limit"] == model.mem_limit
    faster = replace(chain, stages=tuple(replace(s, forward_time=s.forward_time / 2) for s in chain.stages))
    bare = replace(plan, meta={})
    for other in (plan, bare):
        assert rotoff.render(faster, other, width=100) == rotoff.render(faster, bare, width=100)


def test_what_another_writes_under_the_same_name_is_not_shown(
    model: rotoff.Checkpointable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command then shows the simulated step, as of a plan without figures."""
    model.compute_sequence(model.keep_all_memory // 2, refine=False)
    chain, plan = model.chain, model.sequence
    files = [str(tmp_path / name) for name in ("chain.json", "plan.json")]
    chain.save(files[0])

    def shown(meta: dict[str, Any]) -> str:
        replace(plan, meta=meta).save(files[1])
        assert main(["show", *files]) == 0
        return capsys.readouterr().out

    without, said = shown({}), plan.meta["expected"]
    assert shown({"expected": said}) != without
    others: list[Any] = ["x", [], {}, -1, {**said, "machine": {}}]
    assert [one for one in others if shown({"expected": one}) != without] == []


def test_a_measured_step_is_drawn_in_the_same_terms(model: rotoff.Checkpointable) -> None:
    model.compute_sequence(model.keep_all_memory // 2, refine=False)
    with model.record_step() as recorded:
        model(torch.randn(256, 32)).sum().backward()
    events = rotoff.chrome_trace(model.chain, model.sequence, measured=recorded.trace)["traceEvents"]
    held = {pid: [e["args"]["device"] for e in events if e["ph"] == "C" and e["pid"] == pid] for pid in (1, 2)}
    assert max(held[1]) == max(held[2]) == model.get_expected_memory()
