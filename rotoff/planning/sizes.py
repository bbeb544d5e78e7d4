"""Profiles at measured input sizes, and upper bounds for other sizes by interpolation.

A plan for slightly larger sizes also serves all smaller ones, so sizes are rounded up before they are looked up: to one
of eight steps from each power of two to the next.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ..errors import ChainError
from ..profile.between_sizes import NotAlike, Share, between, with_times, without_times
from ..profile.profile import Profile
from ..tensors.tree import flatten

STEPS = 8  # from one power of two to the next
GRAIN = 16  # sizes from 2 * GRAIN on are rounded up to multiples of it, since models pad to such
IMAGE, DEEP = 4, 32  # from IMAGE dimensions on, DEEP replaces GRAIN for shape[2:]: deep networks divide these by 32
MEASURED = 16  # measured sizes that are kept
SQUARE = 2  # highest power of a size in the bytes of a tensor
MONOMIALS = 1000  # most monomials in the polynomial for bytes
EXACT = 1e-9
PIVOTS = 200
SMALL = 1 << 16  # bytes of a peak, of which kernels' fixed workspaces are a part
STRAY = 0.1  # share of the log of a size's ratio by which that of a tensor's bytes may differ from a whole power

Sizes = tuple[tuple[int, ...], ...]  # the shape of each tensor of the input
Array = npt.NDArray[np.float64]


class HasProfile(Protocol):
    """Anything that has a profile."""

    @property
    def profile(self) -> Profile: ...


Of = TypeVar("Of", bound=HasProfile)


class Near(NamedTuple, Generic[Of]):
    """An interpolated profile.

    profile: charges at least the bytes that the requested sizes need. like: the measured course with the most bytes
    among those it was interpolated from. loose: estimated ratio of the bytes charged to the bytes needed.
    """

    profile: Profile
    like: Of
    loose: float


def split(shapes: Sequence[Sequence[Any]]) -> tuple[Any, Sizes]:
    """Split `shapes` into what inputs of all sizes have in common, and the sizes.

    shapes: for each tensor (shape, dtype, device, requires_grad, strides unless contiguous), as in
        `specialization.signature`.
    """
    return tuple(_all_but_sizes(*one) for one in shapes), tuple(tuple(one[0]) for one in shapes)


def rounded(sizes: Sizes) -> Sizes:
    """Round each size up; equal sizes stay equal."""
    deep = {size for shape in sizes if len(shape) >= IMAGE for size in shape[2:]}
    return tuple(tuple(_rounded(size, DEEP if size in deep else GRAIN) for size in shape) for shape in sizes)


def _rounded(size: int, grain: int) -> int:
    step = 1 << max(0, size.bit_length() - STEPS.bit_length())
    if size >= 2 * grain:
        step = max(step, grain)
    return -(-size // step) * step


class MeasuredSizes(Generic[Of]):
    """Measurements of one model on inputs that differ only in size."""

    def __init__(self) -> None:
        self.owed = 0.0  # seconds that steps lost, since they were planned for more bytes than they need
        self.price = 0.0  # seconds of measuring per element of the largest tensor
        self._rows: dict[Sizes, Of] = {}
        self._untimed: dict[Sizes, Profile] = {}  # their profiles without times
        self._alike: list[dict[Sizes, Of]] = []  # groups whose profiles can be interpolated
        self._tensors: dict[Sizes, tuple[Array, Array]] = {}
        self._linear: set[int] = set()  # dimensions, of all tensors in order, in which no tensor was seen to be squared
        self._curved: set[int] = set()  # those in which one may be
        self._doubts = 0  # how often a size took more bytes than interpolated

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Of]:
        return iter(self._rows.values())

    @property
    def sizes(self) -> list[Sizes]:
        """The measured sizes, oldest first."""
        return list(self._rows)

    @property
    def last(self) -> Of:
        return next(reversed(self._rows.values()))

    def add(self, sizes: Sizes, measured: Of, tensors: Sequence[int] = (), picks: bool = False) -> None:
        """Add a measurement; forget the oldest beyond `MEASURED`.

        Args:
            tensors: bytes of each tensor of the step.
            picks: whether they also depend on data.
        """
        known = sizes in self._rows
        own = np.array(tensors, dtype=float), _peaks(measured.profile)
        for at, others in self._tensors.items():
            linear, seen = powers_seen(at, sizes, others, own)
            (self._linear if linear else self._curved).update(seen)
        self._tensors[sizes] = own
        for rows in (self._rows, *self._alike):
            rows.pop(sizes, None)
        self._rows[sizes], self._untimed[sizes] = measured, without_times(measured.profile)
        for rows in filter(None, self._alike):
            if _alike(measured.profile, next(iter(rows.values())).profile):
                told = None if known or picks else self._near(rows, rounded(sizes))
                if told is not None and saved_bytes(told.profile) < saved_bytes(measured.profile):
                    self.doubt()
                rows[sizes] = measured
                break
        else:
            self._alike.append({sizes: measured})
        while len(self._rows) > MEASURED:
            gone = next(iter(self._rows))
            for rows in (self._rows, *self._alike):
                rows.pop(gone, None)
            self._tensors.pop(gone, None)
            self._untimed.pop(gone)
        self._alike = [rows for rows in self._alike if rows]

    def doubt(self) -> None:
        """Interpolate less, since a size took more bytes than interpolated. After the first, a size is charged for what
        the next larger measured one takes, since models pad their inputs; after the second, nothing is interpolated."""
        self._doubts += 1

    def near(self, wanted: Sizes) -> Near[Of] | None:
        """The interpolated profile that charges least for `wanted` and all smaller sizes, with times if some sizes have
        times; None if there is none."""
        if self._doubts > 1:
            return None
        found = [one for rows in self._alike if (one := self._near(rows, wanted)) is not None]
        return min(found, key=lambda one: saved_bytes(one.profile), default=None)

    def _near(self, rows: dict[Sizes, Of], wanted: Sizes) -> Near[Of] | None:
        fit = {at: one for at, one in rows.items() if not _alone(at, wanted)}
        every = self._weighted({at: self._untimed[at] for at in fit}, wanted)
        if every is None:
            return None
        timed = {at: one.profile for at, one in fit.items() if one.profile.timed}
        charged = sum(saved_bytes(one) * share.bytes for _, one, share in every)
        loose = charged / min(saved_bytes(one.profile) * volume(wanted) / volume(at) for at, one in rows.items())
        try:
            profile = between([one for _, one, _ in every], [share for *_, share in every])
            if timed and (some := self._weighted(timed, wanted)) is not None:
                profile = with_times(profile, between([one for _, one, _ in some], [share for *_, share in some]))
        except (NotAlike, ChainError):
            return None
        return Near(profile, rows[every[0][0]], loose)

    def _weighted(self, rows: dict[Sizes, Profile], wanted: Sizes) -> list[tuple[Sizes, Profile, Share]] | None:
        """Those of `rows` to interpolate from, the one with the most bytes first, and what each counts for."""
        if not rows:
            return None
        powers = {**dict.fromkeys(self._linear, 1), **dict.fromkeys(self._curved, SQUARE)}
        charged = [saved_bytes(one) for one in rows.values()]
        if self._doubts:
            larger = [n for n, at in enumerate(rows) if covers(at, wanted)]
            least = min(larger, key=charged.__getitem__, default=None)
            weights = None if least is None else [float(n == least) for n in range(len(rows))]
        else:
            weights = covering([*rows], charged, wanted, powers)
        if weights is None:
            return None
        longer = volume(wanted) / sum(w * volume(at) for w, at in zip(weights, rows, strict=True))
        every = [(at, one, Share(w, longer * w)) for w, (at, one) in zip(weights, rows.items(), strict=True)]
        if sum(weights) < 1 + EXACT:  # else profiles of weight 0 are needed to find the bytes that no size changes
            every = [row for row in every if row[2].bytes]
        return sorted(every, key=lambda row: -saved_bytes(row[1]) * bool(row[2].bytes))


def saved_bytes(profile: Profile) -> int:
    """Bytes that all stages save together."""
    return sum(stage.saved_bytes for stage in profile.chain.stages)


def _peaks(profile: Profile) -> Array:
    """The most bytes that each stage holds in its forward."""
    return np.array([float(one.saved_bytes + one.forward_transient_bytes) for one in profile.chain.stages])


def _alike(one: Profile, other: Profile) -> bool:
    try:
        between([without_times(one), without_times(other)], [Share(0.5, 0.5)] * 2)
        if one.timed and other.timed:
            between([one, other], [Share(0.5, 0.5)] * 2)
    except NotAlike:
        return False
    return True


def _alone(sizes: Sizes, wanted: Sizes) -> bool:
    """Whether one of `sizes` is 1, for which models often have a special case, and that of `wanted` is not."""
    return any(a == 1 != b for one, other in zip(sizes, wanted, strict=True) for a, b in zip(one, other, strict=True))


def powers_seen(
    low: Sizes, high: Sizes, before: tuple[Array, Array], after: tuple[Array, Array]
) -> tuple[bool, set[int]]:
    """Return whether bytes grow at most linearly with each size of the input, and the dimensions for which the two
    inputs show it: those that differ, or none if squares could give the same bytes.

    before, after: bytes of each tensor, and peaks of each stage's forward, of a step with inputs of the sizes `low` and
    `high`. The bytes of one tensor are a product, so their ratio is one of powers of the ratios of sizes. A peak is a
    sum, which must not grow more than any of these.
    """
    pairs = [pair for one, other in zip(low, high, strict=True) for pair in zip(one, other, strict=True)]
    tensors = [n for n, shape in enumerate(low) for _ in shape]
    ratios = [math.log(b / a) if a and b else math.inf for a, b in pairs]
    differing = {d for d, ratio in enumerate(ratios) if ratio}
    if not len(before[0]) or math.inf in ratios or not differing:
        return True, set()
    if any(len(one) != len(other) for one, other in zip(before, after, strict=True)):
        return False, differing
    counts: dict[float, Counter[int]] = {}  # of dimensions with the same ratio in one tensor
    for d in differing:
        counts.setdefault(round(ratios[d], 9), Counter())[tensors[d]] += 1
    most = [max(one.values()) for one in counts.values()]
    single: list[float] = []  # logs of the ratios that bytes may have if nothing is squared
    squared: list[float] = []  # and if something is
    for powers in product(*(range(1 + SQUARE * n) for n in most)):
        over = any(power > n for power, n in zip(powers, most, strict=True))
        (squared if over else single).append(sum(power * ratio for power, ratio in zip(powers, counts, strict=True)))
    stray = STRAY * min(map(abs, counts))
    if np.abs(np.subtract.outer(single, squared)).min() <= 2 * stray:
        return True, set()
    there = (before[0] > 0) & (after[0] > 0)
    found = np.log(after[0][there] / before[0][there])
    whole = (np.abs(np.subtract.outer(found, single)).min(1) <= stray).all()
    growth, decline = math.exp(max(single) + stray), math.exp(stray - min(single))
    slowly = (after[1] <= growth * before[1] + SMALL) & (before[1] <= decline * after[1] + SMALL)
    return bool(whole and slowly.all()), differing


def covering(
    points: Sequence[Sizes], costs: Sequence[float], wanted: Sizes, powers: Mapping[int, int] | None = None
) -> list[float] | None:
    """Weights of `points` whose weighted bytes bound the bytes at `wanted` from above, with the least total `costs`.

    The bound holds if bytes are a polynomial of the sizes with nonnegative coefficients, of degree at most `SQUARE` in
    each size of a tensor (attention's matrix). Weights suffice for every such polynomial if they do for each monomial;
    the least ones solve a linear program. Sizes are counted from half of the smallest (from a tenth where the degree is
    seen to be 1), so that a dimension may also shrink by a constant, as behind a convolution. powers: the degree in the
    dimensions, of all tensors in order, where it is known.

    Returns:
        None if `wanted` has a larger size in a dimension that does not vary over the points and is not in `powers`, or
        for too many monomials.
    """
    columns = [
        [shape[d] for shape in shapes] for shapes in zip(*points, wanted, strict=True) for d in range(len(shapes[0]))
    ]
    tensors = [n for n, shape in enumerate(wanted) for _ in shape]
    degrees: dict[tuple[float, ...], Counter[int]] = {}  # sizes that vary together: tensor -> number of dimensions
    floors: dict[tuple[float, ...], float] = {}
    powers = powers or {}
    degree: dict[tuple[float, ...], int] = {}
    for d, (tensor, column) in enumerate(zip(tensors, columns, strict=True)):
        least, most = min(column), max(column)
        if least == most:
            continue
        if d not in powers and len(set(column[:-1])) == 1 and column[-1] > column[0]:
            return None
        kind = tuple(round((size - least) / (most - least), 9) for size in column)
        if len(points) == 1:
            kind += (round(most / max(1, least), 9),)  # two points always lie alike
        degrees.setdefault(kind, Counter())[tensor] += 1
        shrinks = STRAY if powers.get(d) == 1 else 0.5
        floors[kind] = min(floors.get(kind, math.inf), (1 - shrinks) * least / (most - least))
        degree[kind] = max(degree.get(kind, 1), powers.get(d, SQUARE))
    if math.prod(1 + degree[kind] * max(counts.values()) for kind, counts in degrees.items()) > MONOMIALS:
        return None
    monomials = np.ones((1, len(points) + 1))
    for kind, counts in degrees.items():
        sizes = (np.array(kind[: len(columns[0])]) + floors[kind]) / (1 + floors[kind])
        each = [sizes**n for n in range(1 + degree[kind] * max(counts.values()))]
        monomials = np.concatenate([monomials * power for power in each])
    known, asked = monomials[:, :-1], monomials[:, -1]
    weights = _least(known, asked, np.array(costs, dtype=float) / max(1.0, *costs))
    weights[weights < EXACT] = 0.0
    return [float(w) for w in weights * max(1.0, float((asked / (known @ weights)).max()))]


def _least(known: Array, asked: Array, costs: Array) -> Array:
    """The x >= 0 with known @ x >= asked and the least costs @ x, by the simplex method on the dual problem."""
    rows, columns = known.shape
    table = np.block([[known.T, np.eye(columns), costs[:, None]], [-asked, np.zeros(columns + 1)]])
    for _ in range(PIVOTS):
        entering = int(table[-1, :-1].argmin())
        if table[-1, entering] >= -EXACT:
            break
        rising = table[:-1, entering]
        ratios = np.where(rising > EXACT, table[:-1, -1] / np.maximum(rising, EXACT), np.inf)
        leaving = int(ratios.argmin())
        table[leaving] /= table[leaving, entering]
        others = np.arange(columns + 1) != leaving
        table[others] -= np.outer(table[others, entering], table[leaving])
    return np.array(table[-1, rows : rows + columns])


def covers(high: Sizes, sizes: Sizes) -> bool:
    """Whether none of `sizes` is larger than `high`."""
    return all(a >= b for one, other in zip(high, sizes, strict=True) for a, b in zip(one, other, strict=True))


def halves(value: Any) -> list[Any]:
    """`value` cut to half its batch and, if it has integer tensors of 2 or more dimensions (tokens), to half of their
    length; none of an empty input, which tells nothing of others."""
    tensors, rebuild = flatten(value)
    if not all(t.numel() for t in tensors):
        return []
    batch = tensors[0].shape[0] if tensors[0].dim() else 1
    length = next((t.shape[1] for t in tensors if t.dim() >= 2 and not t.is_floating_point()), 1)
    found = []
    for dimension, size in ((0, batch), (1, length)):
        if size >= 4:
            parts = [t.dim() > dimension and t.shape[dimension] == size for t in tensors]
            cut = [
                t.narrow(dimension, 0, size // 2).clone() if part else t for t, part in zip(tensors, parts, strict=True)
            ]
            found.append(rebuild([t.requires_grad_(of.requires_grad) for t, of in zip(cut, tensors, strict=True)]))
    return found


def volume(sizes: Sizes) -> int:
    """Elements of the largest tensor, at least 1."""
    return max(1, *(math.prod(shape) for shape in sizes))


def _all_but_sizes(shape: Sequence[int], *more: Any) -> Any:
    """All that a tensor has in common with one of another size. Of the strides: the order of the dimensions in memory,
    which of them are dense, and which are expanded."""
    strides = more[3] if len(more) > 3 else ()
    order = sorted(range(len(strides)), key=lambda d: -strides[d])
    ends = [*(shape[d] * strides[d] for d in order[1:]), 1]
    layout = [(d, strides[d] == end, strides[d] == 0) for d, end in zip(order, ends, strict=False)]
    return len(shape), more[:3], tuple(layout)
