"""State of a model that its forward reads and changes: buffers through views, counters, settings; and what is refused,
before it is done."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from planned_steps import smallest
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F

import rotoff
from rotoff.runtime.reads import Reads
from rotoff.runtime.torch_calls import KNOWN, find
from rotoff.tensors.storage import storage_key

WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, make: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([make() for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def sequential(make: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(*[make() for _ in range(4)])


def measured(model: nn.Module, x: torch.Tensor) -> rotoff.Checkpointable:
    return rotoff.Checkpointable(model, cache_directory=None, check=True).measure(x, repeats=1)


def trained(
    make: Callable[[], nn.Module],
    mode: str | None,
    between: Callable[[nn.Module, int], object] = lambda model, step: None,
    room: float = 1.0,
) -> list[torch.Tensor]:
    """Losses, gradients and state of a few steps; planned in `mode` with `room` times the least bytes, or the plain
    model."""
    torch.manual_seed(0)
    model, x = make(), torch.randn(32, WIDTH)
    run: nn.Module = model
    if mode is not None:
        run = measured(model, x)
        run.compute_sequence(int(room * smallest(run, mode)), mode=mode, refine=False)
        assert not run._plan.keeps_all  # or it would be the plain model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found: list[torch.Tensor] = []
    for n in range(3):
        between(model, n)
        torch.manual_seed(n)
        optimizer.zero_grad()
        loss = run(x).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        found += [b.clone() for b in model.buffers()]
        optimizer.step()
    if isinstance(run, rotoff.Checkpointable):
        run.close()
    return found


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


KINDS = [pytest.param(Net, id="recorded"), pytest.param(sequential, id="sequential")]
MODES = ["remat", "offload", "joint"]


# -- buffers


class Averages(Block):
    """Scales by an average of its inputs, which it updates in one of the ways to write to a buffer."""

    how = ""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(2, WIDTH))
        self.way = self.how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x * self.average[0].clone())
        with torch.no_grad():
            mean = x.detach().mean(0)
            if self.way == "itself":
                self.average.mul_(0.9).add_(mean, alpha=0.1)
            elif self.way == "data":
                self.average.data.mul_(0.9).add_(mean, alpha=0.1)
            elif self.way == "detach":
                self.average.detach().mul_(0.9).add_(mean, alpha=0.1)
            elif self.way == "row":
                self.average[0].mul_(0.9).add_(mean, alpha=0.1)
            else:
                first, _ = self.average.unbind()
                first.lerp_(mean, 0.1)
        return y


@pytest.mark.parametrize("how", ["itself", "data", "detach", "row", "unbind"])
@pytest.mark.parametrize("kind", KINDS)
def test_buffers_may_be_written_in_any_way(kind: Any, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Averages, "how", how)
    plain = trained(lambda: kind(Averages), None)
    for mode in MODES:
        assert same(trained(lambda: kind(Averages), mode), plain), mode


# -- attributes that the forward sets


class Counts(Block):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return super().forward(x) / self.count


class Remembers(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.ones(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x * self.mean)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return y


@pytest.mark.parametrize("make", [Counts, Remembers])
@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_finds_attributes_as_its_first_run_did(kind: Any, make: type[nn.Module]) -> None:
    plain = trained(lambda: kind(make), None)
    for mode in MODES:
        assert same(trained(lambda: kind(make), mode), plain), mode


class Warms(Block):
    """Goes another way from the fourth call on; measuring and all but the last step of these tests see the first way
    alone."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return super().forward(x) * (3.0 if self.count > 2 else 1.0)


class Held(nn.Module):
    """Holds a count that the block around it goes by; it is never called itself."""

    count = 0

    def __init__(self) -> None:
        super().__init__()
        self.count = 0


class Around(Block):
    def __init__(self) -> None:
        super().__init__()
        self.held = Held()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.held.count += 1
        return super().forward(x) * (3.0 if self.held.count > 2 else 1.0)


@pytest.mark.parametrize("make", [Warms, Around])
def test_what_goes_by_a_count_is_taken_whole_before_that_shows(make: type[nn.Module]) -> None:
    plain = trained(lambda: Net(make), None)
    for mode in MODES:
        assert same(trained(lambda: Net(make), mode), plain), mode


class Stores(Net):
    """Numbers that are the same in each call, and one that the first call sets for good."""

    length, longest = 0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.length = len(x)
        self.longest = max(self.longest, len(x))
        return super().forward(x)


def test_numbers_that_stay_are_no_counts() -> None:
    plain = trained(Stores, None)
    assert same(trained(Stores, "remat"), plain)


@pytest.mark.parametrize("kind", KINDS)
def test_measuring_leaves_counters_alone(kind: Any) -> None:
    model = kind(Counts)
    measured(model, torch.randn(32, WIDTH)).close()
    assert [m.count for m in model.modules() if isinstance(m, Counts)] == [0] * 4


class Tosses(Block):
    def __init__(self) -> None:
        super().__init__()
        self.chance = random.Random(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.chance.random()


@pytest.mark.parametrize("kind", KINDS)
def test_measuring_leaves_a_generator_of_pythons_alone(kind: Any) -> None:
    assert same(trained(lambda: kind(Tosses), "remat"), trained(lambda: kind(Tosses), None))


# -- settings


class Settings(Net):
    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.act: Callable[[torch.Tensor], torch.Tensor] = F.relu
        self.config = {"temperature": 1.0}
        self.order, self.pair = [0, 1, 2, 3], (1.0, 2.0)
        self.dtype, self.weights = torch.float32, torch.ones(WIDTH)
        self.history: list[float] = []
        self.nested: dict[str, Any] = {"a": {"scale": 1.0}, "rows": [[1.0], [2.0]], "box": SimpleNamespace(scale=1.0)}
        self.nested["box"].around = self.nested
        self.array, self.number = numpy.ones(3), numpy.float32(1.0)
        self.tables = {"used": torch.ones(WIDTH), "not used": torch.ones(WIDTH)}
        self.call = partial(torch.mul, torch.tensor(1.0))
        self.register_buffer("mask", None)
        self.register_parameter("bias", None)
        self.more = nn.ParameterDict()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for n in self.order:
            x = self.act(self.blocks[n](x)) / self.config["temperature"] * self.pair[0]
        x = x if self.mask is None else x * self.mask
        x = x if self.bias is None else x + self.bias
        for factor in self.more.values():
            x = x * factor
        factor = self.gain * self.nested["a"]["scale"] * self.nested["rows"][0][0] * self.nested["box"].scale
        x = self.call(x) * factor * float(self.array[0]) * float(self.number) * self.tables["used"]
        return x.to(self.dtype).float() * self.weights


def settings() -> nn.Module:
    """With a class of its own."""

    class Own(Settings):
        pass

    return Own()


def patch_forward(model: Any) -> None:
    inner = model.blocks[0].forward
    model.blocks[0].forward = lambda x: 2 * inner(x)


CHANGES: dict[str, Callable[[Any], object]] = {
    "function": lambda model: setattr(model, "act", torch.sigmoid),
    "dict": lambda model: model.config.update(temperature=2.0),
    "list": lambda model: setattr(model, "order", [3, 2, 1]),
    "list in place": lambda model: model.order.reverse(),
    "list that grows": lambda model: model.order.append(0),
    "tuple": lambda model: setattr(model, "pair", (3.0, 2.0)),
    "dtype": lambda model: setattr(model, "dtype", torch.bfloat16),
    "tensor": lambda model: setattr(model, "weights", torch.arange(float(WIDTH))),
    "buffer that was None": lambda model: setattr(model, "mask", torch.arange(float(WIDTH))),
    "parameter that was None": lambda model: setattr(model, "bias", nn.Parameter(torch.ones(WIDTH))),
    "parameter dict": lambda model: model.more.update({"a": nn.Parameter(torch.ones(WIDTH) * 2)}),
    "forward": patch_forward,
    "over a class's own": lambda model: setattr(model, "gain", 2.0),
    "class's own": lambda model: setattr(type(model), "gain", 2.0),
    "dict in a dict": lambda model: model.nested["a"].update(scale=2.0),
    "list in a list": lambda model: model.nested["rows"][0].__setitem__(0, 2.0),
    "object": lambda model: setattr(model.nested["box"], "scale", 2.0),
    "array": lambda model: model.array.fill(2.0),
    "number of NumPy": lambda model: setattr(model, "number", numpy.float32(2.0)),
    "tensor in a dict": lambda model: model.tables.update(used=torch.arange(float(WIDTH))),
    "partial": lambda model: setattr(model, "call", partial(torch.mul, torch.tensor(2.0))),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_setting_changed_between_steps_is_noticed(what: str) -> None:
    def between(model: nn.Module, step: int) -> None:
        if step == 1:
            CHANGES[what](model)

    plain = trained(settings, None, between)
    assert not same(plain, trained(settings, None))
    assert same(trained(settings, "remat", between, room=1.6), plain)


def test_what_is_no_setting_is_no_reason_to_measure_again() -> None:
    model, x = Settings(), torch.randn(32, WIDTH)
    run = measured(model, x)
    run.compute_sequence(int(1.2 * smallest(run, "remat")), mode="remat", refine=False)
    first = run.profile
    for n in range(3):
        run(x).sum().backward()
        model.history.append(float(n))
        model.nested = copy.deepcopy(model.nested)  # another, that says the same
        model.tables["not used"] = torch.zeros(WIDTH)
    assert run.profile is first
    run.close()


class Renormed(Block):
    """`embedding` changes its table, which no name or schema says."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + F.embedding(torch.arange(32), self.table, max_norm=0.5))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["joint", "remat", "offload"])
def test_a_buffer_that_a_call_changes_unannounced_is_kept_for_replays(kind: Any, mode: str) -> None:
    assert same(trained(lambda: kind(Renormed), mode), trained(lambda: kind(Renormed), None))


# -- refused


class Teacher(Block):
    """Changes a parameter in its forward."""

    way = ""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.embedding = nn.Embedding(WIDTH, WIDTH, max_norm=0.5 if self.way == "max_norm" else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x * self.mean.clone()) + self.embedding(torch.arange(32))
        with torch.no_grad():
            if self.way == "itself":
                self.mean.mul_(0.9)
            elif self.way == "data":
                self.mean.data.copy_(x.mean(0))
            elif self.way == "new data":
                self.mean.data = x.mean(0)
            elif self.way == "item":
                self.mean[0] = 2
            elif self.way == "foreach":
                torch._foreach_mul_([self.mean], 0.9)
            elif self.way == "out":
                torch.mul(self.mean, 2, out=self.mean)
        return y


@pytest.mark.parametrize("way", ["itself", "data", "new data", "item", "foreach", "out", "max_norm"])
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_a_forward_changes_are_refused_before_they_are(
    kind: Any, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Teacher, "way", way)
    model = kind(Teacher)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(rotoff.MeasureError, match=r"changes parameter '.*(mean|embedding.weight)'.*make that a buffer"):
        measured(model, torch.randn(32, WIDTH))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_parameter_that_is_only_asked_for_a_gradient_is_not_changed() -> None:
    class Thaws(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.up.weight.requires_grad_()
            return super().forward(x)

    assert same(trained(lambda: sequential(Thaws), "remat"), trained(lambda: sequential(Thaws), None))


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_put_in_the_type_that_it_has_is_not_changed(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    """``to`` sets the data of each parameter, to what they are already."""

    class Router(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.up = self.up.to(x.dtype)
            return super().forward(x)

    assert same(trained(lambda: kind(Router), "remat"), trained(lambda: kind(Router), None))
    model, x = kind(Router), torch.randn(32, WIDTH)
    run = measured(model, x)
    run.compute_sequence(smallest(run, "remat"), mode="remat", refine=False)
    for _ in range(2):  # the second finds gradients, which `to` looks at
        run(x).sum().backward()
    assert "another course" not in caplog.text
    run.close()


def test_a_call_that_returns_its_tensor_as_it_is_is_no_part_of_the_course(caplog: pytest.LogCaptureFixture) -> None:
    """Nor is it taken for one by the same name that comes later."""

    class Casts(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.up(x).to(x.dtype)
            return x + self.down(torch.tanh(h).to(torch.float64).to(x.dtype))

    assert same(trained(lambda: Net(Casts), "remat"), trained(lambda: Net(Casts), None))
    assert "another course" not in caplog.text


class Draws(Block):
    generator: torch.Generator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.bernoulli(torch.full_like(x, 0.5), generator=self.generator)


@pytest.mark.parametrize("own", [True, False], ids=["its own", "torch's"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_that_the_model_names(kind: Any, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for mode in (None, *MODES):
        chance = torch.Generator() if own else torch.default_generator
        monkeypatch.setattr(Draws, "generator", chance, raising=False)

        def between(model: nn.Module, step: int, chance: torch.Generator = chance) -> None:
            if step == 0:  # measuring has drawn from it
                chance.manual_seed(5)

        found.append([*trained(lambda: kind(Draws), mode, between), chance.get_state()])
    for got, mode in zip(found[1:], MODES, strict=True):
        assert same(got, found[0]), mode


class Table(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.ones(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x * self.mean.clone())
        self.mean.mul_(0.9)
        return y


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_changed_in_place_that_is_no_buffer(kind: Any) -> None:
    plain = trained(lambda: kind(Table), None)
    for mode in MODES:
        assert same(trained(lambda: kind(Table), mode), plain), mode


class Packs(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with rounding():
            return super().forward(x)


def rounding() -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float())


def test_saved_tensor_hooks_of_others_are_refused_but_not_torchs() -> None:
    x = torch.randn(32, WIDTH)
    with pytest.raises(rotoff.MeasureError, match="saved-tensor hooks"):
        measured(Net(Packs), x)
    run = measured(Net(), x)
    run.compute_sequence(smallest(run, "remat"), mode="remat", refine=False)
    with rounding(), pytest.raises(rotoff.MeasureError, match="saved-tensor hooks"):
        run(x)
    with save_on_cpu():
        run(x).sum().backward()
    run.close()


class Differentiates(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad((z**3).sum(), z)
        return super().forward(x) + 0.01 * gradient


@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_that_differentiates_is_refused_with_a_cure_that_cures(kind: Any) -> None:
    with pytest.raises(rotoff.MeasureError, match="differentiates.*outside of the planned model") as refused:
        measured(kind(Differentiates), torch.randn(32, WIDTH))
    assert "stages=" not in str(refused.value)


# -- threads


@pytest.fixture
def _untouched() -> Iterator[None]:
    call, apply = nn.Module.__call__, torch.autograd.Function.__dict__["apply"]
    yield
    assert nn.Module.__call__ is call
    assert torch.autograd.Function.__dict__["apply"] is apply


@pytest.mark.usefixtures("_untouched")
def test_models_may_be_measured_on_several_threads() -> None:
    failed: list[BaseException] = []
    done: list[rotoff.Checkpointable] = []

    def work(model: nn.Module, x: torch.Tensor) -> None:
        try:
            done.append(measured(model, x))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(Net(), torch.randn(32, WIDTH))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    for run in done:
        run.compute_sequence(smallest(run, "remat"), mode="remat", refine=False)
        run(torch.randn(32, WIDTH)).sum().backward()
        run.close()


def test_containers_that_hold_themselves() -> None:
    class Circular(Block):
        def __init__(self) -> None:
            super().__init__()
            self.parts: dict[str, Any] = {"scale": 1.0}
            self.parts["all"] = [self.parts]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.parts["scale"]

    def change(model: nn.Module, _step: int) -> None:
        for module in model.modules():
            if isinstance(module, Circular):
                module.parts["scale"] += 0.5

    assert same(trained(lambda: Net(Circular), "remat", change), trained(lambda: Net(Circular), None, change))


def test_operators_that_may_change_an_argument_are_told_from_the_others() -> None:
    changing = [torch.Tensor.add_, torch.embedding_renorm_, torch.batch_norm, torch.batch_norm_gather_stats]
    changing += [torch.fused_moving_avg_obs_fake_quant, torch._C._nn.rrelu_with_noise, F.embedding]
    for function in changing:
        known = KNOWN.get(function) or find(function)
        assert known.writes or known.watched, function
    for function in (torch.Tensor.add, torch.Tensor.__getitem__, torch.cat, F.linear, torch.conv2d):
        assert not find(function).writes and not find(function).watched, function


def test_storages_of_parameters_that_are_gone_are_forgotten() -> None:
    known: dict[int, object] = {}
    stays = nn.Parameter(torch.ones(2))
    for _ in range(3):
        reads = Reads(known)
        for tensor in (stays, nn.Parameter(torch.ones(2)), torch.ones(2)):
            reads.note_resident(tensor)
        del tensor
        reads.forget()
    assert set(known) == {storage_key(stays)}
