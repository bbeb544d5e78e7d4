"""A callback for Hugging Face's ``Trainer`` and trainers based on it, such as TRL's.

Give it to the constructor::

    trainer = Trainer(model, args, train_dataset=data, callbacks=[RotoffCallback("6 GiB")])
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..checkpointable import Checkpointable
from ..errors import OptionError
from ..tools.attach import attach, attach_unplanned, attached
from ..tools.config import RotoffConfig, read_settings


class RotoffCallback(TrainerCallback):  # type: ignore[misc]
    """Trains the trainer's model inside `mem_limit` or `device_limit`; pass it to the trainer's constructor.

    The model stays the same object, so the trainer saves and loads the same files as without the callback. Several
    processes follow one plan.

    Args:
        mem_limit, options: as for `rotoff.attach`; a `RotoffConfig` holds all of them.
        device_limit: in place of `mem_limit`, as for `Checkpointable.compute_sequence`, with the trainer's optimizer.

    Attributes:
        planned: the `Checkpointable` that plans the model, once there is a trainer.
    """

    def __init__(
        self,
        mem_limit: int | str | RotoffConfig | None = None,
        *,
        device_limit: int | str | None = None,
        **options: Any,
    ) -> None:
        given = options if device_limit is None else {**options, "device_limit": device_limit}
        self._options = read_settings(mem_limit, given)
        self._device_limit = self._options.pop("device_limit", None)
        self.planned: Checkpointable | None = None

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        if getattr(args, "gradient_checkpointing", False) or getattr(args, "activation_checkpointing", False):
            raise OptionError(
                "gradient_checkpointing is on; turn it off, since rotoff itself plans which stages are recomputed"
            )
        if self._device_limit is not None:
            self.planned, self._asked = attach_unplanned(model, self._options)
            return
        several = {"process_group": True} if args.world_size > 1 else {}
        self.planned = attached(model) or attach(model, **{**several, **self._options})

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, optimizer: Any = None, **_: Any
    ) -> None:
        if self.planned is None:
            # By now the trainer may have wrapped the model's forward in autocast, and a plan must be inside of it.
            raise OptionError(
                "RotoffCallback was added to a finished trainer; give it to the constructor: callbacks=[...]"
            )
        if self._device_limit is not None:
            self.planned.compute_sequence(device_limit=self._device_limit, optimizer=optimizer, **self._asked)
