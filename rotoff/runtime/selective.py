"""Selective recomputation of a stage: ``F_sel`` stores some of the saved tensors, and ``B`` first recomputes the rest.

The first run needs only saved-tensor hooks, because it stores whole saved tensors. The redo runs the stage's forward on
detached inputs under a dispatch mode that identifies operations by their position; views do not count, because they
cost nothing and hooks of modules add some. An operation whose results are stored returns them, one whose results nobody
reads is skipped, and all others run. The redo stops at the last tensor that has to be made again.

Why not PyTorch's ``create_selective_checkpoint_contexts``: it keeps its own copies, by function and count, which could
not be moved to the host; it needs a dispatch mode in the first run as well; and it stores whole results of operations
although autograd may save less of them (a mask). The known pitfalls are handled as follows. In-place changes: a storage
counts as made when its last writer has run, and is not stored if something reads it before; slots check versions. Views
are run, never stored. Random numbers: no operation draws after one that was skipped. Autocast: its cache is off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..tensors.autocast import uncached_autocast
from ..tensors.convolutions import forward_by
from ..tensors.eager_mode import EagerMode
from ..tensors.recipe import QUERIES, Argument, Constant, Recipe, Result, Stored, Unread
from ..tensors.saved_tensors import watch_saved
from ..tensors.storage import View, bytes_of
from ..tensors.tree import tensor_leaves

_MOST_VIEWS = 4096  # of one form


class Redone(BaseException):
    """Stops a replay when every tensor has been made again; a model's ``except Exception`` must not catch it."""


class OtherOperations(Exception):
    """The forward runs other operations than the measured one."""


class _Redo(EagerMode):
    """Runs the operations of one redo.

    stored, beside: as of `redo`. poison: fill the results that nobody should read with NaN, to verify this.
    """

    def __init__(
        self, recipe: Recipe, stored: Mapping[int, torch.Tensor], poison: bool, beside: Callable[[], bool]
    ) -> None:
        super().__init__()
        self._recipe = recipe
        self._stored = stored
        self._poison = poison
        self._beside = beside
        self._next = 0
        self.paused = False  # operations in the pack hook are not the forward's

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.paused or func.is_view or func in QUERIES or self._beside():
            return func(*args, **(kwargs or {}))
        n, recipe = self._next, self._recipe
        self._next = n + 1
        if n >= len(recipe.functions) or recipe.functions[n] is not func:
            raise OtherOperations
        results = recipe.results.get(n)
        if results is None:
            return func(*args, **(kwargs or {}))
        views = None if recipe.sized else self._views(n, func, args, kwargs or {})
        made = [
            self._result(result, args, kwargs, views[place] if views else None)  # of this step's sizes
            for place, result in enumerate(results)
        ]
        return made[0] if n in recipe.single else tuple(made)

    def _views(self, n: int, func: Any, args: Any, kwargs: Any) -> tuple[View | None, ...]:
        """Return the shapes and strides that the results of operation `n` would have for these arguments."""
        leaves, spec = tree_flatten((args, kwargs))
        given = [View.of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        key = n, tuple(map(repr, given))
        known = self._recipe.made
        if key not in known:
            if len(known) >= _MOST_VIEWS:
                known.clear()
            try:
                on_meta, named = tree_unflatten(list(map(_on_meta, given)), spec)
                made = func(*on_meta, **named)
            except (NotImplementedError, RuntimeError) as error:
                raise OtherOperations from error
            made = made if isinstance(made, (tuple, list)) else (made,)
            # kernels may lay their results out otherwise than on meta: as where they were measured
            pairs = zip(made, self._recipe.results[n], strict=False)
            known[key] = tuple(
                View.of(one).ordered(like.view.order) if isinstance(like, (Stored, Unread)) else None
                for one, like in pairs
            )
        return known[key]

    def _result(self, result: Result, args: Any, kwargs: Any, view: View | None = None) -> Any:
        if isinstance(result, Stored):
            stored = self._stored[result.slot]
            if view is not None and self._recipe.views[result.slot] == result.view:
                view = View.of(stored)  # autograd has saved it as it was made
            if view is not None and view.nbytes != stored.untyped_storage().nbytes():
                raise OtherOperations
            return (view or result.view).into(stored)
        if isinstance(result, Argument):
            return tensor_leaves((args, kwargs or {}))[result.place]
        if isinstance(result, Constant):
            return result.value
        view = view or result.view
        empty = torch.empty_strided(view.size, view.stride, dtype=view.dtype, device=result.device)
        if self._poison:
            bytes_of(empty.untyped_storage()).fill_(0xFF)  # NaN if it is a float
        return empty


def _on_meta(leaf: Any) -> Any:
    if isinstance(leaf, View):
        return leaf.on_meta()
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf


def redo(
    recipe: Recipe,
    run: Callable[[], object],
    stored: Mapping[int, torch.Tensor],
    pack: Callable[[torch.Tensor], None],
    state: AbstractContextManager[None],
    poison: bool = False,
    beside: Callable[[], bool] = lambda: False,
) -> None:
    """Run a stage's forward again up to the last tensor that form `recipe` did not store.

    Args:
        run: runs the forward on detached inputs. stored: the tensor of each kept slot. pack: called with each tensor
            that autograd saves, in the order of the first run. state: restores the state from before the first run.
        beside: returns whether the forward is in a dead call, which `recipe` does not contain.

    Raises:
        OtherOperations: if the forward does other operations than when it was measured, or saves fewer tensors.
    """
    count = 0
    mode = _Redo(recipe, stored, poison, beside)

    def counted(tensor: torch.Tensor) -> None:
        nonlocal count
        if beside():
            return
        mode.paused = True
        pack(tensor)
        mode.paused = False
        count += 1
        if count == recipe.stop:
            raise Redone

    try:
        with (
            state,
            uncached_autocast(),
            forward_by(recipe.algorithms),
            watch_saved(counted),
            nullcontext() if recipe.whole else mode,
        ):
            run()
    except Redone:
        return
    except RuntimeError as error:  # TorchScript's interpreter raises it in place of what is raised within
        if count == recipe.stop:
            return
        if "TorchScript interpreter" not in str(error):
            raise
        raise OtherOperations from error
    raise OtherOperations
