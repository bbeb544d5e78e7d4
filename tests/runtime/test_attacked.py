"""Models as people write them on which a planned step once went wrong without a word: a table, row by row."""

from __future__ import annotations

import numpy
import pytest
import torch
from allocated import peak_bytes
from step_by_step import Call, Row, error_of, is_right, verdict
from torch import nn
from whole_models import noise

import rotoff

DEPTHS = (4, 4, 6, 4, 3)


class Layers(nn.Module):
    """Runs the first `many` of its layers."""

    many = 4

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, layer in enumerate(self.layers[: self.many]):
            x = self.passed(torch.tanh(layer(x)), k)
        return x

    def passed(self, x: torch.Tensor, k: int) -> torch.Tensor:
        raise NotImplementedError


class Noisy(Layers):
    """An operator draws from NumPy's generator."""

    def passed(self, x: torch.Tensor, k: int) -> torch.Tensor:
        return noise(x)


class Unseen(Layers):
    """NumPy writes into what an operation has made, and another one reads it."""

    def passed(self, x: torch.Tensor, k: int) -> torch.Tensor:
        scale = torch.empty(64)
        scale.numpy().fill(k + 1)
        return x * scale[torch.arange(64)]


class Packed(nn.Module):
    """The lengths of the sequences change; PyTorch writes those of the padded result unseen."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(16, 16, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(torch.tanh(x), lengths, batch_first=True, enforce_sorted=False)
        outputs, lengths = nn.utils.rnn.pad_packed_sequence(self.cells(packed)[0], batch_first=True)
        return torch.tanh(outputs).sum(1) / lengths[:, None]


def batch(n: int) -> Call:
    return (torch.randn(128, 64, generator=torch.Generator().manual_seed(n)),), {}


def sequences(n: int) -> Call:
    generator = torch.Generator().manual_seed(n)
    longest = (9, 9, 5, 9, 7)[n]
    lengths = torch.randint(1, longest + 1, (8,), generator=generator)
    return (torch.randn(8, longest, 16, generator=generator, requires_grad=True), lengths), {}


def deeper(net: nn.Module, n: int) -> None:
    net.many = DEPTHS[n]


def backward_twice(run: nn.Module, net: nn.Module, call: Call, n: int) -> torch.Tensor:
    loss = error_of(run(*call[0]))
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


ROWS = [
    Row("what cannot be made again, off its course", Noisy, batch, deeper),
    Row("what cannot be made again, in a second backward", Noisy, batch, step=backward_twice),
    Row("what NumPy writes, off its course", Unseen, batch, deeper),
    Row("packed sequences of other lengths", Packed, sequences, room=0),
]


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_what_went_wrong_without_a_word_is_right(row: Row) -> None:
    numpy.random.seed(0)
    said = verdict(row, "remat")
    assert is_right(row, said), said


def test_casts_that_the_caller_has_while_the_loss_is_made_are_charged() -> None:
    """An open region of autocast keeps them."""
    layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(5)]
    model, x = nn.Sequential(*layers), torch.randn(256, 64)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.mse_loss(run(x).float(), torch.zeros(256, 64))
        loss.backward()

    run = rotoff.Checkpointable(model, cache_directory=None).compute_sequence(1 << 40)
    step()
    run.compute_sequence(run.min_mem_limit(), refine=False)
    assert peak_bytes(step) <= run.get_expected_memory() <= run.mem_limit
    run.close()
