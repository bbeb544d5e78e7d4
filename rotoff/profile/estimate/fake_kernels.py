"""The mode of an estimate's fake tensors, which corrects answers that PyTorch's kernels do not give.

A `FakeTensorMode` answers most operations as the device would. There are two exceptions. The statistics of norms over
half precision are half precision on fake CPU tensors, while CUDA always keeps them in float32, and the CPU does if the
weight is float32. Grouped matrix products (mixtures of experts) are refused for other types than bfloat16, although
both devices support them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._python_dispatch import return_and_correct_aliasing

from ...tape.operators import kind_of
from ...tensors.eager_mode import EagerMode
from ...tensors.tree import leaves

_aten = torch.ops.aten
CPU = torch.device("cpu")  # of all fake tensors
_CONTENTS = {torch.Tag.inplace_view, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
SMALL, SMALL_WHOLE = 2**16, 2**22  # elements of floating point, and of whole numbers, such as positions of tokens
QUERIES = frozenset({torch.ops.prim.device.default})  # not counted: fake tensors query their device so
# returns its argument, and on fake tensors a copy
WAITS = frozenset([torch.ops._c10d_functional.wait_tensor.default] if torch.distributed.is_available() else [])
_VIEWS = {  # more than half of all operations; their kernels look at no bytes, so meta tensors give what real ones do
    _aten.as_strided.default,
    _aten.detach.default,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.t.default,
    _aten.transpose.int,
    _aten.view.default,
    _aten._unsafe_view.default,
}
_HALVES = (torch.float16, torch.bfloat16)
_NORMS = {  # whose statistics may be float32; for each, whether CUDA's always are
    _aten.native_layer_norm.default: True,
    _aten.native_group_norm.default: False,
    _aten.native_batch_norm.default: True,
    _aten._native_batch_norm_legit.default: True,
    _aten._native_batch_norm_legit.no_stats: True,
}


class FakeKernels(EagerMode, FakeTensorMode):
    """The mode of an estimate's fake tensors. What a forward makes of numbers alone, such as positions and masks, is
    real while it is small: a forward may look at it. Other real tensors are treated as fake ones.

    cuda: whether they stand for tensors of a CUDA device.
    """

    def __init__(self, cuda: bool = False) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._cuda = cuda
        self._inside = False  # an operation of fake tensors, which may be made of others
        self._unknown: dict[int, torch.UntypedStorage] = {}  # of real tensors that fake ones were written to

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in QUERIES:
            return args[0].device
        if func in WAITS:
            return args[0]
        kwargs = kwargs or {}
        if FakeTensor not in types and not self._inside:
            return self._of_numbers(func, types, args, kwargs)
        self._forget(func, args, kwargs)
        return self._fake(func, types, args, kwargs)

    def _of_numbers(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operation without fake tensors: a real one if all is small and known."""
        given = [t for t in leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        known = torch.Tag.nondeterministic_seeded not in func.tags and all(
            _is_small(t) and not t.requires_grad and t.untyped_storage()._cdata not in self._unknown for t in given
        )
        if known and given and not _CONTENTS.isdisjoint(func.tags):
            return func(*args, **kwargs)
        result = self._fake(func, types, args, kwargs)
        if known and all(_is_small(t) for t in leaves(result) if isinstance(t, torch.Tensor)):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            self._forget(func, args, kwargs)
            return return_and_correct_aliasing(func, args, kwargs, result)  # what it has written, not a fake copy
        return result

    def _forget(self, func: Any, args: Any, kwargs: Any) -> None:
        """Note the real tensors that an operation writes: what they hold is unknown from then on."""
        writes = kind_of(func).writes
        for t in leaves([args[n] if n < len(args) else kwargs.get(name) for n, name in writes]):
            if isinstance(t, torch.Tensor) and not isinstance(t, FakeTensor):
                self._unknown[t.untyped_storage()._cdata] = t.untyped_storage()

    def _fake(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        inside, self._inside = self._inside, True
        try:
            return self.dispatch(func, types, args, kwargs)
        finally:
            self._inside = inside

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _VIEWS and self.is_our_fake(args[0]) and args[0].constant is None:
            with in_kernel_invocation_manager(self):
                views = func(*args, **kwargs)
            return [FakeTensor(self, t, CPU) for t in views] if type(views) is list else FakeTensor(self, views, CPU)
        if func is _aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            return self._grouped(func, types, args, kwargs)
        result: Any = super().dispatch(func, types, args, kwargs)
        if func not in _NORMS or args[0].dtype not in _HALVES:
            return result
        mixed = any(isinstance(t, torch.Tensor) and t.dtype == torch.float32 for t in args[1:])
        if not mixed and not (self._cuda and _NORMS[func]):
            return result
        with self:
            return (result[0], *(torch.empty_like(t, dtype=torch.float32) for t in result[1:]))

    def _grouped(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        wanted = kwargs.pop("out_dtype", None) or args[0].dtype
        with self:
            given = [torch.empty_like(t, dtype=torch.bfloat16) for t in args[:2]]
        result: Any = super().dispatch(func, types, (*given, *args[2:]), kwargs)
        with self:
            return torch.empty_strided(result.size(), result.stride(), dtype=wanted, device=result.device)


def _is_small(t: torch.Tensor) -> bool:
    return t.numel() <= (SMALL if t.is_floating_point() else SMALL_WHOLE)
