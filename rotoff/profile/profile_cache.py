"""Caches the profile of a model on disk, so that the next process need not measure it.

Each value of a `Profile` is written as JSON under the name of its type. A module is written as its position among those
of the recorded stages. A profile with a value that cannot be written (an operation that is not PyTorch's, an unknown
type) is not cached.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import nn

from ..capture.partition.segment import Segment
from ..core.chain import Chain, Form, Stage
from ..io.cache import Cache, digest
from ..runtime.overhead import OverheadTimes
from ..tensors.convolutions import Algorithms
from ..tensors.recipe import Argument, Constant, Recipe, Stored, Unread
from ..tensors.stage import Behaviour, SavedKind, StageModule
from ..tensors.storage import View
from .measure import merged_as
from .memory.eager_memory import FreedEarly, HeldLate
from .memory.skips import Skip
from .profile import Compact, PlacedBackward, Profile

KIND = "profile"
_RECORDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        Argument, Behaviour, Chain, Compact, Constant, Form, FreedEarly, HeldLate, PlacedBackward, Profile, Recipe,
        Skip, Stage, Stored, Unread, OverheadTimes, View,
    )
}  # fmt: skip
_OTHERS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "dtype": (torch.dtype, lambda v: str(v).removeprefix("torch."), lambda v: getattr(torch, v)),
    "device": (torch.device, str, torch.device),
    "operation": (torch._ops.OpOverload, str, lambda v: reduce(getattr, v.split("."), torch.ops)),
    "SavedKind": (SavedKind, operator.attrgetter("value"), SavedKind),
    "Algorithms": (Algorithms, operator.attrgetter("value"), Algorithms),
}


def find_profile(cache: Cache, key: dict[str, Any] | None, stages: Sequence[StageModule]) -> Profile | None:
    """Return the profile cached for `key` of a model recorded as `stages`; None if there is none."""
    found = None if key is None else cache.find(KIND, key)
    if not isinstance(found, dict):
        return None
    try:
        if found["digest"] != _but_times(found["profile"]):
            return None
        profile = _read(found["profile"], _modules(stages))
        every = merged_as(stages, found["stages"])
        groups, prefix = every[found["prefix"] :], every[: found["prefix"]]
        pairs = zip(profile.behaviours, groups, strict=True)
        behaviours = tuple(replace(behaviour, modes=stage.modes()) for behaviour, stage in pairs)
        return replace(profile, prefix=tuple(prefix), stages=tuple(groups), behaviours=behaviours)
    except (TypeError, KeyError, ValueError, AttributeError, IndexError, RuntimeError):  # the file was damaged
        return None


def keep_profile(cache: Cache, key: dict[str, Any] | None, stages: Sequence[StageModule], profile: Profile) -> None:
    """Cache the profile of a model recorded as `stages`, if it can be written."""
    if key is None or cache.directory is None:
        return
    portable = replace(
        profile,
        prefix=(),
        stages=(),
        behaviours=tuple(replace(behaviour, modes=()) for behaviour in profile.behaviours),
    )
    numbers = {id(module): n for n, module in enumerate(_modules(stages))}
    try:
        written = _written(portable, numbers)
    except (TypeError, KeyError):
        return
    names = [stage.name for stage in (*profile.prefix, *profile.stages)]
    kept = {"profile": written, "stages": names, "prefix": len(profile.prefix), "digest": _but_times(written)}
    cache.keep(KIND, key, kept)


def _but_times(written: Any) -> str:
    """A digest of a written profile, but for its floats: times are compared with the machine's."""
    return digest(json.loads(json.dumps(written), parse_float=lambda _: 0.0))


def bytes_are_portable(stages: Sequence[StageModule]) -> bool:
    """Whether a cached profile of these stages also gives bytes. It does if they call PyTorch's own code alone, and no
    bytes depend on data: other code may have been edited since, and then take other bytes."""
    for module in (module for stage in stages for module in stage.modules):
        if getattr(module, "varying", False):
            return False
        if isinstance(module, Segment):
            constants = [value for name, value in module.written()[1].items() if re.fullmatch(r"c\d+", name)]
            if not all(_of_torch(value) for value in constants if callable(value)):
                return False
        elif not type(module).__module__.startswith("rotoff."):
            return False
    return True


def _of_torch(function: Any) -> bool:
    if isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(function).startswith(("aten.", "prims.", "prim."))
    of = getattr(function, "__self__", None)
    owner = of if isinstance(of, type) else function  # a custom function's class
    return (getattr(owner, "__module__", None) or "torch").partition(".")[0] in (
        "torch",
        "builtins",
        "_operator",
        "math",
    )


def _modules(stages: Sequence[StageModule]) -> list[nn.Module]:
    return list(dict.fromkeys(module for stage in stages for module in stage.every_module()))


def _written(value: Any, modules: dict[int, int]) -> Any:
    """Return `value` as JSON values: a tuple as a list, and what JSON does not know as an object with one entry."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is tuple:
        return [_written(one, modules) for one in value]
    name = type(value).__name__
    if type(value) in (list, frozenset, torch.Size):
        return {name: [_written(one, modules) for one in value]}
    if type(value) is dict:
        return {name: [[_written(k, modules), _written(v, modules)] for k, v in value.items()]}
    if _RECORDS.get(name) is type(value):
        return {name: [_written(getattr(value, field), modules) for field in _fields(type(value))]}
    if isinstance(value, nn.Module):
        return {"module": modules[id(value)]}
    for tag, (kind, write, _) in _OTHERS.items():
        if isinstance(value, kind):
            return {tag: write(value)}
    raise TypeError(f"a {name} is not kept")


def _read(value: Any, modules: list[nn.Module]) -> Any:
    """The inverse of `_written`."""
    if isinstance(value, list):
        return tuple(_read(one, modules) for one in value)
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag == "module":
        return modules[content]
    if tag in _OTHERS:
        kind, _, read = _OTHERS[tag]
        if not isinstance(made := read(content), kind):
            raise ValueError(f"{content!r} is no {tag}")
        return made
    parts = [_read(one, modules) for one in content]
    if tag in _RECORDS:
        return _RECORDS[tag](**dict(zip(_fields(_RECORDS[tag]), parts, strict=True)))
    return {"list": list, "frozenset": frozenset, "Size": torch.Size, "dict": dict}[tag](parts)


def _fields(kind: type) -> tuple[str, ...]:
    """Return the fields that a value of `kind` is made of, without caches that it fills later."""
    if not is_dataclass(kind):
        return kind._fields  # type: ignore[attr-defined]
    return tuple(field.name for field in fields(kind) if field.init and field.repr)
