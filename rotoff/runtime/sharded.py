"""Modules that FSDP2 has sharded. It gathers their parameters around each of their calls, and empties them again.

What it does is not on the tape, so a gathered parameter is a resident, which its owner fills before the backward of the
module. Stages are cut where calls of these modules begin and end, what crosses a cut stays on the device, and a stage
is made again for its own backward alone: nothing is gathered behind FSDP's back.

Under a `device_limit`, FSDP2 reads each process's shards where they lie when it gathers: on a CPU they are on the host,
and their gradients and optimizer states are moved; on an accelerator the shards are moved with their states. So FSDP2
works as ever, and no operation of the model meets a shard.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ..accelerator import block_bytes
from ..errors import ExecutionError, OptionError
from ..tape.tape import Tape
from ..tensors.storage import View, in_place_of, is_wrapper, local, rounded, stored

logger = logging.getLogger("rotoff")


def sharded(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules inside `model` that FSDP2 has sharded, by name."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not used unless imported
    return {} if fsdp is None else {name: m for name, m in model.named_modules() if isinstance(m, fsdp.FSDPModule)}


def device_of(model: nn.Module) -> torch.device | None:
    """Return the device on which modules inside `model` that FSDP2 has sharded compute; None if there are none. With a
    `CPUOffloadPolicy` it is not that of their parameters."""
    groups = (group for m in sharded(model).values() for group in m._get_fsdp_state()._fsdp_param_groups)  # type: ignore[operator]
    return next((getattr(group, "device", None) for group in groups), None)


Blocks = frozenset[tuple[int, int]]  # of memory: address and bytes


class Gathered(NamedTuple):
    """What FSDP2 holds gathered when the forward of a model begins, as the root's own parameters.

    parameters: ids of those that it has put in the place of shards. stays: what they take. resharded: the same of
    modules that it empties when their forward ends; at_end: of those that it empties when the backward ends. passing:
    of what it lets go when it gathers the next ones.
    """

    parameters: frozenset[int] = frozenset()
    stays: Blocks = frozenset()
    resharded: Blocks = frozenset()
    at_end: Blocks = frozenset()
    passing: Blocks = frozenset()


def gathered(root: nn.Module) -> Gathered:
    """Return what FSDP2 holds gathered of the modules in `root`, whose forward begins now."""
    found = Gathered()
    try:
        for module in sharded(root).values():
            for group in module._get_fsdp_state()._fsdp_param_groups:  # type: ignore[operator]
                blocks = _blocks_of(t for own in group.fsdp_params for t in _gathered_tensors(own))
                copied = group.comm_ctx.all_gather_state
                output = [] if copied is None else [copied.all_gather_result.all_gather_output]
                early, late = group._reshard_after_forward, group.reshard_after_backward
                leaves = "resharded" if early else "at_end" if late else "stays"
                parameters = found.parameters | {id(_gathered(own)) for own in group.fsdp_params}
                found = found._replace(parameters=parameters, passing=found.passing | _blocks_of(output))
                found = found._replace(**{leaves: getattr(found, leaves) | blocks})
    except AttributeError as error:
        logger.warning(
            "rotoff: torch %s keeps what FSDP2 has gathered where rotoff does not find it (%s), so no limit counts what"
            " the root gathers; give each of its modules that has parameters a fully_shard of its own",
            torch.__version__,
            error,
        )
    return found


def _blocks_of(tensors: Iterable[torch.Tensor]) -> Blocks:
    storages = [t.untyped_storage() for t in tensors]
    return frozenset((storage.data_ptr(), storage.nbytes()) for storage in storages if storage.nbytes())


@contextmanager
def gathering_apart(
    modules: Iterable[nn.Module], tape: Tape, region: Callable[[], AbstractContextManager[object]] = nullcontext
) -> Iterator[None]:
    """Within, `tape` notes nothing of what FSDP2 does before and after calls of these modules; that is in a region."""
    regions: list[AbstractContextManager[object]] = []

    def stop(*_: Any) -> None:
        tape.paused = True
        regions.append(region())
        regions[-1].__enter__()

    def go_on(*_: Any) -> None:
        regions.pop().__exit__(None, None, None)
        tape.paused = False

    hooks: list[Any] = []
    for module in modules:
        hooks += [module.register_forward_pre_hook(stop, prepend=True), module.register_forward_pre_hook(go_on)]
        hooks += [module.register_forward_hook(stop, prepend=True), module.register_forward_hook(go_on)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        while regions:  # of a collective that has failed: none may outlive its log, which it would write into
            go_on()


def dispatching() -> AbstractContextManager[object]:
    """A context in which DTensors work, where operations of a backward do not see tensors of Python's own classes."""
    hidden = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot):
        hidden = hidden.remove(key)
    guard: Any = torch._C._ForceDispatchKeyGuard
    found: AbstractContextManager[object] = guard(torch._C._dispatch_tls_local_include_set(), hidden)
    return found


class _Told:
    """A collective of FSDP2 that says which process it waits for in vain.

    Args:
        own: FSDP2's. explain: makes the error to raise of the one that it has raised. shards: those whose gradients it
            reduces.
    """

    def __init__(
        self, own: Any, explain: Callable[[BaseException], BaseException], shards: Iterable[Shard] = ()
    ) -> None:
        self._own, self.explain, self._shards = own, explain, shards

    def allocate(self, *args: Any, **kwargs: Any) -> Any:
        for shard in self._shards:
            shard.set_aside()
        return self._own.allocate(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._own(*args, **kwargs)
        except RuntimeError as error:
            raise self.explain(error) from error


class Shard:
    """This process's part of one parameter.

    earlier: its gradient on the host, to which that of the running backward will be added.

    Args:
        own, group: FSDP2's own objects for it, and for what is gathered with it.
    """

    def __init__(self, own: Any, group: Any) -> None:
        self._own, self._group = own, group
        self.earlier: torch.Tensor | None = None
        own.to_sharded_dtensor = partial(_gradient_of, own)

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter that the optimizer has."""
        found: nn.Parameter = self._own.sharded_param
        return found

    @property
    def data(self) -> torch.Tensor:
        """The bytes that FSDP2 gathers, with their padding."""
        found: torch.Tensor = self._own._sharded_param_data
        return found

    def put(self, data: torch.Tensor) -> None:
        """Have the parameter, and what FSDP2 gathers, lie where `data` does."""
        if (reads := getattr(self._group.comm_ctx, "all_gather_copy_in_stream", None)) is not None:
            self._group.device_handle.current_stream().wait_stream(reads)  # perhaps the bytes of before
        self._own._sharded_param_data = data
        in_place_of(self.parameter, View.of(local(self.parameter)).on(data.untyped_storage()))

    def refuse_gathered(self) -> None:
        """Raise ExecutionError if FSDP2 holds the whole parameter, which the next forward reads then."""
        if self._group.is_unsharded:
            raise ExecutionError(
                "FSDP2 holds whole parameters from before this update, which its next forward would read; call"
                " set_reshard_after_backward(True) before the last backward, or reshard() before optimizer.step()"
            )

    def set_aside(self) -> None:
        """FSDP2 adds no gradient on the device to one on the host."""
        gradient = self.parameter.grad
        if gradient is not None and gradient.device != self._group.device:
            self.earlier, self.parameter.grad = gradient, None

    def reducing(self) -> AbstractContextManager[object]:
        """Within, the current stream is that on which FSDP2 reduces gradients, and the allocator orders their bytes."""
        found: AbstractContextManager[object] = self._group.device_handle.stream(self._stream)
        return found

    @property
    def _stream(self) -> Any:
        return self._group.comm_ctx.reduce_scatter_stream

    def reduced(self) -> None:
        """Have the current stream wait for the gradient."""
        if (event := self._group._post_reduce_event) is not None:
            event.wait()

    def let_go(self) -> None:
        """The current stream has read the gradient, whose bytes are free then."""
        self._stream.wait_stream(self._group.device_handle.current_stream())


def _gradient_of(own: Any, gradient: torch.Tensor) -> torch.Tensor:
    """Return what FSDP2 sets as a gradient: it says that it lies where the parameter does, as PyTorch wants, and lies
    where it has come."""
    found: Any = type(own).to_sharded_dtensor(own, local(own.sharded_param))
    found._local_tensor = gradient
    return found


class WrappedShard(Shard):
    """One tensor of those of which this process's part of a frozen parameter consists, such as a quantized one."""

    def __init__(self, own: Any, group: Any, tensor: Any) -> None:
        super().__init__(own, group)
        self._tensor = tensor

    @property
    def parameter(self) -> nn.Parameter:
        found: nn.Parameter = self._tensor
        return found

    @property
    def data(self) -> torch.Tensor:
        found: torch.Tensor = self._tensor
        return found

    def put(self, data: torch.Tensor) -> None:
        self._tensor.data = data
        self._own._sharded_param_data = local(self._own.sharded_param)  # not bytes from before


def _shards_in(own: Any, group: Any) -> list[Shard]:
    parameter = own.sharded_param
    if parameter.requires_grad or not is_wrapper(local(parameter)):
        return [Shard(own, group)]
    return [WrappedShard(own, group, tensor) for tensor in stored([local(parameter)])]


class Shards:
    """The shards of a model.

    Attributes:
        units: by name, the modules that gather their parameters at once, with their shards. What a `CPUOffloadPolicy`
            keeps on the host, beside a device, is none of them: FSDP2 moves it.
        of: by id of its parameter, each shard.

    Args:
        root: the module that FSDP2 has sharded last.

    Raises:
        OptionError: if this version of FSDP2 keeps them elsewhere.
    """

    def __init__(self, root: nn.Module) -> None:
        self.units: dict[str, list[Shard]] = {}
        self._root: Any = root
        self._groups: list[Any] = []  # FSDP2's own objects
        self._own: dict[int, Any] = {}
        try:
            for name, module in sharded(root).items():
                groups: list[Any] = module._get_fsdp_state()._fsdp_param_groups  # type: ignore[operator]
                self._groups += groups
                new = {id(own): (own, group) for group in groups for own in group.fsdp_params}
                new = {key: one for key, one in new.items() if key not in self._own}
                there = [one for one in new.values() if one[1].device.type == "cpu" or not one[0].offload_to_cpu]
                self.units[name] = [shard for one in there for shard in _shards_in(*one)]
                self._own |= {key: own for key, (own, _) in new.items()}
            self.of = {id(shard.parameter): shard for several in self.units.values() for shard in several}
            for shard in self.of.values():
                shard.data  # noqa: B018
                shard.reduced()
                shard._group.is_unsharded  # noqa: B018
            self.reduces, self.waiting  # noqa: B018
            self.refuse_after_failure()
            self.tell(lambda error: error)
        except AttributeError as error:
            raise OptionError(
                f"torch {torch.__version__} keeps the shards of FSDP2 where rotoff does not find them ({error}); give a"
                " mem_limit instead of a device_limit"
            ) from error

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that the optimizer has, and the tensors that wrappers consist of."""
        return [shard.parameter for shard in self.of.values()]

    def every(self, model: nn.Module) -> list[nn.Parameter]:
        """Return these and those of `model` that are not sharded, also while FSDP2 has gathered some."""
        ours = {id(p) for own in self._own.values() for p in (own.sharded_param, _gathered(own))}
        return [*self.parameters, *(p for p in model.parameters() if id(p) not in ours)]

    @property
    def reduces(self) -> bool:
        """Whether the next backward reduces gradients (``set_requires_gradient_sync``)."""
        return all(group.reduce_grads for group in self._groups)

    @property
    def waiting(self) -> int:
        """The bytes of whole gradients that wait for a backward that reduces them."""
        found = ((own.unsharded_accumulated_grad, _gathered(own)) for own in self._own.values())
        gradients = (of if of is not None or gathered is None else gathered.grad for of, gathered in found)
        waiting = [local(gradient) for gradient in gradients if gradient is not None]
        return sum(rounded(gradient.nbytes, block_bytes(gradient.device)) for gradient in waiting)

    def refuse_after_failure(self) -> None:
        """Raise ExecutionError if an earlier backward failed: FSDP2 ends neither that one nor those that follow."""
        unended = self._root._get_fsdp_state()._state_ctx.post_backward_final_callback_queued
        if unended and torch._C._current_graph_task_id() == -1:
            raise ExecutionError(
                "an earlier backward failed, after which FSDP2 ends no other, and parameters get no more gradients;"
                " make the model anew, and load what was saved"
            )

    def tell(self, explain: Callable[[BaseException], BaseException]) -> None:
        """Have the collectives raise what `explain` makes of an error."""
        for group in self._groups:
            shards = [self.of[key] for own in group.fsdp_params if (key := id(own.sharded_param)) in self.of]
            for name, reduced in (("_all_gather_comm", []), ("_reduce_scatter_comm", shards)):
                own = getattr(group, name)
                setattr(group, name, _Told(own._own if isinstance(own, _Told) else own, explain, reduced))


def _gathered(own: Any) -> torch.Tensor | None:
    """The gathered parameter, with or without bytes; None before it is gathered for the first time."""
    return getattr(own, "_unsharded_param", None)


def _gathered_tensors(own: Any) -> list[torch.Tensor]:
    """What is allocated when it is gathered."""
    found: list[torch.Tensor] = [*own.all_gather_outputs, *own._unsharded_inner_tensors]
    return found
