"""rotoff: train PyTorch models inside a memory limit, with recompute and offload planned together.

This page is the whole public API. Every name is loaded on first use, so that importing rotoff costs next to nothing;
planning needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .version import __version__ as __version__

if TYPE_CHECKING:
    from .checkpointable import Checkpointable as Checkpointable
    from .core.chain import Chain as Chain
    from .core.chain import Form as Form
    from .core.chain import Stage as Stage
    from .core.parameters import ParameterGroup as ParameterGroup
    from .core.sequence import Op as Op
    from .core.sequence import OpKind as OpKind
    from .core.sequence import Sequence as Sequence
    from .core.sequence import Value as Value
    from .core.sequence import parse as parse
    from .core.simulator import Machine as Machine
    from .core.simulator import Trace as Trace
    from .core.simulator import simulate as simulate
    from .core.sizes import format_bytes as format_bytes
    from .core.sizes import parse_bytes as parse_bytes
    from .errors import ChainError as ChainError
    from .errors import ExecutionError as ExecutionError
    from .errors import InfeasibleError as InfeasibleError
    from .errors import InvalidSequenceError as InvalidSequenceError
    from .errors import LimitError as LimitError
    from .errors import MeasureError as MeasureError
    from .errors import OptionError as OptionError
    from .errors import RotoffError as RotoffError
    from .errors import SequenceFormatError as SequenceFormatError
    from .profile.estimate.devices import Device as Device
    from .profile.estimate.devices import devices as devices
    from .profile.estimate.devices import register_device as register_device
    from .report.chrome_trace import chrome_trace as chrome_trace
    from .report.chrome_trace import save_chrome_trace as save_chrome_trace
    from .report.terminal import render as render
    from .solver import Row as Row
    from .solver import Sweep as Sweep
    from .solver import keep_all as keep_all
    from .solver import solve as solve
    from .solver import sweep as sweep
    from .solver.bounds import lower_bound as lower_bound
    from .solver.bounds import min_mem_limit as min_mem_limit
    from .tools.attach import attach as attach
    from .tools.attach import detach as detach
    from .tools.config import RotoffConfig as RotoffConfig
    from .tools.estimate import estimate as estimate
    from .tools.estimate import stages as stages
    from .tools.largest import Largest as Largest
    from .tools.largest import largest as largest
    from .tools.pipeline_plan import PlannedPipeline as PlannedPipeline
    from .tools.pipeline_plan import PlannedRank as PlannedRank
    from .tools.plan import audit as audit
    from .tools.plan import plan as plan
    from .tools.planned_steps import PlannedMesh as PlannedMesh
    from .tools.planned_steps import PlannedStep as PlannedStep
    from .tools.planned_steps import PlannedSteps as PlannedSteps
    from .tools.schedule import attach_schedule as attach_schedule
    from .tools.selective import SelectivePolicy as SelectivePolicy
    from .tools.selective import selective_policy as selective_policy

_WHERE = {
    name: module
    for module, names in {
        "checkpointable": "Checkpointable",
        "core.chain": "Chain Form Stage",
        "core.parameters": "ParameterGroup",
        "core.sequence": "Op OpKind Sequence Value parse",
        "core.simulator": "Machine Trace simulate",
        "core.sizes": "format_bytes parse_bytes",
        "errors": "ChainError ExecutionError InfeasibleError InvalidSequenceError LimitError"
        " MeasureError OptionError RotoffError SequenceFormatError",
        "profile.estimate.devices": "Device devices register_device",
        "report.chrome_trace": "chrome_trace save_chrome_trace",
        "report.terminal": "render",
        "solver": "Row Sweep keep_all solve sweep",
        "solver.bounds": "lower_bound min_mem_limit",
        "tools.attach": "attach detach",
        "tools.config": "RotoffConfig",
        "tools.estimate": "estimate stages",
        "tools.largest": "Largest largest",
        "tools.pipeline_plan": "PlannedPipeline PlannedRank",
        "tools.plan": "audit plan",
        "tools.planned_steps": "PlannedMesh PlannedStep PlannedSteps",
        "tools.schedule": "attach_schedule",
        "tools.selective": "SelectivePolicy selective_policy",
    }.items()
    for name in names.split()
}
__all__ = ["__version__", *sorted(_WHERE)]
_FOLDERS = ("core", "errors", "io", "nn", "plot", "profile", "report", "solver")  # of the package, as attributes


def __getattr__(name: str) -> Any:
    from importlib import import_module

    try:
        if name in _WHERE:
            found = globals()[name] = getattr(import_module(f".{_WHERE[name]}", __name__), name)
            return found
        if name in _FOLDERS:
            return import_module(f".{name}", __name__)
    except ModuleNotFoundError as error:
        if error.name == "torch":
            raise ModuleNotFoundError(
                f"rotoff.{name} needs torch, which is not installed: pip install torch, or plan without it",
                name="torch",
            ) from error
        if (error.name or "").startswith("rotoff."):
            raise ModuleNotFoundError(
                f"{error.name} is not compiled in {__path__[0]}, which Python found first; if that is a clone's source"
                " tree, start Python in another directory once rotoff is installed, or compile it there: python"
                " setup.py build_ext --inplace",
                name=error.name,
            ) from error
        raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE} - {"TYPE_CHECKING", "Any", "annotations"})
