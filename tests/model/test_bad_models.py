"""What people get wrong when they wrap a model, and models at the edge of what can be wrapped."""

from __future__ import annotations

import copy
import math
import re
from collections import UserDict
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from rotoff import (  # noqa: E402
    Checkpointable,
    InfeasibleError,
    LimitError,
    MeasureError,
    OptionError,
    RotoffError,
    estimate,
    plan,
)

MODES = ("joint", "remat", "offload")


def small_model() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)])


@pytest.fixture(scope="module")
def measured() -> Checkpointable:
    torch.manual_seed(0)
    return Checkpointable(small_model()).measure(torch.randn(64, 32))


def tight(model: Checkpointable, mode: str) -> int:
    """The smallest limit that works for what `model` has measured, found in the error."""
    with pytest.raises(InfeasibleError) as caught:
        model.compute_sequence(1, mode=mode)
    return caught.value.min_mem_limit


def check_step(model: nn.Sequential, x: Any, mode: str) -> None:
    """One step within the smallest limit of `mode` gives the gradients, bit by bit, that the plain model gives."""
    plain, y = copy.deepcopy(model), x.detach().clone().requires_grad_(x.requires_grad)
    wrapped = Checkpointable(model).measure(x)
    wrapped.compute_sequence(tight(wrapped, mode), mode=mode)
    outputs = wrapped(x), plain(y)
    assert torch.equal(*outputs)
    for out in outputs:
        out.sum().backward()
    for a, b in zip([x, *wrapped.parameters()], [y, *plain.parameters()], strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or torch.equal(a.grad, b.grad)
    wrapped.close()


# -- limits, modes and options


@pytest.mark.parametrize(
    ("limit", "sentence"),
    [
        (0, "must be above 0"),
        (-1, "must be above 0"),
        (math.nan, "is nan"),
        (0.5, "looks like a fraction"),
        (True, "is True"),
        (None, "is None"),
        ("6 GiBs", "unknown unit 'GiBs'"),
    ],
    ids=repr,
)
def test_what_is_no_limit(measured: Checkpointable, limit: Any, sentence: str) -> None:
    for model in (measured, Checkpointable(small_model())):  # measured or not yet, the sentence comes at once
        with pytest.raises(LimitError, match=re.escape(sentence)):
            model.compute_sequence(limit)


@pytest.mark.parametrize("mode", ["", "Joint", "keep-all", None, 3])
def test_an_unknown_mode_names_the_modes(mode: Any) -> None:
    with pytest.raises(OptionError, match=re.escape(repr(mode))) as caught:
        Checkpointable(small_model()).compute_sequence("1 MiB", mode=mode)
    assert all(name in str(caught.value) for name in MODES)


@pytest.mark.parametrize("slots", [0, -1, 1.5, True, None, "50"], ids=repr)
def test_slots_are_a_whole_number_of_at_least_one(slots: Any) -> None:
    with pytest.raises(OptionError, match="mem_slots"):
        Checkpointable(small_model()).compute_sequence("1 MiB", mem_slots=slots)


@pytest.mark.parametrize("mode", MODES)
def test_a_limit_too_small_names_the_smallest_that_works(measured: Checkpointable, mode: str) -> None:
    least = tight(measured, mode)
    assert measured.compute_sequence(least, mode=mode).get_expected_memory() <= least
    with pytest.raises(InfeasibleError, match=f"{least} bytes\\) in mode {mode}") as caught:
        measured.compute_sequence(least - 1, mode=mode)
    assert caught.value.min_mem_limit == least


def test_a_limit_that_fails_leaves_the_plan_before_it(measured: Checkpointable) -> None:
    measured.compute_sequence(measured.keep_all_memory)
    before = measured.sequence
    with pytest.raises(InfeasibleError):
        measured.compute_sequence(1)
    with pytest.raises(OptionError):
        measured.compute_sequence(10**9, mode="none")
    assert measured.sequence is before
    assert measured.mem_limit == measured.keep_all_memory


# -- out of order


@pytest.mark.parametrize(
    "name", ["sequence", "get_expected_makespan", "get_expected_memory", "get_expected_host_memory"]
)
def test_what_a_plan_would_tell_needs_a_plan(name: str) -> None:
    model = Checkpointable(small_model()).measure(torch.randn(2, 32))
    with pytest.raises(MeasureError, match="call compute_sequence"):
        getattr(model, name)()


@pytest.mark.parametrize("name", ["chain", "keep_all_memory", "sequence"])
def test_what_a_measurement_would_tell_needs_one(name: str) -> None:
    with pytest.raises(MeasureError, match="nothing has been measured yet"):
        getattr(Checkpointable(small_model()), name)


def test_a_model_that_was_never_planned_is_the_plain_one() -> None:
    model = small_model()
    x = torch.randn(2, 32)
    assert torch.equal(Checkpointable(model)(x), model(x))


# -- what cannot be wrapped


@pytest.mark.parametrize("thing", [None, 3, "model", [nn.Linear(2, 2)], nn.Linear])
def test_what_is_no_module(thing: Any) -> None:
    with pytest.raises(MeasureError, match="give a torch.nn.Module"):
        Checkpointable(thing)


def test_an_empty_model() -> None:
    with pytest.raises(MeasureError, match="at least one module"):
        Checkpointable(nn.Sequential())


@pytest.mark.parametrize("arguments", [(), (torch.ones(2, 32), torch.ones(2, 32))], ids=["none", "two"])
def test_a_sequential_is_called_with_one_argument(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(MeasureError, match=r"cannot be called like this: .*; give what you call the model with"):
        Checkpointable(small_model()).measure(*arguments)


@pytest.mark.parametrize("model", [nn.Identity(), nn.Sequential(nn.Identity(), nn.Identity())], ids=["one", "two"])
def test_a_model_that_computes_nothing(model: nn.Module) -> None:
    for ask in (lambda x: Checkpointable(model).measure(x), lambda x: plan(model, x, cache_directory=False)):
        with pytest.raises(MeasureError, match="the forward computes nothing"):
            ask(torch.randn(4, 4))


@pytest.mark.parametrize("device", ["meta", "cuda"])
def test_a_device_that_is_not_there(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OptionError, match=f"device is '{device}'"):
        Checkpointable(small_model(), device=device)


def test_a_frozen_model_says_what_to_thaw() -> None:
    with pytest.raises(MeasureError, match=r"nothing in the model needs a gradient.*requires_grad_\(\)"):
        Checkpointable(small_model().requires_grad_(False)).measure(torch.randn(64, 32))


def test_an_input_that_does_not_fit_the_model_says_what_the_model_said() -> None:
    with pytest.raises(Exception, match="mat1 and mat2 shapes cannot be multiplied"):
        Checkpointable(small_model()).measure(torch.randn(2, 31))


class Held:
    """Looks like nothing that torch knows."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, batch: Any, more: Any = None) -> torch.Tensor:
        return self.linear(batch["x"] if isinstance(batch, UserDict) else batch.x)


@pytest.mark.parametrize("batch", [Held, lambda x: UserDict(x=x)], ids=["object", "mapping"])
def test_an_input_that_cannot_be_looked_into(batch: Any) -> None:
    given, plain = batch(torch.ones(2, 4)), Reads()
    with pytest.raises(
        MeasureError, match=r"holds no tensor that rotoff can see; pass tensors, .* and dataclasses of them$"
    ):
        Checkpointable(Reads()).measure(given)
    with pytest.raises(MeasureError, match="holds no tensor that rotoff can see"):
        Checkpointable(nn.Sequential(Reads())).measure(given)
    run = Checkpointable(plain).measure(given, torch.ones(2, 4)).compute_sequence("1 MiB")
    assert torch.equal(run(given, torch.ones(2, 4)), plain(given))


@pytest.mark.parametrize(
    "wanted",
    [0, 40.0, True, object(), iter(["linear"]), [], "linear", ["nowhere"], [["linear"]], [3], [nn.Linear(2, 2)]],
)
def test_what_are_no_stages(wanted: Any) -> None:
    with pytest.raises(OptionError, match="give a number of stages, or a list|is no module of the model"):
        Checkpointable(Reads(), stages=wanted)


# -- what is unusual and right


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("needs_grad", [False, True], ids=["no grad", "grad"])
def test_an_input_with_and_without_gradient(mode: str, needs_grad: bool) -> None:
    check_step(small_model(), torch.randn(64, 32, requires_grad=needs_grad), mode)


@pytest.mark.parametrize("mode", MODES)
def test_an_input_of_integers(mode: str) -> None:
    model = nn.Sequential(nn.Embedding(10, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    check_step(model, torch.randint(10, (4, 16)), mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_model_without_parameters(mode: str) -> None:
    check_step(
        nn.Sequential(nn.GELU(), nn.Softmax(-1), nn.Tanh(), nn.SiLU()), torch.randn(64, 32, requires_grad=True), mode
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_model_of_one_stage(mode: str) -> None:
    check_step(nn.Sequential(nn.Linear(32, 32)), torch.randn(8, 32), mode)


@pytest.mark.parametrize("mode", MODES)
def test_frozen_stages(mode: str) -> None:
    model = small_model()
    for module in (model[0], model[2]):
        module.requires_grad_(False)
    check_step(model, torch.randn(64, 32), mode)


def test_an_empty_batch() -> None:
    model = Checkpointable(small_model()).measure(torch.randn(64, 32))
    model.compute_sequence(tight(model, "joint"))
    model(torch.randn(0, 32)).sum().backward()
    assert all(torch.equal(parameter.grad, torch.zeros_like(parameter)) for parameter in model.parameters())


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ({"memslots": 5}, "memslots is not an option; a mode has refine, host_limit, progress"),
        ({"refine": "yes"}, "refine is 'yes'"),
        ({"host_limit": -5}, "host_limit is -5"),
        ({"updates": "after"}, "updates is 'after' and needs a device_limit"),
    ],
)
def test_options_are_checked_even_where_everything_fits(option: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RotoffError, match=re.escape(sentence)):
        Checkpointable(nn.Sequential(nn.Linear(4, 4))).compute_sequence("1 GiB", **option)


def test_a_model_on_the_meta_device_is_for_estimates() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.empty(2, 4)
    with pytest.raises(MeasureError, match=r"on the meta device, where nothing can be measured.*rotoff.estimate"):
        Checkpointable(model).measure(x)
    assert len(estimate(model, x, device="H200")) > 0


def test_a_planned_model_says_that_it_was_given_a_meta_tensor() -> None:
    model, x = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.arange(8)
    wrapped = Checkpointable(model).measure(x, repeats=1).compute_sequence("1 GiB")
    with pytest.raises(MeasureError, match="on the meta device, where nothing can be measured"):
        wrapped(x.to("meta"))
    wrapped(x).sum().backward()
    wrapped.close()


def test_measuring_within_inference_mode_is_refused() -> None:
    with torch.inference_mode(), pytest.raises(MeasureError, match=r"within torch.inference_mode"):
        Checkpointable(nn.Sequential(nn.Linear(4, 4))).measure(torch.randn(2, 4))
