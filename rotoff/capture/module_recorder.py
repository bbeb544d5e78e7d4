"""Records a forward, in which calls of modules and of custom Functions may each become one operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._C._functorch import peek_interpreter_stack
from torch.utils import _pytree as pytree

from ..errors import MeasureError
from ..tensors.eager_mode import unseen, without
from ..tensors.storage import versions_of
from ..tensors.tree import refuse_packed, tensor_leaves
from .graph_attributes import tensors_within
from .interception import without_interception
from .module_calls import ModuleCall, as_one
from .places import alone
from .recorder import Recorder, UnrecordableError
from .sharding import gathers
from .tape import name_of
from .unrepeatable import UncuttableError, compiled, takes_fast_path


class ModuleRecorder(Recorder):
    """A `Recorder` of calls of modules, custom Functions and scripted functions, too, which a mode does not see."""

    def __init__(self, model: nn.Module, *args: Any) -> None:
        super().__init__(model, *args)
        self._names = {module: name for name, module in model.named_modules()}
        self._modules: list[ModuleCall] = []  # all calls of modules
        self._applied: set[int] | None = None  # ids of the tensors that the custom Function that runs was given
        self._reaches = False  # whether it has used modules or parameters that are not among them
        self._left: set[int] = set()  # variables that compiled modules have left in attributes of their own
        self._read: set[int] = set()  # variables that unrecorded calls read since the last recorded module call began

    def end(self, result: Any) -> None:
        super().end(result)
        as_one(self.tape, self._modules, self._varying, self._pinned)

    def _unrecorded(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note the variables that the call reads, and the parameters that a custom Function was not given."""
        result = function(*args, **kwargs)
        given = tensor_leaves((args, kwargs))
        self._read.update(n for tensor in given if (n := self._tensors.number(tensor)) is not None)
        if self._applied is not None and isinstance(result, torch.Tensor):
            self._reaches |= any(isinstance(t, nn.Parameter) and id(t) not in self._applied for t in given)
        return result

    def called(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Replaces ``nn.Module.__call__``."""
        name = self._names.get(module)
        if self._passes() or name is None:
            self._reaches |= name is not None
            return original(module, *args, **kwargs)
        with torch._C.DisableTorchFunction():  # these calls are not the model's
            call = self._begun(module, name, args, kwargs)
            if takes_fast_path(module):
                self.tape.opaque.add(module)
            whole = module in self.tape.opaque or one_call(module)
            held = self._held_by(module) if whole else set()
            handed = held - self._left if compiled(module) else set()
        made, begun = list[Any](), False  # what it returns; whether its own code has begun
        try:
            if handed and (outer := self._around(call, handed)):  # nobody sees what compiled code reads
                self._hidden = outer
                return self._compiled(module, *args, **kwargs)
            self._read.clear()
            begun = not whole
            made.append(result := self._whole(module, args, kwargs) if whole else original(module, *args, **kwargs))
            if self.ended:
                return result
            if (whole or self._hidden is call) and (outer := self._around(call, self._beyond(call, held))):
                self._hidden = outer
            if self._hidden is call:
                self._join_hidden(call, args, kwargs, result)
            elif not whole and self._hidden is None:
                self._ended(call, result)
            if compiled(module):
                with torch._C.DisableTorchFunction():
                    self._left |= self._held_by(module)
            return result
        except MeasureError as error:
            if begun and not made:  # raised by the module's own code
                raise
            self._go_on(error)
            return made[0] if made else original(module, *args, **kwargs)
        finally:
            if self._hidden is call:
                self._hidden = None
            self._open.pop()
            self._places.leave()

    def _held_by(self, module: nn.Module) -> set[int]:
        """Return the variables, with a graph, that a module holds in attributes or in the places of parameters."""
        found = (self._tensors.number(tensor) for tensor in tensors_within(module) if tensor.requires_grad)
        return {n for n in found if n is not None}

    def _beyond(self, call: ModuleCall, held: set[int]) -> set[int]:
        """Return the variables that a call of a module that runs as a whole has read otherwise than as arguments: from
        attributes, or through what its code refers to. held: those in attributes when the call began."""
        read = self._read.union(*(op.reads for op in self.tape.operations[call.begin :]))
        read = {n for n in read if n in held or n not in call.given}
        return self._made_before(call, read) if read else read

    def _made_before(self, call: ModuleCall, variables: set[int]) -> set[int]:
        """Return those of `variables` that were made before a call began."""
        return variables.intersection(n for op in self.tape.operations[: call.begin] for n in op.outputs)

    def _around(self, call: ModuleCall, beyond: set[int]) -> ModuleCall | None:
        """Return the innermost module call around `call` in which the variables that `call` reads `beyond` its
        arguments are made or are arguments: that module runs as a whole, too. None if there are no such variables, or
        if only the model itself makes them and they have no graph: then the runtime keeps them.

        Raises:
            UncuttableError: if only the model itself makes them, and one has a graph.
        """
        if not beyond:
            return None
        for outer in reversed(self._open[: self._open.index(call)]):
            if outer.name and not outer.transformed and not self._made_before(outer, beyond).difference(outer.given):
                self.tape.opaque.add(outer.module)
                return outer
        if not any(self._tensors.variables[n].needs_grad for n in beyond):
            return None
        self._refuse(
            f"lets {call.name!r}, which runs as a whole, read a tensor of the same forward from an"
            " attribute or a variable",
            "; pass it as an argument",
            UncuttableError,
        )

    def _begun(self, module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModuleCall:
        entry = self._places.enter(module)
        self.tape.entries[entry] = self._made
        given = tensor_leaves((args, kwargs))
        transformed = peek_interpreter_stack() is not None
        call = ModuleCall(
            module=module,
            name=name,
            number=len(self._modules) + 1,
            entry=entry,
            begin=len(self.tape.operations),
            made=self._made,
            given=tuple(n for t in given if (n := self._tensors.number(t)) is not None),
            versions=[] if transformed else versions_of(given),
            transformed=transformed,
            drawn=self._generators.states(),
            **self._settings(),
        )
        self._modules.append(call)
        self._open.append(call)
        call.place = self._place()
        return call

    def _whole(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module as one operation."""
        if module is self._model:
            self._refuse(
                "belongs to a model that is compiled, or sharded with hooks, as a whole; compile or shard the"
                " rotoff.Checkpointable around it, or use rotoff.attach",
                kind=UncuttableError,
            )
        refuse_packed((args, kwargs), "an argument")
        if takes_fast_path(module):
            return self.call(module, args, kwargs, partial(unseen, module))
        return self.call(module, args, kwargs, partial(self._compiled, module) if compiled(module) else None)

    def _ended(self, call: ModuleCall, result: Any) -> None:
        """Note that a recorded call of a module has returned."""
        call.until, call.end = len(self._modules), len(self.tape.operations)
        call.outputs = tuple(map(self._tensors.number, tensor_leaves(result)))
        if call.module in self._varying:
            self._sizes.taken_whole(call.given, call.outputs)
            self._check_handed_on(result)

    def _check_handed_on(self, result: Any) -> None:
        """Check what a module whose work depends on data returns beside tensors; if that depends on data, so does the
        module around it."""
        for leaf in pytree.tree_leaves(result):
            if not isinstance(leaf, (torch.Tensor, type(None), bool, str)):
                what = f"passes on a {type(leaf).__name__}, which depends on data or cannot be looked into"
                self._varies(what, self._open[:-1], UnrecordableError)

    def _join_hidden(self, call: ModuleCall, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Replace what a hidden call of a module did by one operation, now that it has returned."""
        seen = self.tape.operations[call.begin :]
        self._pinned = {n: one for n, one in self._pinned.items() if n < call.begin}
        del self.tape.operations[call.begin :]
        for inner in self._modules[call.number :]:
            self.tape.entries.pop(inner.entry, None)
        del self._modules[call.number :]
        self._hidden, self._made = None, call.made
        self._saves[:0] = [one for op in seen for one in op.saves]
        self._inside = True
        try:
            self._noted(call.module, args, kwargs, lambda *_, **__: result, call)
        finally:
            self._inside = False
        last = self.tape.operations[-1]
        ends = tuple(n for op in seen for n in op.ends)
        self.tape.operations[-1] = replace(last, ends=ends + last.ends, keys=alone(call.entry, call.module))

    def _compiled(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call `module` so that the compiler does not see this mode."""
        with without(self), without_interception():
            return module(*args, **kwargs)

    def applied(
        self, apply: Callable[..., Any], original: Callable[..., Any], function: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Replaces the call of a custom Function or a scripted function."""
        if self._passes():
            return original(*args, **kwargs)
        self._applied, self._reaches = {id(t) for t in tensor_leaves((args, kwargs))}, False

        def run(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._now = [result]
            if self._reaches:
                self._hide(f"uses modules or parameters inside of {name_of(function)}, an autograd.Function")
            return result

        try:
            return self.call(apply, args, kwargs, run)
        finally:
            self._applied = None


def one_call(module: nn.Module) -> bool:
    """Whether a call of `module` is recorded as one operation."""
    return (
        compiled(module)
        or takes_fast_path(module)
        or (bool(module._forward_hooks or module._forward_pre_hooks) and gathers(module))
    )
