"""rotoff: train PyTorch models inside a memory limit, with recompute and offload planned together.

This page is the whole public API. Planning needs no torch: `Checkpointable`, and everything else that measures or runs
a model, is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
from .version import __version__ as __version__

if TYPE_CHECKING:
    from .checkpointable import Checkpointable as Checkpointable
    from .tools.attach import attach as attach
    from .tools.attach import detach as detach
    from .tools.estimate import estimate as estimate
    from .tools.mode_comparison import PlannedMode as PlannedMode
    from .tools.mode_comparison import PlannedModes as PlannedModes
    from .tools.mode_comparison import plan as plan
    from .tools.stage_report import stages as stages
    from .tools.whole_device import PlacedStep as PlacedStep

_NEED_TORCH = {
    "Checkpointable": "checkpointable",
    "PlannedMode": "tools.mode_comparison",
    "PlannedModes": "tools.mode_comparison",
    "PlacedStep": "tools.whole_device",
    "attach": "tools.attach",
    "detach": "tools.attach",
    "estimate": "tools.estimate",
    "plan": "tools.mode_comparison",
    "stages": "tools.stage_report",
}


def __getattr__(name: str) -> Any:
    if name in _NEED_TORCH:
        from importlib import import_module

        try:
            return getattr(import_module(f".{_NEED_TORCH[name]}", __name__), name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ModuleNotFoundError(
                f'rotoff.{name} needs torch, which is not installed; pip install "rotoff[torch]", or plan without it',
                name="torch",
            ) from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_NEED_TORCH])
