"""One tensor of the caller's that lies on the device, on the host, or on both: a parameter, its gradient, a part of its
state.

What the caller finds in ``parameter.data``, ``parameter.grad`` or ``optimizer.state`` is always the whole tensor with
its newest numbers. It lies over the link's host bytes, or in a storage of its own on the device. Whatever the caller
puts there counts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from ...tensors.storage import View, bytes_of, rounded, storage_key
from ..links.base import Link, Ticket

ALIGNMENT = 64  # bytes; kernels may take another path, and round otherwise, on tensors that begin elsewhere


def room_of(tensor: torch.Tensor) -> int:
    """The bytes that a tensor takes where it is placed."""
    return rounded(tensor.nbytes, ALIGNMENT)


def placeable(tensor: torch.Tensor | None) -> bool:
    """Whether a tensor can lie anywhere: it is a plain, dense one, and its bytes are all of its storage, but for what
    aligns them."""
    if tensor is None or tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, nn.Parameter):
        return False
    lies_alone = tensor.untyped_storage().nbytes() <= room_of(tensor) and tensor.storage_offset() == 0
    return lies_alone and bool(tensor.numel()) and not (tensor.dtype.is_complex and tensor.is_conj())


class PlacedTensor(ABC):
    """Where one tensor of the caller's lies.

    device: what the device holds of it, None where that is nothing. host: the tensor over the host's bytes.

    Args:
        link: to the host. offset, room: its bytes there.
    """

    def __init__(self, link: Link, offset: int, room: int) -> None:
        self.device: torch.Tensor | None = None
        self.host: torch.Tensor | None = None
        self._link = link
        self._offset = offset
        self._room = room
        self._address = 0  # of `host`
        self._valid = False  # whether the host's bytes are those of `device`
        self._sum: int | None = None  # of the bytes of `device` when that was so
        self._coming: Ticket = None
        self._leaving: Ticket = None
        self._out: Ticket = None

    @abstractmethod
    def get(self) -> torch.Tensor | None:
        """The caller's tensor; None where there is none."""

    @abstractmethod
    def put(self, tensor: torch.Tensor) -> None:
        """Have the caller's tensor lie where `tensor` does, as another object, whose ``.data`` the caller may set
        (``module.cpu()`` does)."""

    @property
    def on_host(self) -> bool:
        """Whether the caller's tensor lies on the host."""
        tensor = self.get()
        if self.host is not None and self.host.data_ptr() != self._address:
            self.host = None  # the caller has moved its bytes into memory that processes share
        return tensor is not None and self.host is not None and storage_key(tensor) == storage_key(self.host)

    @property
    def leaving(self) -> bool:
        """Whether the host has been sent what the device has."""
        return self._valid and self.device is not None

    def look(self) -> bool:
        """Take notice of what the caller has; returns whether it can be moved."""
        tensor = self.get()
        if not placeable(tensor) or tensor is None or tensor.nbytes > self._room:
            self.settle()
            self.device, self._valid = None, False
            return False
        if self.on_host or (self.device is not None and storage_key(self.device) == storage_key(tensor)):
            return True
        self.settle()  # one that the caller, or autograd, has made
        self.device, self._valid = None, False
        if tensor.device == self._link.device:
            self.device = tensor.detach()
        else:
            self._link.drain()
            self._have_host(tensor).copy_(tensor)
            assert self.host is not None
            self.put(self.host)
        return True

    def prefetch(self) -> None:
        """Take device bytes and start the copy from the host."""
        if not self.look() or self.device is not None:
            return
        assert self.host is not None
        bytes_there = self._link.allocate(room_of(self.host))
        self.device = View.of(self.host).on(bytes_there.untyped_storage())
        self._coming = self._link.copy_in([bytes_there[: self.host.nbytes]], self._offset, self._out)
        self._valid, self._sum = True, None

    def offload(self) -> None:
        """Start the copy to the host."""
        if not self.look() or self.device is None or self.on_host:
            return
        self._have_host(self.device)
        source = bytes_of(self.device.untyped_storage())[: self.device.nbytes]
        self._leaving = self._out = self._link.copy_out([source], self._offset)
        self._valid, self._sum = True, None

    def settle(self) -> None:
        """Hold compute until no copy reads or writes this.

        Raises:
            ExecutionError: where a copy failed; what the caller has is whole all the same.
        """
        try:
            if self._leaving is not None:
                self._link.wait(self._leaving)
            if self._coming is not None:
                self._link.wait(self._coming)
        except BaseException:
            self._link.drain()  # an interrupt leaves the copy to go on, and what comes next must come after it
            if self._coming is not None:
                self.device = None  # which the caller's tensor does not lie in before the copy has ended
            self._valid, self._out = False, None
            raise
        finally:
            self._leaving = self._coming = None

    def release(self) -> None:
        """Give the device bytes back; the caller's tensor lies on the host then, written there now where its bytes are
        not."""
        if not self.look() or self.device is None:
            return
        self.settle()
        if not self.on_host:
            if not self._valid or (self._sum is not None and self._sum != _sum(self.device)):
                self._have_host(self.device).copy_(self.device)
            assert self.host is not None
            self.put(self.host)
        self.device = None

    def let_go(self) -> None:
        """Give the device bytes back of what the caller finds on the host."""
        self.settle()
        self.device = None

    def show_host(self) -> None:
        """Have the caller's tensor lie on the host, whereto its bytes may still be on their way (`arrive` waits)."""
        if not self.leaving:
            self.release()
        elif self.host is not None and not self.on_host:
            self.put(self.host)

    def arrive(self) -> None:
        """Block the host until its bytes are there."""
        if self._out is not None:
            self._link.join(self._out)

    def use_device(self) -> None:
        """Have the caller's tensor lie on the device, where it is there, since it is about to be changed."""
        self.settle()
        if self.look() and self.device is not None:
            if self.on_host:
                self.put(self.device)
            self._valid = False

    def hand_over(self) -> None:
        """The caller may look at it, and change it, from now on: what the device has of it is the caller's."""
        self.settle()
        if self.look() and self.device is not None:
            if self.on_host:
                self.put(self.device)
            self._remember()

    def rest(self, resident: bool, on_both: bool = False) -> None:
        """Have it lie where it does between steps: on the device where `resident`, and on the host too where
        `on_both`."""
        self.settle()
        if not self.look():
            return
        if self.on_host:
            self.device = None  # of a step that ended early; the caller's may have been changed since
        if not resident:
            self.release()
            return
        self.prefetch()
        self.settle()
        assert self.device is not None
        if self.on_host:
            self.put(self.device)
        if on_both and not self._valid:
            self.offload()
            self.settle()
        self._remember()

    def _remember(self) -> None:
        if self._valid and self._sum is None and self.device is not None:
            self._sum = _sum(self.device)

    def _have_host(self, like: torch.Tensor) -> torch.Tensor:
        if self.host is None or View.of(self.host) != View.of(like):
            storage = self._link.host_bytes(self._offset, like.nbytes).untyped_storage()
            self.host = View.of(like).on(storage)
            self._address = self.host.data_ptr()
        return self.host


def _sum(tensor: torch.Tensor) -> int:
    """Tells whether somebody has changed a tensor, also past autograd's version counter, as ``parameter.data.mul_``
    does."""
    content = bytes_of(tensor.untyped_storage())
    whole = content.numel() // 8 * 8
    return int(content[:whole].view(torch.int64).sum()) + int(content[whole : tensor.nbytes].sum())


class PlacedParameter(PlacedTensor):
    """A parameter's own numbers."""

    def __init__(self, parameter: nn.Parameter, link: Link, offset: int, room: int) -> None:
        super().__init__(link, offset, room)
        self._parameter = parameter

    def get(self) -> torch.Tensor:
        return self._parameter

    def put(self, tensor: torch.Tensor) -> None:
        self._parameter.data = tensor


class PlacedGradient(PlacedTensor):
    """A parameter's gradient.

    Of a parameter that lies on the host, autograd adds up on a thread of its own what does not come by `take`: a
    penalty of the parameter that the loss takes outside of the model. So what comes by `take` is kept apart, out of
    ``parameter.grad``, until the backward has ended. So is what lies on another device than the parameter: the caller
    finds none of it within a step.
    """

    def __init__(self, parameter: nn.Parameter, link: Link, offset: int, room: int) -> None:
        super().__init__(link, offset, room)
        self._parameter = parameter
        self.apart: torch.Tensor | None = None

    def get(self) -> torch.Tensor | None:
        return self._parameter.grad if self.apart is None else self.apart

    def put(self, tensor: torch.Tensor) -> None:
        if self.apart is not None:
            self.apart = tensor
        elif tensor.device == self._parameter.device:
            self._parameter.grad = tensor.detach()
        else:
            self.apart, self._parameter.grad = tensor, None

    def take(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Keep what autograd has for a parameter that lies on the host; returns what autograd is to add up there
        itself: all of it where hooks want to see it, or where the caller has some to which it is added."""
        parameter, apart = self._parameter, self.apart
        adds = parameter.grad is not None if apart is None else apart.device != gradient.device
        hooked = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        if adds or hooked or gradient.layout is not torch.strided or type(gradient) is not torch.Tensor:
            return gradient.to(parameter.device)
        if apart is not None:
            gradient = apart + gradient
        if gradient.stride() != parameter.stride() or not placeable(gradient):
            own = torch.empty_strided(
                parameter.size(), parameter.stride(), dtype=gradient.dtype, device=gradient.device
            )
            gradient = own.copy_(gradient)
        self.settle()
        self.apart, self.device, self._valid = gradient, gradient, False
        return None

    @property
    def with_autograd(self) -> bool:
        """Whether autograd alone may have it on the host, and add to it there as long as a backward runs."""
        gradient, there = self._parameter.grad, self._link.device
        away = self._parameter.device != there and (gradient is None or gradient.device != there)
        return away and self.apart is None

    @property
    def on_device(self) -> bool:
        """Whether the device has it, and alone."""
        alone = self.apart is None or self._parameter.grad is None
        return alone and self.look() and self.device is not None and not self.leaving

    def join(self) -> None:
        """The backward has ended: have all of it in one place, for the caller to find if the parameter lies there."""
        apart, theirs = self.apart, self._parameter.grad
        if apart is None:
            return
        if theirs is not None:
            self.settle()
            self.arrive()
            with torch.no_grad():
                apart.add_(theirs.to(apart.device))
            self._parameter.grad, self._valid = None, False
        if apart.device == self._parameter.device:
            self.apart, self._parameter.grad = None, apart.detach()

    def forget(self) -> None:
        """Nobody wants it any more: the backward has updated the parameter, or had failed when the next step began."""
        if self.apart is None:
            self._parameter.grad = None
        self.apart = None


class PlacedState(PlacedTensor):
    """One tensor of what an optimizer remembers of a parameter."""

    def __init__(self, state: dict[str, Any], key: str, link: Link, offset: int, room: int) -> None:
        super().__init__(link, offset, room)
        self.state = state
        self._key = key

    def get(self) -> torch.Tensor | None:
        found = self.state.get(self._key)
        return found if isinstance(found, torch.Tensor) else None

    def put(self, tensor: torch.Tensor) -> None:
        self.state[self._key] = tensor.detach()
