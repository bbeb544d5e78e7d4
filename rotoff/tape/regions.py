"""What ``torch.compile`` has compiled with Inductor, as operators that a tape sees.

Inductor's code calls kernels of its own, which the dispatcher does not see. Code that is compiled within `seen` calls
each of its graphs through a higher-order operator of PyTorch (``wrap_inductor_compiled_regions``), which calls an
ordinary one here. What was compiled before, or does more than make tensors and copy to some of its arguments, runs as
it is: what it makes is resident.
"""

from __future__ import annotations

import operator
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary
from zlib import crc32

import torch
from torch.utils import _python_dispatch

from ..errors import ExecutionError
from ..tensors.eager_mode import leave_alone

_library = torch.library.Library("rotoff", "DEF")
_ARGUMENTS = "(Tensor[] read, Tensor(a!)[] written, SymInt[] numbers, int region, Tensor key) -> Tensor[]"
_library.define(f"compiled_region{_ARGUMENTS}")
_library.define(f"compiled_region.draws{_ARGUMENTS}", tags=(torch.Tag.nondeterministic_seeded,))
OPERATORS = torch.ops.rotoff.compiled_region.default, torch.ops.rotoff.compiled_region.draws
HIGHER_ORDER: Any = torch._ops._higher_order_ops.get("inductor_compiled_code")
_OF_SIZES = frozenset(value for value in vars(operator).values() if callable(value))


class Region:
    """A compiled graph.

    written: positions of the arguments that it changes; None if it does what cannot be told, or cannot be done again.
    """

    def __init__(self, call: Any, graph: torch.fx.GraphModule | None) -> None:
        self.call = call
        called = [] if graph is None else [node.target for node in graph.graph.nodes]
        self.written = None if graph is None else _written(graph)
        self._operator = OPERATORS[any(torch.Tag.nondeterministic_seeded in getattr(one, "tags", ()) for one in called)]
        self._code = "" if graph is None else graph.code
        self._keys: dict[tuple[int, ...], torch.Tensor] = {}

    def __call__(self, inputs: list[Any], call: Callable[..., Any]) -> list[Any]:
        """Call the operator with this region; `call` as of `called`."""
        assert self.written is not None
        numbers = [y for n, x in enumerate(inputs) if not isinstance(x, torch.Tensor) for y in (n, x)]
        written = [inputs[n] for n in self.written]
        read = [x for n, x in enumerate(inputs) if isinstance(x, torch.Tensor) and n not in self.written]
        inputs.clear()
        made = iter(call(self._operator, (), (read, written, numbers, id(self), self._key(tuple(numbers)))))
        return [next(made) if x is None else x[0] for x in _open.others]

    def _key(self, numbers: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor without elements whose size tells graphs, and their numbers, apart: operations of a tape are
        known by the sizes of what they read."""
        if (found := self._keys.get(numbers)) is None:
            with torch._C._DisableTorchDispatch():  # no tape notes it
                found = self._keys[numbers] = torch.empty(0, crc32(f"{self._code}{numbers}".encode()))
        return found

    def run(self, read: list[torch.Tensor], written: list[torch.Tensor], numbers: list[int]) -> list[torch.Tensor]:
        """Call the code with its arguments in order, and return the tensors that it makes."""
        assert self.written is not None
        known: dict[int, Any] = dict(zip(numbers[::2], numbers[1::2], strict=True))
        known |= zip(self.written, written, strict=True)
        rest = iter(read)
        made = self.call([known[n] if n in known else next(rest) for n in range(len(known) + len(read))])
        _open.others = [None if isinstance(x, torch.Tensor) else (x,) for x in made]
        return [x for x in made if isinstance(x, torch.Tensor)]


def _written(graph: torch.fx.GraphModule) -> tuple[int, ...] | None:
    inputs = {node: n for n, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    written = set()
    for node in graph.graph.nodes:
        called: Any = node.target
        if node.op != "call_function" or called in _OF_SIZES:
            continue
        if called is torch.ops.aten.copy_.default and node.args[0] in inputs:
            written.add(inputs[node.args[0]])
        elif not isinstance(called, torch._ops.OpOverload) or called._schema.is_mutable or "c10d" in called.namespace:
            return None
    return tuple(sorted(written))


class _Open(threading.local):
    """Of a thread: the regions of each tape that records, and what is no tensor of a region's last results."""

    def __init__(self) -> None:
        self.tapes: list[set[Region]] = []
        self.others: list[Any] = []


_open = _Open()
_regions: WeakValueDictionary[int, Region] = WeakValueDictionary()
_of: WeakKeyDictionary[Any, Region] = WeakKeyDictionary()


def _run(
    read: list[torch.Tensor], written: list[torch.Tensor], numbers: list[int], region: int, key: torch.Tensor
) -> list[torch.Tensor]:
    return _regions[region].run(read, written, numbers)


for one in OPERATORS:
    _library.impl(one, _run, "CompositeExplicitAutograd")


def _call(func: Any, types: tuple[()], args: tuple[Any, ...]) -> Any:
    return func(*args)


def called(func: Any, inputs: list[Any], *, call: Callable[..., Any] = _call, name: str | None = None) -> list[Any]:
    """What the higher-order operator does while a tape records. call: as ``__torch_dispatch__`` of a mode."""
    region = _of.get(func)
    if region is None:
        region = _of[func] = Region(func.compiled_callable, func.original_gm)
        _regions[id(region)] = region
    as_it_is = region.written is None or not all(isinstance(x, torch.Tensor) or type(x) is int for x in inputs)
    if as_it_is or "torch._inductor.cudagraph_trees" in sys.modules:  # CUDA graphs own what they make
        if any(isinstance(x, torch.Tensor) and x.numel() and not x.untyped_storage().nbytes() for x in inputs):
            raise ExecutionError(
                "a function that is compiled apart from its module reads parameters that the device does not have;"
                " compile the module (module.compile()), whose parameters stay there, or give a mem_limit"
            )
        made: list[Any] = func.compiled_callable(inputs)
        return made
    for regions in _open.tapes:
        regions.add(region)  # the model may be gone before the backward
    return region(inputs, call)


_lock = threading.Lock()
_before: list[tuple[bool, bool]] = []  # of each tape that records, in any thread: the settings before the first


@contextmanager
def seen(regions: set[Region]) -> Iterator[None]:
    """Within, what is compiled calls its graphs as operators, as does what was compiled so before. regions: gets those
    that are called on this thread."""
    leave_alone()
    config: Any = sys.modules.get("torch._inductor.config")
    if HIGHER_ORDER is None or config is None:
        yield
        return
    with _lock:
        _before.append((config.wrap_inductor_compiled_regions, _python_dispatch._is_in_torch_dispatch_mode))
        config.wrap_inductor_compiled_regions = _python_dispatch._is_in_torch_dispatch_mode = True
    _open.tapes.append(regions)
    try:
        yield
    finally:
        _open.tapes.pop()
        with _lock:
            if len(_before) == 1:
                config.wrap_inductor_compiled_regions, _python_dispatch._is_in_torch_dispatch_mode = _before[0]
            else:
                _before[1] = _before[0]
            del _before[0]
