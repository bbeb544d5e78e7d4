"""A callback for Hugging Face's ``Trainer`` and trainers based on it, such as TRL's.

Give it to the constructor::

    trainer = Trainer(model, args, train_dataset=data, callbacks=[RotoffCallback("6 GiB")])
"""

from __future__ import annotations

import logging
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..tools.attach import ForTrainer, attached

logger = logging.getLogger("rotoff")
FLAGS = ("gradient_checkpointing", "activation_checkpointing")
UNDERSTOOD = {"offload", "every_n_layers", "use_reentrant"}


class RotoffCallback(ForTrainer, TrainerCallback):  # type: ignore[misc]
    """Trains the trainer's model inside `mem_limit` or ``device_limit``.

    The model stays the same object, so the trainer saves and loads the same files as without the callback. Several
    processes follow one plan.

    Given to the constructor, it reads ``gradient_checkpointing=True`` as a wish for less memory, and switches it off:
    rotoff decides within the limit. Of ``gradient_checkpointing_kwargs``, ``offload`` decides about the mode where none
    is given: False recomputes only.

    Args:
        mem_limit, options: as for `rotoff.attach`; a `RotoffConfig` holds all of them.
    """

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        self._options = {**_read_flags(args), **self._options}
        self._attach(model, args.world_size)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        # it was added to a finished trainer, `model_init` has made another model, or another trainer's callback has
        # planned this one since
        if self.planned is None or all(attached(module) is not self.planned for module in model.modules()):
            self._attach(model, args.world_size)
        self._begin(state.global_step, optimizer)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._end(state.global_step)


def _read_flags(args: TrainingArguments) -> dict[str, Any]:
    """Switch the trainer's own checkpointing off; return the options that it means."""
    on = [name for name in FLAGS if getattr(args, name, False)]
    if not on:
        return {}
    for name in on:
        setattr(args, name, False)
    given = dict(getattr(args, "gradient_checkpointing_kwargs", None) or {})
    offload = given.get("offload")
    logger.info(
        "rotoff: %s is read as a wish for less memory: rotoff decides, within the limit, what is recomputed%s; the"
        " model's own checkpoints do not run",
        on[0],
        "" if offload is False else " or moved to the host",
    )
    if "every_n_layers" in given:
        logger.info("rotoff: every_n_layers is not needed; the limit says how much is kept")
    if unknown := sorted(set(given) - UNDERSTOOD):
        logger.warning("rotoff: gradient_checkpointing_kwargs has %s, which has no effect here", ", ".join(unknown))
    return {"mode": "remat"} if offload is False else {}
