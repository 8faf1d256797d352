"""The arithmetic of the checks: both implementations hold every number to its rounding."""

from __future__ import annotations

import math
import random
import struct
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import clips
from ikit_ops.clips.vectors import Euler, Plain, Vectors, ulp, vectors

NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def both() -> list[Vectors]:
    """The standard library's, and numpy's where this Python has it."""
    found = vectors()
    return [Plain()] if isinstance(found, Plain) else [Plain(), found]


def pieces(ops: Vectors, dtype: str, *columns: list[float]) -> list[Any]:
    return [ops.floats(memoryview(clips.encode(each, NAMES[dtype])), dtype) for each in columns]


def held(ops: Vectors, dtype: str, columns: Sequence[list[float]], ds: float) -> Euler:
    """What x, out and x_next of one dtype come to."""
    x, out, after = pieces(ops, dtype, *columns)
    return ops.euler(x, out, after, ds, (dtype, dtype))


def stepped(dtype: str, ds: float, count: int = 400) -> tuple[list[float], ...]:
    numbers = random.Random(dtype)
    x = clips.rounded([numbers.gauss(0, 1) for _ in range(count)], NAMES[dtype])
    out = clips.rounded([numbers.gauss(0, 2) for _ in range(count)], NAMES[dtype])
    after = [a + ds * b for a, b in zip(x, out, strict=True)]
    return x, out, clips.rounded(after, NAMES[dtype])


@pytest.mark.parametrize("dtype", NAMES)
def test_bytes_become_the_numbers_that_they_are(dtype: str) -> None:
    numbers = clips.rounded([0.0, -0.0, 1.0, -2.5, 3e-5, 60000.0], NAMES[dtype])
    for ops in both():
        (got,) = pieces(ops, dtype, numbers)
        assert [float(value) for value in got] == numbers


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("ds", [-0.05, -1.0, -1e-4])
def test_an_exact_step_is_within_its_rounding(dtype: str, ds: float) -> None:
    for ops in both():
        found = held(ops, dtype, stepped(dtype, ds), ds)
        assert (found.bad, found.finite) == (0, True)
        assert found.worst <= 1


def test_a_product_that_was_rounded_to_bfloat16_on_its_way_is_within_the_bound() -> None:
    x, out, _ = stepped("BF16", -0.07)
    product = clips.rounded([-0.07 * value for value in out], "bfloat16")
    after = clips.rounded([a + b for a, b in zip(x, product, strict=True)], "bfloat16")
    for ops in both():
        found = held(ops, "BF16", (x, out, after), -0.07)
        assert found.bad == 0


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_a_scalar_that_was_rounded_to_a_half_format_first_is_within_the_bound(dtype: str) -> None:
    x, out, _ = stepped(dtype, 0.0)
    rough = clips.rounded([-0.0731], NAMES[dtype])[0]
    product = clips.rounded([rough * value for value in out], NAMES[dtype])
    after = clips.rounded([a + b for a, b in zip(x, product, strict=True)], NAMES[dtype])
    for ops in both():
        assert held(ops, dtype, (x, out, after), -0.0731).bad == 0


def test_terms_that_cancel_are_held_to_the_size_of_the_terms() -> None:
    x, out = [1.0, 1.0], [1.0 + 2.0**-23, 1.0]
    for ops in both():
        found = held(ops, "F32", (x, out, [2.0**-23, -(2.0**-24)]), -1.0)
        assert found.bad == 0
        found = held(ops, "F32", (x, out, [1e-3, 0.0]), -1.0)
        assert found.bad == 1


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("place", [0, 399])
def test_one_number_that_is_a_few_ulp_off_is_found(dtype: str, place: int) -> None:
    x, out, after = stepped(dtype, -0.05)
    after[place] += 40 * ulp(after[place] or 1.0, dtype)
    for ops in both():
        found = held(ops, dtype, (x, out, after), -0.05)
        assert found.bad == 1
        assert found.worst > 1


def test_a_sigma_rounded_to_bfloat16_is_not_within_the_bound() -> None:
    x, out, _ = stepped("F32", 0.0)
    rough = clips.rounded([-0.0731], "bfloat16")[0]
    after = clips.rounded([a + rough * b for a, b in zip(x, out, strict=True)], "float32")
    for ops in both():
        assert held(ops, "F32", (x, out, after), -0.0731).bad > 300


@pytest.mark.parametrize("column", [0, 1, 2])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_told_apart_from_what_is_off(column: int, bad: float) -> None:
    columns = [list(each) for each in stepped("F32", -0.05)]
    columns[column][7] = bad
    for ops in both():
        assert not held(ops, "F32", columns, -0.05).finite


def test_equal_numbers_of_two_dtypes_are_the_same() -> None:
    numbers = clips.rounded([0.5, -3.0, 0.1], "bfloat16")
    for ops in both():
        (wide,), (narrow,) = pieces(ops, "F32", numbers), pieces(ops, "BF16", numbers)
        assert ops.same(wide, narrow)
        (other,) = pieces(ops, "F32", [0.5, -3.0, 0.2])
        assert not ops.same(other, narrow)
        assert ops.identical(memoryview(b"abcd"), memoryview(b"abcd"))
        assert not ops.identical(memoryview(b"abcd"), memoryview(b"abce"))
        assert not ops.identical(memoryview(b"ab"), memoryview(b"abcd"))


@given(st.floats(min_value=2.0**-126, max_value=3e38))
def test_the_ulp_of_float32_is_the_distance_to_the_next_one(value: float) -> None:
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    here, there = struct.unpack("<2f", struct.pack("<2I", bits, bits + 1))
    if math.isfinite(there):
        assert ulp(here, "F32") == there - here


def test_without_numpy_the_standard_library_does_it() -> None:
    program = (
        "import sys; sys.modules['numpy'] = None\n"
        "from ikit_ops.clips.vectors import Plain, vectors\n"
        "assert isinstance(vectors(), Plain)\n"
        "assert vectors().finite([1.0]) and not vectors().finite([float('nan')])\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
