"""Where the user says from which output the backward starts, the gradients of the others take no bytes."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from allocated import peak_bytes
from models import Does, several
from planned_steps import Beside
from torch import nn

import rotoff

WORDS, ROWS = 3000, 96
LOGITS = WORDS * ROWS * 4


class Answer(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor


def language(net: Any, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
    """Blocks, then logits that are the largest tensor there is; returned beside the loss, in one of several ways."""
    x = net.words(ids)
    for block in net.blocks:
        x = x + block(x)
    logits = net.head(x)
    loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
    if net.returns == "attribute":
        net.last = loss
        return logits, loss
    return {"dict": {"loss": loss, "logits": logits}, "tuple": (logits, loss), "named": Answer(loss, logits)}[
        net.returns
    ]


WAYS = {"dict": "loss", "tuple": 1, "named": "loss", "attribute": [1]}


def loss_of(output: Any) -> torch.Tensor:
    return output["loss"] if isinstance(output, dict) else output.loss if isinstance(output, Answer) else output[1]


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.arange(ROWS) * 7 % WORDS


def made(returns: str = "dict") -> nn.Module:
    torch.manual_seed(0)
    words, head = nn.Embedding(WORDS, 64), nn.Linear(64, WORDS, bias=False)
    return Does(language, words=words, blocks=several(6, 64, 256), head=head, returns=returns)


def from_loss(output: Any, _: Any) -> None:
    loss_of(output).backward()


def train(model: nn.Module, ids: torch.Tensor) -> Any:
    output = model(ids, labels=ids)
    loss_of(output).backward()
    return output


@pytest.mark.parametrize("returns", WAYS)
@pytest.mark.grid
def test_no_gradient_of_the_logits_is_charged_and_bits_are_the_plain_models(returns: str, ids: torch.Tensor) -> None:
    beside = Beside(made(returns), sample=(ids, ids), backward=from_loss, backward_from=WAYS[returns])
    anything = rotoff.Checkpointable(made(returns)).measure(ids, labels=ids)
    peak = beside.step(ids, ids, measured=beside.plain)
    assert anything.keep_all_memory >= peak + 0.9 * LOGITS
    assert peak <= beside.planned.keep_all_memory <= 1.02 * peak
    for limit in (beside.planned.keep_all_memory, int(0.9 * peak)):
        beside.at(limit).step(ids, ids)
        beside.check(ids, ids)


def let_go(model: nn.Module, ids: torch.Tensor) -> None:
    loss_of(model(ids, labels=ids)).backward()


@pytest.mark.parametrize("way", [train, let_go])
@pytest.mark.parametrize("returns", ["dict", "tuple", "named"])
def test_a_loop_shows_by_itself_whether_it_holds_the_logits(returns: str, way: Any, ids: torch.Tensor) -> None:
    plain = made(returns)
    way(plain, ids)
    peak = peak_bytes(lambda: way(plain, ids))
    model = rotoff.Checkpointable(made(returns)).compute_sequence("1 GiB")
    for _ in range(2):
        way(model, ids)
    assert peak <= model.keep_all_memory <= 1.02 * peak


@pytest.mark.parametrize(("share", "starts"), [(1.1, "loss"), (0.9, "loss"), (0.9, ["logits", "loss"])])
def test_what_is_returned_beside_it_is_the_plain_models(share: float, starts: Any, ids: torch.Tensor) -> None:
    def of_both(output: Any, _: Any) -> None:
        (output["loss"] + output["logits"].mean()).backward()

    beside = Beside(made(), sample=(ids, ids), backward=of_both, backward_from=starts)
    beside.at(int(share * beside.planned.keep_all_memory)).step(ids, ids)
    with torch.no_grad():
        assert not beside.planned(ids, labels=ids)["logits"].requires_grad


def test_several_outputs_may_be_named(ids: torch.Tensor) -> None:
    model = rotoff.Checkpointable(made(), backward_from=["logits", "loss"]).measure(ids, labels=ids)
    assert model.chain.grad_bytes(len(model.chain)) >= LOGITS


def test_the_last_module_of_a_sequential_may_return_several(ids: torch.Tensor) -> None:
    class Head(nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = super().forward(x)
            return logits.logsumexp(1).mean(), logits

    model = nn.Sequential(nn.Embedding(WORDS, 64), nn.Linear(64, 64), nn.Tanh(), Head(64, WORDS))
    peaks = [rotoff.Checkpointable(model, backward_from=starts).measure(ids).keep_all_memory for starts in (None, 0)]
    assert peaks[1] <= peaks[0] - 0.9 * LOGITS
    with pytest.raises(
        rotoff.MeasureError, match="names 'loss', but the model returns a tuple of 2; name one of those"
    ):
        rotoff.Checkpointable(model, backward_from="loss").measure(ids)


def test_an_estimate_knows_it_too(ids: torch.Tensor) -> None:
    measured = rotoff.Checkpointable(made(), backward_from="loss").measure(ids, labels=ids).chain
    estimated = rotoff.estimate(rotoff.Checkpointable(made(), backward_from="loss"), ids, labels=ids, device="CPU")
    last = len(measured)
    assert estimated.grad_bytes(last) == measured.grad_bytes(last) == 4


def test_an_error_says_what_it_would_save(ids: torch.Tensor) -> None:
    model = rotoff.Checkpointable(made()).measure(ids, labels=ids)
    with pytest.raises(
        rotoff.InfeasibleError, match=r'1\.10 MiB of it for gradients of outputs .* backward_from="loss"'
    ) as refused:
        model.compute_sequence(LOGITS)
    model = rotoff.Checkpointable(made(), backward_from="loss").measure(ids, labels=ids)
    with pytest.raises(rotoff.InfeasibleError) as fewer:
        model.compute_sequence(LOGITS)
    assert "backward_from" not in str(fewer.value)
    assert fewer.value.min_mem_limit <= refused.value.min_mem_limit - 0.9 * LOGITS


def test_what_the_model_does_not_return_is_refused(ids: torch.Tensor) -> None:
    with pytest.raises(
        rotoff.MeasureError, match="names 'los', but the model returns 'loss', 'logits'; name one of those"
    ):
        rotoff.Checkpointable(made(), backward_from="los").measure(ids, labels=ids)
    with pytest.raises(rotoff.MeasureError, match="names 7, but the model returns a tuple of 2"):
        rotoff.Checkpointable(made("tuple"), backward_from=7).measure(ids, labels=ids)
    with pytest.raises(rotoff.MeasureError, match="which needs no gradient on this input; .* labels"):
        rotoff.Checkpointable(made(), backward_from="loss").measure(ids)
    with pytest.raises(rotoff.MeasureError, match="names 'loss', but the model returns a tensor alone"):
        rotoff.Checkpointable(nn.Sequential(nn.Linear(4, 4)), backward_from="loss").measure(torch.randn(2, 4))
