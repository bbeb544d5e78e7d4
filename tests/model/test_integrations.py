"""Trainers with one line more: losses and parameters of the plain run, checkpoints that interchange with the plain
model."""

from __future__ import annotations

import importlib
import sys
import tempfile
import types
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision_operators
from allocated import peak_bytes
from models import same
from shown_in_docs import ROWS, Net, batch, rows
from step_by_step import works
from torch import nn

import rotoff
from rotoff.errors import ExecutionError, LimitError, OptionError
from rotoff.tools.attach import attached


def build() -> Net:
    torch.manual_seed(0)
    return Net()


@cache
def a_limit(bf16: bool = False) -> int:
    """Bytes that keeping everything does not fit: half of the way there from the smallest."""
    wrapped = rotoff.Checkpointable(build())
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        wrapped.measure(**batch())
    return (wrapped.min_mem_limit("joint") + wrapped.keep_all_memory) // 2


@cache
def a_device_limit() -> int:
    """Half of what everything takes: parameters, gradients, AdamW's states and the step."""
    model = build()
    wrapped = rotoff.Checkpointable(model).measure(**batch())
    wrapped.compute_sequence(device_limit="1 TiB", optimizer=torch.optim.AdamW(model.parameters()))
    return wrapped.keep_all_memory // 2


def moves_parameters(planned: rotoff.Checkpointable | None) -> bool:
    assert planned is not None
    return any(op.of for op in planned.sequence)


def asked(how: str, folder: Path) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a row of a table gives to rotoff: a limit of one of the two kinds, by keyword or in a file."""
    limit = {"device_limit": a_device_limit()} if "placed" in how else {"mem_limit": a_limit("bf16" in how)}
    if how != "from a file":
        return (), {**limit, "refine": False}
    yaml = pytest.importorskip("yaml")
    said = {**limit, "mode": "remat", "stages": 5, "options": {"refine": False}}
    (folder / "train.yaml").write_text(yaml.safe_dump({"learning_rate": 0.1, "rotoff": said}))
    return (rotoff.RotoffConfig.load(folder / "train.yaml"),), {}


def does_as_asked(how: str, planned: rotoff.Checkpointable | None) -> bool:
    assert planned is not None
    if "from a file" in how:
        assert len(planned.chain) in (4, 5)  # what makes the logits and the loss may be one
        assert not any(op.kind is rotoff.OpKind.OFFLOAD for op in planned.sequence)
    return moves_parameters(planned) if "placed" in how else works(planned.sequence)


# -- Hugging Face


def hugging_face(
    folder: Path,
    *callbacks: Any,
    model: Any = None,
    model_init: Any = None,
    data: Any = None,
    evaluates: bool = False,
    **options: Any,
) -> Any:
    torchvision_operators.declare()
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    steps = {"per_device_train_batch_size": ROWS, "max_steps": 4, "logging_steps": 1, "save_steps": 2, "seed": 7}
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    arguments = transformers.TrainingArguments(output_dir=str(folder), **steps, **quiet, **options)
    data = data or rows()
    sets = {"train_dataset": data, "eval_dataset": data if evaluates else None}
    model = model or (None if model_init else build())
    return transformers.Trainer(model, arguments, **sets, model_init=model_init, callbacks=list(callbacks))


def for_trainer(*args: Any, **kwargs: Any) -> Any:
    """The callback."""
    pytest.importorskip("transformers")
    from rotoff.integrations.transformers import RotoffCallback

    return RotoffCallback(*args, **kwargs)


@pytest.fixture(scope="module")
def plainly(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """The trainer that has trained the plain model with such options, once for all tests."""

    @cache
    def trained(**options: Any) -> Any:
        trainer = hugging_face(tmp_path_factory.mktemp("plain"), **options)
        trainer.train()
        return trainer

    return trained


def losses(trainer: Any) -> list[float]:
    return [row[name] for row in trainer.state.log_history for name in ("loss", "eval_loss") if name in row]


def alike(trainer: Any, plain: Any) -> bool:
    """Losses and parameters."""
    return losses(trainer) == losses(plain) and same([*trainer.model.parameters()], [*plain.model.parameters()])


@pytest.mark.parametrize(
    "how",
    [
        *("limited", "bf16", "from a file", "placed, evaluated", "bf16, added"),
        *("made by the trainer", "bf16, made by the trainer", "placed, made by the trainer"),
    ],
)
def test_trainer(tmp_path: Path, how: str, plainly: Callable[..., Any]) -> None:
    """Also where ``train`` makes another model than the constructor, and plans a forward that is wrapped already."""
    options: dict[str, Any] = {"bf16": "bf16" in how} | ({"model_init": build} if "made" in how else {})
    if "evaluated" in how:  # clipped, and by its own schedule
        options |= {"evaluates": True, "eval_strategy": "steps", "eval_steps": 2, "max_grad_norm": 0.5}
    plain, (args, kwargs) = plainly(**options), asked(how, tmp_path)
    callback = for_trainer(*args, **kwargs)
    trainer = hugging_face(tmp_path / "planned", *([] if "added" in how else [callback]), **options)
    if "added" in how:
        trainer.add_callback(callback)
    trainer.train()
    assert does_as_asked(how, callback.planned)
    assert callback.planned is attached(trainer.model) or "made" not in how
    assert alike(trainer, plain) and len(losses(plain)) == 4 + 2 * ("evaluated" in how)
    assert type(trainer.model) is Net


def text(words: int) -> list[dict[str, torch.Tensor]]:
    """Drawn rows of `words` words for a language model."""
    drawn = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, words, (12,), generator=drawn) for _ in range(4 * ROWS)]
    return [{"input_ids": one, "labels": one} for one in ids]


def test_trainer_is_charged_for_what_it_holds_alone(tmp_path: Path) -> None:
    """With the model's own loss, what the usual flag takes is enough."""
    torchvision_operators.declare()
    transformers = pytest.importorskip("transformers")

    def gpt() -> Any:
        torch.manual_seed(0)
        sizes = {"n_layer": 8, "n_embd": 16, "n_head": 2, "vocab_size": 3000, "n_positions": 16, "use_cache": False}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))

    some = {name: torch.stack([row[name] for row in text(3000)[:ROWS]]) for name in ("input_ids", "labels")}

    def step(model: nn.Module) -> None:
        model(**some)["loss"].backward()

    usual = gpt()
    usual.gradient_checkpointing_enable()
    step(usual)
    flag = peak_bytes(lambda: step(usual))
    plain = hugging_face(tmp_path / "plain", model=gpt(), data=text(3000))
    plain.train()
    callback = for_trainer(flag, refine=False)
    trainer = hugging_face(tmp_path / "planned", callback, model=gpt(), data=text(3000))
    trainer.train()
    planned = callback.planned
    assert works(planned.sequence)
    assert alike(trainer, plain)
    step(trainer.model)
    assert peak_bytes(lambda: step(trainer.model)) <= planned.get_expected_memory() <= flag


@pytest.mark.parametrize("limit", ["mem_limit", "device_limit"])
def test_trainers_checkpoints_interchange(
    limit: str, tmp_path: Path, plainly: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    plain, given = plainly(bf16=False), {limit: a_limit() if limit == "mem_limit" else a_device_limit()}
    # The second half of the plain run, continued under rotoff from the plain checkpoint, and the other way round.
    planned = hugging_face(tmp_path / "planned", for_trainer(**given, refine=False))
    planned.train(resume_from_checkpoint=f"{plain.args.output_dir}/checkpoint-2")
    assert same(list(planned.model.parameters()), list(plain.model.parameters()))
    planned = hugging_face(tmp_path / "ended", for_trainer(**given, refine=False))
    planned.train(resume_from_checkpoint=str(tmp_path / "planned" / "checkpoint-4"))
    assert "no step was planned" not in caplog.text  # no step was left
    back = hugging_face(tmp_path / "back")
    back.train(resume_from_checkpoint=str(tmp_path / "planned" / "checkpoint-4"))
    assert same(list(back.model.parameters()), list(plain.model.parameters()))
    safetensors = pytest.importorskip("safetensors.torch")
    stored = safetensors.load_file(tmp_path / "planned" / "checkpoint-4" / "model.safetensors")
    assert set(stored) == set(build().state_dict())


@pytest.mark.parametrize("shared", ["callback", "model"])
def test_the_first_of_two_trainers_keeps_its_limit(tmp_path: Path, shared: str, plainly: Callable[..., Any]) -> None:
    """Both are made before either trains: with one callback for two models, or one model and two callbacks."""
    callback, model = for_trainer(a_limit(), refine=False), build()
    first = hugging_face(tmp_path / "first", callback, model=model)
    if shared == "callback":
        hugging_face(tmp_path / "second", callback)
    else:
        hugging_face(tmp_path / "second", for_trainer("1 GiB"), model=model)
    torch.manual_seed(7)
    first.train()
    assert attached(model) is callback.planned
    assert works(callback.planned.sequence)
    plain = plainly(bf16=False)
    assert losses(first) == losses(plain)
    assert same(list(model.parameters()), list(plain.model.parameters()))


def test_trainer_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(LimitError, match="device_limit is '2 GiB'; give one of them"):
        for_trainer(rotoff.RotoffConfig(mem_limit="1 GiB"), device_limit="2 GiB")
    during = for_trainer(device_limit=a_device_limit(), updates="during", refine=False)
    with pytest.raises(ExecutionError, match="clipping needs all gradients at once"):
        hugging_face(tmp_path, during, max_grad_norm=0.0).train()
    attached_by_hand = build()
    rotoff.attach(attached_by_hand, "1 GiB")
    with pytest.raises(OptionError, match="attached already"):
        hugging_face(tmp_path, for_trainer("1 MiB"), model=attached_by_hand)
    for wrong in ("0%", "101%", "half%"):
        with pytest.raises(LimitError, match="a share of keeping everything such as"):
            hugging_face(tmp_path, for_trainer(wrong))


def test_trainer_s_gradient_checkpointing_is_a_wish_for_less_memory(
    tmp_path: Path, plainly: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    said = {"offload": False, "every_n_layers": 2, "colour": "red", "use_reentrant": False}
    callback = for_trainer("75%", refine=False)
    with caplog.at_level("INFO", logger="rotoff"):
        trainer = hugging_face(tmp_path, callback, gradient_checkpointing=True, gradient_checkpointing_kwargs=said)
        trainer.train()
    assert "is read as a wish for less memory" in caplog.text
    assert "gradient_checkpointing_kwargs has colour, which" in caplog.text
    planned = callback.planned
    everything, limit = planned.keep_all_memory, planned.mem_limit
    assert limit == int(0.75 * everything)
    told = [rotoff.format_bytes(n) for n in (everything, planned.min_mem_limit("remat"), limit)]
    first = next(record.message for record in caplog.records if "keeping everything takes" in record.message)
    assert [first.find(one) > 0 for one in told] == [True] * 3
    assert works(planned.sequence)
    assert not any(op.kind is rotoff.OpKind.OFFLOAD for op in planned.sequence)
    assert losses(trainer) == losses(plainly(bf16=False))


# -- Accelerate


def accelerated(model: nn.Module, mixed_precision: str) -> tuple[list[float], Any, nn.Module]:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=mixed_precision, gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, torch.utils.data.DataLoader(rows(), batch_size=ROWS)
    )
    torch.manual_seed(5)
    found = []
    for some in loader:
        with accelerator.accumulate(model):
            loss = model(**some)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    return found, accelerator, model


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_accelerate(tmp_path: Path, mixed_precision: str) -> None:
    expected, _, plain = accelerated(build(), mixed_precision)
    wrapped = rotoff.Checkpointable(build()).compute_sequence(a_limit(mixed_precision == "bf16"), refine=False)
    found, accelerator, model = accelerated(wrapped, mixed_precision)
    assert works(wrapped.sequence)
    assert found == expected
    assert same(list(model.parameters()), list(plain.parameters()))
    accelerator.save_model(model, str(tmp_path))
    safetensors = pytest.importorskip("safetensors.torch")
    other = build()
    other.load_state_dict(safetensors.load_file(tmp_path / "model.safetensors"))
    assert same(list(other.parameters()), list(plain.parameters()))


# -- Lightning


@pytest.fixture
def lightning() -> Any:
    torchvision_operators.declare()
    return pytest.importorskip("lightning.pytorch")


def for_lightning(*args: Any, **kwargs: Any) -> Any:
    """The callback."""
    from rotoff.integrations.lightning import RotoffCallback

    return RotoffCallback(*args, **kwargs)


def lit(lightning: Any) -> Any:
    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = build()
            self.seen: list[float] = []

        def training_step(self, some: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            loss = self.net(**some)["loss"]
            self.seen.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Lit()


def fit(lightning: Any, module: Any, folder: Path, *callbacks: Any, precision: str = "32-true") -> Any:
    torch.manual_seed(5)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=list(callbacks),
        precision=precision,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        trainer.fit(module, torch.utils.data.DataLoader(rows(), batch_size=ROWS))
    return trainer


@cache
def plainly_lit(lightning: Any, precision: str = "32-true") -> Any:
    """The module that was trained without rotoff."""
    plain = lit(lightning)
    fit(lightning, plain, Path(tempfile.gettempdir()), precision=precision)  # writes nothing
    return plain


@pytest.mark.parametrize("how", ["limited", "bf16", "placed"])
def test_lightning(tmp_path: Path, lightning: Any, how: str) -> None:
    """Its steps are closures."""
    precision = "bf16-mixed" if how == "bf16" else "32-true"
    args, kwargs = asked(how, tmp_path)
    plain, module = plainly_lit(lightning, precision), lit(lightning)
    callback = for_lightning(*args, **kwargs)
    trainer = fit(lightning, module, tmp_path, callback, precision=precision)
    assert does_as_asked(how, callback.planned)
    assert module.seen == plain.seen and len(plain.seen) == 4
    assert attached(module.net) is None
    trainer.save_checkpoint(tmp_path / "planned.ckpt")
    other = lit(lightning)
    other.load_state_dict(torch.load(tmp_path / "planned.ckpt", weights_only=False)["state_dict"])
    assert same(list(other.parameters()), list(plain.parameters()))


def test_lightning_fits_a_module_again_by_the_plan_that_it_has(
    tmp_path: Path, lightning: Any, caplog: pytest.LogCaptureFixture
) -> None:
    module, callback = lit(lightning), for_lightning("75%", refine=False)
    fit(lightning, module, tmp_path, callback)
    planned = callback.planned
    with caplog.at_level("INFO", logger="rotoff"):
        fit(lightning, module, tmp_path, callback)
    assert callback.planned is planned
    assert not [record.message for record in caplog.records if record.name == "rotoff"]
    assert works(planned.sequence)
    plain = lit(lightning)
    for _ in range(2):
        fit(lightning, plain, tmp_path)
    assert module.seen == plain.seen
    assert attached(module.net) is None


def test_lightning_says_if_nothing_was_planned(
    tmp_path: Path, lightning: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fit(lightning, lit(lightning), tmp_path, for_lightning("1 KiB", module="net.blocks"))
    assert "it never called the forward of ModuleList in training mode" in caplog.text
    module = lit(lightning)
    rotoff.attach(module.net, a_limit(), refine=False)
    with pytest.raises(OptionError, match="attached already"):
        fit(lightning, module, tmp_path, for_lightning(a_limit()))


def test_lightning_asks_which_module(tmp_path: Path, lightning: Any) -> None:
    module = lit(lightning)
    module.other = nn.Linear(2, 2)
    with pytest.raises(OptionError, match="net, other; name one"):
        fit(lightning, module, tmp_path, for_lightning("1 GiB"))
    with pytest.raises(OptionError, match="no submodule 'nets'"):
        fit(lightning, module, tmp_path, for_lightning("1 GiB", module="nets"))


def test_axolotls_file_gives_the_callback_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its base class is a stand-in: axolotl is not among the tests' packages."""
    torchvision_operators.declare()
    expected = for_trainer("1 GiB", mode="remat")
    base: Any = types.ModuleType("axolotl.integrations.base")
    base.BasePlugin = object
    for name in ("axolotl", "axolotl.integrations"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    plugin = importlib.import_module("rotoff.integrations.axolotl").RotoffPlugin()
    assert plugin.get_input_args() == "rotoff.integrations.axolotl.RotoffArgs"
    (found,) = plugin.add_callbacks_pre_trainer(
        types.SimpleNamespace(rotoff={"mem_limit": "1 GiB", "mode": "remat"}), None
    )
    assert isinstance(found, type(expected)) and found._options == expected._options
    with pytest.raises(OptionError, match="mem_limits"):
        plugin.add_callbacks_pre_trainer(types.SimpleNamespace(rotoff={"mem_limits": "1 GiB"}), None)
