"""Predicted bytes against measured ones, on all models of the tests, where stages are large beside the generators' states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from allocated import left_bytes
from models import fresh
from test_runtime import step_peak, with_sequence

import rotoff

TIMES = 16  # larger than the models' own batches


def many(name: str) -> tuple[torch.nn.Module, Any]:
    """The model `name`, and a way to draw a batch `TIMES` as large as its own."""
    model, batch = fresh(name)

    def joined(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(parts).detach().requires_grad_(parts[0].requires_grad)

    def draw() -> Any:
        batches = [batch() for _ in range(TIMES)]
        if isinstance(batches[0], tuple):
            return tuple(joined(list(parts)) for parts in zip(*batches, strict=True))
        return joined(batches)

    return model, draw


def test_a_replays_graph_keeps_neither_itself_nor_its_input() -> None:
    """ReLU saves its result; what a hook is given for that has a graph, which holds the input that is dropped here."""
    model, draw = many("mlp")
    wrapped = rotoff.Checkpointable(model).measure(draw(), repeats=1)
    text = ["F_ck 1", "F_none 2", "F_none 3", "F_all 4", "drop a 3", "F_all 5", "F_all 6", "B 6", "B 5", "F_all 1"]
    text += ["F_all 2", "drop abar 1", "F_ck 3", "B 4", "F_all 3", "B 3", "F_all 1", "B 2", "B 1"]
    with_sequence(wrapped, rotoff.Sequence.from_text(text))
    assert step_peak(wrapped, draw) <= wrapped.get_expected_memory()
    wrapped.close()


def test_a_forward_that_is_dropped_needs_no_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    import gc

    model, draw = many("mlp")
    wrapped = rotoff.Checkpointable(model).measure(draw(), repeats=1)
    text = [f"F_all {i}" for i in range(1, 6)] + ["offload abar 2", "F_all 6"] + [f"B {i}" for i in range(6, 0, -1)]
    with_sequence(wrapped, rotoff.Sequence.from_text(text))
    x = draw()
    wrapped(x).sum().backward()  # the link's thread and file are there
    monkeypatch.setattr(gc, "collect", lambda *_: 0)  # `left_bytes` calls it
    gc.disable()
    try:
        assert left_bytes(lambda: wrapped(x) is None) <= 0
    finally:
        gc.enable()
    wrapped.close()
