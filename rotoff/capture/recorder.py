"""Records every call of torch in a model's forward while it runs; `module_recorder` adds the calls of modules."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, NoReturn

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..errors import MeasureError
from ..tensors.autocast import autocast_now
from ..tensors.eager_mode import Unwatched
from ..tensors.kernel_flags import kernel_flags
from ..tensors.rng import Generators
from ..tensors.saved_tensors import foreign_hooks
from ..tensors.storage import versions_of
from ..tensors.tree import look_into, tensor_leaves
from .collectives import Collective, as_collective
from .graph_attributes import GraphAttributes
from .interception import noting_draws
from .known_tensors import KnownTensors
from .module_calls import ModuleCall, pinned
from .partition.data_sizes import DataSizes
from .partition.weight_casts import WeightCasts
from .places import Places
from .tape import NOTHING, SET_REQUIRES_GRAD, RecordedCall, Ref, Settings, Tape, argument_leaves, substitute
from .unrepeatable import ONCE_MORE, Parameters, UncuttableError, UnrepeatableError

# properties of a tensor that do not depend on its contents
_FACTS = frozenset(
    ["dim", "size", "stride", "numel", "nelement", "element_size", "ndimension", "storage_offset", "is_contiguous",
     "is_floating_point", "is_complex", "is_signed", "is_inference", "is_shared", "is_pinned", "is_conj", "is_neg",
     "is_same_size", "is_set_to", "is_storage", "type", "get_device", "__len__", "__hash__", "__repr__",
     "__format__", "__str__", "untyped_storage", "storage", "data_ptr", "has_names", "__dir__", "result_type",
     "can_cast", "promote_types", "is_tensor", "broadcast_shapes", "__reduce_ex__", "_is_view", "_is_zerotensor",
     "is_distributed", "is_autocast_enabled", "get_default_dtype", "dense_dim", "sparse_dim", "is_coalesced",
     "is_grad_enabled", "__instancecheck__", "_has_compatible_shallow_copy_type"]
)  # fmt: skip
HOOKS = frozenset(["register_hook", "register_post_accumulate_grad_hook", "retain_grad"])
_PLAIN = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, torch.Size, torch.layout)


class UnrecordableError(MeasureError):
    """The model itself, outside of its submodules, does what cannot be recorded."""


SEEDS = (
    "calls torch.seed(), whose number no replay gets again",
    "; call torch.manual_seed with a number that torch.randint has drawn",
)


class _HiddenError(Exception):
    """Raised to stop recording inside a module's call."""

    def __init__(self, call: ModuleCall) -> None:
        super().__init__()
        self.call = call


class Recorder(TorchFunctionMode):
    """Records every call while it is active.

    Args:
        given: the forward's tensors.
        named: modules that are called as a whole if what they do cannot be recorded.
        in_step: whether the forward is a training step's, which must not run twice: what cannot be recorded ends the
            recording, and the forward goes on.

    Attributes:
        trouble: what could not be recorded. ended: whether it has ended the recording.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        given: list[torch.Tensor],
        named: Collection[nn.Module],
        in_step: bool,
    ) -> None:
        super().__init__()
        self._in_step = in_step
        self._named = frozenset(named)
        self._varying: set[nn.Module] = set()
        self._hidden: ModuleCall | None = None
        self._now: list[Any] = []  # what the current call has returned, once it has
        self.ended = False
        self._open: list[ModuleCall] = []  # calls of modules that are running, outermost first
        self._pinned: dict[int, RecordedCall] = {}  # replacements of operations within modules, by number
        self._sizes = DataSizes()
        self.trouble: MeasureError | None = None
        self._model = model
        self._attributes = GraphAttributes(model)
        self._tensors = KnownTensors(model)
        self._parameters = Parameters([model])
        self.tape = Tape(variables=self._tensors.variables, tables=self._tensors.tables)
        self.tape.modules = frozenset(model.modules())
        self.tape.inputs = self._tensors.inputs(given)
        self._inside = False
        self._thread = threading.get_ident()
        self._places = Places()
        self._made = 0  # number of operations that make or change tensors
        self._generators = Generators(device)
        self._drawn = self._generators.states()
        self._ambient = autocast_now(), kernel_flags()
        self.casts = WeightCasts(self._tensors, self.tape.operations)
        self._hooks: list[Any] = []  # handles of hooks that the forward registered on tensors
        self._saves: list[tuple[int, int]] = []  # storages that the current call has saved
        self._seeding: set[int] = set()  # numbers of the calls of modules in which ``torch.seed`` was called

    def end(self, result: Any) -> None:
        """Record what the model returned.

        Raises:
            MeasureError: if it cannot be recorded, or something before has ended the recording.
        """
        if self.ended and (trouble := self.trouble) is not None:
            self.trouble = None  # which refers to this recorder
            raise trouble
        self._note_freed()
        self.tape.attributes = self._attributes.find(self._on_tape, self._in_step)
        look_into(result)
        self._returned("", result)
        if self.tape.attributes:
            result = result, [vars(module)[name] for module, name in self.tape.attributes]
        found, self.tape.result_spec = pytree.tree_flatten(result)
        for leaf in found:
            if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
                raise UncuttableError(
                    f"{type(self._model).__name__} returns a {type(leaf).__name__}, which rotoff cannot look into;"
                    " have it return tensors, tuples, dicts or dataclasses (use_cache=False instead of a cache, the"
                    " parameters of a distribution)"
                )
            self.tape.result.append(self._reference(leaf) if isinstance(leaf, torch.Tensor) else leaf)
        self.tape.varying = frozenset(self._varying | self.tape.opaque)
        self.tape.casts, self.tape.region_ends = self.casts.kept, tuple(self.casts.ends)

    def finish(self) -> None:
        """Record which storages still exist, apart from results; the caller holds the graph alone."""
        known = {self.tape.variables[n].storage for n in (*self.tape.inputs, *self.tape.result_variables())}
        self.tape.held = self._tensors.alive() - known
        if self._in_step:
            return
        for handle in self._hooks:  # a hook that holds its own tensor would leave a cycle
            handle.remove()
        for generator, state in self.tape.generators:
            generator.set_state(state)
        self._attributes.put_back(self.tape.attributes)

    def forget(self) -> None:
        """Let go of all tensors: the graph's hooks hold this recorder."""
        self._tensors.forget()

    def saves(self, tensor: torch.Tensor) -> None:
        """Note what autograd saves, instead of keeping it."""
        try:
            with torch._C.DisableTorchFunction():  # these calls are not the model's
                storage = None if self.ended else self._tensors.storage(tensor, new=True)
        except MeasureError as error:
            self._go_on(error)
            return
        if storage is not None:
            self._saves.append((storage, tensor.untyped_storage().nbytes()))

    def _on_tape(self, tensor: torch.Tensor) -> bool:
        """Whether a recorded operation makes a tensor."""
        number = self._tensors.number(tensor)
        return number is not None and any(number in op.outputs for op in reversed(self.tape.operations))

    def _note_freed(self) -> None:
        """Note the storages freed since the last operation began."""
        freed = self._tensors.freed()
        if freed and self.tape.operations:
            last = self.tape.operations[-1]
            self.tape.operations[-1] = replace(last, ends=last.ends + freed)

    # -- what is called

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._passes():
            return self._unrecorded(func, args, kwargs)
        if func is torch.Tensor.__iter__:
            return iter(self.call(torch.unbind, args, {}))
        if func == SET_REQUIRES_GRAD:
            self.call(torch.Tensor.requires_grad_, args, {})
            return None
        return self.call(func, args, kwargs)

    def _unrecorded(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call within one that is recorded."""
        return function(*args, **kwargs)

    def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Callable[..., Any] | None = None,
    ) -> Any:
        """Run `function`, by calling `run`, and record it; nested calls are not recorded."""
        function = as_collective(function)
        self._inside, self._now = True, []
        try:
            with Unwatched() as unwatched:
                return self._noted(function, args, kwargs, unwatched.watched(noting_draws(function, run or function)))
        except _HiddenError as hidden:
            self._hidden = hidden.call
        except MeasureError as error:
            self._go_on(error)
        finally:
            self._inside = False
            made, self._now = self._now, []
        return made[0] if made else (run or function)(*args, **kwargs)

    def _go_on(self, error: MeasureError) -> None:
        """End the recording, if the forward must not run twice and a replay may repeat what it does; else raise
        `error`."""
        if self.ended or not self._in_step or isinstance(error, UnrepeatableError):
            raise error
        self.trouble, self.ended = error.with_traceback(None), True

    def _passes(self) -> bool:
        """Whether what is called now is not looked at."""
        return self._inside or self.ended or self._hidden is not None or threading.get_ident() != self._thread

    def _noted(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Any, made: ModuleCall | None = None
    ) -> Any:
        """Run and record a call. made: the module call that has already run, if any."""
        name = getattr(function, "__name__", "")
        self._note_freed()
        generated = self._generators.states() if made is None else made.drawn
        if name in HOOKS:
            return self._hooked(run(*args, **kwargs))
        given = self._looked_at(function, name, args, kwargs)
        received = function.written(args, kwargs) if isinstance(function, Collective) else ()
        versions = versions_of(given) if made is None else made.versions
        detached = name == "detach" or not torch.is_grad_enabled()
        references = substitute((args, kwargs), lambda leaf: self._reference(leaf, detached))
        settings = self._settings()
        if made is None:
            self._saves.clear()
        with self.casts.seen(function, name) as casts:
            result = run(*args, **kwargs)
        self._now = [result] if made is None else []
        self._drawn = self._generators.states()
        if name == "__set__":  # of ``data``, perhaps
            self._tensors.moved(args[0])
        returned = self._returned(name, result)
        pairs = zip(given, versions, versions_of(given), strict=True)
        changed = [*received, *(tensor for tensor, old, new in pairs if old != new)]
        self._note_changed(changed)
        draws, effect = self._drawn is not generated, name == "__set__" or isinstance(function, nn.Module)
        silent = not (changed or effect or draws)
        if silent and returned and not name.endswith("_") and {*map(id, returned)} <= {*map(id, given)}:
            return result  # no operation, such as x.to(x.dtype)
        outputs = tuple(self._tensors.output(t) for t in returned)
        reads = tuple(dict.fromkeys(leaf.variable for leaf in argument_leaves(references) if isinstance(leaf, Ref)))
        expected = NOTHING
        if silent and not returned:
            if not given or result is None or not self._asks(function, name, reads, result):
                return result
            expected = result
        elif not self._sizes.computed.isdisjoint(reads) and self._sizes.counted(name, reads):
            self._varies()
        self._sizes.note(function, name, references, given, reads, outputs, draws)
        one = RecordedCall(
            function=function,
            args=references[0],
            kwargs=references[1],
            outputs=outputs,
            reads=reads,
            writes=frozenset(n for t in changed if (n := self._tensors.storage(t)) is not None),
            writes_owned=tuple(dict.fromkeys(owned for t in changed for owned in self._tensors.owners(t))),
            draws=draws,
            **settings,
            expected=expected,
            effect=effect or any(self._tensors.lasts(t) for t in changed),
            place=self._place(),
            casts=tuple(casts),
            saves=tuple(self._saves),
        )
        self.tape.picks |= (picks := self._sizes.picks(name, references, given))
        self._append(one, pinned(one, given, returned) if picks else None)
        return result

    def _returned(self, name: str, result: Any) -> list[torch.Tensor]:
        """The tensors in the result of a call."""
        returned = tensor_leaves(result)
        if any(tensor.is_nested for tensor in returned):
            self._refuse("makes a nested tensor, whose bytes rotoff cannot see", "; pad its rows")
        if any(map(is_functorch_wrapped_tensor, returned)):
            self._hide(_transformed(name))
        return returned

    def _hooked(self, handle: Any) -> Any:
        """Note a hook; it belongs to the step's own graph, not to the tape."""
        self._hooks += [] if handle is None else [handle]
        return handle

    def _append(self, one: RecordedCall, pinned: RecordedCall | None) -> None:
        """Put an operation on the tape. pinned: its replacement within the modules around it."""
        if pinned is not None:
            self._pinned[len(self.tape.operations)] = pinned
        if one.makes:
            one = replace(one, keys=self._places.keys(one.function))
            self._places.calls.append(one.function)
            self._made += 1
        self.tape.operations.append(one)

    def _looked_at(self, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Return the tensors among the arguments of a call; refuse one that cannot be recorded."""
        tensors = tensor_leaves((args, kwargs))
        if any(map(is_functorch_wrapped_tensor, tensors)):
            self._hide(_transformed(name))
        for one in (*args, *kwargs.values()):
            if isinstance(one, torch.Generator) and all(one is not known for known, _ in self.tape.generators):
                self.tape.generators.append((one, one.get_state()))
        if (objection := self._parameters.objection(function, args, kwargs)) is not None:
            self._refuse(*objection, UnrepeatableError)
        if (hooks := foreign_hooks()) is not None:
            self._refuse(hooks[0], hooks[1], UnrepeatableError)
        return tensors

    def _asks(self, function: Any, name: str, reads: tuple[int, ...], answer: Any) -> bool:
        """Whether a call that makes no tensor reads one's contents, so that its result is part of the course."""
        computed = not self._sizes.computed.isdisjoint(reads)
        if name in _FACTS or name == "__get__":
            if not self._sizes.asked(function, name, reads):
                return False
            if computed:
                self._varies()
        elif name == "backward":
            self._refuse("calls backward, which belongs in the training loop", kind=UnrepeatableError)
        elif computed and not isinstance(answer, bool):
            self._varies()
        return True

    def seeding(self, seed: Callable[[], int]) -> Callable[[], int]:
        """Return what replaces ``torch.seed`` meanwhile."""

        def noted() -> int:
            self._seeding |= {call.number for call in self._open}
            if self._inside or self._hidden is not None:
                self._refuse(*SEEDS, UnrepeatableError)
            return seed()

        return noted

    def _reference(self, leaf: Any, detached: bool = False) -> Any:
        """Return what stands for `leaf` in an argument. detached: of a call that continues no graph."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        reference = self._tensors.reference(leaf, detached)
        if reference is None:
            self._refuse(
                f"uses a tensor of shape {tuple(leaf.shape)} ({leaf.grad_fn or 'a view'}) that rotoff did not see being"
                " made: by a hook that collects intermediate results (output_attentions=True), by Tensor.set_ or"
                " torch.load, or by code outside of torch"
            )
        return reference

    def _note_changed(self, changed: list[torch.Tensor]) -> None:
        for tensor in changed:
            if any(owned.table == "_parameters" for owned in self._tensors.owners(tensor)):
                self._refuse("changes a parameter", ONCE_MORE, UnrepeatableError)
            if any(tensor is one for one in self._tensors.tables):
                self.tape.changed_bytes += tensor.nbytes
                self.tape.changed[id(tensor)] = tensor

    def _varies(
        self,
        what: str = "",
        around: Sequence[ModuleCall] | None = None,
        kind: type[MeasureError] = UnrepeatableError,
    ) -> None:
        """Note that the work of the innermost of the modules `around` (of all, by default) depends on data; refuse
        `what` if it is the model itself."""
        around = self._open if around is None else around
        if any(call.module in self._varying for call in around):
            return
        inner = next((call for call in reversed(around) if call.name), None)
        if inner is not None:
            self._varying.add(inner.module)
        elif what:
            self._refuse(what, kind=kind)

    def _hide(self, what: str) -> NoReturn:
        """Stop recording in the innermost module around that is not itself transformed; refuse `what` if there is none
        but the model."""
        for call in reversed(self._open):
            if call.name and not call.transformed:
                if call.number in self._seeding:
                    self._refuse(*SEEDS, UnrepeatableError)
                self.tape.opaque.add(call.module)
                raise _HiddenError(call)
        self._refuse(what, kind=UnrecordableError)

    def _settings(self) -> Settings:
        autocast, kernels = autocast_now(), kernel_flags()
        before, kernels_before = self._ambient
        return {
            "grad": torch.is_grad_enabled(),
            "autocast": () if autocast == before else autocast,
            "kernels": () if kernels == kernels_before else kernels,
        }

    def _place(self) -> tuple[tuple[str, int], ...]:
        return tuple((call.name, call.number) for call in self._open)

    def _refuse(self, what: str, cure: str = "", kind: type[MeasureError] = MeasureError) -> NoReturn:
        if kind is MeasureError and (call := next((c for c in self._open if c.module in self._named), None)):
            raise _HiddenError(call)
        where = f" in module {self._open[-1].name!r}" if self._open and self._open[-1].name else ""
        self.trouble = kind(f"the forward of {type(self._model).__name__} {what}{where}{cure}")
        raise self.trouble


def _transformed(name: str) -> str:
    return (
        f"calls {name} under a transform of torch.func (vmap, grad), which rotoff cannot look through (and derivatives,"
        " grad or jvp, not in a submodule either)"
    )
