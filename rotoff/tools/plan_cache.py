"""Keeps the results of `rotoff.plan` on disk for the next process.

An entry's key is what a result depends on, read without running the model: the model's structure, settings and code,
the sample's shapes, the question, PyTorch's settings and the versions. Beside the result lies a list of the files of
all Python modules that were loaded, PyTorch and the standard library excepted; if one of them has been edited, it is
planned anew.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from ..accelerator import TYPES
from ..core.chain import Chain
from ..io.cache import Cache, digest
from ..module_proxy import ModuleProxy
from ..profile.estimate.devices import Device
from ..tape.operators import settings
from ..tensors.autocast import in_region
from ..version import __version__
from .model_text import described_whole
from .planned_modes import PlacedStep, PlannedMode, PlannedModes, PlannedStep

logger = logging.getLogger("rotoff")
KIND = "step"
_ROWS = {"rows": PlannedMode, "placed": PlacedStep, "steps": PlannedStep}  # fields of `PlannedModes`
Files = dict[str, tuple[str, int, int]]  # by module: its file, when it was written, and its size


def plan_key(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: Device, asked: Iterable[Any]
) -> dict[str, Any] | None:
    """What the answer to a question depends on; None if another process could not recognise some of it.

    Args:
        args, kwargs: of `rotoff.plan`.
        asked: the other arguments of `rotoff.plan`.
    """
    options: list[str] = []
    if isinstance(model, ModuleProxy):  # a Checkpointable
        chosen: Any = model._options
        model, options = model._model, chosen.described(model._model)
    text = described_whole(model, (args, kwargs))
    interactive = "__main__." in text and getattr(sys.modules["__main__"], "__file__", None) is None
    asked = [repr(value) for value in asked]
    if interactive or any("@" in one or " at 0x" in one for one in (text, *options, *asked)):  # objects' addresses
        return None
    return {
        "model": hashlib.sha256(text.encode()).hexdigest(),
        "options": options,
        "device": [str(sorted(value.items()) if name == "flops" else value) for name, value in vars(device).items()],
        "asked": asked,
        "torch": _settings_of_torch(TYPES),
        "versions": [__version__, torch.__version__, platform.python_version()],
    }


def find_plan(cache: Cache, key: dict[str, Any] | None) -> PlannedModes | None:
    """The result kept for `key`, unless a file that it depends on has changed or the entry is damaged."""
    kept = cache.find(KIND, key) if key is not None else None
    if kept is None:
        return None
    try:
        if kept["digest"] != digest(kept["found"]):
            raise ValueError("its digest is another one")
        if not all(_unchanged(name, *file) for name, file in kept["files"].items()):
            return None
        found = _read(kept["found"])
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        logger.warning("rotoff: a plan kept in %s is damaged and is ignored: %s", cache.directory, error)
        return None
    logger.info("rotoff: plan from the cache in %s", cache.directory)
    return found


def keep_plan(cache: Cache, key: dict[str, Any] | None, found: PlannedModes) -> None:
    """Keep `found` for `key`."""
    if key is not None:
        written = _written(found)
        cache.keep(KIND, key, {"found": written, "digest": digest(written), "files": _files()})


def _written(found: PlannedModes) -> dict[str, Any]:
    """`found` in JSON values."""
    rows = {name: [*map(asdict, getattr(found, name))] for name in _ROWS}
    return {**vars(found), **rows, "notes": [*found.notes], "chain": found.chain.to_dict()}


def _read(written: dict[str, Any]) -> PlannedModes:
    """The reverse of `_written`."""
    rows = {name: tuple(kind(**row) for row in written[name]) for name, kind in _ROWS.items()}
    return PlannedModes(
        **{**written, **rows, "notes": tuple(written["notes"]), "chain": Chain.from_dict(written["chain"])}
    )


def _files() -> Files:
    """The files of the loaded modules. Those of PyTorch and the standard library go by their version."""
    packages = sysconfig.get_path("purelib"), sysconfig.get_path("platlib")
    standard, own = sysconfig.get_path("stdlib") + os.sep, os.path.dirname(torch.__file__) + os.sep
    found: Files = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if not isinstance(path, str) or path.startswith(own):
            continue
        if path.startswith(standard) and not path.startswith(packages):
            continue
        if (file := _file(path)) is not None:
            found[name] = file
    return found


def _file(path: str) -> tuple[str, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:  # a module of an archive, or one whose file has gone
        return None
    return path, status.st_mtime_ns, status.st_size


def _unchanged(name: str, path: str, written: int, size: int) -> bool:
    """Whether the module still comes from that file, if it is loaded, and the file has not been written since."""
    now = getattr(sys.modules.get(name), "__file__", None)
    return now in (None, path) and _file(path) == (path, written, size)


def _settings_of_torch(types: Sequence[str]) -> dict[str, Any]:
    """Return PyTorch's settings that bytes and times depend on. types: of devices, for autocast."""
    return {
        "autocast": [[t, torch.is_autocast_enabled(t), str(torch.get_autocast_dtype(t))] for t in types],
        "region": in_region(),
        "defaults": [str(torch.get_default_dtype()), str(torch.get_default_device())],
        "kernels": [*map(str, settings()), torch.is_autocast_cache_enabled()],
    }
