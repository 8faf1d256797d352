"""The arithmetic of the model-free checks: by numpy where it is, else by the standard library.

A flow-match Euler step is one multiply-add for each number, so the dump's own numbers must
reproduce it to rounding.  The bound is elementwise: half a unit in the last place (ulp) of the
dtype that ``x_next`` is kept in, half an ulp of the dtype that the product was rounded to (and as
much again where that is a half format: torch rounds the scalar to the tensor's dtype first), and
four float32 roundings of the terms (a fused multiply-add differs by one of them).  Near zero
the terms cancel and the result's own ulp says nothing, which is why the terms are in the bound.

With numpy, the float32 result is first compared with ``x_next`` as integers: neighbouring
floats are neighbouring integers, so a difference of at most two (or of half a bfloat16) is
within the bound, and only the few other numbers are looked at with care.
"""

from __future__ import annotations

import functools
import math
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

ULP_BITS = {"F32": 23, "F16": 10, "BF16": 7}
_LEAST_EXPONENT = {"F32": -126, "F16": -14, "BF16": -126}
# How far two float32 of the same value may lie apart as integers, by the dtype of x_next.
_NEAR = {"F32": 2, "F16": 1 << 12, "BF16": 1 << 15}
_FLOAT32_SLACK = 4 * 2.0**-23


@dataclass
class Euler:
    """What a piece of a step showed: how many numbers are off, and the worst in bounds."""

    bad: int = 0
    worst: float = 0.0
    finite: bool = True


class Vectors(Protocol):
    """Arithmetic on pieces of tensors."""

    def floats(self, data: memoryview, dtype: str) -> Any:
        """Little-endian F32, BF16 or F16 bytes as numbers."""

    def same(self, one: Any, other: Any) -> bool:
        """Whether all numbers are equal."""

    def identical(self, one: memoryview, other: memoryview) -> bool:
        """Whether all bytes are equal."""

    def euler(self, x: Any, out: Any, x_next: Any, ds: float, dtypes: tuple[str, str]) -> Euler:
        """Hold ``x_next`` against ``x + ds * out``; dtypes of out and of x_next."""

    def finite(self, numbers: Any) -> bool:
        """Whether there is no NaN and no infinity."""


@functools.cache
def vectors() -> Vectors:
    """The fastest implementation that this Python has."""
    try:
        import numpy  # 0.1 s and an optional package: only who checks clips pays
    except ImportError:
        return Plain()
    return Numpy(numpy)


class Plain:
    """The standard library alone: a hundred times slower, and enough for short clips."""

    def floats(self, data: memoryview, dtype: str) -> Sequence[float]:
        """Little-endian F32, BF16 or F16 bytes as numbers."""
        if dtype == "F16":
            return struct.unpack(f"<{len(data) // 2}e", data)
        if dtype == "BF16":  # the upper half of a float32
            wide = bytearray(2 * len(data))
            wide[2::4], wide[3::4] = data[0::2], data[1::2]
            data = memoryview(wide)
        values = array("f")
        values.frombytes(data)
        if sys.byteorder == "big":
            values.byteswap()
        return values

    def same(self, one: Sequence[float], other: Sequence[float]) -> bool:
        """Whether all numbers are equal."""
        return len(one) == len(other) and all(a == b for a, b in zip(one, other, strict=True))

    def identical(self, one: memoryview, other: memoryview) -> bool:
        """Whether all bytes are equal."""
        return bytes(one) == bytes(other)

    def euler(self, x: Any, out: Any, x_next: Any, ds: float, dtypes: tuple[str, str]) -> Euler:
        """Hold ``x_next`` against ``x + ds * out``; dtypes of out and of x_next."""
        found = Euler(finite=self.finite(x) and self.finite(out) and self.finite(x_next))
        if not found.finite:
            return found
        for a, b, c in zip(x, out, x_next, strict=True):
            off = abs(a + ds * b - c)
            if off > _FLOAT32_SLACK * abs(c) or off > found.worst * _FLOAT32_SLACK * abs(c):
                ratio = off / _bound(a, ds * b, c, dtypes)
                found.worst = max(found.worst, ratio)
                found.bad += ratio > 1
        return found

    def finite(self, numbers: Sequence[float]) -> bool:
        """By the sum, which one NaN or infinity makes non-finite."""
        return math.isfinite(sum(numbers))


def _bound(x: float, product: float, x_next: float, dtypes: tuple[str, str]) -> float:
    """The most that rounding explains for one number; never 0."""
    bound = 0.5 * ulp(x_next, dtypes[1]) + _FLOAT32_SLACK * (abs(x) + abs(product))
    if dtypes[0] == "F32":
        return bound
    return bound + 0.5 * ulp(product, dtypes[0]) + abs(product) * 0.5 ** (ULP_BITS[dtypes[0]] + 1)


def ulp(value: float, dtype: str) -> float:
    """The distance from one number of the dtype to the next, at the value's size."""
    exponent = max(math.frexp(value)[1] - 1, _LEAST_EXPONENT[dtype])
    return math.ldexp(1.0, exponent - ULP_BITS[dtype])


class Numpy:
    """numpy: a 292 MB clip in a fifth of a second."""

    def __init__(self, numpy: Any) -> None:
        self.np = numpy

    def floats(self, data: memoryview, dtype: str) -> Any:
        """Little-endian F32, BF16 or F16 bytes as float32; a view where they are that."""
        np = self.np
        if dtype == "F32":
            return np.frombuffer(data, "<f4")
        if dtype == "BF16":
            return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
        return np.frombuffer(data, "<f2").astype(np.float32)

    def same(self, one: Any, other: Any) -> bool:
        """Whether all numbers are equal."""
        return bool(self.np.array_equal(one, other))

    def identical(self, one: memoryview, other: memoryview) -> bool:
        """Whether all bytes are equal."""
        np = self.np
        words = "<u4" if len(one) % 4 == 0 == len(other) % 4 else "<u1"
        return bool(np.array_equal(np.frombuffer(one, words), np.frombuffer(other, words)))

    def euler(self, x: Any, out: Any, x_next: Any, ds: float, dtypes: tuple[str, str]) -> Euler:
        """Hold ``x_next`` against ``x + ds * out``; dtypes of out and of x_next."""
        np = self.np
        with np.errstate(all="ignore"):  # infinities and NaN are what is looked for
            made = np.multiply(out, np.float32(ds))
            made += x
            low, high = float(made.min()), float(made.max())
            if not (math.isfinite(low) and math.isfinite(high)):
                if self.finite(x) and self.finite(out) and self.finite(x_next):
                    return self._careful(x, out, x_next, ds, dtypes)  # only the sum overflows
                return Euler(finite=False)
            near = _NEAR[dtypes[1]]
            apart = made.view(np.int32) - x_next.view(np.int32)
            apart += near
            odd = np.flatnonzero(apart.view(np.uint32) > 2 * near)
            if not len(odd):
                return Euler()
            return self._careful(x[odd], out[odd], x_next[odd], ds, dtypes)

    def _careful(self, x: Any, out: Any, x_next: Any, ds: float, dtypes: tuple[str, str]) -> Euler:
        np = self.np
        if not self.finite(x_next):
            return Euler(finite=False)
        x, x_next = x.astype(np.float64), x_next.astype(np.float64)
        product = out.astype(np.float64) * ds
        bound = 0.5 * self._ulp(x_next, dtypes[1]) + _FLOAT32_SLACK * (abs(x) + abs(product))
        if dtypes[0] != "F32":
            bound += 0.5 * self._ulp(product, dtypes[0])
            bound += abs(product) * 0.5 ** (ULP_BITS[dtypes[0]] + 1)
        ratio = abs(x + product - x_next) / bound
        return Euler(int((ratio > 1).sum()), float(ratio.max()))

    def _ulp(self, values: Any, dtype: str) -> Any:
        np = self.np
        exponents = np.maximum(np.frexp(values)[1] - 1, _LEAST_EXPONENT[dtype])
        return np.ldexp(1.0, exponents - ULP_BITS[dtype])

    def finite(self, numbers: Any) -> bool:
        """Whether there is no NaN and no infinity."""
        return bool(self.np.isfinite(numbers).all())
