"""The interface of a link between device and host; one implementation for CUDA, one for CPU and file.

A link only moves bytes; the plan decides which value, when, and where it lies on the host. The host side is one slab
per plan, reserved before its steps, addressed by offset. The compute lane is whatever executes the stages (the current
CUDA stream, or the thread that runs forward and backward).
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

Ticket = Any  # what a link returns for a copy that it has started; opaque to the interpreter
Range = tuple[int, int]  # of host bytes: the first, and how many
Offset = int | Sequence[int]  # the first host byte of each tensor, or of the first if they are packed one after another


def first_bytes(tensors: Sequence[torch.Tensor], offset: Offset) -> Sequence[int]:
    """Return the first host byte of each tensor."""
    if not isinstance(offset, int):
        return offset
    ends = itertools.accumulate((tensor.nbytes for tensor in tensors), initial=offset)
    return [first for first, _ in zip(ends, tensors, strict=False)]


class Link(ABC):
    """Copies between one device and the host.

    The order that an implementation must keep; nothing blocks the host, except where host and device are one:

    * `copy_out` reads its sources only after all compute issued before it; `copy_in` writes its targets only after all
      compute issued before it (they may be recycled memory) and after the copy that wrote the host bytes.
    * `wait` makes all compute issued after it come after the copy; it is called before a target is used, and before
      a source or a target is released.

    A ticket may be destroyed without `wait`: its memory goes back to the allocator only when that is safe. So an
    aborted step, on any thread, may simply release all that it holds.
    """

    device: torch.device
    capacity: int  # host bytes that `reserve` has secured
    # whether tickets keep their times, for `span`: (begin, end) in seconds since a mark of the device's clock
    timed = False
    # whether copies are queued and run by the device, both directions at once; if not, by the processor that computes
    queues = False

    @abstractmethod
    def reserve(self, nbytes: int, whole: Sequence[Range] = ()) -> None:
        """Secure at least `nbytes` bytes of host memory until `close`; within a step only for tensors whose own bytes
        the caller keeps. whole: those of the new bytes that `host_bytes` will be asked for, each in one piece.

        Raises:
            rotoff.ExecutionError: if the host cannot give them.
        """

    def begin(self) -> None:
        """Begin another step. Copies of the last step may still be running: copies to the host in this step must wait
        for all earlier copies from there, whose host bytes they overwrite."""

    @abstractmethod
    def allocate(self, nbytes: int) -> torch.Tensor:
        """`nbytes` uninitialised bytes on the device, a 1-d uint8 tensor with a storage of its own, for `copy_in`."""

    def stand_in(self, nbytes: int) -> torch.Tensor:
        """Return bytes for measuring, as a 1-d uint8 tensor: copies are as fast as with the device's bytes, but if
        possible these take no device memory."""
        return self.allocate(nbytes)

    @abstractmethod
    def copy_out(self, sources: Sequence[torch.Tensor], offset: Offset) -> Ticket:
        """Start copying 1-d uint8 device tensors to the host bytes at `offset`, all as one copy."""

    @abstractmethod
    def copy_in(self, targets: Sequence[torch.Tensor], offset: Offset, *after: Ticket) -> Ticket:
        """Start copying the host bytes at `offset` into 1-d uint8 device tensors, all as one copy. after: the copies
        that wrote those host bytes; None is ignored."""

    def host_bytes(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return host bytes, all secured by one `reserve`, as a 1-d uint8 tensor with a storage of its own, which stays
        readable and writable for as long as it lives."""
        raise NotImplementedError

    @abstractmethod
    def wait(self, ticket: Ticket) -> None:
        """Hold the compute lane until the copy has ended; raises what the copy raised. Waiting twice is harmless."""

    def join(self, ticket: Ticket) -> None:
        """Block the host until the copy has ended, so that it may read the host bytes; if the host computes, this is
        `wait`."""
        self.wait(ticket)

    @abstractmethod
    def drain(self) -> None:
        """Block the host until all copies begun so far have ended. For measuring, aborting and reading host bytes;
        never called within a step."""

    @abstractmethod
    def close(self) -> None:
        """Give host memory, files, threads and streams back, once all copies have ended. Closing twice is harmless."""
