"""What the interpreter asks of a link between device and host; one implementation for CUDA, one for CPU and file.

A link moves bytes, nothing else: which value, when, and where on the host it lies is the plan's business. The host side
is one slab per plan, reserved once, addressed by offset. The compute lane is whatever executes the stages (the current
CUDA stream, or the thread that runs forward and backward).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

Ticket = Any  # what a link returns for a copy that it has started; opaque to the interpreter


class Link(ABC):
    """Copies between one device and the host.

    The order that an implementation must keep (design: nothing blocks the host, except where host and device are one):

    * `copy_out` reads its sources only after all compute issued before it; `copy_in` writes its targets only after all
      compute issued before it (they may be recycled memory) and after the copy that wrote the host bytes.
    * `wait` makes all compute issued after it come after the copy; it is called before a target is used, and before
      a source or a target is released.

    A ticket that dies unawaited is as good as awaited: its memory goes back to the allocator only when that is safe. So
    a step that is given up, on whatever thread, may just let go of all that it holds.
    """

    device: torch.device
    duplex: bool
    capacity: int  # host bytes that `reserve` has secured
    # whether tickets keep their times, for `span`: (begin, end) in seconds since a mark of the device's clock
    timed = False
    recording = False  # whether `access` wants to be told what compute touches
    cached = False  # whether copies run through the processor's caches, so that the same bytes again are copied faster
    queues = False  # whether copies are asked for ahead and done by the device, without the host
    typed = False  # whether copies want tensors that hold float32 alone as such, and not as bytes

    @abstractmethod
    def reserve(self, nbytes: int) -> None:
        """Have at least `nbytes` bytes of host memory, kept until `close`; called outside of steps.

        Raises:
            rotoff.ExecutionError: where the host cannot give them.
        """

    def begin(self) -> None:
        """Another step begins, whose compute may be ordered after nothing of the last one's: that has been issued, and
        may not have ended. Its copies to the host must come after all copies from there, whose host bytes they
        overwrite."""

    @abstractmethod
    def allocate(self, nbytes: int) -> torch.Tensor:
        """`nbytes` uninitialised bytes on the device, a 1-d uint8 tensor with a storage of its own, for `copy_in`."""

    def stand_in(self, nbytes: int) -> torch.Tensor:
        """Bytes that copies run from and to as fast as from and to the device's, and that take none of the device's
        where there are such; for measuring. A 1-d uint8 tensor.

        Raises:
            rotoff.ExecutionError: where there is no room for them.
        """
        return self.allocate(nbytes)

    @abstractmethod
    def copy_out(self, sources: Sequence[torch.Tensor], offset: int) -> Ticket:
        """Start copying 1-d uint8 device tensors to the host, packed one after another from byte `offset`."""

    @abstractmethod
    def copy_in(self, targets: Sequence[torch.Tensor], offset: int, after: Ticket) -> Ticket:
        """Start copying host bytes from `offset` into 1-d uint8 device tensors; `after` wrote those host bytes."""

    def host_bytes(self, offset: int, nbytes: int) -> torch.Tensor:
        """Host bytes, all of which one `reserve` has secured, as a 1-d uint8 tensor that anybody may read and write,
        for as long as it lives; a storage of its own."""
        raise NotImplementedError

    @abstractmethod
    def wait(self, ticket: Ticket) -> None:
        """Hold the compute lane until the copy has ended; raises what the copy raised. Waiting twice is harmless."""

    def join(self, ticket: Ticket) -> None:
        """Block the host until the copy has ended, so that it may look at the host bytes; where host and compute are
        one, this is `wait`."""
        self.wait(ticket)

    @abstractmethod
    def drain(self) -> None:
        """Block the host until all copies begun so far have ended; for measuring, for giving up and for who looks at
        host bytes, never amid a step."""

    @abstractmethod
    def close(self) -> None:
        """Give host memory, files, threads and streams back, once all copies have ended. Closing twice is harmless."""

    def access(self, what: str, reads: Sequence[torch.UntypedStorage], writes: Sequence[torch.UntypedStorage]) -> None:
        """Told by the interpreter which storages compute is about to touch, where `recording` is true."""

    def release(self, what: str, storages: Sequence[torch.UntypedStorage]) -> None:
        """Told by the interpreter which storages it is about to give back to the allocator, where `recording` is
        true."""
