"""Hugging Face's ``Trainer``, and all that is made of it, such as TRL's trainers: one callback.

from rotoff.integrations.transformers import RotoffCallback trainer = Trainer(model, args, train_dataset=data,
callbacks=[RotoffCallback("6 GiB")])
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..checkpointable import Checkpointable
from ..errors import OptionError
from ..tools.attach import attach, attach_unplanned, attached
from ..tools.config import RotoffConfig, read_limits


class RotoffCallback(TrainerCallback):  # type: ignore[misc]
    """Trains the trainer's model inside `mem_limit`, or all of it inside `device_limit`; give it to the trainer's
    constructor.

    The model stays the object that it is: what the trainer saves and loads is what it saves and loads without. With
    several processes all follow one plan.

    Args:
        mem_limit, options: as of `rotoff.attach`; a `RotoffConfig` says all in one.
        device_limit: in place of `mem_limit`, as of `Checkpointable.compute_sequence`; for the trainer's own optimizer.

    Attributes:
        planned: the `Checkpointable` that plans the model, once there is a trainer.
    """

    def __init__(
        self, mem_limit: int | str | RotoffConfig = "auto", *, device_limit: int | str | None = None, **options: Any
    ) -> None:
        mem_limit, device_limit, options = read_limits(mem_limit, device_limit, options)
        self._mem_limit = mem_limit
        self._device_limit = device_limit
        self._options = options
        self.planned: Checkpointable | None = None

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        if getattr(args, "gradient_checkpointing", False) or getattr(args, "activation_checkpointing", False):
            raise OptionError(
                "gradient_checkpointing recomputes on its own; leave it off, rotoff plans what is recomputed"
            )
        if self._device_limit is not None:
            self.planned, self._options = attach_unplanned(model, self._options)
            return
        several = {"process_group": True} if args.world_size > 1 else {}
        self.planned = attached(model) or attach(model, self._mem_limit, **{**several, **self._options})

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, optimizer: Any = None, **_: Any
    ) -> None:
        if self.planned is None:
            # By now the trainer may have put autocast around the model's forward, and a plan must stand within it.
            raise OptionError(
                "RotoffCallback was added to a finished trainer; give it to the constructor: callbacks=[...]"
            )
        if self._device_limit is not None:
            self.planned.compute_sequence(device_limit=self._device_limit, optimizer=optimizer, **self._options)
