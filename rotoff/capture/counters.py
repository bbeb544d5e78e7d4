"""Numbers that a forward changes itself and may go by, such as a count of the steps: in buffers, and in attributes of modules.

The number is another one in each step (``nn.BatchNorm2d(momentum=None)`` divides by its count of batches), so that a recording
which holds it would be of no use in the next. The module that goes on with it is taken whole and runs its own code. So is the
module around an attribute that a call changes: what goes by it may do so from the thousandth step on (``if self.step > 1000``), which
two recordings do not show.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from .tape import NOTHING, Tape
from .unrepeatable import UnrepeatableError

Attribute = tuple[nn.Module, str]  # a module and the name of an attribute of its

NUMBERS = 64  # bytes that a count may have


def readers(tape: Tape, model: nn.Module) -> list[nn.Module]:
    """The innermost modules of `model`, itself left out, that ask for such a number. Conditions (bool) are none: they settle."""
    changed = {
        (owned.module, owned.name) for op in tape.operations for owned in op.writes_owned if owned.table == "_buffers"
    }
    if not changed:
        return []
    counts: set[int] = set()  # variables that follow from those buffers
    found: dict[nn.Module, None] = {}
    for op in tape.operations:
        if counts.isdisjoint(op.reads) and not any((owned.module, owned.name) in changed for owned in op.owned()):
            continue
        if op.expected is not NOTHING and not isinstance(op.expected, bool):
            names = [name for name, _ in op.place if name]
            found.update({model.get_submodule(name): None for name in names[-1:]})
        counts.update(n for n in op.outputs if n is not None and tape.variables[n].nbytes <= NUMBERS)
    return list(found)


def numbers(model: nn.Module) -> dict[Attribute, int | float]:
    """The attributes of the modules of `model` that hold a number."""
    return {(m, name): value for m in model.modules() for name, value in vars(m).items() if type(value) in (int, float)}


def put(values: dict[Attribute, int | float]) -> None:
    """Give attributes the `numbers` that they held."""
    for (module, name), value in values.items():
        vars(module)[name] = value


def counts(model: nn.Module, before: dict[Attribute, int | float], whole: Iterable[nn.Module]) -> list[Attribute]:
    """The attributes that hold another number than `before` a call, but for those of modules that are taken `whole`.

    Not of the first call: what that alone sets is a cache.
    """
    inner = {m for outer in whole for m in outer.modules()}
    now: Any = numbers(model)
    return [key for key, value in before.items() if key[0] not in inner and now.get(key, value) != value and value == value]


def around(found: Iterable[Attribute], model: nn.Module, tape: Tape) -> list[nn.Module]:
    """The innermost modules around some attributes that are called; `model` itself, where there is none within."""
    names = {module: name for name, module in model.named_modules()}
    modules: dict[nn.Module, None] = {}
    for module, _ in found:
        name = names[module]
        while name and model.get_submodule(name) not in tape.called:
            name = name.rpartition(".")[0]
        modules[model.get_submodule(name)] = None
    return list(modules)


def described(found: Sequence[Attribute]) -> str:
    """How calls differ, in words."""
    module, name = found[0]
    return f"each changes the number in attribute {name!r} of a {type(module).__name__}"


def refusal(model: nn.Module, found: Sequence[Attribute]) -> UnrepeatableError:
    """Where nothing smaller than `model` could be taken whole."""
    return UnrepeatableError(
        f"the forward of {type(model).__name__} counts: {described(found)}, and a planned step does not run the model's own Python code;"
        " move the count, and what goes by it, into a submodule, or count in the training loop and hand the number in as a tensor"
    )
