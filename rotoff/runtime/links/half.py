"""Half precision for offloading: float32 values are copied, and stored on the host, in 16 bits. Lossy; off by default.

Source: Hascoet et al., *Reducing the Memory Cost of Training Convolutional Neural Networks by CPU Offloading* (JSEA
2019), sections 4.3 and 5.2, where converting "the hidden activations to FP16 before sending them" is proposed.

The conversion is a part of the copy: it runs on the copy's own stream, piece by piece, so it does not delay compute and
needs one piece of device memory for each direction (`STAGING_BYTES`), whatever the size of the value. Nothing else
changes: order, events and host addresses are the `StreamLink`'s. Other types are copied unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...accelerator import SEGMENT, Stream
from ...errors import OptionError
from .base import Offset, first_bytes
from .cuda import CudaStreams, StreamLink, Streams

PIECE = 2 << 20  # elements that are converted at a time
# Each direction's stream has one piece in 16 bits at a time: the allocator gives it back to the same stream, in order,
# and rounds what it takes for a stream of its own up to a segment at most.
STAGING_BYTES = 2 * SEGMENT
DTYPES = (torch.float16, torch.bfloat16)


def check_offload_dtype(dtype: torch.dtype | None) -> None:
    """Raise OptionError if `dtype` is neither None nor a 16-bit floating-point type."""
    if dtype is not None and dtype not in DTYPES:
        raise OptionError(f"offload_dtype is {dtype!r}; give torch.float16, torch.bfloat16, or None for no conversion")


class HalfLink(StreamLink):
    """A `StreamLink` that keeps float32 tensors in `dtype` on the host.

    Sources and targets may be 1-d float32 tensors beside 1-d uint8 ones (`typed`); a value's tensors must come back
    with the types that they left with.
    """

    typed = True

    def __init__(self, streams: Streams, dtype: torch.dtype) -> None:
        super().__init__(streams)
        self._dtype = dtype

    def _places(self, tensors: Sequence[torch.Tensor], offset: Offset) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return (host, device) for `tensors`; each has as many host bytes as without conversion and uses half."""
        places: list[tuple[torch.Tensor, torch.Tensor]] = []
        for tensor, first in zip(tensors, first_bytes(tensors, offset), strict=True):
            host = self._halves(tensor, first) if tensor.dtype is torch.float32 else None
            if host is None:
                places += super()._places([tensor.view(torch.uint8)], first)
            else:
                places += zip(host.split(PIECE), tensor.split(PIECE), strict=True)
        return places

    def _halves(self, tensor: torch.Tensor, offset: int) -> torch.Tensor | None:
        """Return the tensor's place on the host in 16 bits; None unless it is in one piece and at an even address."""
        pieces = list(self._slab.pieces(offset, 2 * tensor.numel()))
        if len(pieces) != 1 or pieces[0].storage_offset() % 2:
            return None
        return pieces[0].view(self._dtype)


class _SharedStreams(CudaStreams):
    """All links of a device copy on the same two streams, so that together they have one piece for each direction."""

    _sides: dict[torch.device, tuple[Stream, Stream]] = {}
    _taken = 0

    def side(self) -> Stream:
        if self.device not in self._sides:
            self._sides[self.device] = super().side(), super().side()
        self._taken += 1
        return self._sides[self.device][self._taken - 1]


class CudaHalfLink(HalfLink):
    """The link of a CUDA device with values in `dtype` on the host."""

    def __init__(self, device: torch.device | str | int, dtype: torch.dtype) -> None:
        super().__init__(_SharedStreams(device), dtype)
