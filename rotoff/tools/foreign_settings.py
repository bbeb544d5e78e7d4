"""Reads what other tools' settings say about memory: a Trainer's arguments, FSDP2's policies, a DeepSpeed, axolotl or
torchtitan file. Each reader takes the keys that it knows, and everything else is reported as not understood."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import OptionError
from ..io.files import load_settings
from ..solver.settings import CHECKPOINT, CHECKPOINT_ON_HOST, ON_HOST, SAVED_ON_HOST, UPDATED_ON_HOST, Setting

_HOW = "give a Trainer's arguments, FSDP2's policies, or a DeepSpeed (JSON), axolotl (YAML) or torchtitan (TOML) file"


@dataclass
class ForeignSettings:
    """What was read.

    kind: whose settings. setting: how a step is made. optimizer, batch, autocast: None if not said. master_weights:
    whether the tool holds float32 copies of parameters. read: keys that were understood, with their values. not_read:
    all others.
    """

    kind: str
    setting: Setting = field(default_factory=Setting)
    optimizer: str | None = None
    batch: int | None = None
    autocast: str | None = None
    master_weights: bool = False
    read: dict[str, Any] = field(default_factory=dict)
    not_read: dict[str, Any] = field(default_factory=dict)

    def set(self, said: Mapping[str, Any]) -> None:
        of_step = {name: value for name, value in said.items() if hasattr(self.setting, name)}
        self.setting = replace(self.setting, **of_step)
        vars(self).update({name: value for name, value in said.items() if name not in of_step})


# By dotted key: what each known value means; or the name of a number; or NESTED, other settings within.
Rules = Mapping[str, Any]
NESTED = object()


def _on(**said: Any) -> dict[Any, dict[str, Any]]:
    """What a switch means."""
    return {True: said, False: {}, None: {}}


_NAMES = {"sgd": "sgd", "adam": "adam", "adamw": "adamw", "adamw_torch": "adamw", "adamw_torch_fused": "adamw"}
_OPTIMIZER = {name: {"optimizer": known} for name, known in _NAMES.items()}
_OFFLOADED: dict[Any, dict[str, Any]] = {"none": {}, None: {}}
_AUTOCAST: Rules = {"bf16": _on(autocast="bfloat16"), "fp16": _on(autocast="float16"), "deepspeed": NESTED}
_DEEPSPEED: Rules = {
    "zero_optimization.stage": {stage: {} for stage in range(4)},  # shards over devices, of which one is audited
    "zero_optimization.offload_optimizer.device": {**_OFFLOADED, "cpu": {"parameters": UPDATED_ON_HOST}},
    "zero_optimization.offload_param.device": {**_OFFLOADED, "cpu": {"parameters": ON_HOST}},
    "activation_checkpointing.cpu_checkpointing": _on(activations=CHECKPOINT_ON_HOST),
    "train_micro_batch_size_per_gpu": "batch",
    "optimizer.type": _OPTIMIZER,
    "bf16.enabled": _on(master_weights=True),
    "fp16.enabled": _on(master_weights=True),
}
_TRAINER: Rules = {
    "gradient_checkpointing": _on(activations=CHECKPOINT),
    "gradient_checkpointing_kwargs.use_reentrant": _on(),
    "gradient_checkpointing_kwargs.offload": _on(activations=CHECKPOINT_ON_HOST),
    "gradient_checkpointing_kwargs.every_n_layers": "every",
    "per_device_train_batch_size": "batch",
    "optim": _OPTIMIZER,
    **_AUTOCAST,
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
}  # fmt: skip
_TORCHTITAN: Rules = {
    "activation_checkpoint.mode": {"none": {}, "full": {"activations": CHECKPOINT}},
    "training.enable_cpu_offload": _on(parameters=ON_HOST),
    "training.local_batch_size": "batch",
    "optimizer.name": _OPTIMIZER,
}
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
    names = [type(one).__name__ for one in policies]
    if not policies or not all(name.endswith("Policy") for name in names):
        raise OptionError(f"settings is {given!r}; {_HOW}")
    found = ForeignSettings("FSDP2")
    for name, one in zip(names, policies, strict=True):
        if name == "CPUOffloadPolicy":
            found.set({"parameters": ON_HOST})
        (found.read if name in ("CPUOffloadPolicy", "OffloadPolicy") else found.not_read)[name] = one
    return found


def _by(kind: str, rules: Rules, given: Mapping[str, Any]) -> ForeignSettings:
    found, said = ForeignSettings(kind), dict(_flat(given, rules))
    for key in sorted(said, key=lambda key: [*rules, key].index(key)):  # in the rules' order
        idle = "gradient_checkpointing_kwargs" in key and not given.get("gradient_checkpointing")
        understood = key in rules and not idle and _understood(found, rules[key], said[key])
        (found.read if understood else found.not_read)[key] = said[key]
    return found


def _understood(found: ForeignSettings, rule: Any, value: Any) -> bool:
    if rule is NESTED and value not in (None, "", []):
        inner = read_foreign(value)
        found.set({"parameters": inner.setting.parameters, "master_weights": inner.master_weights})
        found.not_read |= {f"{inner.kind}: {key}": said for key, said in inner.not_read.items()}
    elif isinstance(rule, str):  # a number
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            return False
        found.set({rule: value})
    elif rule is not NESTED:
        value = getattr(value, "value", value)  # of an enumeration
        value = value.lower() if isinstance(value, str) else value
        if isinstance(value, (list, dict)) or value not in rule:
            return False
        found.set(rule[value])
    return True


def _flat(given: Mapping[str, Any], rules: Rules, before: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in given.items():
        key = f"{before}{name}"
        if isinstance(value, Mapping) and key not in rules:
            yield from _flat(value, rules, f"{key}.")
        else:
            yield key, value
