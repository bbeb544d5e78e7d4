"""Files of settings: YAML (with PyYAML), TOML (from Python 3.11 on) or JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ..errors import OptionError
from .files import parse_nested


def load_settings(path: str | os.PathLike[str]) -> Any:
    """The values in a file: JSON if it ends in .json, TOML if in .toml, else YAML.

    Raises:
        OptionError: if it is not that, or gives a name twice, of which JSON and YAML would take the last. OSError: if
            it cannot be read.
    """
    parse = {".json": _json, ".toml": _toml}.get(Path(path).suffix, _yaml)
    try:
        return parse_nested(parse, Path(path).read_text(encoding="utf-8"))
    except ModuleNotFoundError as error:
        raise OptionError(f"{path} needs the module {error.name}, which is not installed; write JSON") from None
    except ValueError as error:
        raise OptionError(f"{path}: {error}") from error


def _check_once(names: list[Any]) -> None:
    if twice := [name for n, name in enumerate(names) if name in names[:n]]:
        raise OptionError(f"{twice[0]} is given twice; give it once")


def _json(text: str) -> Any:
    def read(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _check_once([name for name, _ in pairs])
        return dict(pairs)

    return json.loads(text, object_pairs_hook=read)


def _toml(text: str) -> Any:
    import tomllib

    return tomllib.loads(text)


def _yaml(text: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
            _check_once([self.construct_object(key, deep=True) for key in keys])
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise OptionError(f"not YAML: {' '.join(str(error).split())}") from error
