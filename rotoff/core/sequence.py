"""Sequences of operations (plans): as objects, as text and as files; ``parse(str(op)) == op``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, cached_property, partial
from typing import Any, NamedTuple, overload

from ..errors import LimitError, SequenceFormatError
from ..io.files import is_text, load_json, save_json
from .sizes import parse_bytes

FORMAT = "rotoff.sequence"
VERSION = 1
MODES = ("joint", "remat", "offload")  # what a sequence may do: recompute and move, or only one
MOST_DIGITS = 18  # of a stage's number; Python itself reads no more than 4300


class Value(NamedTuple):
    """a_i (``saved`` false) or ā_i (``saved`` true), as text ``a i`` or ``abar i``; or a parameter group's value.

    of: "w" for a group's parameters, "g" for their gradients, "o" for the optimizer's state, as text ``w k``, ``g k``,
    ``o k``; `stage` is then k, the group's number. "" for a stage's value.
    """

    saved: bool
    stage: int
    of: str = ""

    def __str__(self) -> str:
        return f"{self.of or ('abar' if self.saved else 'a')} {self.stage}"


@cache  # called several times in every operation that the interpreter runs
def a(i: int) -> Value:
    """a_i, the output of stage i; a_0 is the chain's input."""
    return Value(False, i)


@cache
def abar(i: int) -> Value:
    """ā_i, all that stage i's backward needs besides its input."""
    return Value(True, i)


@cache
def w(k: int) -> Value:
    """The parameters of group k."""
    return Value(False, k, "w")


@cache
def g(k: int) -> Value:
    """The gradients of the parameters of group k."""
    return Value(False, k, "g")


@cache
def o(k: int) -> Value:
    """The optimizer's state for the parameters of group k."""
    return Value(False, k, "o")


class OpKind(Enum):
    """The machine's operations. ``F_none`` is the papers' F_∅; ``U`` updates on the device, ``H`` on the host."""

    __hash__ = object.__hash__  # Enum's own is Python, and every operation of the machine looks kinds up in sets

    F_ALL = "F_all"
    F_SEL = "F_sel"
    F_CK = "F_ck"
    F_NONE = "F_none"
    B = "B"
    U = "U"
    H = "H"
    OFFLOAD = "offload"
    FREE = "free"
    PREFETCH = "prefetch"
    WAIT = "wait"
    DROP = "drop"


FORWARDS = frozenset({OpKind.F_ALL, OpKind.F_SEL, OpKind.F_CK, OpKind.F_NONE})
UPDATES = frozenset({OpKind.U, OpKind.H})
COMPUTES = FORWARDS | {OpKind.B, OpKind.U}
TRANSFERS = frozenset({OpKind.OFFLOAD, OpKind.FREE, OpKind.PREFETCH, OpKind.WAIT, OpKind.DROP})


@dataclass(frozen=True)
class Op:
    """One operation of a plan; make one from text with `rotoff.parse`.

    Args:
        kind: what it does.
        stage: the stage that it runs, or whose value it moves; for ``U``, ``H`` and moves of ``w``, ``g``, ``o`` the
            group.
        form: k of ``F_sel i k``, otherwise 0.
        saved: of a move, whether the value is ā_i, not a_i.
        of: of a move, "w", "g" or "o" for a value of a parameter group, otherwise "".
    """

    kind: OpKind
    stage: int
    form: int = 0
    saved: bool = False
    of: str = ""

    def __post_init__(self) -> None:
        numbers = all(hasattr(n, "__index__") for n in (self.stage, self.form)) and self.stage >= 0
        known = isinstance(self.kind, OpKind) and numbers
        if not known or (self.form < 1 if self.kind is OpKind.F_SEL else self.form != 0):
            raise SequenceFormatError(
                f"there is no operation of kind {self.kind!r}, stage {self.stage!r} and form {self.form!r}; a kind is a"
                " rotoff.OpKind, a stage a whole number from 0, a form one from 1 for F_sel and 0 for all others"
            )
        if self.of and (self.of not in _GROUP_VALUES or self.saved or self.kind not in TRANSFERS):
            raise SequenceFormatError(
                f"there is no {self.kind.value} of a value of {self.of!r}{' that is saved' if self.saved else ''}; a"
                " move takes values of 'w', 'g' or 'o', which are not saved ones, and other operations none"
            )

    @cached_property
    def value(self) -> Value:
        """The value that a move acts on, or that a forward makes."""
        if self.kind in TRANSFERS:
            return Value(self.saved, self.stage, self.of)
        return Value(self.kind in (OpKind.F_ALL, OpKind.F_SEL), self.stage)

    def __str__(self) -> str:
        if self.kind in TRANSFERS:
            return f"{self.kind.value} {self.value}"
        if self.kind is OpKind.F_SEL:
            return f"F_sel {self.stage} {self.form}"
        return f"{self.kind.value} {self.stage}"


_KINDS = {kind.value: kind for kind in OpKind}
_GROUP_VALUES = ("w", "g", "o")
_VALUES = {"a": (False, ""), "abar": (True, ""), **{name: (False, name) for name in _GROUP_VALUES}}


def parse(text: str) -> Op:
    """The operation that `text` names, the reverse of ``str(op)``.

    Raises:
        SequenceFormatError: if `text` is not an operation.
    """
    words = text.split() if isinstance(text, str) else []
    kind = _KINDS.get(words[0]) if words else None
    if kind in TRANSFERS and len(words) == 3 and words[1] in _VALUES and _is_number(words[2]):
        saved, of = _VALUES[words[1]]
        return Op(kind, int(words[2]), saved=saved, of=of)
    if kind is OpKind.F_SEL and len(words) == 3 and _is_number(words[1]) and _is_number(words[2]) and int(words[2]) > 0:
        return Op(kind, int(words[1]), form=int(words[2]))
    if kind in COMPUTES | UPDATES and kind is not OpKind.F_SEL and len(words) == 2 and _is_number(words[1]):
        return Op(kind, int(words[1]))
    raise SequenceFormatError(
        f'{text!r} is not an operation; operations read "F_all 3", "F_sel 3 1", "B 3", "offload abar 3", "U 3"'
    )


def parse_value(text: str) -> Value:
    """The value that `text` names, the reverse of ``str(value)``.

    Raises:
        SequenceFormatError: if `text` is not a value.
    """
    words = text.split() if isinstance(text, str) else []
    if len(words) == 2 and words[0] in _VALUES and _is_number(words[1]):
        saved, of = _VALUES[words[0]]
        return Value(saved, int(words[1]), of)
    raise SequenceFormatError(f'{text!r} is not a value; values read "a 3", "abar 3", "w 3", "g 3", "o 3"')


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) <= MOST_DIGITS


# Operations on the stage or group of a number.
F_all, F_ck, F_none, B = (partial(Op, kind) for kind in (OpKind.F_ALL, OpKind.F_CK, OpKind.F_NONE, OpKind.B))
U, H = partial(Op, OpKind.U), partial(Op, OpKind.H)


def F_sel(i: int, k: int) -> Op:
    return Op(OpKind.F_SEL, i, form=k)


def _moves(kind: OpKind) -> Callable[[Value], Op]:
    return lambda v: Op(kind, v.stage, saved=v.saved, of=v.of)


offload, free, prefetch = map(_moves, (OpKind.OFFLOAD, OpKind.FREE, OpKind.PREFETCH))
wait, drop = map(_moves, (OpKind.WAIT, OpKind.DROP))


def awaited(op: Op) -> tuple[Value, ...]:
    """The values whose copies end before the compute lane goes on after `op`, if they have any."""
    i = op.stage
    if op.kind is OpKind.B:
        return abar(i), a(i), a(i - 1)
    if op.kind is OpKind.F_NONE:
        return (a(i - 1),)
    if op.kind is OpKind.U:
        return w(i), g(i), o(i)
    return (op.value,) if op.kind in (OpKind.FREE, OpKind.WAIT, OpKind.DROP) else ()


def resident_values(texts: Iterable[str]) -> tuple[Value, ...]:
    """The values that the texts of `Sequence.resident` name.

    Raises:
        SequenceFormatError: if one of them is not ``w k`` or ``o k``, or occurs twice.
    """
    if isinstance(texts, (str, Mapping)) or not isinstance(texts, Iterable):
        raise SequenceFormatError(f'resident of the sequence is {texts!r}; give a list of texts such as "w 1"')
    values = tuple(parse_value(text) for text in texts)
    for n, v in enumerate(values):
        if v.of not in ("w", "o"):
            raise SequenceFormatError(
                f"resident of the sequence names {v}; between steps the device holds only w and o"
            )
        if v in values[:n]:
            raise SequenceFormatError(f"resident of the sequence names {v} twice; name it once")
    return values


@dataclass(frozen=True)
class Sequence:
    """The operations of one training step, in program order: a plan.

    Args:
        ops: the operations, as a sequence of `Op`.
        mode: the solver's mode, or the policy's name.
        mem_limit: the limit in bytes that it was made for, or None.
        resident: values of parameter groups that the device holds between steps, as texts such as ``"w 1"`` or ``"o
            1"``.
        meta, extra: stored with it; rotoff does not read them.
    """

    ops: tuple[Op, ...]
    mode: str = ""
    mem_limit: int | None = None
    meta: Mapping[str, Any] = field(default_factory=dict, compare=False)
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)
    resident: list[str] = field(default_factory=list, hash=False)

    def __post_init__(self) -> None:
        if not isinstance(self.ops, Iterable):
            raise SequenceFormatError(f"the operations are {self.ops!r}; give a sequence of rotoff.Op")
        if not is_text(self.mode):
            raise SequenceFormatError(f"the mode is {self.mode!r}; give text, without lone halves of surrogate pairs")
        object.__setattr__(self, "ops", tuple(self.ops))
        for op in self.ops:
            if not isinstance(op, Op):
                raise SequenceFormatError(f"{op!r} is not a rotoff.Op; use rotoff.parse(text)")
        object.__setattr__(self, "resident", [str(v) for v in resident_values(self.resident)])

    def __len__(self) -> int:
        return len(self.ops)

    def __iter__(self) -> Iterator[Op]:
        return iter(self.ops)

    @overload
    def __getitem__(self, index: int) -> Op: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Op, ...]: ...
    def __getitem__(self, index: int | slice) -> Op | tuple[Op, ...]:
        return self.ops[index]

    def __str__(self) -> str:
        return "\n".join(str(op) for op in self.ops)

    @classmethod
    def from_text(cls, lines: str | Iterable[str], **fields: Any) -> Sequence:
        """A sequence from one operation a line (blank lines are skipped), or from a list of such texts."""
        rows = lines.splitlines() if isinstance(lines, str) else lines
        return cls(tuple(parse(row) for row in rows if not isinstance(row, str) or row.strip()), **fields)

    def to_dict(self) -> dict[str, Any]:
        """The sequence as the JSON object of its file format; `from_dict` is the reverse."""
        meta = {"meta": dict(self.meta)} if self.meta else {}
        head = {"format": FORMAT, "version": VERSION, "mode": self.mode, "mem_limit": self.mem_limit}
        groups = self.resident or any(op.of or op.kind in UPDATES for op in self.ops)
        rest = {"resident": list(self.resident)} if groups else {}
        return {**self.extra, **head, **meta, **rest, "ops": [str(op) for op in self.ops]}

    @classmethod
    def from_dict(cls, data: Any) -> Sequence:
        """The sequence that a JSON object of the file format describes; unknown fields are kept in `extra`."""
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise SequenceFormatError(f'not a sequence: the field "format" must be "{FORMAT}"')
        if data.get("version") != VERSION:
            raise SequenceFormatError(
                f"the sequence file has version {data.get('version')!r}; this rotoff reads version {VERSION}"
            )
        ops, mode, limit, meta = data.get("ops"), data.get("mode", ""), data.get("mem_limit"), data.get("meta", {})
        if not isinstance(ops, list) or not isinstance(mode, str) or not isinstance(meta, Mapping):
            raise SequenceFormatError('a sequence needs "ops", a list of texts; "mode" is text and "meta" an object')
        if isinstance(limit, str):
            raise SequenceFormatError(f'"mem_limit" of the sequence is {limit!r}; give a number of bytes')
        try:
            limit = None if limit is None else parse_bytes(limit, '"mem_limit" of the sequence')
        except LimitError as error:
            raise SequenceFormatError(str(error)) from None
        known = {"format", "version", "ops", "mode", "mem_limit", "meta", "resident"}
        extra = {key: data[key] for key in data if key not in known}
        rest = data.get("resident", [])
        return cls.from_text(ops, mode=mode, mem_limit=limit, meta=meta, extra=extra, resident=rest)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the sequence as JSON to `path`, atomically."""
        save_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Sequence:
        """Read a sequence from the JSON file at `path`.

        Raises:
            SequenceFormatError: if the file is not a sequence. OSError: if it cannot be read.
        """
        return load_json(path, cls.from_dict, SequenceFormatError)
