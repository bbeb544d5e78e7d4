"""Numbers of bytes as people write them, and the sentences for what is not one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rotoff


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("6 GiB", 6 * 1024**3),
        ("6GiB", 6 * 1024**3),
        ("6 gib", 6 * 1024**3),
        ("1.5 GB", 1_500_000_000),
        ("0.5 KiB", 512),
        (".5 kB", 500),
        ("80 MB", 80_000_000),
        ("2 PiB", 2 * 1024**5),
        ("2e3 B", 2000),
        ("1.9 B", 1),
        ("4096", 4096),
        ("  4096  ", 4096),
    ],
)
def test_sizes_as_text(text: str, number: int) -> None:
    assert rotoff.parse_bytes(text) == number


@pytest.mark.parametrize(
    ("value", "number"),
    [(1, 1), (2**70, 2**70), (1.5, 1), (4096.9, 4096), (np.int64(7), 7), (np.float64(7.5), 7)],
)
def test_sizes_as_numbers(value: object, number: int) -> None:
    parsed = rotoff.parse_bytes(value)
    assert parsed == number
    assert type(parsed) is int


def test_a_whole_number_written_with_an_exponent_is_bytes() -> None:
    assert rotoff.parse_bytes("2e9") == 2_000_000_000
    assert rotoff.parse_bytes("1.5e3") == 1500


def test_large_whole_numbers_are_exact() -> None:
    assert rotoff.parse_bytes(f"{2**60 + 1}") == 2**60 + 1
    assert rotoff.parse_bytes(2**60 + 1) == 2**60 + 1


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (0, "must be above 0"),
        (-1, "must be above 0"),
        (-0.5, "must be above 0"),
        (0.0, "must be above 0"),
        (0.5, "looks like a fraction"),
        (1.0, "looks like a fraction"),
        (float("nan"), "is nan"),
        (float("inf"), "is inf"),
        (True, "is True"),
        (False, "is False"),
        (None, "is None"),
        (1j, "is 1j"),
        ([4096], "is \\[4096\\]"),
        ("", "is ''"),
        ("six GiB", "is 'six GiB'"),
        ("-6 GiB", "is '-6 GiB'"),
        ("6 GiBs", "unknown unit 'GiBs'"),
        ("6 XB", "unknown unit 'XB'"),
        ("6 GiB 2", "is '6 GiB 2'"),
        ("1.5", "without a unit"),
        ("1e0", "without a unit"),
        ("50%", "a share; limits are absolute.*keep_all_memory"),
        ("0", "less than one byte"),
        ("0 GiB", "less than one byte"),
        ("0.1 B", "less than one byte"),
        ("1e400 B", "too large"),
        ("9" * 400, "too large"),
        ("9" * 5000 + " GiB", "too large"),
        ("nan B", "is 'nan B'"),
    ],
)
def test_what_is_not_a_size(value: object, sentence: str) -> None:
    with pytest.raises(rotoff.LimitError, match=sentence) as caught:
        rotoff.parse_bytes(value)
    assert str(caught.value).startswith("mem_limit is ")
    assert isinstance(caught.value, ValueError)


def test_the_error_names_what_was_read() -> None:
    with pytest.raises(rotoff.LimitError, match="^host_limit is 0"):
        rotoff.parse_bytes(0, "host_limit")


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (1, "1 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1.31 * 1024**3, "1.31 GiB"), (2**55, "32768.00 TiB")],
)
def test_sizes_are_printed_in_the_unit_that_fits(number: float, text: str) -> None:
    assert rotoff.format_bytes(number) == text


@given(st.integers(1, 2**50))
def test_printed_sizes_read_back_to_three_digits(number: int) -> None:
    assert rotoff.parse_bytes(rotoff.format_bytes(number)) == pytest.approx(number, rel=0.006)
