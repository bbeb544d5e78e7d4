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

from ..errors import OptionError
from ..tools.attach import ForTrainer, detach
from ..tools.config import RotoffConfig


class RotoffCallback(ForTrainer, Callback):  # type: ignore[misc]
    """Trains a submodule of the LightningModule inside `mem_limit` or ``device_limit``, from the start of ``fit`` to
    its end. Another ``fit`` with the same callback goes on with the plan.

    Args:
        mem_limit, options: as for `rotoff.attach`; a `RotoffConfig` holds all of them.
        module: name of the submodule that ``training_step`` calls, such as "net" or "model.encoder"; by default the
            only child that has parameters.
    """

    def __init__(
        self, mem_limit: int | str | RotoffConfig | None = None, module: str | None = None, **options: Any
    ) -> None:
        super().__init__(mem_limit, **options)
        self._module = module

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._attach(self._target(pl_module), trainer.world_size)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(trainer.global_step, trainer.optimizers)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end(trainer.global_step)
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
