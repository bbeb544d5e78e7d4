"""Modules that FSDP2 has sharded. It gathers their parameters around each of their calls, and empties them again.

What it does is not on the tape, so a gathered parameter is a resident, which its owner fills before the backward of the
module. Stages are cut where calls of these modules begin and end, what crosses a cut stays on the device, and a stage
is made again for its own backward alone: nothing is gathered behind FSDP's back.

Under a `device_limit` each process's shards lie on the host, where FSDP2 reads them when it gathers. Only their
gradients and optimizer states are moved. So FSDP2 works as ever, and no operation of the model meets a shard.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ..errors import OptionError
from ..tape.tape import Tape
from ..tensors.storage import View, local


def sharded(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules inside `model` that FSDP2 has sharded, by name."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not used unless imported
    return {} if fsdp is None else {name: m for name, m in model.named_modules() if isinstance(m, fsdp.FSDPModule)}


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
        own: FSDP2's. explain: makes the error to raise of the one that it has raised.
    """

    def __init__(self, own: Any, explain: Callable[[BaseException], BaseException]) -> None:
        self._own, self.explain = own, explain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._own(*args, **kwargs)
        except RuntimeError as error:
            raise self.explain(error) from error


class Shard:
    """This process's part of one parameter.

    Args:
        own: FSDP2's own object for it.
    """

    def __init__(self, own: Any) -> None:
        self._own = own

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
        parameter: Any = self.parameter
        self._own._sharded_param_data = data
        parameter._local_tensor = View.of(local(parameter)).on(data.untyped_storage())

    @property
    def whole_bytes(self) -> int:
        """The bytes of the parameter once it is gathered."""
        dtype = self._own.mp_policy.param_dtype or self.parameter.dtype
        return self.parameter.numel() * int(dtype.itemsize)

    @property
    def gathered(self) -> torch.Tensor | None:
        """The gathered parameter, with or without bytes; None before it is gathered for the first time."""
        return getattr(self._own, "_unsharded_param", None)

    @property
    def waiting(self) -> torch.Tensor | None:
        """The whole gradient that waits for a backward that reduces it, if there is one."""
        found: torch.Tensor | None = self._own.unsharded_accumulated_grad
        return found if found is not None or self.gathered is None else self.gathered.grad


class Shards:
    """The shards of a model.

    Attributes:
        units: by name, the modules that gather their parameters at once, with their shards.
        of: by id of its parameter, each shard.

    Args:
        root: the module that FSDP2 has sharded last.

    Raises:
        OptionError: if this version of FSDP2 keeps them elsewhere.
    """

    def __init__(self, root: nn.Module) -> None:
        self.units: dict[str, list[Shard]] = {}
        seen = set[int]()
        self._groups: list[Any] = []
        try:
            for name, module in sharded(root).items():
                groups: list[Any] = module._get_fsdp_state()._fsdp_param_groups  # type: ignore[operator]
                self._groups += groups
                every = {id(own): own for group in groups for own in group.fsdp_params}
                self.units[name] = [Shard(own) for key, own in every.items() if key not in seen]
                seen |= every.keys()
            self.of = {id(shard.parameter): shard for several in self.units.values() for shard in several}
            for shard in self.of.values():
                shard.data, shard.whole_bytes, shard.waiting  # noqa: B018
            self.reduces  # noqa: B018
            self.tell(lambda error: error)
        except AttributeError as error:
            raise OptionError(
                f"torch {torch.__version__} keeps the shards of FSDP2 where rotoff does not find them ({error}); give a"
                " mem_limit instead of a device_limit"
            ) from error

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that the optimizer has."""
        return [shard.parameter for shard in self.of.values()]

    def beside(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the parameters of `model` that are not sharded."""
        ours = {id(one.gathered) for one in self.of.values()} | self.of.keys()
        return [p for p in model.parameters() if id(p) not in ours]

    @property
    def throughout(self) -> int:
        """The bytes that the root gathers before the model's forward, and keeps to the end of the backward."""
        return sum(shard.whole_bytes for shard in self.units[""])

    @property
    def reduces(self) -> bool:
        """Whether the next backward reduces gradients (``set_requires_gradient_sync``)."""
        return all(group.reduce_grads for group in self._groups)

    @property
    def waiting(self) -> int:
        """The bytes of whole gradients that wait for a backward that reduces them."""
        return sum(local(t).nbytes for shard in self.of.values() if (t := shard.waiting) is not None)

    def tell(self, explain: Callable[[BaseException], BaseException]) -> None:
        """Have the collectives raise what `explain` makes of an error."""
        for group in self._groups:
            for name in ("_all_gather_comm", "_reduce_scatter_comm"):
                own = getattr(group, name)
                setattr(group, name, _Told(own._own if isinstance(own, _Told) else own, explain))
