"""Commands that run or trace models, with torch: profile, plan, audit, largest, doctor."""

from __future__ import annotations

import argparse
import importlib
import runpy
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..core.sequence import MODES
from ..core.sizes import format_bytes
from ..io.files import save_json
from ..profile.estimate.devices import devices, find
from ..report.chain_table import chain_table
from .command import Add, UsageError, add_command, add_mem_slots, listed, print_json, shown

_TARGET = (
    "MODULE:FUNCTION, or FILE.py:FUNCTION, is called without arguments and returns (model, sample): the model in"
    " training"
    "\nmode on its device, and its arguments: a tensor, a tuple of positional ones, or a dict of keyword arguments."
)


def _load(options: argparse.Namespace) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The model that the function returns, and the arguments to call it with.

    Raises:
        UsageError: if there is no such function, it raises, or it does not return (model, sample). OptionError: for an
            unknown device, before the model is made.
    """
    from ..tools.largest import read_built

    if options.device is not None:
        find(options.device)
    function = _load_function(options.target)
    try:
        made = function()
    except Exception as error:
        raise UsageError(
            f"{options.target} raised {type(error).__name__}: {error} (--traceback shows where)"
        ) from error
    return read_built(made, options.target)


def _load_function(text: str) -> Any:
    where, colon, name = text.rpartition(":")
    if not colon or not where or not name:
        raise UsageError(
            f"{text!r} is not MODULE:FUNCTION; give, for example, my_models:build or path/to/my_models.py:build"
        )
    try:
        if where.endswith(".py"):
            found = runpy.run_path(where, run_name=Path(where).stem)
        else:
            if "" not in sys.path and str(Path.cwd()) not in sys.path:
                sys.path.insert(0, str(Path.cwd()))  # the script `rotoff` has its own folder there instead
            found = vars(importlib.import_module(where))
    except Exception as error:
        raise UsageError(
            f"{where} cannot be imported: {type(error).__name__}: {error} (--traceback shows where)"
        ) from error
    if not callable(function := found.get(name)):
        raise UsageError(f"{where} has no function {name!r}")
    return function


def _cut(options: argparse.Namespace) -> dict[str, Any]:
    """The options of `Checkpointable` among the arguments, without those that are the default."""
    found: dict[str, Any] = {}
    if (stages := options.stages) is not None:
        found["stages"] = int(stages) if stages.isdigit() else listed(stages)
    if options.backward_from is not None:
        starts = [int(name) if name.isdigit() else name for name in listed(options.backward_from)]
        found["backward_from"] = starts if len(starts) > 1 else starts[0]
    return {**found, "forms": False} if options.no_forms else found


def _asked(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    question = ("mem_limit", "device", "optimizer", "master_weights", "host_bandwidth", "mem_slots", "mesh", "link")
    return {name: getattr(options, name) for name in (*question, *names)}


def _profile(options: argparse.Namespace) -> int:
    from ..checkpointable import Checkpointable
    from ..tools.estimate import estimate

    model, args, kwargs = _load(options)
    wrapped, notes = Checkpointable(model, **_cut(options)), []
    if options.device is not None:
        chain = estimate(wrapped, *args, device=options.device, **kwargs)
    else:
        wrapped.measure(*args, repeats=options.repeats, **kwargs)
        chain, everything = wrapped.chain, format_bytes(wrapped.keep_all_memory)
        notes = [
            wrapped.strategy,
            f"plain PyTorch allocates {everything} in a step, beyond parameters, gradients and the batch",
        ]
    wrapped.close()
    chain = replace(chain, name=chain.name or type(model).__name__)
    if options.output:
        chain.save(options.output)
        notes.append(f"written to {options.output}")
    if options.json:
        print_json(chain.to_dict())
    else:
        print(chain_table(chain), *notes, sep="\n")
    return 0


def _plan(options: argparse.Namespace) -> int:
    from ..tools.plan import plan

    model, args, kwargs = _load(options)
    asked = _asked(options, "modes", "pipeline", "microbatches", "schedule", "chunks", "ranks_per_link")
    found = plan(model, *args, **asked, **_cut(options), **kwargs)
    shown(options, found)
    return 0 if found.fits else 1


def _audit(options: argparse.Namespace) -> int:
    from ..tools.audit import audit
    from ..tools.foreign_settings import read_foreign

    read_foreign(options.settings)  # refused before the model is made
    model, args, kwargs = _load(options)
    asked = {name: getattr(options, name) for name in ("settings", "device", "optimizer", "master_weights")}
    shown(options, audit(model, *args, **asked, **_cut(options), **kwargs))
    return 0


def _largest(options: argparse.Namespace) -> int:
    from ..tools.largest import check_sized, largest

    find(options.device)
    function = _load_function(options.target)
    check_sized(function, options.target)
    found = largest(function, **_asked(options, "step_time", "step", "most"), **_cut(options))
    if options.json:
        planned = found.planned and found.planned.to_dict()
        print_json({**asdict(replace(found, planned=None)), "planned": planned})
    else:
        print(found)
        if found.planned is not None:
            print(f"\nsize {found.size}: {found.planned}")
    return 0 if found.size else 1


def _doctor(options: argparse.Namespace) -> int:
    import torch

    from ..planning.options import read_device
    from ..tools.doctor.examination import examine
    from ..tools.doctor.findings import FAILED, VERDICTS, Report

    device = read_device(options.device or torch.accelerator.current_accelerator(check_available=True) or "cpu")
    assert device is not None
    if device.index is not None and device.index >= max(1, count := torch.accelerator.device_count()):
        last = f"{device.type}:{count - 1}"
        raise UsageError(f"device is {options.device!r}, and torch finds {count}: the last is {last}")
    try:
        save_json(options.output, Report(str(device)).to_dict())
    except OSError as error:  # before the work
        raise UsageError(f"{options.output} cannot be written ({error.strerror}); name another file with -o") from error

    for report in examine(device, options.seconds):
        save_json(options.output, report.to_dict())  # after each check, so that an interrupt keeps the findings so far
        if not options.json:
            print(report.findings[-1], flush=True)
    if options.json:
        print_json(report.to_dict())
    else:
        ended = [finding.verdict for finding in report.findings]
        counts = ", ".join(f"{ended.count(verdict)} {verdict}" for verdict in VERDICTS)
        print(f"\n{counts}, in {report.seconds:.0f} s; written to {options.output}")
        print("Is this hardware new to rotoff? Please attach the file to an issue: it is used to check predictions.")
        print(report.conclusion(options.output))
    return 1 if report.verdict == FAILED else 0


def _add_model(add: Add, device: str | None = "H200") -> None:
    """Add the arguments that name the model, how it is cut, and the device. device: the default."""
    known, otherwise = ", ".join(one.name for one in devices()), device or "the model's own, where it is measured"
    add("target", metavar="MODULE:FUNCTION", help="returns the model and a sample to call it with")
    add("--device", default=device, metavar="NAME", help=f"one of {known} (default: {otherwise})")
    add("--stages", metavar="N|NAMES", help="about how many, or dotted names of modules, by commas, one for each")
    add("--backward-from", metavar="NAMES", help="outputs where the backward starts: keys or indices, by commas")
    add("--no-forms", action="store_true", help="stages are saved whole, or not at all")


def _add_question(add: Add) -> None:
    """Add the arguments of `plan` and `largest`."""
    _add_model(add)
    add_mem_slots(add)
    add("--mem-limit", metavar="SIZE", help="of a step; parameters, gradients and states then stay")
    add("--optimizer", default="adam", metavar="NAME", help="sgd, momentum, adam (default) or adamw")
    add("--master-weights", action="store_true", help="count float32 weights and states for half precision")
    add("--mesh", metavar="AXES", help="plan for each of the ranks of fsdp=N, tp=N or fsdp=N,tp=N, with FSDP2")
    add("--link", type=float, metavar="B/S", help="that a rank sends to the others (default: the device's)")
    add("--host-bandwidth", type=float, default=40e9, metavar="B/S", help="of the host's memory (default: 40e9)")


def add_commands(commands: Any) -> None:
    add = add_command(
        commands,
        "profile",
        _profile,
        "measure a model on its device, or estimate it on another one, and show its stages",
        "rotoff profile my_models:build -o chain.json",
        f'{_TARGET}\nWith --device, tensors may be on the device "meta": neither the device nor memory is needed.',
    )
    _add_model(add, device=None)
    add("--repeats", type=int, metavar="N", help="recorded steps (default: 2)")
    add("-o", "--output", metavar="CHAIN.json", help="write the chain to this file")
    add = add_command(
        commands,
        "plan",
        _plan,
        "say whether training fits a device that you may not have, how, and at what cost",
        'rotoff plan my_models:build --device "RTX 4090" --optimizer adamw',
        f'{_TARGET}\nTensors may be on the device "meta". Exit code 1: no mode fits the limit, or the device is too'
        " small.",
    )
    _add_question(add)
    add("--modes", type=listed, default=MODES, metavar="NAMES", help=f"some of {','.join(MODES)} (default: all)")
    add("--pipeline", type=int, metavar="N", help="plan a pipeline of N such devices; --mem-limit of each")
    add("--microbatches", type=int, default=1, metavar="N", help="of a pipeline's batch (default: 1)")
    add("--schedule", default="1F1B", metavar="NAME", help="GPipe, 1F1B (default) or Interleaved1F1B")
    add("--chunks", type=int, default=1, metavar="N", help="stages of each rank (default: 1)")
    add("--ranks-per-link", type=int, default=1, metavar="N", help="that share a link (default: 1)")
    add = add_command(
        commands,
        "audit",
        _audit,
        "say what another tool's settings take, and what is possible in the same bytes",
        'rotoff audit my_models:build ds_config.json --device "RTX 4090"',
        _TARGET,
    )
    _add_model(add)
    add("settings", help="a DeepSpeed .json, axolotl .yaml or torchtitan .toml file, or a Trainer's")
    add("--optimizer", metavar="NAME", help="as for rotoff plan (default: what the file says)")
    add("--master-weights", action="store_true", default=None, help="as for rotoff plan")
    add = add_command(
        commands,
        "largest",
        _largest,
        "find the largest batch, context or depth that trains on a device that you do not have",
        'rotoff largest my_models:build_for --device "RTX 4090" --step 16',
        'The function takes a size and returns (model, sample), on the device "meta". Exit code 1: none works.\n'
        "Whether an embedding's table is long enough is not checked: give the longest context as --most.",
    )
    _add_question(add)
    add("--step-time", type=float, metavar="SECONDS", help="the most of a step, with its updates")
    add("--step", type=int, default=1, metavar="N", help="sizes are multiples of it (default: 1)")
    add("--most", type=int, default=2**20, metavar="N", help="the largest size to try (default: 2**20)")
    _add_doctor(commands)


def _add_doctor(commands: Any) -> None:
    add = add_command(
        commands,
        "doctor",
        _doctor,
        "check this machine for all that training under a limit needs, with a verdict for each",
        "rotoff doctor --device cuda -o doctor.json",
        "Versions, memory, pinned memory, bandwidth, and a small model trained under three limits: bytes and seconds"
        " against\npredicted ones, gradients against plain ones, waits of the host, overlap of copies. Exit code 1: a"
        " check failed.",
    )
    add("--device", metavar="NAME", help="cpu, cuda or cuda:1 (default: CUDA if available)")
    add("--seconds", type=float, default=2.0, metavar="N", help="of timed steps at each of three limits")
    add("-o", "--output", default="doctor.json", metavar="FILE", help="(default: doctor.json)")
