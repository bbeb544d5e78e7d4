"""The chain: the cost of each stage of a model in bytes and seconds. It knows nothing else of the model.

Stages count from 1 to L; a_0 is the chain's input and a_i the output of stage i. Symbols of the papers:
u_F ``forward_time``, u_B ``backward_time``, |a_i| ``output_bytes``, |ā_i| ``saved_bytes``, |δ_i| ``grad_bytes``,
o_F and o_B the transient bytes, β the bandwidths.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from ..errors import ChainError
from ..io.files import load_json, save_json
from .chain_fields import at_most, check_name, clean, number, read, several
from .parameters import ParameterGroup

FORMAT = "rotoff.chain"
VERSION = 1
WITH_PARAMETERS = 2


class LinkRates(NamedTuple):
    """The fields of a chain that say how fast copies to the host and from it are."""

    d2h_bandwidth: float
    h2d_bandwidth: float
    duplex: bool = True
    d2h_bidirectional_bandwidth: float | None = None
    h2d_bidirectional_bandwidth: float | None = None

    def divided(self, many: float) -> LinkRates:
        """An equal share for each of `many` that copy at once."""
        busy = (rate and rate / many for rate in (self.d2h_bidirectional_bandwidth, self.h2d_bidirectional_bandwidth))
        return LinkRates(self.d2h_bandwidth / many, self.h2d_bandwidth / many, self.duplex, *busy)

    def at_most(self, other: LinkRates) -> LinkRates:
        """The smaller of each rate."""
        d2h, h2d = min(self.d2h_bandwidth, other.d2h_bandwidth), min(self.h2d_bandwidth, other.h2d_bandwidth)
        busy = (rate and most and min(rate, most) for rate, most in zip(self[3:], other[3:], strict=True))
        return LinkRates(d2h, h2d, self.duplex, *busy)


BIDIRECTIONAL = LinkRates._fields[3:]


@dataclass(frozen=True)
class Form:
    """A way to keep only a part of a stage's ā; the backward first recomputes the rest. Form 0 is the whole ā.

    Args:
        saved_bytes: bytes of ā_i in this form, output included, so at least `output_bytes`.
        backward_time: seconds of B, with the recomputation of what is not stored.
        forward_transient_bytes, backward_transient_bytes: held in addition to all values while F or B runs.
        extra: unknown fields of a file.
    """

    saved_bytes: int
    backward_time: float
    forward_transient_bytes: int = 0
    backward_transient_bytes: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Stage:
    """Costs of one stage, in bytes and seconds; the module's docstring has the papers' symbols.

    Args:
        name: name of the stage.
        forward_time, backward_time: seconds of the forward and of the backward.
        output_bytes: bytes of a_i.
        saved_bytes: bytes of ā_i, output included, so at least `output_bytes`.
        grad_bytes: bytes of δ_i; by default `output_bytes`.
        forward_transient_bytes, backward_transient_bytes: held in addition to all values while ``F_all`` or ``B`` runs.
        checkpoint_transient_bytes: the same for ``F_ck`` and ``F_none``; by default `forward_transient_bytes`.
        forms: smaller forms of ā_i, as a sequence of `Form`.
        tail_time: seconds that a forward leaves out if it runs again right before its own backward: it stops at the
            last tensor that autograd saves.
        extra: unknown fields of a file.

    Raises:
        ChainError: for anything but finite numbers at or above 0, for `saved_bytes` (of the stage or a form) below
            `output_bytes`, which it includes, and for `tail_time` above `forward_time`. The message names the stage,
            the field and the value.
    """

    name: str = ""
    forward_time: float = 0.0
    backward_time: float = 0.0
    output_bytes: int = 0
    saved_bytes: int = 0
    grad_bytes: int | None = None
    forward_transient_bytes: int = 0
    checkpoint_transient_bytes: int | None = None
    backward_transient_bytes: int = 0
    forms: tuple[Form, ...] = ()
    tail_time: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        where = f"stage {self.name!r}" if self.name else "a stage"
        put = object.__setattr__
        check_name(self.name, "a stage")
        put(self, "grad_bytes", _default(self.grad_bytes, self.output_bytes))
        transient = _default(self.checkpoint_transient_bytes, self.forward_transient_bytes)
        put(self, "checkpoint_transient_bytes", transient)
        clean(self, where, ("forward_time", "backward_time", "tail_time"), _STAGE_SIZES)
        if self.tail_time > self.forward_time:
            raise ChainError(
                f"tail_time of {where} is {self.tail_time}, more than its forward_time of {self.forward_time}; it is"
                " the end of the forward, so give at most that"
            )
        forms = enumerate(several(self.forms, "forms", where, "rotoff.Form"), start=1)
        put(self, "forms", tuple(_checked_form(form, k, where) for k, form in forms))
        for k in range(1 + len(self.forms)):
            if (saved := self.form(k).saved_bytes) < self.output_bytes:
                raise ChainError(
                    f"saved_bytes of {f'form {k} of ' if k else ''}{where} is {saved}, less than its output_bytes of"
                    f" {self.output_bytes}; saved_bytes counts the output too, so add it"
                )

    def form(self, k: int) -> Form:
        """Form `k` of ā: 0 is the stage's own costs (``F_all``), 1 to K its smaller forms (``F_sel``)."""
        if k == 0:
            return Form(
                self.saved_bytes, self.backward_time, self.forward_transient_bytes, self.backward_transient_bytes
            )
        if not 1 <= k <= len(self.forms):
            raise IndexError(f"stage {self.name!r} has forms 0 to {len(self.forms)}, not {k}")
        return self.forms[k - 1]


@dataclass(frozen=True)
class Chain:
    """A training step as a chain of L ≥ 1 stages and one link to the host.

    Args:
        stages: stages 1 to L, as a sequence of `Stage`.
        d2h_bandwidth, h2d_bandwidth: bytes per second from device to host and back.
        input_bytes: bytes of a_0.
        input_grad_bytes: bytes of δ_0; 0 if the input needs no gradient.
        duplex: whether copies can run in both directions at once.
        name: name of the chain.
        d2h_bidirectional_bandwidth, h2d_bidirectional_bandwidth: bytes per second of a direction while copies run in
            the other one too; None if they do not slow each other down. Without duplex they have no effect.
        parameters: groups 1 to K of parameters, as a sequence of `ParameterGroup`; empty if a limit covers activations
            only.
        meta: anything worth keeping with the chain (model, shapes, device, versions).
        extra: unknown fields of a file.

    Raises:
        ChainError: if a field is missing, negative, NaN or of the wrong type, or there is no stage.
    """

    stages: tuple[Stage, ...]
    d2h_bandwidth: float
    h2d_bandwidth: float
    input_bytes: int = 0
    input_grad_bytes: int = 0
    duplex: bool = True
    name: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict, compare=False)
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)
    parameters: tuple[ParameterGroup, ...] = ()
    d2h_bidirectional_bandwidth: float | None = None
    h2d_bidirectional_bandwidth: float | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        check_name(self.name, "the chain")
        put(self, "stages", tuple(several(self.stages, "stages", "the chain", "rotoff.Stage")))
        if not self.stages:
            raise ChainError("the chain has no stages; it needs at least one")
        for stage in self.stages:
            if not isinstance(stage, Stage):
                raise ChainError(f"a stage is {stage!r}, not a rotoff.Stage")
        for name in ("d2h_bandwidth", "h2d_bandwidth"):
            value = number(getattr(self, name), name, "the chain")
            if value == 0:
                raise ChainError(f"{name} of the chain is 0; give bytes per second above 0 (mode='remat' uses no link)")
            put(self, name, value)
        for name, alone in zip(BIDIRECTIONAL, self.link[:2], strict=True):
            value = getattr(self, name)
            put(self, name, None if value is None else at_most(value, alone, name))
        clean(self, "the chain", sizes=("input_bytes", "input_grad_bytes"))
        if not isinstance(self.duplex, bool):
            raise ChainError(f"duplex of the chain is {self.duplex!r}; give true or false")
        put(self, "parameters", tuple(several(self.parameters, "parameters", "the chain", "rotoff.ParameterGroup")))
        for k, group in enumerate(self.parameters, start=1):
            if not isinstance(group, ParameterGroup):
                raise ChainError(f"group {k} of the parameters is {group!r}, not a rotoff.ParameterGroup")
            if max(group.stages) > len(self.stages):
                raise ChainError(
                    f"group {k} of the parameters names stage {max(group.stages)}, but the chain has stages 1 to"
                    f" {len(self)}"
                )
        updates = sum(group.update_time + (group.host_update_time or 0.0) for group in self.parameters)
        if not math.isfinite(updates + sum(stage.forward_time + stage.backward_time for stage in self.stages)):
            raise ChainError(
                "the times of the chain's stages come to more than 1e308 seconds; give seconds of one step"
            )

    def __len__(self) -> int:
        """L, the number of stages."""
        return len(self.stages)

    def stage(self, i: int) -> Stage:
        """Stage i, counted from 1."""
        if not 1 <= i <= len(self.stages):
            raise IndexError(f"the chain has stages 1 to {len(self.stages)}, not {i}")
        return self.stages[i - 1]

    def group(self, k: int) -> ParameterGroup:
        """Group k of the parameters, counted from 1."""
        if not 1 <= k <= len(self.parameters):
            raise IndexError(f"the chain has parameter groups 1 to {len(self.parameters)}, not {k}")
        return self.parameters[k - 1]

    def without_parameters(self) -> Chain:
        """The same chain without parameters: they stay on the device and are not charged."""
        return replace(self, parameters=()) if self.parameters else self

    def output_bytes(self, i: int) -> int:
        """Bytes of a_i; a_0 is the chain's input."""
        return self.input_bytes if i == 0 else self.stage(i).output_bytes

    def grad_bytes(self, i: int) -> int:
        """Bytes of δ_i, the gradient of a_i."""
        if i == 0:
            return self.input_grad_bytes
        grad = self.stage(i).grad_bytes
        assert grad is not None
        return grad

    @property
    def link(self) -> LinkRates:
        """The fields of the link."""
        return LinkRates(*(getattr(self, name) for name in LinkRates._fields))

    @property
    def bidirectional_shares(self) -> tuple[float, float]:
        """The shares of the d2h and the h2d bandwidth that remain while copies run in both directions; 1 is all."""
        if not self.duplex:
            return 1.0, 1.0
        out, back, _, out_beside, back_beside = self.link
        return (out_beside or out) / out, (back_beside or back) / back

    @property
    def compute_time(self) -> float:
        """Seconds of one step that keeps everything: every forward and backward once, without copies."""
        return math.fsum(s.forward_time + s.backward_time for s in self.stages)

    def to_dict(self) -> dict[str, Any]:
        """The chain as the JSON object of its file format; `from_dict` is the reverse."""
        head = {"format": FORMAT, "version": WITH_PARAMETERS if self.parameters else VERSION, "name": self.name}
        link = {name: value for name, value in self.link._asdict().items() if value is not None}
        ends = {"input_bytes": self.input_bytes, "input_grad_bytes": self.input_grad_bytes}
        meta = {"meta": dict(self.meta)} if self.meta else {}
        stages = {"stages": [_stage_to_dict(s) for s in self.stages]}
        groups = {"parameters": [group.to_dict() for group in self.parameters]} if self.parameters else {}
        return {**self.extra, **head, **link, **ends, **meta, **stages, **groups}

    @classmethod
    def from_dict(cls, data: Any) -> Chain:
        """The chain that a JSON object of the file format describes; unknown fields are kept in `extra`.

        Raises:
            ChainError: if the object is not such a chain; the message names the field.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise ChainError(f'not a chain: the field "format" must be "{FORMAT}"')
        version, groups = data.get("version"), data.get("parameters", [])
        if version not in (VERSION, WITH_PARAMETERS):
            raise ChainError(
                f"the chain file has version {version!r}; this rotoff reads versions {VERSION} and {WITH_PARAMETERS}"
            )
        if version == VERSION and "parameters" in data:
            raise ChainError(
                f"a chain file of version {VERSION} cannot have parameters; give version {WITH_PARAMETERS}"
            )
        for name in ("d2h_bandwidth", "h2d_bandwidth", "input_bytes", "stages"):
            if name not in data:
                raise ChainError(f"the chain misses the field {name!r}")
        if not isinstance(data["stages"], list):
            raise ChainError(f"stages of the chain is {data['stages']!r}, not a list")
        if not isinstance(groups, list):
            raise ChainError(f"parameters of the chain is {groups!r}, not a list")
        ends = ("input_bytes", "input_grad_bytes")
        known = {"name", "meta", *LinkRates._fields, *ends}
        values = {key: data[key] for key in known if key in data}
        if not isinstance(values.get("meta", {}), Mapping):
            raise ChainError(f"meta of the chain is {values['meta']!r}, not an object")
        extra = {key: data[key] for key in data if key not in known | {"format", "version", "stages", "parameters"}}
        stages = tuple(_stage_from_dict(item, i) for i, item in enumerate(data["stages"], start=1))
        parameters = tuple(ParameterGroup.from_dict(item, k) for k, item in enumerate(groups, start=1))
        return cls(stages=stages, parameters=parameters, extra=extra, **values)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the chain as JSON to `path`, atomically."""
        save_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Chain:
        """Read a chain from the JSON file at `path`.

        Raises:
            ChainError: if the file is not a chain. OSError: if it cannot be read.
        """
        return load_json(path, cls.from_dict, ChainError)


def check_chain(chain: Any) -> None:
    """Raise `ChainError` if `chain` is something else, such as a path."""
    if not isinstance(chain, Chain):
        given = repr(chain) if isinstance(chain, (str, type(None))) else f"a {type(chain).__name__}"
        raise ChainError(f"the chain is {given}; give a rotoff.Chain, such as Chain.load(path)")


_FORM_SIZES = ("saved_bytes", "forward_transient_bytes", "backward_transient_bytes")
_STAGE_SIZES = ("output_bytes", *_FORM_SIZES, "grad_bytes", "checkpoint_transient_bytes")
_FORM_FIELDS = tuple(one.name for one in fields(Form) if one.name != "extra")
_STAGE_FIELDS = tuple(one.name for one in fields(Stage) if one.name not in ("forms", "extra"))


def _stage_to_dict(stage: Stage) -> dict[str, Any]:
    data: dict[str, Any] = {**stage.extra, **{name: getattr(stage, name) for name in _STAGE_FIELDS}}
    if not stage.tail_time:
        del data["tail_time"]
    if stage.forms:
        data["forms"] = [{**form.extra, **{name: getattr(form, name) for name in _FORM_FIELDS}} for form in stage.forms]
    return data


def _stage_from_dict(data: Any, i: int) -> Stage:
    required = ("forward_time", "backward_time", "output_bytes", "saved_bytes")
    forms = (data.get("forms") or []) if isinstance(data, Mapping) else []
    if not isinstance(forms, list):
        raise ChainError(f"forms of stage {i} is {forms!r}, not a list")
    stage = read(Stage, data, f"stage {i}", required, _STAGE_FIELDS, forms=())
    own = {name: getattr(stage, name) for name in ("forward_transient_bytes", "backward_transient_bytes")}
    try:
        made = [
            read(Form, form, f"form {k}", ("saved_bytes", "backward_time"), _FORM_FIELDS, **own)
            for k, form in enumerate(forms, start=1)
        ]
        return replace(stage, forms=tuple(made))
    except ChainError as error:
        raise ChainError(f"stage {i}: {error}") from error


def _checked_form(form: Form, k: int, where: str) -> Form:
    where = f"form {k} of {where}"
    if not isinstance(form, Form):
        raise ChainError(f"{where} is {form!r}, not a rotoff.Form")
    made = replace(form)
    clean(made, where, ("backward_time",), _FORM_SIZES)
    return made


def _default(value: int | None, other: int) -> int:
    return other if value is None else value
