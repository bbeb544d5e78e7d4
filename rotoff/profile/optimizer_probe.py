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
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..accelerator import block_bytes, finish, is_accelerator
from ..errors import OptionError
from ..runtime.placed.tensor import room_of, unplaceable
from ..runtime.placed.updates import copy_of, own_step
from ..tensors.storage import local, rounded
from ..tensors.torch_settings import bytes_by_default
from ..tensors.undo import OTHERS, is_as_before, is_generator, note, put_back
from .allocations import logged, peak_of

_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)  # distinct sizes identify the dimensions of a state's tensor
_SIZED = 1 << 20  # elements of the parameters on which a step's bytes are measured, at most
# And its time: a quarter of what the optimizer updates, but at least and at most so many. The most are more than the
# caches of a host hold, and take an accelerator far longer than launching the kernels.
_LEAST_TIMED, _MOST_TIMED = 1 << 20, 1 << 26
_REPEATS = 3
_SCALARS = 256  # bytes beside that a parameter takes in its update, such as its step count and rows of a factor
_OTHER = (
    "rotoff can place parameters only if the optimizer updates each one by itself; give a mem_limit instead of a"
    " device_limit"
)


class OptimizerProbe:
    """Measures the optimizers that update a model.

    Args:
        device: on which parameters are updated, unless the host does it.
        costs: earlier measurements; new ones are added. None: an update's seconds are of no interest, and 0.

    Raises:
        OptionError: if an optimizer does not update each parameter by itself, or needs a closure.
    """

    def __init__(self, optimizers: Sequence[Optimizer], device: torch.device, costs: dict[Any, float] | None) -> None:
        self._device = device
        self._repeats = 0 if costs is None else _REPEATS
        self._group: dict[int, tuple[Optimizer, dict[str, Any]]] = {}
        self._states: dict[Any, dict[str, Any]] = {}
        self._device_alone: set[Any] = set()  # keys of those whose optimizers fail on the host
        self._costs = {} if costs is None else costs
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
        return sum(self._seconds_of(p, self._device) for p in parameters if self.updates(p))

    def host_update_time(self, parameters: Sequence[nn.Parameter]) -> float | None:
        """Return the seconds of updating `parameters` on the host's processor; None if it cannot."""
        if not self.on_host(parameters):
            return None
        return sum(self._seconds_of(p, _HOST) for p in parameters if self.updates(p))

    def update_bytes(self, parameters: Sequence[nn.Parameter]) -> int:
        """Return what updating `parameters` takes beside them, their gradients and their states: what it takes on
        smaller ones of their proportions, times their elements for each of those."""
        updated = [p for p in parameters if self.updates(p)]
        by = max(1.0, sum(local(p).numel() for p in updated) / _SIZED)
        shapes = [_shrunk(p, by) for p in updated]
        key = self._device, *((self._key(p), shape) for p, shape in zip(updated, shapes, strict=True))
        if key not in self._costs:
            self._costs[key] = self._bytes(updated, shapes, self._device)
        return int(by * self._costs[key]) + _SCALARS * len(parameters)

    def _key(self, parameter: nn.Parameter) -> Any:
        optimizer, group = self._group[id(parameter)]
        return type(optimizer), id(group), parameter.dtype, parameter.dim()

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
        both = self._stand_in([(parameter, p) for p in small])
        one_by_one = self._stand_in([(parameter, p) for p in apart])
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

    def _seconds_of(self, parameter: nn.Parameter, device: torch.device) -> float:
        """Return the seconds of updating a parameter. Where bytes depend on the shape, as with Muon, which multiplies
        matrices, seconds do."""
        if not self._repeats:
            return 0.0
        key: Any = (device, self._key(parameter))
        if key not in self._costs:
            self._state(parameter)
            try:
                one, other = (self._bytes([parameter], [_shape(parameter, 1 << 14, n)], device) for n in (512, 64))
                alike = math.isclose(one, other, rel_tol=0.001)
            except RuntimeError:  # no memory, as for a square matrix of so many rows
                alike = False
            self._costs[key] = self._seconds_of_a_byte(parameter, device) if alike else math.nan
        if math.isnan(self._costs[key]):
            shape = _shrunk(parameter, max(1.0, local(parameter).numel() / _LEAST_TIMED))
            key = (*key, shape)
            if key not in self._costs:
                self._costs[key] = self._seconds(parameter, shape, device) / (math.prod(shape) * parameter.itemsize)
        return self._costs[key] * local(parameter).nbytes

    def _seconds_of_a_byte(self, parameter: nn.Parameter, device: torch.device) -> float:
        """Return the seconds that each byte of a parameter adds to its update: what an update takes whatever its size,
        such as the launch of kernels, is shared by all parameters of a step."""
        key, (_, group) = self._key(parameter), self._group[id(parameter)]
        alike = sum(local(one).numel() for one in group["params"] if self._key(one) == key)
        elements = min(max(alike // 4, _LEAST_TIMED), _MOST_TIMED)
        while True:
            try:
                large, small = (
                    self._seconds(parameter, _shape(parameter, n), device) for n in (elements, elements // 4)
                )
                break
            except RuntimeError:  # no memory, as a CPU says it
                if elements == _LEAST_TIMED:
                    raise
                elements = max(elements // 4, _LEAST_TIMED)
        # with a noisy clock updates must not seem to be free
        return max(large - small, large / 10) / (elements * 3 // 4 * parameter.itemsize)

    def _bytes(
        self, parameters: Sequence[nn.Parameter], shapes: Sequence[tuple[int, ...]], device: torch.device
    ) -> int:
        """Return the most bytes that updating parameters of these `shapes` takes, by each optimizer in turn."""
        small = [(p, _small(s, p.dtype, n, device)) for n, (p, s) in enumerate(zip(parameters, shapes, strict=True))]
        most = 0
        for of in {id(optimizer): None for optimizer, _ in self._group.values()}:
            if own := [(p, one) for p, one in small if id(self._group[id(p)][0]) == of]:
                made = self._stand_in(own)
                with _unchanged(made):
                    own_step(made)  # which makes the states
                    most = max(most, peak_of(logged(partial(own_step, made), device)[1]))
        return most

    def _seconds(self, parameter: nn.Parameter, shape: Sequence[int], device: torch.device) -> float:
        """Return the seconds of updating a parameter of that shape."""
        large = _small(shape, parameter.dtype, 1, device)
        optimizer, seconds = self._stand_in([(parameter, large)]), []
        with _unchanged(optimizer):
            for _ in range(1 + self._repeats):
                finish(device)
                began = time.perf_counter()
                own_step(optimizer)
                finish(device)
                seconds.append(time.perf_counter() - began)
        return statistics.median(seconds[1:])

    def _stand_in(self, pairs: Sequence[tuple[nn.Parameter, nn.Parameter]]) -> Optimizer:
        """Return a copy of an optimizer that updates, in place of each of some parameters, a small one."""
        optimizer, _ = self._group[id(pairs[0][0])]
        made = copy_of(optimizer)
        made.param_groups, made.state = [], defaultdict(dict)
        for group in optimizer.param_groups:
            if several := [small for p, small in pairs if self._group[id(p)][1] is group]:
                options = {k: v for k, v in group.items() if k != "params"}
                made.param_groups.append({**copy.deepcopy(options), "params": several})
        for parameter, small in pairs:
            known = optimizer.state.get(parameter, {})
            tensors = [t for t in known.values() if isinstance(t, torch.Tensor)]
            if known and all((t.numel() == 1 and t.dim() < 2) or t.shape == parameter.shape for t in tensors):
                # an optimizer may make its state in its constructor
                made.state[small] = {k: _like(v, parameter, small) for k, v in known.items()}
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


def _shrunk(parameter: nn.Parameter, by: float) -> tuple[int, ...]:
    """Return the parameter's shape with so many times fewer elements, the first two dimensions reduced alike."""
    sizes = list(local(parameter).shape)
    shorter_first = sorted(range(len(sizes[:2])), key=sizes.__getitem__)
    for left, n in zip(range(len(shorter_first), 0, -1), shorter_first, strict=True):
        size = max(1, sizes[n])
        sizes[n] = math.ceil(size / by ** (1 / left))
        by *= sizes[n] / size
    return tuple(sizes)


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
