"""A callback for Lightning.

Give it to the trainer::

    trainer = Trainer(callbacks=[RotoffCallback("6 GiB", module="net")])
"""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ModuleNotFoundError:  # the older name of the package
    from pytorch_lightning import Callback, LightningModule, Trainer

from ..checkpointable import ATTACHED, Checkpointable
from ..errors import OptionError
from ..tools.attach import Attachment, attach_for_trainer, detach, warn_if_unused
from ..tools.config import RotoffConfig, read_settings


class RotoffCallback(Callback):  # type: ignore[misc]
    """Trains a submodule of the LightningModule inside `mem_limit` or `device_limit`, from the start of ``fit`` to its
    end. Another ``fit`` of the same module goes on with the plan.

    Args:
        mem_limit, options: as for `rotoff.attach`; a `RotoffConfig` holds all of them.
        module: name of the submodule that ``training_step`` calls, such as "net" or "model.encoder"; by default the
            only child that has parameters.
        device_limit: in place of `mem_limit`, as for `Checkpointable.compute_sequence`, with the trainer's optimizers.

    Attributes:
        planned: the `Checkpointable` that plans it, while fitting.
    """

    def __init__(
        self,
        mem_limit: int | str | RotoffConfig | None = None,
        module: str | None = None,
        *,
        device_limit: int | str | None = None,
        **options: Any,
    ) -> None:
        given = options if device_limit is None else {**options, "device_limit": device_limit}
        self._options = read_settings(mem_limit, given)
        self._later: dict[str, Any] = {}
        self._steps_before = 0  # of the trainer, when training began
        self._module = module
        self.planned: Checkpointable | None = None
        self._left: tuple[dict[str, Any], Attachment] | None = None  # by an earlier fit, with its options

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        several = {"process_group": True} if trainer.world_size > 1 and "device_limit" not in self._options else {}
        target, options = self._target(pl_module), {**several, **self._options}
        left = self._left[1] if self._left is not None and self._left[0] == options else None
        self.planned, self._later = attach_for_trainer(target, options, left)
        self._left = options, vars(target)[ATTACHED]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps_before = trainer.global_step
        if self._later and self.planned is not None:
            self.planned.compute_sequence(optimizer=trainer.optimizers, **self._later)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step > self._steps_before and self.planned is not None:
            warn_if_unused(self.planned)
        detach(self._target(pl_module))

    def _target(self, pl_module: LightningModule) -> Any:
        if self._module is not None:
            try:
                return pl_module.get_submodule(self._module)
            except AttributeError:
                raise OptionError(f"{type(pl_module).__name__} has no submodule {self._module!r}") from None
        found = {name: child for name, child in pl_module.named_children() if any(True for _ in child.parameters())}
        if len(found) != 1:
            names = ", ".join(found) or "none"
            raise OptionError(
                f"{type(pl_module).__name__} has these children with parameters: {names}; name one as module="
            )
        return next(iter(found.values()))
