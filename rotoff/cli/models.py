"""Commands that run or trace models, with torch: profile, estimate, plan, largest, stages."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..core.chain import Chain
from ..core.sequence import MODES
from ..core.sizes import format_bytes
from ..io.progress import Bar
from ..profile.estimate.devices import devices, find
from .command import Command, UsageError, add_json, print_json, size
from .pictures import stage_table

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
    function = _load_function(text)
    try:
        made = function()
    except Exception as error:
        raise UsageError(f"{text} raised {type(error).__name__}: {error} (--traceback shows where)") from error
    if not isinstance(made, tuple) or len(made) != 2:
        raise UsageError(f"{text} returned {type(made).__name__}; it must return (model, sample)")
    model, sample = made
    if isinstance(sample, dict):
        return model, (), sample
    return model, sample if isinstance(sample, tuple) else (sample,), {}


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


def _profile_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="MODULE:FUNCTION", help="returns the model and a sample to call it with")
    parser.add_argument(
        "--repeats", type=int, metavar="N", help="timed runs of each stage (default: until their median is steady)"
    )
    parser.add_argument("--name", default="", help="of the chain (default: the model's class)")
    _add_cut(parser)
    parser.add_argument("--host-directory", metavar="DIR", help="on a CPU, the directory of the file for offloading")
    parser.add_argument("-o", "--output", metavar="CHAIN.json", help="write the chain to this file")
    add_json(parser)


def _profile(options: argparse.Namespace) -> int:
    from ..checkpointable import Checkpointable

    _check_repeats(options)
    model, args, kwargs = load_target(options.target)
    wrapped = Checkpointable(model, host_directory=options.host_directory, **_cut(options))
    with Bar("measuring") as bar:
        wrapped.measure(
            *args, repeats=options.repeats, progress=lambda n, of, name: bar(n / max(1, of), name), **kwargs
        )
    chain = replace(wrapped.chain, name=options.name or wrapped.chain.name or type(model).__name__)
    everything = wrapped.keep_all_memory
    wrapped.close()
    note = (
        f"a step that keeps everything allocates {format_bytes(everything)} beyond parameters, gradients and the batch"
    )
    _give(chain, options, note)
    return 0


def _add_device(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(device.name for device in devices())
    parser.add_argument("--device", default="H200", metavar="NAME", help=f"one of {names} (default: H200)")


def _estimate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="MODULE:FUNCTION", help="returns the model and a sample to call it with")
    _add_device(parser)
    parser.add_argument("--name", default="", help="of the chain (default: the model's class)")
    _add_cut(parser)
    parser.add_argument("-o", "--output", metavar="CHAIN.json", help="write the chain to this file")
    add_json(parser)


def _estimate(options: argparse.Namespace) -> int:
    from ..checkpointable import Checkpointable
    from ..tools.estimate import estimate

    find(options.device)  # an unknown device is refused before the model is made
    model, args, kwargs = load_target(options.target)
    chain = estimate(Checkpointable(model, **_cut(options)), *args, device=options.device, **kwargs)
    _give(replace(chain, name=options.name or chain.name or type(model).__name__), options)
    return 0


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="MODULE:FUNCTION", help="returns the model and a sample to call it with")
    _add_question(parser)
    parser.add_argument("--modes", metavar="NAMES", help=f"some of {','.join(MODES)} (default: all)")
    parser.add_argument(
        "--pipeline", type=int, metavar="N", help="plan a pipeline of N such devices; --mem-limit of each"
    )
    parser.add_argument("--microbatches", type=int, default=1, metavar="N", help="of a pipeline's batch (default: 1)")
    parser.add_argument("--schedule", default="1F1B", metavar="NAME", help="GPipe, 1F1B (default) or Interleaved1F1B")
    parser.add_argument("--chunks", type=int, default=1, metavar="N", help="stages of each rank (default: 1)")
    parser.add_argument(
        "--ranks-per-link", type=int, default=1, metavar="N", help="neighbours that share a link (default: 1)"
    )
    _add_cut(parser)
    add_json(parser)


def _add_question(parser: argparse.ArgumentParser) -> None:
    """Arguments that `plan` and `largest` share."""
    _add_device(parser)
    parser.add_argument(
        "--mem-limit",
        type=size,
        metavar="SIZE",
        help="bytes that a step may allocate beyond parameters, gradients, states and the batch, which then stay on the"
        " device (default: all of the device is planned, and these may move)",
    )
    parser.add_argument(
        "--optimizer", default="adam", metavar="NAME", help="sgd, momentum, adam or adamw (default: adam)"
    )
    parser.add_argument(
        "--master-weights",
        action="store_true",
        help="count float32 copies of parameters in half precision, and states in float32",
    )
    parser.add_argument(
        "--host-bandwidth",
        type=float,
        default=40e9,
        metavar="B/S",
        help="bandwidth of the host's memory while the link is busy, for updates on the host (default: 40e9)",
    )
    parser.add_argument(
        "--mem-slots", type=int, default=50, metavar="N", help="slots of the joint dynamic program (default: 50)"
    )


_QUESTION = ("mem_limit", "device", "optimizer", "master_weights", "host_bandwidth", "mem_slots")
_PIPELINE = ("pipeline", "microbatches", "schedule", "chunks", "ranks_per_link")


def _plan(options: argparse.Namespace) -> int:
    from ..tools.plan import plan

    find(options.device)  # an unknown device is refused before the model is made
    model, args, kwargs = load_target(options.target)
    asked = {name: getattr(options, name) for name in (*_QUESTION, *_PIPELINE)}
    modes = MODES if options.modes is None else [mode.strip() for mode in options.modes.split(",")]
    found = plan(model, *args, modes=modes, **asked, **_cut(options), **kwargs)
    if options.json:
        print_json(found.to_dict())
    else:
        print(found)
    return 0 if found.works else 1


def _audit_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="MODULE:FUNCTION", help="returns the model and a sample to call it with")
    parser.add_argument(
        "settings",
        metavar="SETTINGS",
        help="a DeepSpeed .json, axolotl .yaml, torchtitan .toml file, or a Trainer's arguments in one of these",
    )
    _add_device(parser)
    parser.add_argument(
        "--optimizer", metavar="NAME", help="sgd, momentum, adam or adamw (default: what the file says)"
    )
    parser.add_argument("--master-weights", action="store_true", default=None, help="as for rotoff plan")
    _add_cut(parser)
    add_json(parser)


def _audit(options: argparse.Namespace) -> int:
    from ..tools.audit import audit
    from ..tools.foreign_settings import read_foreign

    find(options.device)
    read_foreign(options.settings)  # refused before the model is made
    model, args, kwargs = load_target(options.target)
    asked = {name: getattr(options, name) for name in ("settings", "device", "optimizer", "master_weights")}
    found = audit(model, *args, **asked, **_cut(options), **kwargs)
    if options.json:
        print_json(found.to_dict())
    else:
        print(found)
    return 0


def _largest_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="MODULE:FUNCTION", help="takes a size, returns the model and a sample")
    _add_question(parser)
    parser.add_argument(
        "--step-time", type=float, metavar="SECONDS", help="most estimated seconds of a step, with the updates"
    )
    parser.add_argument("--step", type=int, default=1, metavar="N", help="sizes are multiples of it (default: 1)")
    parser.add_argument("--most", type=int, default=2**20, metavar="N", help="the largest size to try (default: 2**20)")
    _add_cut(parser)
    add_json(parser)


def _largest(options: argparse.Namespace) -> int:
    from ..tools.largest import check_sized, largest

    find(options.device)  # an unknown device is refused before the model is made
    function = _load_function(options.target)
    check_sized(function, options.target)
    names = (*_QUESTION, "step_time", "step", "most")
    found = largest(function, **{name: getattr(options, name) for name in names}, **_cut(options))
    if options.json:
        planned = found.planned and found.planned.to_dict()
        print_json({**asdict(replace(found, planned=None)), "planned": planned})
    else:
        print(found)
        if found.planned is not None:
            print(f"\nsize {found.size}: {found.planned}")
    return 0 if found.size else 1


def _give(chain: Chain, options: argparse.Namespace, note: str = "") -> None:
    """Write and print a chain, as the options say."""
    if options.output:
        chain.save(options.output)
    if options.json:
        print_json(chain.to_dict())
        return
    print(stage_table(chain))
    if note:
        print(note)
    if options.output:
        print(f"written to {options.output}")


def _stages_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="MODULE:FUNCTION", help="returns the model and a sample to call it with")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="timed runs of each stage (default: 3)")
    _add_cut(parser)
    add_json(parser)


def _add_cut(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--stages",
        metavar="N|NAMES",
        help="about how many stages to cut into, or dotted names of modules (by commas): each becomes one stage",
    )
    parser.add_argument(
        "--backward-from",
        metavar="NAMES",
        help="keys (loss) or indices (0) of the outputs that the backward starts from, by commas (default: any)",
    )
    parser.add_argument("--no-forms", action="store_true", help="stages are saved whole, or not at all")


def _cut(options: argparse.Namespace) -> dict[str, Any]:
    """The options of `Checkpointable` for the arguments that `_add_cut` adds, without those that are the default."""

    def listed(text: str) -> list[str]:
        return [name.strip() for name in text.split(",")]

    found: dict[str, Any] = {}
    if (stages := options.stages) is not None:
        found["stages"] = int(stages) if stages.isdigit() else listed(stages)
    if options.backward_from is not None:
        starts = [int(name) if name.isdigit() else name for name in listed(options.backward_from)]
        found["backward_from"] = starts if len(starts) > 1 else starts[0]
    return {**found, "forms": False} if options.no_forms else found


def _stages(options: argparse.Namespace) -> int:
    from ..checkpointable import Checkpointable
    from ..tools.stage_report import stages

    _check_repeats(options)
    model, args, kwargs = load_target(options.target)
    found = stages(Checkpointable(model, **_cut(options)), *args, repeats=options.repeats, **kwargs)
    if options.json:
        print_json(found.to_dict())
    else:
        print(found)
    return 0


def _check_repeats(options: argparse.Namespace) -> None:
    if options.repeats is not None and options.repeats < 1:
        raise UsageError(f"--repeats is {options.repeats}; give at least 1")


COMMANDS = (
    Command(
        "profile",
        "measure a model on its device, stage by stage, and write its chain",
        "rotoff profile my_models:build -o chain.json",
        _profile_arguments,
        _profile,
        _TARGET,
    ),
    Command(
        "estimate",
        "estimate the chain of a model on a device that you do not have, without running it",
        "rotoff estimate my_models:build --device H200 -o chain.json",
        _estimate_arguments,
        _estimate,
        f'{_TARGET}\nTensors may be on the device "meta": neither the device nor memory is needed.',
    ),
    Command(
        "plan",
        "say whether training fits a device that you may not have, how, and at what cost",
        'rotoff plan my_models:build --device "RTX 4090" --optimizer adamw',
        _plan_arguments,
        _plan,
        f'{_TARGET}\nTensors may be on the device "meta". Exit code 1: no mode fits the limit, or the device is too'
        " small.",
    ),
    Command(
        "audit",
        "say what another tool's settings take, and what is possible in the same bytes",
        'rotoff audit my_models:build ds_config.json --device "RTX 4090"',
        _audit_arguments,
        _audit,
        _TARGET,
    ),
    Command(
        "largest",
        "find the largest batch, context or depth that trains on a device that you do not have",
        'rotoff largest my_models:build_for --device "RTX 4090" --step 16',
        _largest_arguments,
        _largest,
        'The function takes a size and returns (model, sample), on the device "meta". Exit code 1: none works.\n'
        "Whether an embedding's table is long enough is not checked: give the longest context as --most.",
    ),
    Command(
        "stages",
        "print the stages of a model, each one measured",
        "rotoff stages my_models:build",
        _stages_arguments,
        _stages,
        _TARGET,
    ),
)
