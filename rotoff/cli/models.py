"""Commands that run or trace models, with torch: profile, plan, audit, largest, doctor."""

from __future__ import annotations

import argparse
import importlib
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..core.sizes import format_bytes
from ..errors import OptionError
from ..io.files import save_json
from ..profile.estimate.devices import devices
from ..report.chain_table import chain_table
from .command import Add, add_command, answer, asked, listed

_TARGET = (
    "MODULE:FUNCTION, or FILE.py:FUNCTION, is called without arguments and returns (model, sample): the model in"
    " training"
    "\nmode on its device, and its arguments: a tensor, a tuple of positional ones, or a dict of keyword arguments."
)


def _load(options: argparse.Namespace) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The model that the function returns, and the arguments to call it with."""
    from ..tools.largest import read_built

    return read_built(_function(options.target)(), options.target)


def _function(text: str) -> Any:
    where, _, name = text.rpartition(":")
    if not where or not name:
        raise OptionError(
            f"{text!r} is not MODULE:FUNCTION; give, for example, my_models:build or path/to/my_models.py:build"
        )
    if where.endswith(".py"):
        found = runpy.run_path(where, run_name=Path(where).stem)
    else:
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))  # the script `rotoff` has its own folder there instead
        found = vars(importlib.import_module(where))
    if not callable(function := found.get(name)):
        raise OptionError(f"{where} has no function {name!r}")
    return function


def _profile(options: argparse.Namespace) -> int:
    from ..checkpointable import Checkpointable
    from ..tools.estimate import estimate

    (model, args, kwargs), cut = _load(options), asked(options)
    device = cut.pop("device", None)
    wrapped, notes = Checkpointable(model, **cut), ""
    if device is not None:
        chain = estimate(wrapped, *args, device=device, **kwargs)
    else:
        chain = wrapped.measure(*args, **kwargs).chain
        takes = (
            f"allocates {format_bytes(wrapped.keep_all_memory)} in a step, beyond parameters, gradients and the batch"
        )
        notes = f"\n{wrapped.strategy}\nplain PyTorch {takes}"
    wrapped.close()
    chain = replace(chain, name=chain.name or type(model).__name__)
    if options.output:
        chain.save(options.output)
    answer(options, chain.to_dict, f"{chain_table(chain)}{notes}")
    return 0


def _plan(options: argparse.Namespace) -> int:
    from ..tools.plan import plan

    model, args, kwargs = _load(options)
    found = plan(model, *args, **asked(options), **kwargs)
    answer(options, found.to_dict, found)
    return 0 if found.fits else 1


def _largest(options: argparse.Namespace) -> int:
    from ..tools.largest import largest

    found = largest(_function(options.target), **asked(options))
    planned = f"\n\nsize {found.size}: {found.planned}" if found.planned else ""
    answer(options, found.to_dict, f"{found}{planned}")
    return 0 if found.size else 1


def _doctor(options: argparse.Namespace) -> int:
    import torch

    from ..planning.options import read_device
    from ..tools.doctor import FAILED, examine

    device = read_device(options.device or torch.accelerator.current_accelerator(check_available=True) or "cpu")
    assert device is not None
    path, options.output = options.output, None
    for report in examine(device):
        save_json(path, report.to_dict())  # after each check, so that an interrupt keeps the findings so far
        if not options.json:
            print(report.findings[-1], flush=True)
    new = "Is this hardware new to rotoff? Please attach it to an issue: it is used to check predictions."
    answer(options, report.to_dict, f"\nwritten to {path}. {new}\n{report.conclusion(path)}")
    return 1 if report.verdict == FAILED else 0


def _stages(text: str) -> int | list[str]:
    return int(text) if text.isdigit() else listed(text)


def _starts(text: str) -> Any:
    starts = [int(name) if name.isdigit() else name for name in listed(text)]
    return starts if len(starts) > 1 else starts[0]


def _add_model(add: Add, device: str = "H200") -> None:
    """Add the arguments that name the model, how it is cut, and the device. device: what it is by default."""
    known = ", ".join(one.name for one in devices())
    add("target", metavar="MODULE:FUNCTION", help="returns the model and a sample to call it with")
    add("--device", metavar="NAME", help=f"one of {known} (default: {device})")
    add("--stages", type=_stages, metavar="N|NAMES", help="about how many, or dotted names of modules, by commas")
    starts = "outputs where the backward starts: keys or indices, by commas"
    add("--backward-from", type=_starts, metavar="NAMES", help=starts)
    add("--no-forms", dest="forms", action="store_false", help="stages are saved whole, or not at all")


def _add_question(add: Add) -> None:
    """Add the arguments of `plan`, `audit` and `largest`."""
    _add_model(add)
    add("--optimizer", metavar="NAME", help="sgd, momentum, adam (default) or adamw")
    add("--master-weights", action="store_true", help="count float32 weights and states for half precision")
    add("--host-bandwidth", type=float, metavar="B/S", help="of the host's memory (default: 40e9)")
    add("--mem-limit", metavar="SIZE", help="of a step; parameters, gradients and states then stay")
    add("--mesh", metavar="AXES", help="plan for each of the ranks of fsdp=N, tp=N or fsdp=N,tp=N, with FSDP2")
    add("--link", type=float, metavar="B/S", help="that a rank sends to the others (default: the device's)")


def add_commands(commands: Any) -> None:
    add = add_command(
        commands,
        _profile,
        "rotoff profile my_models:build -o chain.json",
        "measure a model on its device, or estimate it on another one, and show its stages",
        f'{_TARGET}\nWith --device, tensors may be on the device "meta": neither the device nor memory is needed.',
    )
    _add_model(add, "the model's own, where it is measured")
    add("-o", "--output", metavar="CHAIN.json", help="write the chain to this file")
    add = add_command(
        commands,
        _plan,
        'rotoff plan my_models:build --device "RTX 4090" --optimizer adamw',
        "say whether training fits a device that you may not have, how, and at what cost",
        f'{_TARGET}\nTensors may be on the device "meta". Exit code 1: no mode fits the limit, or the device is too'
        " small.",
    )
    _add_question(add)
    add("--modes", type=listed, metavar="NAMES", help="some of joint,remat,offload (default: all)")
    add("--pipeline", type=int, metavar="N", help="plan a pipeline of N such devices; --mem-limit of each")
    add("--microbatches", type=int, metavar="N", help="of a pipeline's batch (default: 1)")
    add("--schedule", metavar="NAME", help="GPipe, 1F1B (default) or Interleaved1F1B")
    add("--chunks", type=int, metavar="N", help="stages of each rank (default: 1)")
    add("--ranks-per-link", type=int, metavar="N", help="that share a link (default: 1)")
    add = add_command(
        commands,
        _plan,
        'rotoff audit my_models:build ds_config.json --device "RTX 4090"',
        "say what another tool's settings take, and plan in the same bytes",
        _TARGET,
    )
    _add_question(add)
    add("settings", help="a DeepSpeed .json, axolotl .yaml or torchtitan .toml file")
    add = add_command(
        commands,
        _largest,
        'rotoff largest my_models:build_for --device "RTX 4090" --step 16',
        "find the largest batch, context or depth that trains on a device that you do not have",
        'The function takes a size and returns (model, sample), on the device "meta". Exit code 1: none works.\n'
        "Whether an embedding's table is long enough is not checked: give the longest context as --most.",
    )
    _add_question(add)
    add("--step", type=int, metavar="N", help="sizes are multiples of it (default: 1)")
    add("--most", type=int, metavar="N", help="the largest size to try (default: 2**20)")
    add = add_command(
        commands,
        _doctor,
        "rotoff doctor --device cuda -o doctor.json",
        "check this machine for all that training under a limit needs, with a verdict for each",
        "Versions, memory, pinned memory, bandwidth, and a small model trained under three limits: gradients against"
        " plain\nones, bytes and seconds against predicted ones. Exit code 1: a check failed.",
    )
    add("--device", default=None, metavar="NAME", help="cpu, cuda or cuda:1 (default: CUDA if available)")
    add("-o", "--output", default="doctor.json", metavar="FILE", help="(default: doctor.json)")
