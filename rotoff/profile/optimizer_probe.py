"""Finds out what an optimizer keeps for each parameter and what a step costs, by running it on small parameters."""

from __future__ import annotations

import copy
import itertools
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from ..accelerator import block_bytes, finish, is_accelerator
from ..errors import OptionError
from ..runtime.placed.tensor import room_of, unplaceable
from ..runtime.placed.updates import copy_of, host_threads, own_step
from ..tensors.storage import local, rounded
from ..tensors.torch_settings import bytes_by_default
from ..tensors.undo import OTHERS, is_as_before, is_generator, note, put_back
from .allocations import logged, peak_of

_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)  # distinct sizes identify the dimensions of a state's tensor
# Elements of the parameters on which a step's bytes are measured; the last are for when the time is of no interest.
_SIZED, _SIZED_QUICKLY = 1 << 18, 1 << 14
# And its time: a quarter of what the optimizer updates, but at least and at most so many. The most are more than the
# caches of a host hold, and take an accelerator far longer than launching the kernels.
_LEAST_TIMED, _MOST_TIMED = 1 << 20, 1 << 26
_REPEATS = 3
_SCALARS = 256  # bytes beside that a parameter takes in its update, such as its step count and rows of a factor
_OTHER = (
    "rotoff can place parameters only if the optimizer updates each one by itself; give a mem_limit instead of a"
    " device_limit"
)


class UpdateCosts(NamedTuple):
    """What an update takes for each byte of a parameter.

    Attributes:
        alone: bytes if the optimizer updates no other before it.
        left: bytes that it holds while it updates the next one.
        together: bytes that each of several adds if it updates them at once; 0 if it does not.
        by_shape: whether bytes depend on the shape, as with Muon, which multiplies matrices.
    """

    seconds: float
    alone: float
    left: float
    together: float
    by_shape: bool = False


class OptimizerProbe:
    """Measures the optimizers that update a model.

    Args:
        device: on which parameters are updated, unless the host does it.
        times: earlier measurements; new ones are added. None: an update's seconds are of no interest, and 0.

    Raises:
        OptionError: if an optimizer does not update each parameter by itself, or needs a closure.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], device: torch.device, times: dict[Any, UpdateCosts] | None
    ) -> None:
        self._device = device
        self._repeats = 0 if times is None else _REPEATS
        self._group: dict[int, tuple[Optimizer, dict[str, Any]]] = {}
        self._states: dict[Any, dict[str, Any]] = {}
        self._device_alone: set[Any] = set()  # keys of those whose optimizers fail on the host
        self._times = {} if times is None else times
        for optimizer in optimizers:
            if not isinstance(optimizer, Optimizer):
                raise OptionError(
                    f"optimizer is a {type(optimizer).__name__}; give a torch.optim.Optimizer, or a list of them"
                )
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self._group[id(parameter)] = optimizer, group

    def updates(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter needs a gradient and one of the optimizers updates it."""
        return parameter.requires_grad and id(parameter) in self._group

    def state_bytes(self, parameter: nn.Parameter) -> int:
        """Return the bytes of the tensors that the optimizer keeps for the parameter, each rounded as where it is
        placed. For a frozen one it may have some from earlier training."""
        state, of = self._whole_state(parameter)
        tensors = (of(t) for t in state.values() if isinstance(t, torch.Tensor) and t.numel() > 1)
        return sum(rounded(room_of(t), block_bytes(self._device)) for t in tensors)

    def unplaced_bytes(self, parameters: Iterable[nn.Parameter]) -> int:
        """Return the bytes of the other tensors that the optimizer keeps for `parameters`, which are not placed: step
        counts, and those in lists or dictionaries."""
        states = map(self._whole_state, parameters)
        tensors = (of(t) for state, of in states for t in unplaceable(state))
        return sum(rounded(t.nbytes, block_bytes(t.device)) for t in tensors)

    def _whole_state(self, parameter: nn.Parameter) -> tuple[dict[str, Any], Callable[[torch.Tensor], torch.Tensor]]:
        """Return the optimizer's state of a parameter, or that of a small one, and what makes its tensors those of the
        parameter here."""
        optimizer, _ = self._group.get(id(parameter), (None, None))
        known = {} if optimizer is None else optimizer.state.get(parameter, {})
        if not self.updates(parameter) or any(isinstance(t, torch.Tensor) for t in known.values()):
            return known, local
        return self._state(parameter), partial(_resized, parameter=parameter)

    def on_host(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Return whether the host's processor can update the parameters."""
        for p in filter(self.updates, parameters):
            self._state(p)
        return not any(self._key(p) in self._device_alone for p in filter(self.updates, parameters))

    def update_time(self, parameters: Sequence[nn.Parameter]) -> float:
        """Return the seconds of updating `parameters` on the device."""
        return sum(self._timed(p, self._device).seconds * local(p).nbytes for p in parameters if self.updates(p))

    def host_update_time(self, parameters: Sequence[nn.Parameter]) -> float | None:
        """Return the seconds of updating `parameters` on the host's processor; None if it cannot."""
        if not self.on_host(parameters):
            return None
        return sum(self._timed(p, _HOST).seconds * local(p).nbytes for p in parameters if self.updates(p))

    def update_bytes(self, parameters: Sequence[nn.Parameter]) -> int:
        """Return what updating `parameters` takes beside them, their gradients and their states."""
        most = together = beside = 0.0
        before: nn.Parameter | None = None
        for p in filter(self.updates, parameters):
            found = self._timed(p, self._device)
            nbytes = local(p).nbytes
            most = max(most, self._left(before, p) + found.alone * nbytes)
            together += found.together * nbytes
            beside = max(beside, (found.alone - found.together) * nbytes)
            before = p
        return int(max(most, together + beside)) + _SCALARS * len(parameters)

    def _left(self, before: nn.Parameter | None, now: nn.Parameter) -> float:
        """Return what the update of one parameter holds while the next is updated, at most. Adafactor, say, keeps the
        mean of a matrix's rows until the next matrix, past any vector."""
        if before is None:
            return 0.0
        found = self._timed(before, self._device)
        return local(before).nbytes * (found.alone if found.by_shape and before.dim() != now.dim() else found.left)

    def _key(self, parameter: nn.Parameter) -> Any:
        _, group = self._group[id(parameter)]
        return id(group), parameter.dtype, parameter.dim()

    def _state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the state of a small parameter of the same kind; checks the optimizer first."""
        key = self._key(parameter)
        if key not in self._states:
            try:
                self._states[key] = self._checked_state(parameter, _HOST)
            except OptionError:
                if not is_accelerator(self._device):
                    raise
                # it may have kernels for the device alone, as with `capturable`, or for quantized states
                self._states[key] = self._checked_state(parameter, self._device)
                self._device_alone.add(key)
        return self._states[key]

    def _checked_state(self, parameter: nn.Parameter, device: torch.device) -> dict[str, Any]:
        """Return the state of a small parameter on `device`.

        Raises:
            OptionError: if the optimizer fails there, or does not update each parameter by itself.
        """
        shape = _PRIMES[: parameter.dim()]
        small = [_small(shape, parameter.dtype, seed, device) for seed in (1, 2)]
        apart = [copy.deepcopy(p) for p in small]
        for p, q in zip(small, apart, strict=True):
            q.grad = None if p.grad is None else p.grad.clone()
        both = self._stand_in(parameter, small)
        one_by_one = self._stand_in(parameter, apart)
        options = _options(both)
        name, drew = type(self._group[id(parameter)][0]).__name__, False
        try:
            for _ in range(2):
                with _unchanged(both) as so_far:
                    own_step(both)
                    counts, draws = so_far()
                    drew |= draws
                for p in apart:
                    one_by_one.param_groups[0]["params"] = [p]
                    with _unchanged(one_by_one):
                        own_step(one_by_one)
        except Exception as error:
            raise OptionError(f"{name} fails in a step on small parameters ({error}); {_OTHER}") from error
        if drew:
            raise OptionError(
                f"{name} draws random numbers in its step, and steps of groups of parameters would draw others than"
                " one step of all; give a mem_limit instead of a device_limit"
            )
        if {*map(id, both.state)} - {*map(id, small)} or counts:  # each group would count
            raise OptionError(f"{name} keeps a state that belongs to no parameter; {_OTHER}")
        if _options(both) != options or not all(map(torch.equal, small, apart)):
            raise OptionError(f"{name} does not update each parameter by itself; {_OTHER}")
        return both.state[small[0]]

    def _timed(self, parameter: nn.Parameter, device: torch.device) -> UpdateCosts:
        """Return what updating a byte of a parameter takes."""
        key = device, type(self._group[id(parameter)][0]), self._key(parameter)
        elements = _SIZED if self._repeats else _SIZED_QUICKLY
        if key not in self._times:
            self._state(parameter)
            try:
                found = UpdateCosts(0.0, *self._bytes(parameter, _shape(parameter, elements), device))
                if parameter.dim() > 1:
                    other = self._bytes(parameter, _shape(parameter, elements, 64), device)
                    found = found._replace(by_shape=not math.isclose(sum(other), sum(found[1:4]), rel_tol=0.001))
                if self._repeats and not found.by_shape:
                    found = found._replace(seconds=self._seconds_of_a_byte(parameter, device))
            except RuntimeError:  # no memory, as for a square matrix of so many rows
                found = UpdateCosts(0.0, 0.0, 0.0, 0.0, by_shape=True)
            self._times[key] = found
        if not (found := self._times[key]).by_shape:
            return found
        if (own := (*key, tuple(local(parameter).shape))) not in self._times:
            timed = _scaled(parameter, _LEAST_TIMED)
            seconds = self._seconds(parameter, timed, device) if self._repeats else 0.0
            sized = self._bytes(parameter, _scaled(parameter, _SIZED), device)
            self._times[own] = UpdateCosts(seconds / (math.prod(timed) * parameter.itemsize), *sized, by_shape=True)
        return self._times[own]

    def _seconds_of_a_byte(self, parameter: nn.Parameter, device: torch.device) -> float:
        """Return the seconds that each byte of a parameter adds to its update: what an update takes whatever its size,
        such as the launch of kernels, is shared by all parameters of a step."""
        key = self._key(parameter)
        alike = sum(local(one).numel() for one in self._parameters() if self._key(one) == key)
        elements = min(max(alike // 4, _LEAST_TIMED), _MOST_TIMED)
        while True:
            try:
                large, small = (
                    self._seconds(parameter, _shape(parameter, n), device) for n in (elements, elements // 4)
                )
                break
            except torch.OutOfMemoryError:
                if elements == _LEAST_TIMED:
                    raise
                elements = max(elements // 4, _LEAST_TIMED)
        # with a noisy clock updates must not seem to be free
        return max(large - small, large / 10) / (elements * 3 // 4 * parameter.itemsize)

    def _parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the optimizers."""
        groups = {id(group): group for _, group in self._group.values()}
        for group in groups.values():
            yield from group["params"]

    def _bytes(self, parameter: nn.Parameter, shape: Sequence[int], device: torch.device) -> tuple[float, float, float]:
        small = [_small(shape, parameter.dtype, seed, device) for seed in (1, 2, 3)]
        made = [self._stand_in(parameter, small[:count]) for count in (1, 2, 3)]
        with _unchanged(made[0]):  # they share attributes
            for several in made:
                own_step(several)
            alone, two, three = (peak_of(logged(partial(own_step, some), device)[1]) / small[0].nbytes for some in made)
        return alone, two - alone, max(0.0, three - two)

    def _seconds(self, parameter: nn.Parameter, shape: Sequence[int], device: torch.device) -> float:
        """Return the seconds of updating a parameter of that shape, by the threads that will do it."""
        large = _small(shape, parameter.dtype, 1, device)
        optimizer, seconds, threads = self._stand_in(parameter, [large]), [], torch.get_num_threads()
        if device != self._device:
            torch.set_num_threads(host_threads())
        try:
            with _unchanged(optimizer):
                for _ in range(1 + self._repeats):
                    finish(device)
                    began = time.perf_counter()
                    own_step(optimizer)
                    finish(device)
                    seconds.append(time.perf_counter() - began)
        finally:
            torch.set_num_threads(threads)
        return statistics.median(seconds[1:])

    def _stand_in(self, parameter: nn.Parameter, small: list[nn.Parameter]) -> Optimizer:
        """Return a copy of the parameter's optimizer that updates `small` instead."""
        optimizer, group = self._group[id(parameter)]
        made = copy_of(optimizer)
        made.param_groups = [{**copy.deepcopy({k: v for k, v in group.items() if k != "params"}), "params": small}]
        made.state = defaultdict(dict)
        known = optimizer.state.get(parameter, {})
        tensors = [t for t in known.values() if isinstance(t, torch.Tensor)]
        alike = all((t.numel() == 1 and t.dim() < 2) or t.shape == parameter.shape for t in tensors)
        for p in small if known and alike else ():  # an optimizer may make its state in its constructor
            made.state[p] = {k: _like(v, parameter, p) for k, v in known.items()}
        return made


def _resized(tensor: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Return what `tensor`, of the state of a small parameter, is for `parameter`; without data."""
    dimensions = list(zip(_PRIMES, local(parameter).shape, strict=False))
    sizes: dict[int, int] = {}
    for count in range(1, len(dimensions) + 1):  # a state's dimension may be several of the parameter's in one
        for some in itertools.combinations(dimensions, count):
            sizes[math.prod(small for small, _ in some)] = math.prod(size for _, size in some)
    return torch.empty([sizes.get(size, size) for size in tensor.shape], dtype=tensor.dtype, device="meta")


@contextmanager
def _unchanged(optimizer: Optimizer) -> Iterator[Callable[[], tuple[bool, bool]]]:
    """Restore after the block what the optimizer's attributes hold, which its stand-ins share, and the generators of
    all code. Yields what tells whether something of these has changed so far, and whether a generator has."""

    def own() -> dict[str, Any]:
        return {k: v for k, v in vars(optimizer).items() if k not in ("param_groups", "state", "defaults")}

    def numbers() -> dict[str, Any]:
        return {name: value for name, value in own().items() if type(value) in (int, float)}

    def so_far() -> tuple[bool, bool]:
        others = [one for one, content in held.values() if not is_as_before(one, content)]
        return bool(others) or numbers() != before, any(map(is_generator, others))

    held: dict[int, tuple[Any, Any]] = {}
    settings = (value for group in optimizer.param_groups for value in group.values() if is_generator(value))
    for value in (*own().values(), *settings, torch.default_generator, *OTHERS):
        note(value, held)
    before = numbers()
    try:
        with bytes_by_default():
            yield so_far
    finally:
        for one, content in held.values():
            put_back(one, content)


def _options(optimizer: Optimizer) -> str:
    return repr([{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups])


def _shape(parameter: nn.Parameter, elements: int, columns: int = 512) -> tuple[int, ...]:
    """Return the shape of a parameter with as many dimensions and so many elements."""
    return (elements,) if parameter.dim() < 2 else (elements // columns, columns, *(1 for _ in parameter.shape[2:]))


def _scaled(parameter: nn.Parameter, elements: int) -> tuple[int, ...]:
    """Return the parameter's shape, its first two dimensions reduced alike if it has more than so many elements."""
    here = local(parameter)
    by = math.sqrt(max(1.0, here.numel() / elements))
    return tuple(max(1, round(size / by)) if n < 2 else size for n, size in enumerate(here.shape))


_HOST = torch.device("cpu")


def _small(shape: Sequence[int], dtype: torch.dtype, seed: int, device: torch.device = _HOST) -> nn.Parameter:
    """Return a parameter with a gradient; a large one repeats its first numbers, which are slow to draw."""
    generator, count = torch.Generator().manual_seed(seed), math.prod(shape)
    drawn = max(min(count, _LEAST_TIMED), 1)

    def numbers() -> torch.Tensor:
        own = torch.empty(drawn, dtype=torch.float32, device=_HOST).normal_(generator=generator).to(device, dtype)
        return own.repeat(-(-count // drawn))[:count].view(tuple(shape))

    made = nn.Parameter(numbers())
    made.grad = numbers()
    return made


def _like(value: Any, parameter: nn.Parameter, small: nn.Parameter) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    if value.shape == parameter.shape:
        return torch.zeros_like(small, dtype=value.dtype)
    value = local(value)
    return value.to(small.device, copy=True) if value.device == parameter.device else value.clone()
