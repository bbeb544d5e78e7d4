"""Commands that run or trace models, with torch: profile, plan, audit, largest."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..core.sequence import MODES
from ..core.sizes import format_bytes
from ..io.progress import Bar
from ..profile.estimate.devices import devices, find
from ..report.chain_table import chain_table
from .command import Argument, Command, UsageError, argument, print_json, shown, size

_TARGET = (
    "MODULE:FUNCTION, or FILE.py:FUNCTION, is called without arguments and returns (model, sample): the model in"
    " training"
    "\nmode on its device, and its arguments: a tensor, a tuple of positional ones, or a dict of keyword arguments."
)


def load_target(text: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The model that ``module:function`` returns, and the arguments to call it with.

    Raises:
        UsageError: if there is no such function, it raises, or it does not return (model, sample).
    """
    from ..tools.largest import read_built

    function = _load_function(text)
    try:
        made = function()
    except Exception as error:
        raise UsageError(f"{text} raised {type(error).__name__}: {error} (--traceback shows where)") from error
    return read_built(made, text)


def _load_function(text: str) -> Any:
    where, colon, name = text.rpartition(":")
    if not colon or not where or not name:
        raise UsageError(
            f"{text!r} is not MODULE:FUNCTION; give, for example, my_models:build or path/to/my_models.py:build"
        )
    module = _load_module(where)
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"{where} has no function {name!r}")
    return function


def _load_module(where: str) -> Any:
    try:
        if where.endswith(".py"):
            path = Path(where)
            spec = importlib.util.spec_from_file_location(path.stem, path)
            if spec is None or spec.loader is None or not path.is_file():
                raise UsageError(f"there is no file {where}")
            module = importlib.util.module_from_spec(spec)
            sys.modules.setdefault(path.stem, module)
            spec.loader.exec_module(module)
            return module
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))  # the script `rotoff` has its own folder there instead
        return importlib.import_module(where)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"{where} cannot be imported: {type(error).__name__}: {error} (--traceback shows where)"
        ) from error


_DEVICES = ", ".join(device.name for device in devices())
_MODEL = argument("target", metavar="MODULE:FUNCTION", help="returns the model and a sample to call it with")
_OPTIMIZER = "sgd, momentum, adam or adamw"


def _device(otherwise: str | None, said: str) -> Argument:
    return argument("--device", default=otherwise, metavar="NAME", help=f"one of {_DEVICES} (default: {said})")


_CUT = (
    argument("--stages", metavar="N|NAMES", help="about how many, or dotted names of modules, by commas, one for each"),
    argument("--backward-from", metavar="NAMES", help="outputs where the backward starts: keys or indices, by commas"),
    argument("--no-forms", action="store_true", help="stages are saved whole, or not at all"),
)


def _cut(options: argparse.Namespace) -> dict[str, Any]:
    """The options of `Checkpointable` for the arguments `_CUT`, without those that are the default."""

    def listed(text: str) -> list[str]:
        return [name.strip() for name in text.split(",")]

    found: dict[str, Any] = {}
    if (stages := options.stages) is not None:
        found["stages"] = int(stages) if stages.isdigit() else listed(stages)
    if options.backward_from is not None:
        starts = [int(name) if name.isdigit() else name for name in listed(options.backward_from)]
        found["backward_from"] = starts if len(starts) > 1 else starts[0]
    return {**found, "forms": False} if options.no_forms else found


# of `plan` and `largest`
_QUESTION = (
    _device("H200", "H200"),
    argument("--mem-limit", type=size, metavar="SIZE", help="of a step; parameters, gradients and states then stay"),
    argument("--optimizer", default="adam", metavar="NAME", help=f"{_OPTIMIZER} (default: adam)"),
    argument("--master-weights", action="store_true", help="count float32 weights and states for half precision"),
    argument("--host-bandwidth", type=float, default=40e9, metavar="B/S", help="of the host's memory (default: 40e9)"),
    argument("--mem-slots", type=int, default=50, metavar="N", help="slots of the joint dynamic program (default: 50)"),
)


def _asked(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    question = ("mem_limit", "device", "optimizer", "master_weights", "host_bandwidth", "mem_slots")
    return {name: getattr(options, name) for name in (*question, *names)}


def _profile(options: argparse.Namespace) -> int:
    from ..checkpointable import Checkpointable
    from ..tools.estimate import estimate

    if options.repeats is not None and options.repeats < 1:
        raise UsageError(f"--repeats is {options.repeats}; give at least 1")
    if options.device is not None:
        find(options.device)  # an unknown device is refused before the model is made
    model, args, kwargs = load_target(options.target)
    wrapped, notes = Checkpointable(model, host_directory=options.host_directory, **_cut(options)), []
    if options.device is not None:
        chain = estimate(wrapped, *args, device=options.device, **kwargs)
    else:
        with Bar("measuring") as bar:
            wrapped.measure(
                *args, repeats=options.repeats, progress=lambda n, of, name: bar(n / max(1, of), name), **kwargs
            )
        chain, everything = wrapped.chain, format_bytes(wrapped.keep_all_memory)
        notes = [
            wrapped.strategy,
            f"a step that keeps everything allocates {everything} beyond parameters, gradients and the batch",
        ]
    wrapped.close()
    chain = replace(chain, name=options.name or chain.name or type(model).__name__)
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

    find(options.device)
    model, args, kwargs = load_target(options.target)
    asked = _asked(options, "pipeline", "microbatches", "schedule", "chunks", "ranks_per_link")
    modes = MODES if options.modes is None else [mode.strip() for mode in options.modes.split(",")]
    found = plan(model, *args, modes=modes, **asked, **_cut(options), **kwargs)
    shown(options, found)
    return 0 if found.fits else 1


def _audit(options: argparse.Namespace) -> int:
    from ..tools.audit import audit
    from ..tools.foreign_settings import read_foreign

    find(options.device)
    read_foreign(options.settings)  # refused before the model is made
    model, args, kwargs = load_target(options.target)
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


COMMANDS = (
    Command(
        "profile",
        "measure a model on its device, or estimate it on another one, and show its stages",
        "rotoff profile my_models:build -o chain.json",
        _profile,
        (
            _MODEL,
            _device(None, "the model's own, where it is measured"),
            argument("--repeats", type=int, metavar="N", help="recorded steps (default: 2)"),
            argument("--name", default="", help="of the chain (default: the model's class)"),
            *_CUT,
            argument("--host-directory", metavar="DIR", help="on a CPU, the directory of the file for offloading"),
            argument("-o", "--output", metavar="CHAIN.json", help="write the chain to this file"),
        ),
        f'{_TARGET}\nWith --device, tensors may be on the device "meta": neither the device nor memory is needed.',
    ),
    Command(
        "plan",
        "say whether training fits a device that you may not have, how, and at what cost",
        'rotoff plan my_models:build --device "RTX 4090" --optimizer adamw',
        _plan,
        (
            _MODEL,
            *_QUESTION,
            argument("--modes", metavar="NAMES", help=f"some of {','.join(MODES)} (default: all)"),
            argument(
                "--pipeline", type=int, metavar="N", help="plan a pipeline of N such devices; --mem-limit of each"
            ),
            argument("--microbatches", type=int, default=1, metavar="N", help="of a pipeline's batch (default: 1)"),
            argument("--schedule", default="1F1B", metavar="NAME", help="GPipe, 1F1B (default) or Interleaved1F1B"),
            argument("--chunks", type=int, default=1, metavar="N", help="stages of each rank (default: 1)"),
            argument("--ranks-per-link", type=int, default=1, metavar="N", help="that share a link (default: 1)"),
            *_CUT,
        ),
        f'{_TARGET}\nTensors may be on the device "meta". Exit code 1: no mode fits the limit, or the device is too'
        " small.",
    ),
    Command(
        "audit",
        "say what another tool's settings take, and what is possible in the same bytes",
        'rotoff audit my_models:build ds_config.json --device "RTX 4090"',
        _audit,
        (
            _MODEL,
            argument("settings", help="a DeepSpeed .json, axolotl .yaml or torchtitan .toml file, or a Trainer's"),
            _device("H200", "H200"),
            argument("--optimizer", metavar="NAME", help=f"{_OPTIMIZER} (default: what the file says)"),
            argument("--master-weights", action="store_true", default=None, help="as for rotoff plan"),
            *_CUT,
        ),
        _TARGET,
    ),
    Command(
        "largest",
        "find the largest batch, context or depth that trains on a device that you do not have",
        'rotoff largest my_models:build_for --device "RTX 4090" --step 16',
        _largest,
        (
            argument("target", metavar="MODULE:FUNCTION", help="takes a size, returns the model and a sample"),
            *_QUESTION,
            argument("--step-time", type=float, metavar="SECONDS", help="the most of a step, with its updates"),
            argument("--step", type=int, default=1, metavar="N", help="sizes are multiples of it (default: 1)"),
            argument("--most", type=int, default=2**20, metavar="N", help="the largest size to try (default: 2**20)"),
            *_CUT,
        ),
        'The function takes a size and returns (model, sample), on the device "meta". Exit code 1: none works.\n'
        "Whether an embedding's table is long enough is not checked: give the longest context as --most.",
    ),
)
