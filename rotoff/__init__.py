"""rotoff: train PyTorch models inside a memory limit, by recompute and offload planned together.

The whole public API stands on this page. Planning needs no torch: `Checkpointable` and what measures or runs a model
is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .bounds import lower_bound as lower_bound
from .bounds import min_mem_limit as min_mem_limit
from .chain import Chain as Chain
from .chain import Form as Form
from .chain import Stage as Stage
from .chrome_trace import chrome_trace as chrome_trace
from .chrome_trace import save_chrome_trace as save_chrome_trace
from .errors import ChainError as ChainError
from .errors import ExecutionError as ExecutionError
from .errors import InfeasibleError as InfeasibleError
from .errors import InvalidSequenceError as InvalidSequenceError
from .errors import LimitError as LimitError
from .errors import MeasureError as MeasureError
from .errors import OptionError as OptionError
from .errors import RotoffError as RotoffError
from .errors import SequenceFormatError as SequenceFormatError
from .parameters import ParameterGroup as ParameterGroup
from .profile.devices import Device as Device
from .profile.devices import devices as devices
from .profile.devices import register_device as register_device
from .sequence import Op as Op
from .sequence import OpKind as OpKind
from .sequence import Sequence as Sequence
from .sequence import Value as Value
from .sequence import parse as parse
from .simulator import Machine as Machine
from .simulator import Trace as Trace
from .simulator import simulate as simulate
from .sizes import format_bytes as format_bytes
from .sizes import parse_bytes as parse_bytes
from .solver import Row as Row
from .solver import Sweep as Sweep
from .solver import keep_all as keep_all
from .solver import solve as solve
from .solver import sweep as sweep
from .terminal import render as render

if TYPE_CHECKING:
    from .checkpointable import Checkpointable as Checkpointable
    from .estimation import estimate as estimate
    from .found_stages import stages as stages
    from .in_place import attach as attach
    from .in_place import detach as detach
    from .planned_modes import PlannedMode as PlannedMode
    from .planned_modes import PlannedModes as PlannedModes
    from .planned_modes import plan as plan

__version__ = "0.1.0"
_NEED_TORCH = {
    "Checkpointable": "checkpointable",
    "PlannedMode": "planned_modes",
    "PlannedModes": "planned_modes",
    "attach": "in_place",
    "detach": "in_place",
    "estimate": "estimation",
    "plan": "planned_modes",
    "stages": "found_stages",
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
