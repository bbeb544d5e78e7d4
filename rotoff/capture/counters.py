"""Numbers that a forward reads from buffers which it changes itself, such as a count of the steps.

The number is another one in each step (``nn.BatchNorm2d(momentum=None)`` divides by its count of batches), so that a recording
which holds it would be of no use in the next. The module that goes on with it is taken whole and runs its own code.
"""

from __future__ import annotations

from torch import nn

from .tape import NOTHING, Tape

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
