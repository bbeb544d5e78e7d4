"""Reads the option `stages`: about how many there are to be, or the modules that are one each."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence, Sized

from torch import nn

from ..errors import MeasureError, OptionError
from ..profile.tape_chain import STAGES

StagesOption = int | Sequence[str | nn.Module] | None


def stages_of(model: nn.Module, wanted: StagesOption) -> int | tuple[str, ...]:
    """Return about how many stages are wanted, or the dotted names of the modules that are one each. None: the modules
    of an ``nn.Sequential``, or about `STAGES`.

    Raises:
        OptionError: if `wanted` is neither, or names what is no module of `model`.
        MeasureError: if none are wanted and `model` is an empty ``nn.Sequential``.
    """
    if wanted is None:
        return _modules(model) if is_sequential(model) else STAGES
    if isinstance(wanted, int) and not isinstance(wanted, bool) and wanted > 0:
        return wanted
    if isinstance(wanted, str) or not (isinstance(wanted, Iterable) and isinstance(wanted, Sized) and len(wanted)):
        raise OptionError(
            f"stages is {wanted!r}; give a number of stages, or a list of the model's modules or their names"
        )
    known = {name: module for name, module in model.named_modules() if name}
    names = []
    for item in wanted:
        name = next((n for n, m in known.items() if m is item), None) if isinstance(item, nn.Module) else item
        if not isinstance(name, str) or name not in known:
            shown = f"a {type(item).__name__}" if isinstance(item, nn.Module) else repr(item)
            raise OptionError(f"stages names {shown}, which is no module of the model; see model.named_modules()")
        names.append(name)
    return tuple(names)


def is_sequential(model: nn.Module) -> bool:
    """Whether the model's forward is that of ``nn.Sequential``."""
    # static, because a scripted module has no attribute forward
    return inspect.getattr_static(type(model), "forward", None) is nn.Sequential.forward


def _modules(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the modules of an ``nn.Sequential``, in order; nested ones are flattened, unless they are of
    a subclass (whose forward may differ) or compiled."""
    names = {module: name for name, module in model.named_modules()}
    found: list[str] = []
    todo = list(model.children())[::-1]
    while todo:
        module = todo.pop()
        if type(module) is nn.Sequential and len(module) > 0 and module._compiled_call_impl is None:
            todo += list(module.children())[::-1]
        else:
            found.append(names[module])
    if not found:
        raise MeasureError("the model is an empty nn.Sequential; it needs at least one module")
    return tuple(found)
