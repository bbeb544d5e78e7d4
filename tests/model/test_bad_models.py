"""What people get wrong when they wrap a model, and models at the edge of what can be wrapped."""

from __future__ import annotations

import contextlib
import math
import re
from collections import UserDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from forced_plans import alike, twins  # noqa: E402
from models import Does, Kept, members  # noqa: E402
from planned_steps import Beside  # noqa: E402
from torch import func, nn  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.nn.modules import module as calls  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402
from torch.utils.module_tracker import ModuleTracker  # noqa: E402

from rotoff import (  # noqa: E402
    Checkpointable,
    InfeasibleError,
    LimitError,
    MeasureError,
    OptionError,
    RotoffError,
    estimate,
    largest,
    plan,
    stages,
)
from rotoff.tools.attach import ForTrainer  # noqa: E402

MODES = ("joint", "remat", "offload")


def small_model() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)])


@pytest.fixture(scope="module")
def measured() -> Checkpointable:
    torch.manual_seed(0)
    return Checkpointable(small_model()).measure(torch.randn(64, 32))


# -- what is refused, in a sentence


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, batch: Any, more: Any = None) -> torch.Tensor:
        return self.linear(batch["x"] if isinstance(batch, UserDict) else batch.x)


def new(**options: Any) -> Checkpointable:
    return Checkpointable(small_model(), **options)


def planned(*limit: Any, **options: Any) -> Checkpointable:
    return new().compute_sequence(*(limit or ("1 MiB",)), **options)


def sample(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (64, 32)))


@torch.inference_mode()
def measured_in_inference() -> None:
    new().measure(sample())


Ask = Callable[[Any], object]
REFUSED: list[tuple[type[Exception], str, Ask, list[Any]]] = [  # with each of the values
    (LimitError, "must be above 0", planned, [0, -1]),
    (LimitError, "is VALUE", planned, [math.nan]),
    (LimitError, "looks like a fraction", planned, [0.5]),
    (LimitError, "is VALUE", planned, [True, None]),
    (LimitError, "unknown unit 'GiBs'", planned, ["6 GiBs"]),
    (OptionError, "mode is VALUE; it is one of joint, remat, offload", lambda v: planned(mode=v), ["", "Joint", "keep-all", None, 3]),
    (OptionError, "mem_slots", lambda v: planned(mem_slots=v), [0, -1, 1.5, True, None, "50"]),
    (OptionError, "memslots is not an option; a mode has refine, host_limit", lambda v: planned(memslots=v), [5]),
    (RotoffError, "refine is 'yes'", lambda v: planned("1 GiB", refine=v), ["yes"]),
    (RotoffError, "host_limit is -5", lambda v: planned("1 GiB", host_limit=v), [-5]),
    (RotoffError, "updates is 'after' and needs a device_limit", lambda v: planned("1 GiB", updates=v), ["after"]),
    (OptionError, "polic", lambda v: planned("1 KiB", **v), [{"policy": "vdn"}, *({"policy": "greedy", **more} for more in ({"mode": "remat"}, {"refine": False}))]),
    (MeasureError, "call compute_sequence", lambda v: getattr(new().measure(sample()), v)(),
     ["sequence", "get_expected_makespan", "get_expected_memory", "get_expected_host_memory"]),
    (MeasureError, "nothing has been measured yet", lambda v: getattr(new(), v),
     ["chain", "keep_all_memory", "sequence"]),
    (MeasureError, r"nothing has been measured yet; call measure\(\*sample\)", lambda v: planned().min_mem_limit(v), ["joint"]),
    (OptionError, "mode is VALUE; modes are 'joint', 'remat', 'offload'", lambda v: new().min_mem_limit(v), ["fast"]),
    (MeasureError, "give a torch.nn.Module", Checkpointable, [None, 3, "model", [nn.Linear(2, 2)], nn.Linear]),
    (MeasureError, "at least one module", Checkpointable, [nn.Sequential()]),
    (MeasureError, "cannot be called like this: .*; give what you call the model with", lambda v: new().measure(*v),
     [(), (torch.ones(2, 32), torch.ones(2, 32))]),
    (MeasureError, r"nothing in the model needs a gradient.*requires_grad_\(\)",
     lambda v: Checkpointable(small_model().requires_grad_(False)).measure(v), [sample()]),
    (MeasureError, "mat1 and mat2 shapes cannot be multiplied", lambda v: new().measure(v), [sample(2, 31)]),
    (MeasureError, "within torch.inference_mode", lambda v: measured_in_inference(), [None]),
    (OptionError, "give a number of stages, or a list|is no module of the model",
     lambda v: Checkpointable(Reads(), stages=v),
     [0, 40.0, True, object(), iter(["linear"]), [], "linear", ["nowhere"], [["linear"]], [3], [nn.Linear(2, 2)]]),
    (OptionError, "backward_from is .*; give the key of an output", lambda v: Checkpointable(Reads(), backward_from=v),
     [b"loss", bytearray(b"loss"), iter(["loss"]), 1.0, 1.5, True, [], [None], ["loss", None], {"loss": 1}, {}]),
    (MeasureError, "repeats is VALUE; give a whole number", lambda v: new().measure(sample(), repeats=v), [0, -1, 2.5, True]),
    (OptionError, "device is 'meta'", lambda v: new(device=v), ["meta"]),
    (OptionError, "device is .*; give one such as", lambda v: new(device=v),
     [True, -1, 2**70, 1.5, b"cpu", ["cpu"], "", "cpu\0", nn.Module]),
    (OptionError, "forms is .*; give true or false", lambda v: new(forms=v),
     [None, 1, 3, 0.5, "yes", [], ["aten.addmm"]]),
    (OptionError, "check is .*; give true or false", lambda v: new(check=v), [None, 1, "yes", []]),
]  # fmt: skip


@pytest.mark.parametrize(("error", "sentence", "ask", "values"), REFUSED, ids=[row[1] for row in REFUSED])
def test_what_is_refused(error: type[Exception], sentence: str, ask: Ask, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(error, match=sentence.replace("VALUE", re.escape(repr(value)))):
            ask(value)


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OptionError, match="device is 'cuda'"):
        new(device="cuda")


@pytest.mark.parametrize("measured", [True, False])
def test_a_planned_step_is_refused_within_a_capture_and_the_plain_one_is_not(
    measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, x = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)]), torch.randn(64, 8)
    model = Checkpointable(plain).measure(x)
    everything, least = model.keep_all_memory, model.min_mem_limit()
    model = model if measured else Checkpointable(plain)
    model.compute_sequence(least)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(MeasureError, match="while a CUDA graph is captured.*a limit that keeps everything"):
        model(x)
    with torch.no_grad():
        model(x)
    if measured:
        model.compute_sequence(everything)
        model(x).sum().backward()


def test_a_limit_that_fails_leaves_the_plan_before_it(measured: Checkpointable) -> None:
    measured.compute_sequence(measured.keep_all_memory)
    before = measured.sequence
    with pytest.raises(InfeasibleError):
        measured.compute_sequence(1)
    with pytest.raises(OptionError):
        measured.compute_sequence(10**9, mode="none")
    assert measured.sequence is before
    assert measured.mem_limit == measured.keep_all_memory


@pytest.mark.parametrize("model", [nn.Identity(), nn.Sequential(nn.Identity(), nn.Identity())], ids=["one", "two"])
def test_a_model_that_computes_nothing(model: nn.Module) -> None:
    for ask in (lambda x: Checkpointable(model).measure(x), lambda x: plan(model, x)):
        with pytest.raises(MeasureError, match="the forward computes nothing"):
            ask(torch.randn(4, 4))


@pytest.mark.parametrize("batch", [Kept, lambda x: UserDict(x=x)], ids=["object", "mapping"])
def test_an_input_that_cannot_be_looked_into_is_trained_as_by_the_plain_model(batch: Any) -> None:
    x = batch(torch.ones(2, 4))
    Beside(Reads(), sample=(x,)).within("joint").step(x)


# -- what is on around the whole process


@contextlib.contextmanager
def hooks_of_all_modules() -> Iterator[None]:
    handles = [register(lambda *_: None) for register in (
        calls.register_module_forward_pre_hook, calls.register_module_forward_hook,
        calls.register_module_full_backward_pre_hook, calls.register_module_full_backward_hook,
    )]  # fmt: skip
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


AROUND = {
    "FlopCounterMode": lambda: FlopCounterMode(display=False),
    "ModuleTracker": ModuleTracker,
    "hooks": hooks_of_all_modules,
}


@pytest.mark.parametrize("name", AROUND)
def test_within_what_hooks_all_modules_a_step_is_the_plain_models(name: str) -> None:
    x = torch.randn(64, 32)
    with AROUND[name]():
        beside = Beside(small_model(), sample=(x,)).within("remat")
    for _ in range(2):
        with AROUND[name]():
            beside.step(x)
    assert beside.planned.get_expected_memory() < beside.planned.keep_all_memory


def test_a_profiler_after_a_first_forward_without_backward_sees_its_steps() -> None:
    model = Checkpointable(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    model.compute_sequence("1 MiB")
    model(torch.randn(4, 8))
    with torch.profiler.profile() as profiler:
        model(torch.randn(4, 8)).sum().backward()
    assert any(event.name == "aten::tanh" for event in profiler.events())


@pytest.mark.parametrize("around", [torch.profiler.profile, torch.autograd.profiler.profile])
def test_a_profiler_around_first_steps_is_said_once_and_truly_at_the_end(
    around: Any, caplog: pytest.LogCaptureFixture
) -> None:
    net = small_model()
    trainer = ForTrainer("1 MiB")
    trainer._attach(net, processes=1)
    for n in (64, 32, 16):
        with around():
            net(torch.randn(n, 32)).sum().backward()
    trainer._end(steps=3)
    first, last = [record.getMessage() for record in caplog.records]
    assert "has no plan, since it cannot be recorded while a profiler is active" in first
    assert "no step was planned or limited: it cannot be recorded while a profiler is active" in last
    assert "never called" not in last


@contextlib.contextmanager
def set_by(setter: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


DEFAULTS: dict[str, Callable[[], Any]] = {
    "within meta": lambda: torch.device("meta"),
    "meta": lambda: set_by(torch.set_default_device, "meta", None),
    "float64": lambda: set_by(torch.set_default_dtype, torch.float64, torch.float32),
    "bfloat16": lambda: set_by(torch.set_default_dtype, torch.bfloat16, torch.float32),
}


def trained(model: nn.Module, x: torch.Tensor, optimizer: Any = torch.optim.SGD, **limit: Any) -> list[torch.Tensor]:
    """The parameters after two steps from one seed, the same of the plain model and of the planned one."""

    def plan(run: Checkpointable, own: Any, *_: Any, **__: Any) -> None:
        asked = {**limit, "optimizer": own} if limit else {"mem_limit": run.min_mem_limit("joint")}
        run.compute_sequence(**asked, refine=False)

    pairs = twins(model, x, make=lambda parameters: [optimizer(parameters, lr=0.1)], plan=plan)
    for _, run, (own,) in pairs:
        for k in range(2):
            torch.manual_seed(k)
            run(x).square().sum().backward()
            own.step()
            own.zero_grad()
    assert alike(pairs)
    return [p.detach() for p in model.parameters()]


def in_a_plan(*args: Any, **kwargs: Any) -> Any:
    found = plan(*args, device="RTX 4090", **kwargs)
    return found.min_mem_limits, found.resident_bytes, found.keep_all_bytes


ENTRIES: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "plan": in_a_plan,
    "plan, sgd": lambda model, x: in_a_plan(model, x, optimizer="sgd"),
    "plan, pipeline": lambda model, x: [row.keep_all_bytes for row in plan(model, x, pipeline=2, microbatches=4).rows],
    "estimate": lambda model, x: estimate(model, x, device="RTX 4090").stages,
    "estimate, CPU": lambda model, x: estimate(model, x, device="CPU").stages,
    "largest": lambda model, x: (
        largest(
            lambda n: (model, torch.empty(n, 32, device="meta", dtype=torch.float32)),
            mem_limit="1 MiB",
            step=64,
            most=4096,
        ).size
    ),
    "stages": lambda model, x: [one.saved_bytes for one in stages(model, x).chain.stages],
    "measure": lambda model, x: [one.saved_bytes for one in Checkpointable(model).measure(x).chain.stages],
    "train": trained,
    "train, placed": lambda model, x: trained(model, x, device_limit="64 KiB"),
    "train, placed, with states": lambda model, x: trained(
        model, x, partial(torch.optim.SGD, momentum=0.9), device_limit="64 KiB"
    ),
}


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.grid(every=4)
def test_a_default_device_or_dtype_changes_nothing(name: str, default: str) -> None:
    found = []
    for around in (contextlib.nullcontext, DEFAULTS[default]):
        torch.manual_seed(0)
        model, x = small_model(), torch.randn(64, 32)
        with around():
            found.append(ENTRIES[name](model, x))
    if name.startswith("train"):
        assert all(map(torch.equal, *found))
    else:
        assert found[0] == found[1]


# -- lazy modules, and derivatives within the forward


LAZY: dict[str, Callable[[], nn.Module]] = {
    "norm": lambda: nn.Sequential(nn.LazyLinear(32), nn.LazyBatchNorm1d(), nn.Dropout(0.1), nn.Linear(32, 32)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 4, 4)), nn.Sequential(nn.LazyConv2d(8, 3), nn.ReLU()), nn.LazyConv2d(4, 1)
    ),
}


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("name", LAZY)
def test_a_lazy_model_trains_as_the_plain_one(
    name: str, placed: bool, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    x, pair = torch.randn(64, 32), (LAZY[name](), LAZY[name]())
    for one in pair:
        torch.manual_seed(0)
        for part in one.modules():
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()
    model, run = pair[1], Checkpointable(pair[1])
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in pair]
    asked = {"device_limit": "1 MiB", "optimizer": optimizers[1]} if placed else {"mem_limit": "1 MiB"}
    with pytest.raises(MeasureError, match="a lazy module.*run the plain model once"):
        run.measure(x)
    run.compute_sequence(**asked, refine=False)
    for k in range(3):
        for one, optimizer in zip((pair[0], run), optimizers, strict=True):
            torch.manual_seed(k)
            one(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(map(torch.equal, pair[0].parameters(), model.parameters()))
    assert len([record for record in caplog.records if "a lazy module" in record.getMessage()]) == 1
    assert len(run.plans()) == 1
    for ask in (estimate, plan):
        with pytest.raises(MeasureError, match="a lazy module"):
            ask(LAZY[name](), x)


TRANSFORMS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "grad": lambda net, x: x + func.grad(net.told)(x),
    "grad of parameters": lambda net, x: x @ func.grad(
        lambda p: func.functional_call(net.linear, p, (x,)).square().sum()
    )(dict(net.linear.named_parameters()))["weight"],
    "vjp": lambda net, x: x + func.vjp(net.told, x)[1](torch.ones(()))[0],
    "hessian": lambda net, x: x + func.vmap(func.hessian(net.told))(x).mean(-1),
    "jvp": lambda net, x: x + func.jvp(lambda z: torch.tanh(net.linear(z)), (x,), (torch.ones_like(x),))[1],
    "forward_ad": lambda net, x: x + net.forward_ad(x),
}  # fmt: skip


class Within(nn.Module):
    """Calls a transform of torch.func in its forward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear, self.rest = kind, nn.Linear(32, 32), small_model()

    def told(self, z: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(z)).sum()

    def forward_ad(self, x: torch.Tensor) -> Any:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(self.linear(forward_ad.make_dual(x, x)))[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest[2:](TRANSFORMS[self.kind](self, self.rest[:2](x)))


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_derivatives_within_the_forward_are_the_plain_models(kind: str) -> None:
    x = torch.randn(16, 32)
    beside = Beside(nn.Sequential(nn.Linear(32, 32), Within(kind)), sample=(x,)).within("remat")
    for _ in range(2):
        beside.step(x)


# -- what is unusual and right


@pytest.mark.parametrize("mode", MODES)
def test_models_without_parameters_and_of_one_stage(mode: str) -> None:
    without = nn.Sequential(nn.GELU(), nn.Softmax(-1), nn.Tanh(), nn.SiLU())
    for model, x in (
        (without, torch.randn(64, 32, requires_grad=True)),
        (nn.Sequential(nn.Linear(32, 32)), torch.randn(8, 32)),
    ):
        Beside(model, sample=(x,)).within(mode).step(x)


def test_a_model_on_the_meta_device_is_for_estimates() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.empty(2, 4)
    with pytest.raises(MeasureError, match=r"on the meta device, where nothing can be measured.*rotoff.estimate"):
        Checkpointable(model).measure(x)
    assert len(estimate(model, x, device="H200")) > 0


@pytest.mark.parametrize("mode", MODES)
def test_a_part_of_a_model_may_be_on_the_meta_device(mode: str) -> None:
    """Members that are mapped over the code of one without bytes."""
    x, code = torch.randn(64, 32), nn.Linear(32, 32, device="meta")
    blocks = (Does(lambda net, x: x + net.members(x).relu(), members=members(32, code)) for _ in range(3))
    Beside(nn.Sequential(*blocks), sample=(x,)).within(mode).step(x)


def test_a_planned_model_says_that_it_was_given_a_meta_tensor() -> None:
    model, x = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.arange(8)
    wrapped = Checkpointable(model).measure(x).compute_sequence("1 GiB")
    with pytest.raises(MeasureError, match="on the meta device, where nothing can be measured"):
        wrapped(x.to("meta"))
    wrapped(x).sum().backward()
    wrapped.close()
