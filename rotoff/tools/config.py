"""`RotoffConfig`: all settings of training within a limit, as one value that can be read from a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn

from ..core.sizes import is_auto, parse_bytes, parse_share
from ..errors import LimitError, OptionError
from ..io.files import load_settings
from ..planning.options import Options, check_flag
from ..planning.request import check_limits, check_options


@dataclass(frozen=True, kw_only=True)
class RotoffConfig:
    """All settings as one argument of `rotoff.attach` and of the trainers' callbacks.

    Use it to keep the settings in a YAML or JSON file beside those of the trainer. The fields are arguments of
    `Checkpointable` and its `compute_sequence`.

    Args:
        mem_limit: as for `rotoff.attach`. None: "auto", unless device_limit is given.
        device_limit: bytes or a size for all that the device holds; `attach` then needs the optimizer as well.
        process_group: True: all processes follow one plan; the callbacks decide this by themselves.
        cache_directory: not used, as in `Checkpointable`.
        options: further arguments of `rotoff.solve`, such as ``{"refine": 2}``.

    `attach` refuses bad values, and so do `from_dict` and `load`.
    """

    mem_limit: int | str | None = None
    device_limit: int | str | None = None
    mode: str = "joint"
    mem_slots: int = 50
    in_flight: int = 1
    policy: str | None = None
    host_limit: int | str | None = None
    device: str | None = None
    stages: int | list[str] | None = None
    backward_from: str | int | list[str | int] | None = None
    forms: bool = True
    host_directory: str | None = None
    cache_directory: Any = None
    process_group: bool | None = None
    updates: str | None = None
    check: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RotoffConfig:
        """The configuration that a dict describes.

        Raises:
            OptionError: for anything but a dict, unknown fields, and values that no model can have. LimitError: for a
                limit that is none, and for two.
        """
        known = [one.name for one in fields(cls)]
        if not isinstance(data, Mapping):
            raise OptionError(f"the configuration is {data!r}; give names and values, such as mem_limit: 6 GiB")
        if unknown := sorted(map(str, set(data) - set(known))):
            raise OptionError(f"the configuration names {', '.join(unknown)}; known names are {', '.join(known)}")
        made = cls(**data)
        _check(made)
        return made

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RotoffConfig:
        """Read a YAML, TOML or JSON file. The settings may be the whole file, or its part ``rotoff:``.

        Raises:
            OptionError: if the file is none of these; else as for `from_dict`, with the file's name. OSError: if it
                cannot be read.
        """
        data = load_settings(path)
        try:
            return cls.from_dict(data["rotoff"] if isinstance(data, Mapping) and "rotoff" in data else data)
        except (LimitError, OptionError) as error:
            raise type(error)(f"{path}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """The fields that differ from the defaults; `from_dict` is the reverse."""
        default = type(self)()
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in given.items() if value != getattr(default, name)}

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments for `rotoff.attach`."""
        return read_settings(self, {})


def _check(said: RotoffConfig) -> None:
    """Raise LimitError or OptionError for a value that no model can have; modules and devices are looked for when a
    model is attached."""
    given = said.arguments()
    check_limits(given["mem_limit"], said.device_limit, policy=said.policy, in_flight=said.in_flight)
    if said.device_limit is not None:
        parse_bytes(said.device_limit, "device_limit")
    elif not is_auto(given["mem_limit"]) and parse_share(given["mem_limit"]) is None:
        parse_bytes(given["mem_limit"])
    beside = {*(one.name for one in fields(said))} - {"host_limit", "updates"}
    solving = {name: value for name, value in given.items() if name not in beside}
    check_options(said.mode, said.mem_slots, said.policy, solving)
    check_flag("check", said.check)
    Options(None, said.backward_from, said.forms, said.host_directory).check(nn.Module())


def read_settings(mem_limit: int | str | RotoffConfig | None, options: dict[str, Any]) -> dict[str, Any]:
    """`options` with `mem_limit`, or over the fields of a configuration; exactly one limit is in them.

    Raises:
        LimitError: if two limits are given. OptionError: if a configuration's options are none, or are its fields.
    """
    if isinstance(mem_limit, RotoffConfig):
        given = mem_limit.to_dict()
        further, own = given.pop("options", {}), [one.name for one in fields(RotoffConfig)]
        if not isinstance(further, Mapping) or not set(further).isdisjoint(own):
            raise OptionError(f"options is {further!r}; give names and values of rotoff.solve's, such as refine: 2")
        options = {**further, **given, **options}
    elif mem_limit is not None:
        options = {**options, "mem_limit": mem_limit}
    limit, device_limit = options.get("mem_limit"), options.get("device_limit")
    if limit is not None and device_limit is not None:
        check_limits(limit, device_limit)  # refuses both
    return {**options, "mem_limit": "auto" if limit is None and device_limit is None else limit}
