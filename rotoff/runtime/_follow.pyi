from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

TAG: str

class Var:
    origin: tuple[object, int]
    dead: bool
    hollow: bool
    gone: bool
    stays: bool
    def __call__(self) -> torch.Tensor | None: ...
    @property
    def stage(self) -> int: ...

class Follower:
    inside: bool
    on_course: bool
    as_measured: bool
    sets_flags: bool
    seen: bool
    dead: bool
    saved: list[Any]
    dropped: list[None]
    tape: Any
    outside: Any
    reads: Any
    frames: Any
    lender: Any
    autocast_before: Any
    kernels_before: tuple[bool, ...]
    _unusual: bool
    _every: bool
    _stage: int
    _position: int
    _next_entry: int
    _within: int
    _rows: tuple[tuple[Any, ...], ...]
    _entries: tuple[tuple[Any, ...], ...]
    _origin: tuple[object, int]
    _outside: tuple[object, int]
    _log: list[Any]
    _numbered: dict[int, Var]
    _held: Collection[int]
    _dying: Sequence[int]
    _token: object
    _step: Any
    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def called(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any] | None = None
    ) -> Any: ...
    def _tag(self, tensor: torch.Tensor, origin: tuple[object, int]) -> Var: ...
    def _let_go_all(self) -> None: ...
    def _may_read(self, row: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool: ...
    def _known(self, tensor: torch.Tensor) -> Var | None: ...
    def _reference(self, foreign: list[torch.Tensor], stage: int, leaf: Any) -> Any: ...
