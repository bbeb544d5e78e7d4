"""A run of recorded operations as a module, written out as one Python function, so that running it has no overhead."""

from __future__ import annotations

import builtins
import linecache
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...tensors.autocast import autocast_as
from ...tensors.kernel_flags import kernels_as
from ...tensors.stage import names_in
from ...tensors.tree import flatten, tensor_leaves
from ..interception import code_of
from ..tape import Owned, Pinned, RecordedCall, Ref, Tape


class Segment(nn.Module):
    """Operations in order: takes the tensors of the variables `enters`, in any structure, and returns those of
    `leaves`.

    Parameters and buffers are those of the recorded model, looked up in their modules at each call.

    Args:
        leaves: variables to return, as a tuple. None: what the model returns.

    Attributes:
        varying: whether it calls a module whose work depends on data.
    """

    def __init__(
        self, tape: Tape, operations: Sequence[RecordedCall], enters: Sequence[int], leaves: Sequence[int] | None
    ) -> None:
        super().__init__()
        made: list[RecordedCall] = []
        until: dict[int, int] = {}  # variable within a module called as a whole -> last operation that has it
        for operation in operations:
            start = len(made)
            made += tape.inner.get(id(operation), (operation,))
            if id(operation) in tape.inner:
                until.update(_held(tape, made, start))
        owned = [o for operation in (*operations, *made) for o in operation.owned()]
        last = tape.result if leaves is None else []
        owned += [leaf for leaf in last if isinstance(leaf, Owned)]
        whole = [operation.function for operation in operations if isinstance(operation.function, nn.Module)]
        self.operations = tuple(operations)
        self.leaves = None if leaves is None else tuple(leaves)
        # in tuples, because a module as an attribute would become a submodule
        self._whole = tuple(whole)
        self.varying = any(module in tape.varying for module in whole)
        self._owned = tuple(dict.fromkeys(owned))
        self._run = _Writer(tape, made, enters, leaves, until).compiled()

    def forward(self, value: Any) -> Any:
        return self._run(flatten(value)[0])

    def written(self) -> tuple[str, dict[str, Any]]:
        """Return the function's source, and the objects that its names stand for."""
        return "".join(linecache.getlines(self._run.__code__.co_filename)), self._run.__globals__

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for module, table, name in self._owned:
            if table == "_parameters" and (parameter := module._parameters[name]) is not None:
                yield name, parameter
        for module in self._whole:
            yield from module.named_parameters(prefix, recurse, remove_duplicate)

    def names_read(self, table: str) -> Iterator[tuple[nn.Module, str]]:
        """Yield (module, name) of the "_parameters" or "_buffers" that the operations read or write, and of all in
        modules that are called as a whole."""
        yield from ((module, name) for module, own, name in self._owned if own == table)
        for outer in self._whole:
            yield from names_in(outer, table)

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        """Yield the modules whose buffers the operations read, and those that are called as a whole."""
        found: dict[nn.Module, None] = {}
        for module, table, _ in self._owned:
            if table == "_buffers":
                found[module] = None
        for outer in self._whole:
            for module in outer.modules():
                found[module] = None
        yield from found


def _held(tape: Tape, operations: Sequence[RecordedCall], start: int) -> Iterator[tuple[int, int]]:
    """Yield (variable, last operation) for what the operations from `start` on make, the calls of one module: how long
    the model's own code holds it, since the runtime does not take it away earlier."""
    ends: dict[int | None, int] = {}
    for position in reversed(range(start, len(operations))):
        ends.update(dict.fromkeys(operations[position].ends, position))
        for n in operations[position].made:
            yield n, ends.get(tape.variables[n].storage, len(operations) - 1)


class _Writer:
    def __init__(
        self,
        tape: Tape,
        operations: Sequence[RecordedCall],
        enters: Sequence[int],
        leaves: Sequence[int] | None,
        until: Mapping[int, int],
    ) -> None:
        self._tape = tape
        self._operations = operations
        self._enters = enters
        self._leaves = leaves
        self._until = until
        self._names: dict[str, Any] = {"_flat": _flat, "_grad": torch.set_grad_enabled}
        self._names |= {"_around": autocast_as, "_kernels": kernels_as}
        self._objects: dict[int, str] = {}

    def compiled(self) -> types.FunctionType:
        source = "\n".join(self._lines())
        filename = f"<rotoff segment {id(self._names)}>"
        exec(compile(source, filename, "exec"), self._names)
        function: types.FunctionType = self._names["run"]
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
        weakref.finalize(function, linecache.cache.pop, filename, None)
        return function

    def _lines(self) -> Iterator[str]:
        yield "def run(values):"
        if self._enters:
            yield f"    [{', '.join(f'v{n}' for n in self._enters)}] = values"
        yield "    del values"
        last: dict[int, int] = {}
        for position, operation in enumerate(self._operations):
            for n in operation.touched:
                last[n] = max(position, self._until.get(n, 0))
        kept = set(self._tape.result_variables() if self._leaves is None else self._leaves)
        dying: dict[int, list[int]] = {}
        for n, position in last.items():
            if n not in kept:
                dying.setdefault(position, []).append(n)
        unused = [n for n in dict.fromkeys(self._enters) if n not in last and n not in kept]
        if unused:
            yield "    del " + ", ".join(f"v{n}" for n in unused)
        for position, operation in enumerate(self._operations):
            yield from self._operation(operation)
            if position in dying:
                yield "    del " + ", ".join(f"v{n}" for n in dying[position])
        if self._leaves is not None:
            yield f"    return ({''.join(f'v{n}, ' for n in self._leaves)})"
        else:
            spec = self._named(self._tape.result_spec)
            self._names["_unflatten"] = pytree.tree_unflatten
            yield f"    return _unflatten([{', '.join(map(self._expression, self._tape.result))}], {spec})"

    def _operation(self, operation: RecordedCall) -> Iterator[str]:
        arguments = [self._expression(value) for value in operation.args]
        arguments += [
            f"**{{{k!r}: {self._expression(v)}}}" if not k.isidentifier() else f"{k}={self._expression(v)}"
            for k, v in operation.kwargs.items()
        ]
        call = f"{self._called(operation.function)}({', '.join(arguments)})"
        indent = "    "
        if operation.autocast:
            yield f"{indent}with _around({self._named(operation.autocast)}):"
            indent += "    "
        if operation.kernels:
            yield f"{indent}with _kernels({self._named(operation.kernels)}):"
            indent += "    "
        if not operation.grad:
            yield f"{indent}with _grad(False):"
            indent += "    "
        names = [f"v{n}" if n is not None else "_" for n in operation.outputs]
        if not names:  # the value read is in later calls; reading it again would wait for the device
            yield indent + ("pass" if operation.function in _READS else call)
        else:
            yield f"{indent}[{', '.join(names)}] = _flat({call})"
        if "_" in names:
            yield f"{indent}del _"

    def _called(self, function: Any) -> str:
        """Return the expression of a function. Custom and scripted functions are called as in the model's code, so that
        modes see one call."""
        code = code_of(function)
        if isinstance(code, type):
            return f"{self._named(code)}.apply"
        return self._named(code if isinstance(code, torch.jit.ScriptFunction) else function)

    def _expression(self, value: Any) -> str:
        kind = type(value)
        if kind is Ref:
            return f"v{value.variable}"
        if kind is Pinned:
            return f"{self._named(value.tensor)}.to({self._named(value.device)}, copy=True)"
        if kind is Owned:
            return f"{self._named(getattr(value.module, value.table))}[{value.name!r}]"
        if value is None or kind in (bool, int, str) or value is Ellipsis:
            return repr(value)
        if kind is tuple:
            return f"({''.join(self._expression(v) + ', ' for v in value)})"
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return f"{self._named(kind)}({', '.join(map(self._expression, value))})"
        if kind is list:
            return f"[{', '.join(map(self._expression, value))}]"
        if kind is dict:
            return "{" + ", ".join(f"{self._expression(k)}: {self._expression(v)}" for k, v in value.items()) + "}"
        if kind is slice:
            self._names["slice"] = builtins.slice
            return f"slice({', '.join(map(self._expression, (value.start, value.stop, value.step)))})"
        return self._named(value)

    def _named(self, value: Any) -> str:
        name = self._objects.get(id(value))
        if name is None:
            name = self._objects[id(value)] = f"c{len(self._objects)}"
            self._names[name] = value  # keeps it alive, so that its id stays unique
        return name


_READS = tuple(
    getattr(torch.Tensor, name) for name in ("__bool__", "__int__", "__float__", "__index__", "item", "tolist")
)
_LISTENERS: list[Callable[[torch.Tensor], object]] = []


@contextmanager
def results_noted(note: Callable[[torch.Tensor], object]) -> Iterator[None]:
    """Call `note` with each tensor that an operation of a segment returns."""
    _LISTENERS.append(note)
    try:
        yield
    finally:
        _LISTENERS.pop()


def _flat(result: Any) -> list[torch.Tensor]:
    found = tensor_leaves(result)
    for note in _LISTENERS:
        for tensor in found:
            note(tensor)
    return found
