"""Properties of torch functions that the runtime needs: whether they read a tensor's bytes, which arguments they
change, and whether they draw random numbers."""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from ..capture.collectives import Collective, as_collective
from ..capture.interception import code_of
from .arguments import tensors_of

Written = Callable[[tuple[Any, ...], dict[str, Any]], Sequence[torch.Tensor]]


def _is_like(tensor: Any, *wanted: Any, **named: Any) -> bool:
    """Whether ``tensor.to(*wanted, **named)`` is the tensor itself."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter)
    if not plain or named.get("copy") or named.get("memory_format") is not None:
        return False
    for one in (*wanted[:2], *(named.get(name) for name in ("device", "dtype", "other"))):
        if isinstance(one, torch.Tensor):
            if one.dtype != tensor.dtype or one.device != tensor.device:
                return False
        elif isinstance(one, torch.dtype):
            if one != tensor.dtype:
                return False
        elif isinstance(one, torch.device | str):
            if torch.device(one) != tensor.device:
                return False
        elif one is not None and not isinstance(one, bool):
            return False
    return not any(wanted[2:])


def _is_of(dtype: torch.dtype) -> Callable[..., bool]:
    return lambda tensor, *more, **named: not more and not named and _is_like(tensor, dtype)


_CASTS = {name: getattr(torch, name) for name in ("float", "half", "bfloat16", "double", "long", "int", "bool")}
_CONVERSIONS: dict[Any, Callable[..., bool]] = {
    torch.Tensor.to: _is_like,
    torch.Tensor.type_as: _is_like,
    torch.Tensor.type: lambda tensor, *more, **named: not more and not named,  # its name
    torch.Tensor.contiguous: lambda tensor, *more, **named: (
        not more and not named and _is_like(tensor) and tensor.layout is torch.strided and tensor.is_contiguous()
    ),
    **{getattr(torch.Tensor, name): _is_of(dtype) for name, dtype in _CASTS.items()},
}


class FunctionProperties:
    """Properties of a torch function that the runtime needs.

    fact: whether it is a query that does not read the tensor's bytes, such as ``x.shape``.
    written: returns the arguments that a call changes, by the function's name or schema; None: it changes none.
    vague: whether name and schema say only that it writes to ``out``; it may change other arguments, too.
    watched: whether it is vague and no schema excludes such changes, so that versions before and after are compared.
    writes: whether it changes, or may change, arguments other than ``out``.
    content: whether it changes the numbers in these arguments.
    draws: returns whether a call may draw random numbers; None: none does.
    returns_itself: returns whether a call returns its tensor itself, such as ``x.to(x.dtype)``, or only its type.
    ordinary: whether none of the above concerns its calls, unless they have an ``out``.
    owner: the custom or scripted Function that it calls; None for all others.
    code: what has the `code_of` its own that it runs; None for most.
    instead: the function that is called in its place; None: itself.
    name: for messages.
    """

    def __init__(self, function: Any, written: Written | None, fact: bool = False, instead: Any = None) -> None:
        self.code = code = code_of(function)
        self.owner = owner = None if code is function else code
        self.fact = fact
        self.instead = instead
        self.written = written
        self.vague = written is _out
        self.watched = self.vague and not _is_said_to_change_nothing(function)
        self.writes = (written is not None and not self.vague) or owner is not None
        self.content = function not in _NO_CONTENT
        self.draws = _chance(function) if code is None else _surely
        self.returns_itself = _CONVERSIONS.get(function)
        self.ordinary = not (fact or self.watched or self.writes or instead or function is torch.Tensor.__iter__) and (
            self.draws is None is self.returns_itself
        )
        self.name = getattr(function if owner is None else owner, "__name__", type(function).__name__)


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[torch.Tensor]:
    first = args[0] if args else kwargs.get("input", kwargs.get("self"))
    return tensors_of(first)


def _set(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[torch.Tensor]:
    """For setting an attribute: no change if the tensor is set to itself, as ``nn.Module.to`` does."""
    return [] if args[0] is args[-1] else _first(args, kwargs)


def _out(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[torch.Tensor]:
    return tensors_of(kwargs.get("out"))


def _flagged(place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[torch.Tensor]:
    """For a function whose argument `place` is ``inplace``."""
    return _first(args, kwargs) if (args[place] if len(args) > place else kwargs.get("inplace")) else []


def _statistics(
    first: int, training: int, name: str, default: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Sequence[torch.Tensor]:
    """For batch norm and instance norm: the running statistics, which are arguments `first` and `first + 1`."""
    if not (args[training] if len(args) > training else kwargs.get(name, default)):
        return []
    return tensors_of([*args[first : first + 2], kwargs.get("running_mean"), kwargs.get("running_var")])


def _by_schema(
    names: tuple[tuple[int, str], ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Sequence[torch.Tensor]:
    return tensors_of([args[n] if n < len(args) else kwargs.get(name) for n, name in names])


_NATIVE = frozenset(map(type, (torch.cat, torch.Tensor.add, torch.Tensor.__getitem__)))
_UNTOLD = re.compile("^_[^_]|batch_norm")  # functions whose schemas do not name all arguments that they change


def _is_said_to_change_nothing(function: Any) -> bool:
    """Whether all schemas of `function`, one of torch's own operators, say that it changes no positional argument."""
    if type(function) not in _NATIVE or _UNTOLD.search(function.__name__) is not None:
        return False
    schemas = _schemas(function)
    written = [arg for schema in schemas for arg in schema.arguments if _is_written(arg)]
    return bool(schemas) and all(arg.kwarg_only for arg in written)


def _written_by_schema(function: Any) -> set[tuple[int, str]]:
    """Place and name of the arguments that an operator changes, as its schemas say; autograd counts not all of these
    changes. Of torch's own functions, those besides ``out`` and the tensor that the name's underscore is for."""
    own = type(function) in _NATIVE
    return {
        (n, arg.name)
        for schema in _schemas(function)
        for n, arg in enumerate(schema.arguments)
        if _is_written(arg) and not (own and (arg.kwarg_only or arg.name == "self"))
    }


def _schemas(function: Any) -> list[torch.FunctionSchema]:
    """Return the schemas of an operator, or of the one with the name of a function of torch's own; none of others."""
    if isinstance(function, torch._ops.OpOverload):
        return [function._schema]
    packet = getattr(torch.ops.aten, function.__name__, None) if type(function) in _NATIVE else function
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return []
    return [getattr(packet, one)._schema for one in packet.overloads()]


def _is_written(argument: torch.Argument) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


_FACTS = frozenset(
    ["dim", "size", "numel", "nelement", "__len__", "ndimension", "element_size", "get_device", "is_floating_point",
     "is_complex", "is_signed", "__hash__", "is_inference", "is_same_size", "result_type", "is_conj", "is_neg"]
)  # fmt: skip
_FACT_ATTRIBUTES = frozenset(
    ["shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "grad_fn", "layout", "is_cuda", "is_cpu",
     "is_meta", "is_sparse", "is_nested", "is_quantized", "itemsize", "nbytes", "names", "output_nr", "retains_grad",
     "is_mps", "is_xpu", "is_mkldnn", "is_sparse_csr", "is_xla", "is_ipu", "is_maia", "is_vulkan", "is_mtia",
     "_backward_hooks", "_version", "name", "_post_accumulate_grad_hooks", "grad"]
)  # fmt: skip
_IN_PLACE = frozenset(
    ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift", "matmul", "div"]
)
# these change no numbers
_NO_CONTENT = frozenset([torch.Tensor.requires_grad_, torch.Tensor.detach_, torch.Tensor.share_memory_])


_DRAWING = re.compile(
    "drop|rand|bernoulli|normal|uniform|multinomial|poisson|exponential|geometric|cauchy|rrelu|gumbel|attention|fractional|lstm|gru|rnn|apply"
)


def _chance(function: Any) -> Callable[[tuple[Any, ...], dict[str, Any]], bool] | None:
    name = getattr(function, "__name__", "")
    if name and _DRAWING.search(name) is None:
        return None
    if function in (torch.nn.functional.dropout, torch.dropout):
        return partial(_likely, 1, "p", 0.5)
    if function is torch.nn.functional.scaled_dot_product_attention:
        return partial(_likely, 4, "dropout_p", 0.0)
    return _surely


def _surely(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return True


def _likely(place: int, name: str, default: float, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call draws: its probability, argument `place`, is not zero."""
    return (args[place] if len(args) > place else kwargs.get(name, default)) != 0


# custom and scripted functions that have changed arguments in place, with the positions of these among their tensors
WRITERS: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()


def find(function: Any) -> FunctionProperties:
    """Return the properties of a function that is not in `KNOWN`."""
    if isinstance(function, nn.Module) or code_of(function) not in (None, function):
        return FunctionProperties(function, _out)  # not stored in `KNOWN`, which must hold nothing of a model
    known = _known(function)
    with suppress(TypeError):  # not hashable
        KNOWN[function] = known
    return known


def _pickled(tensor: torch.Tensor, protocol: Any) -> Any:
    """``tensor.__reduce_ex__``, without the attributes that rotoff has set."""
    told = vars(tensor)
    own = {name: told.pop(name) for name in [*told] if name.startswith("_rotoff")}
    try:
        return tensor.__reduce_ex__(protocol)
    finally:
        told.update(own)


def _known(function: Any) -> FunctionProperties:
    name = getattr(function, "__name__", "")
    if isinstance(collective := as_collective(function), Collective):
        return FunctionProperties(collective, collective.written, instead=collective)
    if name == "__get__":
        return FunctionProperties(function, None, fact=getattr(function.__self__, "__name__", "") in _FACT_ATTRIBUTES)
    if name in _FACTS:
        return FunctionProperties(function, None, fact=True)
    if function is torch.Tensor.__reduce_ex__:
        return FunctionProperties(function, None, instead=_pickled)
    if name == "__set__":
        return FunctionProperties(function, _set)
    if name == "__setitem__" or (name.endswith("_") and not name.startswith("__")):
        return FunctionProperties(function, _first)
    if name.startswith("__i") and name[3:-2] in _IN_PLACE:
        return FunctionProperties(function, _first)
    if written := _written_by_schema(function):
        return FunctionProperties(function, partial(_by_schema, tuple(sorted(written))))
    if str(getattr(function, "__module__", "")).startswith("torch.nn.functional"):
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            return FunctionProperties(function, _out)
        if "inplace" in signature.parameters:
            return FunctionProperties(function, partial(_flagged, list(signature.parameters).index("inplace")))
    return FunctionProperties(function, _out)


_STATISTICS = {
    torch.nn.functional.batch_norm: partial(_statistics, 1, 5, "training", False),
    torch.nn.functional.instance_norm: partial(_statistics, 1, 5, "use_input_stats", True),
    torch.batch_norm: partial(_statistics, 3, 5, "training", False),
    torch.instance_norm: partial(_statistics, 3, 5, "use_input_stats", True),
}
KNOWN: dict[Any, FunctionProperties] = {
    function: FunctionProperties(function, written) for function, written in _STATISTICS.items()
}


def same_call(one: Any, function: Any) -> bool:
    """Whether `one` and `function` call the same function."""
    if type(one) is partial and type(function) is partial:  # scripted functions
        return one.func is function.func and one.args == function.args
    return bool(one == function)
