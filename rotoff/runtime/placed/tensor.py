"""A tensor of the caller that lies on the device, on the host, or on both: a parameter, its gradient, a part of its
state.

The caller always finds the whole tensor with its newest numbers in ``parameter.data``, ``parameter.grad`` or
``optimizer.state``. It lies in the link's host bytes, or in a storage of its own on the device. If the caller puts
another tensor there, this one is used.
"""

from __future__ import annotations

import itertools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import nn

from ...errors import ExecutionError
from ...tensors.storage import (
    View,
    bytes_of,
    dispatches,
    in_place_of,
    in_shared_memory,
    local,
    rounded,
    storage_key,
    uses_of,
    version_of,
)
from ...tensors.tree import tensor_leaves
from ..links.base import Link, Ticket
from ..sharded import Shard
from .used_up import UsedUp

ALIGNMENT = 64  # bytes; kernels may take another path, and round otherwise, on tensors that begin elsewhere
BLOCKS = 16  # of a checksum, which shows that numbers have moved from one to another


def room_of(tensor: torch.Tensor) -> int:
    """The bytes that a tensor, or this process's part of it, takes where it is placed."""
    return rounded(local(tensor).nbytes, ALIGNMENT)


def placeable(tensor: torch.Tensor | None) -> bool:
    """Whether a tensor can be placed: it is plain and dense, and fills its storage up to the alignment."""
    if tensor is None or tensor.layout is not torch.strided or dispatches(tensor):
        return False
    lies_alone = tensor.nbytes <= tensor.untyped_storage().nbytes() <= room_of(tensor) and not tensor.storage_offset()
    return lies_alone and bool(tensor.numel()) and not (tensor.dtype.is_complex and tensor.is_conj())


def unplaceable(state: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors of an optimizer's state of one parameter that are not placed: those of one element, and those
    in lists or dictionaries."""
    found = []
    for value in state.values():
        if not isinstance(value, torch.Tensor) or value.numel() < 2:
            found += tensor_leaves(value)
    return found


class HostBytes:
    """The host bytes of a link, in which each placed tensor lies in one piece."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._next = self._end = self._secured = 0  # of the fresh ones

    def take(self, sizes: Sequence[int]) -> list[int]:
        """Secure pieces of these sizes; returns the first byte of each."""
        *firsts, end = itertools.accumulate(sizes, initial=rounded(self.link.capacity, ALIGNMENT))
        self.link.reserve(end, [*zip(firsts, sizes, strict=True)])
        return firsts

    def fresh(self, nbytes: int) -> int:
        """Secure a piece for a tensor whose own the caller keeps; each time as many bytes as before, since the link
        maps all of them anew."""
        if self._next + nbytes > self._end:
            size = max(nbytes, self._secured)
            try:
                (self._next,) = self.take([size])
            except ExecutionError:
                size = nbytes
                (self._next,) = self.take([size])
            self._end, self._secured = self._next + size, self._secured + size
        self._next += nbytes
        return self._next - nbytes


class PlacedTensor(ABC):
    """The place of one tensor of the caller.

    device: its copy on the device, or None. host: the tensor over the link's host bytes, or None.

    Args:
        host: where it lies there. offset, room: its bytes.
    """

    def __init__(self, host: HostBytes, offset: int, room: int) -> None:
        self.device: torch.Tensor | None = None
        self.host: torch.Tensor | None = None
        self._bytes, self.link = host, host.link
        self._offset = offset
        self._room = room
        self._left: list[tuple[int, torch.Tensor]] = []  # bytes that the caller has kept a tensor over
        self._address = 0  # of `host`
        # `_content` when the host's bytes were those of `device`; empty while nobody can have changed it since
        self._same: tuple[int, ...] | None = None
        self._coming: Ticket = None
        self._leaving: Ticket = None
        self._out: Ticket = None
        self._fetched = 0  # `version` of the host's tensor when it was copied to the device
        self.shown: torch.UntypedStorage | None = None  # in which a forward expects the device's copy

    @abstractmethod
    def get(self) -> torch.Tensor | None:
        """The caller's tensor; None where there is none."""

    @abstractmethod
    def put(self, tensor: torch.Tensor) -> None:
        """Have the caller's tensor lie where `tensor` does, as another object, whose ``.data`` the caller may set
        (``module.cpu()`` does)."""

    @property
    def version(self) -> int:
        """How often the caller's tensor was changed, as autograd counts."""
        return 0 if (tensor := self.get()) is None else version_of(tensor)

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
        return self._same is not None and self.device is not None

    @property
    def moving(self) -> bool:
        """Whether a copy may be running, and nothing has waited for it."""
        return self._coming is not None or self._leaving is not None

    def look(self) -> bool:
        """Update this object to the tensor that the caller has now; returns whether it can be moved."""
        tensor = self.get()
        if tensor is None or not self._fits(tensor):
            self.settle()
            self.device, self._same = None, None
            return False
        if self.on_host or (self.device is not None and storage_key(self.device) == storage_key(tensor)):
            return True
        self.settle()  # one that the caller, or autograd, has made
        self.device, self._same = None, None
        self._leave_kept()
        if tensor.device == self.link.device:
            self.device = tensor.detach()
        else:
            self.link.drain()
            self._have_host(tensor).copy_(tensor)
            assert self.host is not None
            self.put(self.host)
        return True

    def _fits(self, tensor: torch.Tensor) -> bool:
        return placeable(tensor) and tensor.nbytes <= self._room

    def _leave_kept(self) -> None:
        """Take other host bytes if the caller has kept the tensor over these, whose numbers must stay."""
        if self.host is None or not _is_kept(self.host):
            return
        free = next((n for n, (_, tensor) in enumerate(self._left) if not _is_kept(tensor)), None)
        offset = self._bytes.fresh(self._room) if free is None else self._left.pop(free)[0]
        self._left.append((self._offset, self.host))
        self._offset, self.host, self._out = offset, None, None

    def settle(self) -> None:
        """Make compute wait until no copy reads or writes this.

        Raises:
            ExecutionError: if a copy failed; the caller's tensor is intact all the same.
        """
        try:
            if self._leaving is not None:
                self.link.wait(self._leaving)
            if self._coming is not None:
                self.link.wait(self._coming)
        except BaseException:
            self.link.drain()  # after an interrupt the copy still runs, and all that follows must come after it
            if self._coming is not None:
                self.device = None  # incomplete; the caller's tensor is not there before the copy has ended
            self._same, self._out = None, None
            raise
        finally:
            self._leaving = self._coming = None

    def release(self) -> None:
        """Free the device bytes; the caller's tensor then lies on the host, and is copied there now if needed."""
        if not self.look() or self.device is None:
            return
        self.settle()
        if not self.on_host:
            if self._same is None or (self._same and self._same != self._content(bool(self._same[0]))):
                self._leave_kept()
                self._have_host(self.device).copy_(self.device)
            assert self.host is not None
            self.put(self.host)
            if self.shown is None:
                self._warn_of_sharing(self.device)
        self.device = None

    def lane(self) -> AbstractContextManager[object]:
        """Within, the current stream is the one on which the device's copy is made."""
        return nullcontext()

    def let_go(self) -> None:
        """Free the device bytes; the caller's tensor is already on the host."""
        self.settle()
        self.device = None

    def show_host(self) -> None:
        """Put the caller's tensor on the host; the copy of its bytes may still be running (`arrive` waits)."""
        if not self.leaving:
            self.release()
        elif self.host is not None and not self.on_host:
            self.put(self.host)
        self._fetched = -1  # the device's copy is an older one from now on

    def arrive(self) -> None:
        """Block the host until its bytes have been copied there."""
        if self._out is not None:
            self.link.join(self._out)

    def hand_over(self, changes: bool = False, counted: bool = False) -> None:
        """Give the tensor to the caller, who may read and change it from now on; the device's copy, if any, is the
        caller's tensor. changes: whether it is about to be changed. counted: whether autograd counts every change, so
        that no checksum is needed."""
        self.settle()
        if self.look() and self.device is not None:
            if self.on_host:
                if self.version != self._fetched or self.may_change_uncounted:
                    self.device.copy_(self._have_host(self.device))  # the caller has changed it since it was copied
                self.put(self.device)
                assert self.host is not None
                self._warn_of_sharing(self.host)
            if changes:
                self._same = None
            elif self._same == ():
                self._same = self._content(counted)

    def rest(self, resident: bool, same: bool = False) -> None:
        """Put it where it lies between steps: on the device if `resident`. same: whether a copy there is what the
        caller's tensor on the host is."""
        with suppress(ExecutionError):  # a copy that failed has lost nothing, and is made again if need be
            self.settle()
        if self.on_host and not same:
            self.device = None  # of a step that ended early; the caller's may have been changed since
        if resident:
            prefetch([self])
            self.hand_over()
        else:
            self.release()

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return bytes on the device for the copy."""
        if self.shown is None:
            return self.link.allocate(nbytes)
        self.shown.resize_(nbytes)
        return bytes_of(self.shown)

    def _warn_of_sharing(self, left: torch.Tensor) -> None:
        """Warn if someone else has the memory that the caller's tensor has left. The text is the same for all, so that
        Python shows it once for a whole state dict."""
        if _is_kept(left) or in_shared_memory(left):
            warnings.warn(
                "rotoff: another tensor, as in a kept state dict, or another process shares the memory of a parameter"
                " or optimizer state that has moved between device and host. It does not follow updates; clone such"
                " tensors, or drop them",
                RuntimeWarning,
                stacklevel=1,
            )

    @property
    def may_change_uncounted(self) -> bool:
        """Whether hooks of the caller's may change it within the backward, through ``.data``."""
        return False

    def _content(self, counted: bool) -> tuple[int, ...]:
        """`counted`, and what changes with the caller's tensor: its version, and which tensor it is or its checksum."""
        assert self.device is not None
        return counted, self.version, id(self.get()) if counted else _checksum(self.device)

    def _have_host(self, like: torch.Tensor) -> torch.Tensor:
        view = View.of(like)._replace(offset=0)
        if self.host is None or View.of(self.host) != view:
            storage = self.link.host_bytes(self._offset, like.nbytes).untyped_storage()
            self.host = view.on(storage)
            self._address = self.host.data_ptr()
        return self.host


def prefetch(tensors: Iterable[PlacedTensor]) -> None:
    """Take device bytes and start the copies from the host, as one: a copy costs the host more than a tensor in it."""
    coming = [one for one in tensors if one.look() and one.device is None]
    if not coming:
        return
    link, hosts = coming[0].link, [one.host for one in coming if one.host is not None]
    # no more, since savers look for storages shared by tensors
    there = [one.allocate(host.nbytes) for one, host in zip(coming, hosts, strict=True)]
    ticket = link.copy_in(there, [one._offset for one in coming], *dict.fromkeys(one._out for one in coming))
    for one, host, data in zip(coming, hosts, there, strict=True):
        one.device = View.of(host).on(data.untyped_storage())
        one._coming, one._same, one._fetched = ticket, (), one.version


def offload(tensors: Iterable[PlacedTensor]) -> None:
    """Start the copies to the host, as one."""
    going = [one for one in tensors if one.look() and one.device is not None and not one.on_host]
    if not going:
        return
    devices = [one.device for one in going if one.device is not None]
    for one, device in zip(going, devices, strict=True):
        one._leave_kept()
        one._have_host(device)
    sources = [_bytes_in(device) for device in devices]
    ticket = going[0].link.copy_out(sources, [one._offset for one in going])
    for one in going:
        one._leaving = one._out = ticket
        one._same = ()


def _bytes_in(tensor: torch.Tensor) -> torch.Tensor:
    begin = int(tensor.storage_offset()) * tensor.itemsize
    return bytes_of(tensor.untyped_storage())[begin : begin + tensor.nbytes]


def _is_kept(own: torch.Tensor) -> bool:
    """Whether anything beside `own` holds its storage."""
    return uses_of(own) > 2  # `own`, and that call's


def _checksum(tensor: torch.Tensor) -> int:
    """Return a number that also shows changes that autograd's version counter does not count, such as
    ``parameter.data.mul_``; of those that only move numbers, it shows moves between its blocks."""
    content = bytes_of(tensor.untyped_storage())
    words = content[: content.numel() // 8 * 8].view(torch.int64)  # PyTorch adds up bytes in a copy, 8 times as large
    even = words.numel() // BLOCKS * BLOCKS
    found = words[:even].view(BLOCKS, -1).sum(1).cumsum_(0).sum()
    found += words[even:].sum()
    found += content[words.nbytes :].sum()
    return int(found)


def checksum_bytes(block: int) -> int:
    """The bytes on the device that making a checksum takes, if the allocator hands out blocks of `block` bytes."""
    return rounded(8 * BLOCKS, block) + 2 * rounded(8, block)


class PlacedParameter(PlacedTensor):
    """A parameter's own numbers, or all that FSDP2 gathers of its `shard`."""

    def __init__(self, parameter: nn.Parameter, shard: Shard | None, host: HostBytes, offset: int, room: int) -> None:
        super().__init__(host, offset, room)
        self._parameter, self._shard = parameter, shard

    def get(self) -> torch.Tensor:
        return self._parameter if self._shard is None else self._shard.data

    def put(self, tensor: torch.Tensor) -> None:
        if self._shard is None:
            self._parameter.data = tensor
        else:
            self._shard.put(tensor)

    @property
    def may_change_uncounted(self) -> bool:
        return bool(self._parameter._backward_hooks or self._parameter._post_accumulate_grad_hooks)


class PlacedGradient(PlacedTensor):
    """A parameter's gradient.

    If a parameter lies on the host, autograd accumulates on another thread the gradients that do not come by `take`,
    such as that of a penalty on the parameter outside of the model. So gradients that come by `take` are kept in
    `apart`, not in ``parameter.grad``, until the backward has ended. So are gradients on another device than the
    parameter: the caller does not see them within a step.
    """

    def __init__(self, parameter: nn.Parameter, shard: Shard | None, host: HostBytes, offset: int, room: int) -> None:
        super().__init__(host, offset, room)
        self._parameter, self._shard = parameter, shard
        self.apart: torch.Tensor | None = None
        self.callers: int | None = None  # the storage of a larger tensor, if the caller has that

    def _fits(self, tensor: torch.Tensor) -> bool:
        """Several may be parts of one tensor, as those of shards that FSDP2 gathers at once."""
        part = tensor.is_contiguous() and tensor.numel() > 0 and tensor.nbytes <= self._room
        return super()._fits(tensor) or (part and storage_key(tensor) != self.callers)

    def look(self) -> bool:
        gradient = self.get()
        if self._shard is not None and gradient is not None:
            self._shard.reduced()
            if not gradient.numel():  # of an empty shard, and a part of one tensor with others
                self.put(torch.empty_like(gradient, device=self._parameter.device))
        return super().look()

    def get(self) -> torch.Tensor | None:
        gradient = self._parameter.grad
        if self.apart is not None or gradient is None or isinstance(gradient, UsedUp):
            return self.apart
        return local(gradient)

    def put(self, tensor: torch.Tensor) -> None:
        if self._shard is not None and tensor.device != self._parameter.device:  # which comes, too
            self._parameter.grad._local_tensor = tensor.detach()  # type: ignore[union-attr]
        elif self.apart is not None:
            self.apart = tensor
        elif tensor.device == self._parameter.device:
            self._parameter.grad = in_place_of(self._parameter.grad, tensor)
        else:
            self.apart, self._parameter.grad = tensor, None

    def _warn_of_sharing(self, left: torch.Tensor) -> None:
        """Nothing: autograd may still hold a gradient that has just arrived."""

    def take(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Keep the gradient of a parameter that lies on the host and return None; or return it for autograd to
        accumulate there, if the parameter has hooks, or a gradient on the host to which it is added."""
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
        self._leave_kept()
        self.apart, self.device, self._same = gradient, gradient, None
        return None

    @property
    def with_autograd(self) -> bool:
        """Whether only autograd may use it, because it may add to it on the host while a backward runs."""
        gradient, there = self._parameter.grad, self.link.device
        away = self._parameter.device != there and (gradient is None or gradient.device != there)
        return away and self.apart is None and self._shard is None

    @property
    def on_device(self) -> bool:
        """Whether all of it is on the device, and only there."""
        alone = self.apart is None or self._parameter.grad is None
        return alone and self.look() and self.device is not None and not self.leaving

    def join(self) -> None:
        """After the backward: add up its parts, and put the sum into ``parameter.grad`` if the device is the same."""
        apart, theirs = self.apart, self._parameter.grad
        if self._shard is not None:
            self._join_shard(self._shard)
            return
        if apart is None:
            return
        if theirs is not None:
            self.settle()
            self.arrive()
            with torch.no_grad():
                apart.add_(theirs.to(apart.device))
            self._parameter.grad, self._same = None, None
        if apart.device == self._parameter.device:
            self.apart, self._parameter.grad = None, apart.detach()

    def lane(self) -> AbstractContextManager[object]:
        return nullcontext() if self._shard is None else self._shard.reducing()

    def let_go(self) -> None:
        super().let_go()
        if self._shard is not None:
            self._shard.let_go()

    def _join_shard(self, shard: Shard) -> None:
        earlier, shard.earlier, gradient = shard.earlier, None, self.get()
        if gradient is None:
            self._parameter.grad = earlier
            return
        if earlier is not None:
            self.settle()
            self.arrive()
            gradient.add_(local(earlier).to(gradient.device))
            self._same = None
        self.put(gradient)  # it says where it lies from now on

    def forget(self) -> None:
        """Drop it, because the backward has updated the parameter."""
        if self.apart is None:
            self._parameter.grad = None
        self.apart = None


class PlacedState(PlacedTensor):
    """One tensor of an optimizer's state of a parameter."""

    def __init__(self, state: dict[str, Any], key: str, host: HostBytes, offset: int, room: int) -> None:
        super().__init__(host, offset, room)
        self.state = state
        self._key = key

    def get(self) -> torch.Tensor | None:
        found = self.state.get(self._key)
        return local(found) if isinstance(found, torch.Tensor) else None

    def put(self, tensor: torch.Tensor) -> None:
        self.state[self._key] = in_place_of(self.state[self._key], tensor)
