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

import torch
from torch.utils import _python_dispatch

from ..tensors.eager_mode import leave_alone

_library = torch.library.Library("rotoff", "DEF")
_library.define(
    "compiled_region(int region, Tensor[] read, Tensor(a!)[] written, SymInt[] numbers) -> Tensor[]",
    tags=(torch.Tag.nondeterministic_seeded,),
)
OPERATOR = torch.ops.rotoff.compiled_region.default
HIGHER_ORDER: Any = torch._ops._higher_order_ops.get("inductor_compiled_code")
_OF_SIZES = frozenset(value for value in vars(operator).values() if callable(value))


class Region:
    """A compiled graph.

    written: positions of the arguments that it changes; None if it does what cannot be told, or cannot be done again.
    """

    def __init__(self, call: Any, graph: torch.fx.GraphModule | None) -> None:
        self.call = call
        self.written = None if graph is None else _written(graph)

    def __call__(self, inputs: list[Any], call: Callable[..., Any]) -> list[Any]:
        """Call the operator with this region; `call` as of `called`."""
        assert self.written is not None
        numbers = [y for n, x in enumerate(inputs) if not isinstance(x, torch.Tensor) for y in (n, x)]
        written = [inputs[n] for n in self.written]
        read = [x for n, x in enumerate(inputs) if isinstance(x, torch.Tensor) and n not in self.written]
        inputs.clear()
        made = iter(call(OPERATOR, (), (id(self), read, written, numbers)))
        return [next(made) if x is None else x[0] for x in _open.others]

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


@torch.library.impl("rotoff::compiled_region", "CompositeExplicitAutograd", lib=_library)
def _run(region: int, read: list[torch.Tensor], written: list[torch.Tensor], numbers: list[int]) -> list[torch.Tensor]:
    return _regions[region].run(read, written, numbers)


def _call(operator: Any, types: tuple[()], args: tuple[Any, ...]) -> Any:
    return operator(*args)


def called(func: Any, inputs: list[Any], *, call: Callable[..., Any] = _call, name: str | None = None) -> list[Any]:
    """What the higher-order operator does while a tape records. call: as ``__torch_dispatch__`` of a mode."""
    region = _of.get(func)
    if region is None:
        region = _of[func] = Region(func.compiled_callable, func.original_gm)
        _regions[id(region)] = region
    if region.written is None or "torch._inductor.cudagraph_trees" in sys.modules:  # graphs own what they make
        made: list[Any] = func.compiled_callable(inputs)
        return made
    for regions in _open.tapes:
        regions.add(region)  # the model may be gone before the backward
    return region(inputs, call)


@contextmanager
def seen(regions: set[Region]) -> Iterator[None]:
    """Within, what is compiled calls its graphs as operators, as does what was compiled so before. regions: gets those
    that are called on this thread."""
    leave_alone()
    config = sys.modules.get("torch._inductor.config")
    if HIGHER_ORDER is None or config is None:
        yield
        return
    before, _python_dispatch._is_in_torch_dispatch_mode = _python_dispatch._is_in_torch_dispatch_mode, True
    _open.tapes.append(regions)
    try:
        with config.patch(wrap_inductor_compiled_regions=True):
            yield
    finally:
        _open.tapes.pop()
        _python_dispatch._is_in_torch_dispatch_mode = before
