"""What tells modules of equal cost: their code, as far as it is found, and all that it is called with."""

from __future__ import annotations

from types import FunctionType

import pytest
import torch
from torch import nn

from rotoff.capture import strategy
from rotoff.profile.selective.graph import structure
from rotoff.profile.timing.timing_cache import profile_key


def helper(x: torch.Tensor) -> torch.Tensor:
    return deeper(x) + 1


def deeper(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Calls(nn.Module):
    @property
    def factor(self) -> int:
        return 3

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return helper(self.method(x)).relu()


def other(code: str) -> FunctionType:
    """A function of this module with another body."""
    found: dict[str, FunctionType] = {}
    exec(f"def changed(x): return {code}", {"__name__": __name__}, found)
    return found["changed"]


def test_equal_modules_have_equal_structure_texts() -> None:
    assert structure([Calls()]) == structure([Calls()])


@pytest.mark.parametrize("name", ["helper", "deeper"])
def test_structure_includes_called_functions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = structure([Calls()])
    monkeypatch.setitem(globals(), name, other("x * 3"))
    assert structure([Calls()]) != before


def test_structure_includes_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "deeper", other("x * 3"))
    three = structure([Calls()])
    monkeypatch.setitem(globals(), "deeper", other("x * 4"))
    assert structure([Calls()]) != three


def test_structure_includes_methods_and_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    before = structure([Calls()])
    monkeypatch.setattr(Calls, "method", lambda self, x: x.exp() * self.factor)
    changed = structure([Calls()])
    assert changed != before
    monkeypatch.setattr(Calls, "factor", property(lambda self: 5))
    assert structure([Calls()]) not in (before, changed)


def closing_over(factor: object) -> FunctionType:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * factor

    return scaled


class Scaled(nn.Module):
    def __init__(self, factor: object) -> None:
        super().__init__()
        self.scale = closing_over(factor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(x)


def test_structure_of_closure_includes_code_and_cells() -> None:
    assert "@" not in structure([Scaled(2)])
    assert structure([Scaled(2)]) == structure([Scaled(2)])
    assert structure([Scaled(2)]) != structure([Scaled(3)])
    assert "@" in structure([Scaled(object())])


class Pooled(nn.Module):
    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.conv, self.size = nn.Conv2d(3, 3, 1), size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.max_pool2d(self.conv(x), self.size)


def test_times_of_pooling_model_are_found_in_cache() -> None:
    """`max_pool2d` is a closure, and what the model returns is put together by a specification."""

    def key(size: int) -> object:
        x = torch.zeros(1, 3, 8, 8)
        found = strategy.capture(Pooled(size), ((x,), {}), torch.device("cpu"))
        return profile_key(found.stages, ((x,), {}), torch.device("cpu"))

    assert key(2) is not None
    assert key(2) == key(2)
    assert key(2) != key(4)


def test_profile_key_includes_default_dtype() -> None:
    """A forward that makes tensors from numbers takes other bytes under another one."""
    x = torch.zeros(1, 3, 8, 8)
    found = strategy.capture(Pooled(2), ((x,), {}), torch.device("cpu"))
    single = profile_key(found.stages, ((x,), {}), torch.device("cpu"))
    torch.set_default_dtype(torch.float64)
    try:
        assert profile_key(found.stages, ((x,), {}), torch.device("cpu")) != single
    finally:
        torch.set_default_dtype(torch.float32)
