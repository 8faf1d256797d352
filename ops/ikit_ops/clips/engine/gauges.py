"""What an output holds of each known direction, at one step of one stream.

A ``Ruler`` is made of the reference's run at a step: its output, its guidance passes, and the
directions that were worked out for it.  It measures any output at that step the same way: the
engine's, the reference's own in bf16 (which tells the noise), and with int8 weights (the bias).

Guidance is fitted where pipelines combine it.  LTX-2 combines its passes as estimates of x0, the
others as velocities; the differences are the same but for a factor.  A rescale multiplies all of
it by one number that depends on the output, so where one is asked for that number is fitted too;
and where none is, that fit tells of passes that were combined in another way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Passes:
    """The guidance passes at one step: the conditional one, and the differences that are added."""

    base: torch.Tensor
    differences: Mapping[str, torch.Tensor]
    x: torch.Tensor
    sigma: float
    x0_space: bool
    rescaled: bool


@dataclass(frozen=True)
class Reading:
    """One direction's amount in an output, what is left without it, and its deviation.

    ``deviation`` is what an error of one unit in every number would add.
    """

    off: float
    rest: float
    deviation: float


class Ruler:
    """Measures outputs of one step against the reference's."""

    def __init__(self, wanted: torch.Tensor, floor: float, passes: Passes | None) -> None:
        """``floor`` is the size (2-norm) of the bf16 error at this step."""
        self.wanted, self.floor, self.passes = _flat(wanted), floor, passes
        self.numbers = self.wanted.numel()
        self.directions: dict[str, torch.Tensor] = {}
        self.columns: dict[str, torch.Tensor] = {}
        self.own: dict[bool, dict[str, float]] = {}
        self.unseen: list[str] = []
        if passes is None:
            self.directions["scale"] = self.wanted
        else:
            self._fit_guidance(passes)

    def add(self, name: str, direction: torch.Tensor) -> None:
        """Measure along one more direction."""
        self.directions[name] = _flat(direction)

    def _fit_guidance(self, passes: Passes) -> None:
        """The reference's own amounts; a pass that changes less than rounding has none."""
        sign = -passes.sigma if passes.x0_space else 1.0
        base = _flat(passes.base)
        self.base = _flat(passes.x) - passes.sigma * base if passes.x0_space else base
        self.columns = {name: sign * _flat(each) for name, each in passes.differences.items()}
        while self.columns:
            solved = self._solve(self.wanted, passes.rescaled)[0]
            small = [
                name
                for name, each in self.columns.items()
                if abs(solved[name]) * float(each.norm()) <= abs(sign) * self.floor
            ]
            if not small:
                break
            self.unseen += small
            self.columns = {n: each for n, each in self.columns.items() if n not in small}
        if self.columns:
            self.own = {free: self._amounts(self.wanted, free)[0] for free in (False, True)}

    def _solve(
        self, out: torch.Tensor, free: bool
    ) -> tuple[dict[str, float], float, dict[str, float]]:
        """The coefficients of an output, what is left, and the deviations, all as velocities.

        ``free``: the conditional pass has a coefficient too (``rescale``), else it is one.
        """
        passes = self.passes
        names, columns = list(self.columns), list(self.columns.values())
        sigma = passes.sigma if passes is not None and passes.x0_space else None
        target = out if sigma is None or passes is None else _flat(passes.x) - sigma * out
        if free:
            names, columns = ["rescale", *names], [self.base, *columns]
        else:
            target = target - self.base
        solved, rest, spread = _least_squares(columns, target)
        scale = 1.0 if sigma is None else sigma
        return (
            dict(zip(names, map(float, solved), strict=True)),
            rest / scale,
            {name: each * scale for name, each in zip(names, spread, strict=True)},
        )

    def _amounts(
        self, out: torch.Tensor, free: bool
    ) -> tuple[dict[str, float], float, dict[str, float]]:
        """The scales that an output shows: of each guidance, and of everything together."""
        solved, rest, spread = self._solve(out, free)
        factor = solved.get("rescale", 1.0) or 1e-12
        found = {name: value / factor for name, value in solved.items()}
        spread = {name: each / abs(factor) for name, each in spread.items()}
        if free:
            found["rescale"], spread["rescale"] = factor, spread["rescale"] * abs(factor)
        if "guidance" in found:
            found["guidance"] += 1.0
        return found, rest, spread

    def guidance(self, out: torch.Tensor) -> float | None:
        """The guidance scale that an output shows, or None."""
        if self.passes is None or "guidance" not in self.columns:
            return None
        return self._amounts(_flat(out), self.passes.rescaled)[0]["guidance"]

    def _read_guidance(self, out: torch.Tensor, free: bool, names: Sequence[str]) -> dict[str, Any]:
        values, rest, spread = self._amounts(out, free)
        own = self.own[free]
        return {
            name: Reading(
                values[name] / own[name] - 1,
                rest / self.floor,
                self.floor * spread[name] / abs(own[name]),
            )
            for name in names
            if own.get(name)
        }

    def read(self, out: torch.Tensor) -> dict[str, Reading]:
        """What an output holds of every direction; rest and deviation in units of the floor."""
        flat = _flat(out)
        error = flat - self.wanted
        found: dict[str, Reading] = {}
        if self.passes is not None and self.columns:
            free = self.passes.rescaled
            found |= self._read_guidance(flat, free, list(self.columns))
            found |= self._read_guidance(flat, True, ["rescale"])
        for name, direction in self.directions.items():
            length = float(direction.norm())
            if length > 0:
                off = float(error @ direction) / length**2
                rest = float((error - off * direction).norm())
                found[name] = Reading(off, rest / self.floor, self.floor / length)
        return found


def relative(one: torch.Tensor, wanted: torch.Tensor) -> float:
    """|one - wanted| / |wanted|."""
    size = float(wanted.double().norm())
    gap = float((one.double() - wanted.double()).norm())
    return gap / size if size else (0.0 if gap == 0 else 1e9)


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    """The cosine of the angle between two tensors; 0 where one is zero."""
    a, b = _flat(one), _flat(other)
    sizes = float(a.norm() * b.norm())
    return float(a @ b) / sizes if sizes else 0.0


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().double()


def _least_squares(
    columns: Sequence[torch.Tensor], target: torch.Tensor
) -> tuple[torch.Tensor, float, list[float]]:
    """Least squares: the coefficients, the size of what is left, and their deviations.

    By the normal equations, in float64 and with columns of unit length: they are few, and may
    have millions of numbers.
    """
    matrix = torch.stack(list(columns), dim=1)
    lengths = matrix.norm(dim=0).clamp_min(1e-300)
    matrix = matrix / lengths
    inverse: Any = torch.linalg.pinv(matrix.T @ matrix, hermitian=True)
    solved = inverse @ (matrix.T @ target)
    rest = float((target - matrix @ solved).norm())
    spread = inverse.diagonal().clamp_min(0.0).sqrt() / lengths
    return solved / lengths, rest, spread.tolist()
