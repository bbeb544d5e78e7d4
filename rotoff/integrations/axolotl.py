"""A plugin for axolotl, named in the YAML file of a training; its callback is that of the Trainer::

plugins:
  - rotoff.integrations.axolotl.RotoffPlugin
rotoff:
  mem_limit: 6 GiB
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from ..tools.config import RotoffConfig
from .transformers import RotoffCallback


class RotoffArgs(BaseModel):  # type: ignore[misc]
    """What the file may say. rotoff: the fields of a `RotoffConfig`."""

    rotoff: dict[str, Any]


class RotoffPlugin(BasePlugin):  # type: ignore[misc]
    """Trains axolotl's model inside the limit that the file gives under ``rotoff``, by a `RotoffCallback`.

    Raises:
        rotoff.OptionError, rotoff.LimitError: if the file has a name or value there that `RotoffConfig` does not take.
    """

    def get_input_args(self) -> str:
        return f"{__name__}.{RotoffArgs.__name__}"

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[RotoffCallback]:
        return [RotoffCallback(RotoffConfig.from_dict(dict(cfg.rotoff)))]
