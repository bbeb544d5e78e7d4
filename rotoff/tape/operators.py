"""What a tape knows of an operator, and of the settings under which it ran."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any
from zlib import crc32

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from .. import accelerator

_C = torch._C


def _put_precision(backend: str, op: str, value: str) -> None:
    _C._set_fp32_precision_setter(backend, op, "none")
    if _C._get_fp32_precision_getter(backend, op) != value:  # else it follows that of the backend, or of all
        _C._set_fp32_precision_setter(backend, op, value)


def _precision(backend: str, op: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    return partial(_C._get_fp32_precision_getter, backend, op), partial(_put_precision, backend, op)


def _named(getter: str, setter: str, *names: str) -> list[tuple[Callable[[], Any], Callable[..., object]]]:
    return [(getattr(_C, getter.format(name)), getattr(_C, setter.format(name))) for name in names]


_REDUCED = "_get_cublas_allow_{}_reduced_precision_reduction", "_set_cublas_allow_{}_reduced_precision_reduction"
# What chooses kernels below autograd: getter, setter. Autocast, modes and transforms have acted above.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.is_grad_enabled, _C._set_grad_enabled),  # oneDNN's LSTM makes another result without
    (torch.get_default_dtype, torch.set_default_dtype),
    *_named("_get_{}", "_set_{}", "nnpack_enabled", "mkldnn_enabled", "cudnn_enabled"),
    *_named("_get_{}", "_set_{}", "cudnn_benchmark", "cudnn_deterministic"),
    *((get, lambda both, put=put: put(*both)) for get, put in _named(*_REDUCED, "fp16", "bf16")),
    *_named("_get_{}", "_set_{}", "cublas_allow_fp16_accumulation", "blas_preferred_backend"),
    *(_precision(*one) for one in product((*accelerator.ACCELERATORS, "mkldnn"), ("conv", "rnn", "matmul"))),
    *_named("_get_{}_sdp_enabled", "_set_sdp_use_{}", "flash", "mem_efficient", "math", "cudnn"),
    (
        lambda: (_C._get_deterministic_algorithms(), _C._get_deterministic_algorithms_warn_only()),
        lambda both: _C._set_deterministic_algorithms(both[0], warn_only=both[1]),
    ),
)
_GETTERS = tuple(get for get, _ in _SETTINGS)

Settings = list[Any]


def settings() -> Settings:
    """Return the present settings."""
    return [get() for get in _GETTERS]


def put_settings(wanted: Settings) -> None:
    """Make them the present ones."""
    for (get, put), value in zip(_SETTINGS, wanted, strict=True):
        if get() != value:
            put(value)


@contextmanager
def below_autograd() -> Iterator[None]:
    """Out of autograd, of every mode, autocast and transform of the caller's; settings are put back at the end."""
    before = settings()
    try:
        with (
            _C._AutoDispatchBelowAutograd(),
            _C._DisableTorchDispatch(),
            _C._DisableAutocast(),
            temporarily_clear_interpreter_stack(),
        ):
            yield
    finally:
        put_settings(before)


class Kind:
    """What the schema of an operator says.

    view: whether it only makes views. random: whether it draws from a generator of PyTorch. writes: position and name
    of each argument that it changes. makes: whether it also makes a new tensor. kept: whether its results are never
    made again, because other processes take part. name_sum: a number that other operators hardly have.
    """

    __slots__ = ("kept", "makes", "name_sum", "random", "view", "writes")

    def __init__(self, operator: torch._ops.OpOverload) -> None:
        schema = operator._schema
        aliases = [result.alias_info for result in schema.returns]
        self.view = bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
        self.random = torch.Tag.nondeterministic_seeded in operator.tags
        # batch norms change their running statistics, and their schemas do not say so
        self.writes = [
            (n, argument.name)
            for n, argument in enumerate(schema.arguments)
            if (argument.alias_info and argument.alias_info.is_write)
            or argument.name in ("running_mean", "running_var")
        ]
        self.makes = any(alias is None for alias in aliases)
        self.kept = "c10d" in operator.namespace
        self.name_sum = crc32(str(operator).encode())


_KINDS: dict[Any, Kind] = {}


def kind_of(operator: torch._ops.OpOverload) -> Kind:
    kind = _KINDS.get(operator)
    if kind is None:
        kind = _KINDS[operator] = Kind(operator)
    return kind


def tensors_of(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors among the arguments of an operator, which are values or lists of values."""
    for x in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from (y for y in x if isinstance(y, torch.Tensor))


def results_of(out: Any) -> Iterator[Any]:
    """What an operator has returned, lists taken apart."""
    for x in out if isinstance(out, (tuple, list)) else (out,):
        if isinstance(x, (tuple, list)):
            yield from x
        else:
            yield x


def replaced(x: Any, kind: type, by: Callable[[Any], Any]) -> Any:
    """`x`, an argument, with each value of type `kind` replaced."""
    if isinstance(x, kind):
        return by(x)
    if isinstance(x, (list, tuple)):
        return [by(y) if isinstance(y, kind) else y for y in x]
    return x


def generator_of(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Generator | None:
    """The generator from which an operator draws."""
    for x in (*args, *kwargs.values()):
        if isinstance(x, torch.Generator):
            return x
    where = kwargs.get("device") or next((t.device for t in tensors_of(args, kwargs)), "cpu")
    device = torch.device(where)
    return torch.default_generator if device.type == "cpu" else accelerator.generator_of(device)
