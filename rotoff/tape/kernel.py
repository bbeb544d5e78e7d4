"""The compiled tape, equal to its twin in Python, for the version of torch that runs. `tape.Tape` says what it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from . import regions
from . import tape as twin
from .dispatch import compiled as _kernel

_compiled: WeakKeyDictionary[twin.Known, tuple[int, int, Any]] = WeakKeyDictionary()


def _known(known: twin.Known) -> Any:
    """`known` for the kernel. Its sets only grow, so their sizes tell whether they have changed."""
    sizes = len(known.sure), len(known.held)
    found = _compiled.get(known)
    if found is None or found[:2] != sizes:
        found = _compiled[known] = (*sizes, _kernel.Known(known.sure, known.held))
    return found[2]


Tape: Any = twin.Tape  # what follows a forward: the compiled one, if it is there

if _kernel is not None:

    class Compiled(_kernel.Tape):  # type: ignore[misc]
        """What `tape.Tape` is, compiled, with contents and slots of its own."""

        on_backward: Callable[[Any, int], None] | None = None

        def __init__(self, known: twin.Known | None = None) -> None:
            self.known = known
            self.regions: set[regions.Region] = set()
            if known is not None:
                self.know(_known(known))

        def __enter__(self) -> Compiled:
            self._seen = regions.seen(self.regions)
            self._seen.__enter__()
            self.begin()
            return self

        def __exit__(self, *error: object) -> None:
            self._seen.__exit__(None, None, None)
            try:
                self.enter(0)
            finally:
                self.end()

        def take_apart(self, t: torch.Tensor) -> Any:
            return twin.taken_apart(t, self.pack)

        def put_together(self, packed: tuple[Any, ...]) -> torch.Tensor:
            return twin.put_together(packed, self.unpack)

    Tape = Compiled
