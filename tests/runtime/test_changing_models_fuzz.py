"""Random mixes of what the rows of the table do, with random changes between their steps: to the bits of the plain model,
in any mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import changing_models  # noqa: F401 - fills the table
import odd_models  # noqa: F401
import torch
from changing_models import again_backward
from hypothesis import Phase, assume, given, note, settings
from hypothesis import strategies as st
from step_by_step import MODES, Row, nothing, one_step, verdict
from trunks import ADDED, Added, Long, at, batch

INFEASIBLE = (
    "refused: the training step needs at least"  # a change may ask for more than the limit that was given before
)


class Mixed(Long):
    """Runs its blocks in an order of its own."""

    acts: list[Added]

    def __init__(self) -> None:
        super().__init__()
        self.order = list(range(self.many))

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return self.acts[n % len(self.acts)].act(self, x, n % 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for n, k in enumerate(self.order):
            x = self.along(self.blocks[k](x), n)
        return self.head(x)


def turned(net: Any, n: int) -> None:
    net.order = [*net.order[1:], net.order[0]]


def part_frozen(net: Any, n: int) -> None:
    for block in net.blocks[::2]:
        block.requires_grad_(n % 2 == 0)


def hooked(net: Any, n: int) -> None:
    if n % 2:
        net.handle = net.blocks[3].norm.register_forward_hook(lambda module, args, result: result * 0.5)
    elif n:
        net.handle.remove()


CHANGES: tuple[Callable[[Any, int], object], ...] = (
    nothing,
    turned,
    part_frozen,
    hooked,
    at(2, lambda net: net.order.pop()),
    at(2, lambda net: net.order.append(0)),
)


@st.composite
def rows(draw: st.DrawFn) -> Row:
    acts = draw(st.lists(st.sampled_from(ADDED), min_size=2, max_size=4, unique_by=lambda act: act.name))
    other = draw(st.sampled_from(CHANGES))
    has = {name: make for act in acts for name, make in act.has.items()}

    def change(net: Any, n: int) -> None:
        for one in (*(act.change for act in acts), other):
            one(net, n)

    def again(net: Any) -> None:
        for act in acts:
            act.again(net)

    step, room = draw(st.sampled_from((one_step, again_backward))), draw(st.sampled_from((0.2, 0.4, 0.6)))
    name = f"{[act.name for act in acts]}, {CHANGES.index(other)}, {step.__name__}"
    make = type("Mix", (Mixed,), {"acts": acts}, **has)
    return Row(name, make, batch, change, step=step, room=room, again=again, steps=4)


# Nothing is shrunk: what is drawn is small, and each attempt takes a measurement.
@settings(max_examples=settings().max_examples // 2, phases=(Phase.explicit, Phase.generate))
@given(row=rows(), mode=st.sampled_from(MODES))
def test_random_models_that_change_train_as_the_plain_model_does(row: Row, mode: str) -> None:
    said = verdict(row, mode)
    note(f"{row.name}, {mode}, room {row.room}")
    assume(not said.startswith(("no plan", INFEASIBLE)))
    assert said == "equal"
