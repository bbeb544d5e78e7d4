"""Refuses what a forward must not do, because it runs several times while it is measured and again in replays.

Changing a parameter in place would happen once more in each run. Buffers may change, and draws from torch's generators
are repeated (`runtime.replay`).
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..errors import MeasureError
from ..tensors.eager_mode import EagerFunctionMode
from ..tensors.stage import StageModule
from ..tensors.storage import key_of
from .interception import Patches
from .tape import name_of

_FAST = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)
_RENORMALIZING = (torch.nn.functional.embedding, torch.nn.functional.embedding_bag)  # max_norm is their fourth argument


ONCE_MORE = (
    ", but rotoff runs it several times to measure it, and again in replays; make that a buffer (register_buffer), or"
    " change it outside of forward"
)


NO_BUFFER = (
    ", but a replay would change it again; register it (register_buffer, with persistent=False to leave it out of the"
    " state_dict)"
)


IN_A_SUBMODULE = "do that after the forward, with what the model returns, or in a submodule that returns tensors"


class UncuttableError(MeasureError):
    """The problem exists however the model is cut; the message has its own cure."""


class UnrepeatableError(UncuttableError):
    """A forward does what cannot be repeated."""


_DERIVATIVES = (
    "the model differentiates within its forward (torch.func: grad, vjp, jacrev, hessian, jvp), which a planned step"
    " cannot run again; do that in the training loop, outside of the planned model"
)


def _no_level(own: Callable[[], Any]) -> Callable[[], Any]:
    def enter() -> Any:
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is None:  # no step of this thread's
            return own()
        raise UnrepeatableError(_DERIVATIVES)

    return enter


_NO_FORWARD_LEVELS = Patches((torch.autograd.forward_ad, "enter_dual_level", _no_level))


@contextmanager
def derivatives_refused() -> Iterator[None]:
    """Within, refuse derivatives by ``torch.func``: forward ones, which a replay could not make, and others, which fail
    under saved-tensor hooks."""
    try:
        with _NO_FORWARD_LEVELS:
            yield
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):  # of PyTorch's
            raise
        raise UnrepeatableError(_DERIVATIVES) from error


class Parameters:
    """The parameters of some modules, by storage."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._names: dict[int, str] = {}
        for module in modules:
            for name, parameter in module.named_parameters():
                if (key := key_of(parameter)) is not None:
                    self._names.setdefault(key, name)

    def objection(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[str, str] | None:
        """Return why a call cannot be repeated, as the predicate of a sentence about the forward and its cure; None if
        it can."""
        name = self._changed(function, args, kwargs)
        if name is None:
            return None
        return f"changes parameter {name!r} ({name_of(function)})", ONCE_MORE

    def _changed(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        if function in _RENORMALIZING:
            largest = kwargs.get("max_norm", args[3] if len(args) > 3 else None)
            return None if largest is None else self._of(kwargs.get("weight", args[1] if len(args) > 1 else None))
        own = getattr(function, "__name__", "")
        sets = own == "__set__" and getattr(getattr(function, "__self__", None), "__name__", "") == "data"
        if sets and len(args) > 1 and _same_bytes(args[0], args[1]):
            return None  # module.to(dtype) without a change
        in_place = own.endswith("_") and not own.endswith("__") and own not in _NO_CONTENT
        if sets or in_place or own == "__setitem__" or (own.startswith("__i") and own in _IN_PLACE):
            several = args and isinstance(args[0], (list, tuple))  # torch._foreach_mul_
            targets = args[0] if several else args[:1]
            return next((name for target in targets if (name := self._of(target)) is not None), None)
        return self._of(kwargs.get("out"))

    def _of(self, target: Any) -> str | None:
        if not isinstance(target, torch.Tensor):
            return None
        key = key_of(target)
        return None if key is None else self._names.get(key)


def _same_bytes(tensor: Any, other: Any) -> bool:
    if not (isinstance(tensor, torch.Tensor) and isinstance(other, torch.Tensor)) or (key := key_of(tensor)) is None:
        return False
    place = tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()
    return key == key_of(other) and place == (other.dtype, other.size(), other.stride(), other.storage_offset())


_NO_CONTENT = frozenset(["requires_grad_", "detach_", "share_memory_", "rename_"])  # keep the content
_IN_PLACE = frozenset(
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
)


class Refusing(EagerFunctionMode):
    """Raises UnrepeatableError before a call that cannot be repeated. who: makes the call, for the message."""

    def __init__(self, parameters: Parameters, who: str) -> None:
        super().__init__()
        self._parameters = parameters
        self._who = who

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (objection := self._parameters.objection(function, args, kwargs)) is not None:
            raise UnrepeatableError(f"{self._who} {''.join(objection)}")
        if function in _OF_GRADIENTS and not args[0].requires_grad:
            return RemovableHandle(OrderedDict()) if function is torch.Tensor.register_hook else None
        return function(*args, **kwargs)


# these raise for a tensor that needs no gradient
_OF_GRADIENTS = frozenset([torch.Tensor.register_hook, torch.Tensor.retain_grad])


def refusing(stage: StageModule) -> AbstractContextManager[Any]:
    """Raise UnrepeatableError before a run of `stage` does what cannot be repeated. Compiled stages are not checked,
    because a mode would compile them again."""
    if any(compiled(module) for module in stage.every_module()):
        return nullcontext()
    return Refusing(Parameters(stage.modules), f"stage {stage.name!r}")


def compiled(module: nn.Module) -> bool:
    """Whether Python does not run the module's code, because it is compiled or scripted."""
    made: Any = type(module)
    return getattr(module, "_compiled_call_impl", None) is not None or _made_by_a_compiler(made)


def takes_fast_path(module: nn.Module) -> bool:
    """Whether PyTorch may run the module by kernels that it does not use, and with bits that it does not give, where a
    function mode is on."""
    if module.training or not isinstance(module, _FAST):
        return False
    return not (torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters()))


@lru_cache(maxsize=256)
def _made_by_a_compiler(kind: type) -> bool:
    dynamo = sys.modules.get("torch._dynamo")
    return issubclass(kind, torch.jit.ScriptModule) or (dynamo is not None and issubclass(kind, dynamo.OptimizedModule))
