"""Reads what other tools' settings say about memory: a Trainer's arguments, FSDP2's policies, a DeepSpeed, axolotl or
torchtitan file. Each reader takes the keys that it knows, and everything else is reported as not understood."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ..errors import OptionError
from ..io.files import load_settings
from ..solver.settings import CHECKPOINT, CHECKPOINT_ON_HOST, ON_HOST, SAVED_ON_HOST, UPDATED_ON_HOST, Setting

_HOW = "give a Trainer's arguments, FSDP2's policies, or a DeepSpeed (JSON), axolotl (YAML) or torchtitan (TOML) file"


@dataclass
class ForeignSettings:
    """What was read.

    kind: whose settings. said: what it means: fields of `Setting`; optimizer, batch, autocast; master_weights: whether
    the tool holds float32 copies of parameters. read: keys that were understood, with their values. not_read: all
    others.
    """

    kind: str
    said: dict[str, Any] = field(default_factory=dict)
    read: dict[str, Any] = field(default_factory=dict)
    not_read: dict[str, Any] = field(default_factory=dict)

    @property
    def setting(self) -> Setting:
        """How a step is made."""
        return Setting(**{one.name: self.said[one.name] for one in fields(Setting) if one.name in self.said})

    def notes(self, sample: tuple[int, ...]) -> Iterable[str]:
        """What was read, as sentences. sample: its batch, if it has one."""
        told = {"read": self.read, "not understood, and not counted": self.not_read}
        for words, keys in told.items():
            if keys:
                yield f"{self.kind}, {words}: " + ", ".join(f"{key} = {value}" for key, value in keys.items())
        if sample and (batch := self.said.get("batch", *sample)) not in sample:
            yield f"the settings have a batch of {batch}, the sample has {sample[0]}; the figures are for the sample"


# By dotted key: what each known value means; or the name of a number.
Rules = Mapping[str, Any]


def _on(**said: Any) -> dict[Any, dict[str, Any]]:
    """What a switch means."""
    return {True: said, False: {}, None: {}}


_NAMES = {"sgd": "sgd", "adam": "adam", "adamw": "adamw", "adamw_torch": "adamw", "adamw_torch_fused": "adamw"}
_OPTIMIZER = {name: {"optimizer": known} for name, known in _NAMES.items()}
_OFFLOADED: dict[Any, dict[str, Any]] = {"none": {}, None: {}}
_AUTOCAST: Rules = {"bf16": _on(autocast="bfloat16"), "fp16": _on(autocast="float16")}
_DEEPSPEED: Rules = {
    "zero_optimization.stage": {stage: {} for stage in range(4)},  # shards over devices, of which one is planned
    "zero_optimization.offload_optimizer.device": {**_OFFLOADED, "cpu": {"parameters": UPDATED_ON_HOST}},
    "zero_optimization.offload_param.device": {**_OFFLOADED, "cpu": {"parameters": ON_HOST}},
    "activation_checkpointing.cpu_checkpointing": _on(activations=CHECKPOINT_ON_HOST),
    "train_micro_batch_size_per_gpu": "batch",
    "optimizer.type": _OPTIMIZER,
    "bf16.enabled": _on(master_weights=True),
    "fp16.enabled": _on(master_weights=True),
}
_OF_DEVICE = ("zero_optimization", "bf16", "fp16")  # what counts of a DeepSpeed file that other settings name
_NESTED: Rules = {
    "deepspeed": {None: {}, "": {}},
    **{f"deepspeed.{key}": rule for key, rule in _DEEPSPEED.items() if key.startswith(_OF_DEVICE)},
}
_TRAINER: Rules = {
    "gradient_checkpointing": _on(activations=CHECKPOINT),
    "gradient_checkpointing_kwargs.use_reentrant": _on(),
    "gradient_checkpointing_kwargs.offload": _on(activations=CHECKPOINT_ON_HOST),
    "gradient_checkpointing_kwargs.every_n_layers": "every",
    "per_device_train_batch_size": "batch",
    "optim": _OPTIMIZER,
    **_AUTOCAST,
    **_NESTED,
}
_AXOLOTL: Rules = {
    "gradient_checkpointing": {**_on(activations=CHECKPOINT), "offload": {"activations": CHECKPOINT_ON_HOST}},
    "activation_offloading": {
        **_on(activations=SAVED_ON_HOST), "hidden_states": {"activations": CHECKPOINT_ON_HOST},
    },
    "micro_batch_size": "batch",
    "optimizer": _OPTIMIZER,
    "fsdp_config.offload_params": _on(parameters=ON_HOST),
    **_AUTOCAST,
    **_NESTED,
}  # fmt: skip
_TORCHTITAN: Rules = {
    "activation_checkpoint.mode": {"none": {}, "full": {"activations": CHECKPOINT}},
    "training.enable_cpu_offload": _on(parameters=ON_HOST),
    "training.local_batch_size": "batch",
    "optimizer.name": _OPTIMIZER,
}
_FSDP2: Rules = {"CPUOffloadPolicy": _on(parameters=ON_HOST), "OffloadPolicy": _on()}
# by a key that no other tool has
_KINDS: Mapping[str, tuple[str, Rules]] = {
    "zero_optimization": ("DeepSpeed", _DEEPSPEED),
    "train_micro_batch_size_per_gpu": ("DeepSpeed", _DEEPSPEED),
    "per_device_train_batch_size": ("Trainer", _TRAINER),
    "base_model": ("axolotl", _AXOLOTL),
    "micro_batch_size": ("axolotl", _AXOLOTL),
    "activation_checkpoint": ("torchtitan", _TORCHTITAN),
    "training": ("torchtitan", _TORCHTITAN),
}


def read_foreign(given: Any) -> ForeignSettings:
    """The settings of another tool.

    Args:
        given: a ``transformers.TrainingArguments``, one or several of FSDP2's policies, a file's path, or a dict.

    Raises:
        OptionError: for anything else. OSError: if the file cannot be read.
    """
    if isinstance(given, (str, os.PathLike)):
        given = load_settings(given)
    if hasattr(given, "per_device_train_batch_size"):  # those that differ from the default, and what is known
        usual = {one.name: one.default for one in getattr(given, "__dataclass_fields__", {}).values()}
        said = {name: value for name, value in vars(given).items() if name in usual}
        given = {name: value for name, value in said.items() if name in _TRAINER or value != usual[name]}
        given |= {"per_device_train_batch_size": said["per_device_train_batch_size"]}
    if isinstance(given, Mapping):
        for key, (kind, rules) in _KINDS.items():
            if key in given:
                return _by(kind, rules, given)
        raise OptionError(
            f"the settings name {', '.join(map(str, given)) or 'nothing'}, which no known tool reads; {_HOW}"
        )
    policies = list(given) if isinstance(given, Iterable) else [given]
    by_name = {type(one).__name__: True for one in policies}
    if not policies or not all(name.endswith("Policy") for name in by_name):
        raise OptionError(f"settings is {given!r}; {_HOW}")
    return _by("FSDP2", _FSDP2, by_name)


def _by(kind: str, rules: Rules, given: Mapping[str, Any]) -> ForeignSettings:
    if isinstance(nested := given.get("deepspeed"), (str, os.PathLike)) and nested:
        given = {**given, "deepspeed": load_settings(nested)}
    found, flat = ForeignSettings(kind), dict(_flat(given))
    for key in sorted(flat, key=lambda key: [*rules, key].index(key)):  # in the rules' order
        idle = "gradient_checkpointing_kwargs" in key and not given.get("gradient_checkpointing")
        meaning = None if idle or key not in rules else _meaning(rules[key], flat[key])
        found.said |= meaning or {}
        (found.not_read if meaning is None else found.read)[key] = flat[key]
    return found


def _meaning(rule: Any, value: Any) -> dict[str, Any] | None:
    """What a value means; None if it is not understood."""
    if isinstance(rule, str):
        return {rule: value} if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
    value = getattr(value, "value", value)  # of an enumeration
    value = value.lower() if isinstance(value, str) else value
    return rule.get(value) if isinstance(value, Hashable) else None


def _flat(given: Mapping[str, Any], before: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in given.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value
