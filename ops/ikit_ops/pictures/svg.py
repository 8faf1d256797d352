"""SVG that can be kept as evidence: one file, no script, nothing loaded from elsewhere.

A picture is stored beside a record and looked at years later, in a browser, an editor or a
pull request.  So it holds only shapes, text and a style sheet of its own.  A viewer with a
dark background gets dark colours, by ``prefers-color-scheme`` inside that style sheet; one
that knows no media queries draws the light ones, on a ground that is drawn too, so that
text is legible in both.  CSS variables are avoided: librsvg has none.

The same input gives the same bytes.  Text comes from outside (model, device and kernel
names): it is one line, free of characters that XML forbids, escaped, and cut to its room.
Fonts differ from machine to machine, so the room is estimated, a little generously.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Sequence

from ikit_mcp.call import one_line

MEDIA_TYPE = "image/svg+xml"
BOLD = 1.15  # how much wider bold text is: a factor for the size given to ``fit``
_MARKUP = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"})
_FORBIDDEN = re.compile("[^\x09\x0a\x0d\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

# class: (what it colours, light, dark); contrast of text on its ground >= 4.5 in both
_COLOURS = {
    "ground": ("fill", "#ffffff", "#14181f"),
    "ink": ("fill", "#1c2430", "#e6e9ee"),
    "muted": ("fill", "#586372", "#a3adba"),
    "warn": ("fill", "#a13c00", "#f5b364"),
    "one": ("fill", "#2f6db3", "#6ea8e6"),
    "two": ("fill", "#18857b", "#4fc2b5"),
    "three": ("fill", "#9a6b00", "#d9ac3f"),
    "four": ("fill", "#7d4fa8", "#b690dc"),
    "grid": ("stroke", "#e2e6eb", "#2b323c"),
    "axis": ("stroke", "#8b95a3", "#6b7684"),
    "curve": ("stroke", "#2f6db3", "#6ea8e6"),
    "mark": ("stroke", "#a13c00", "#f5b364"),
    "hollow": ("stroke", "#1c2430", "#e6e9ee"),
}
_SHAPES = (
    "text{font-family:system-ui,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;font-size:12px}"
    ".big{font-size:17px;font-weight:600}.head{font-size:13px;font-weight:600}"
    ".small{font-size:11px}.end{text-anchor:end}.mid{text-anchor:middle}"
    ".grid,.axis{stroke-width:1}.curve{stroke-width:2;fill:none;stroke-linejoin:round}"
    ".mark{stroke-width:1;stroke-dasharray:4 3}.hollow{stroke-width:1.5;fill:none}"
)


def clean(text: str, limit: int = 200) -> str:
    """Text from outside as one line that XML can hold; not yet escaped."""
    return _FORBIDDEN.sub("\ufffd", one_line(text, limit))


def escaped(text: str, limit: int = 200) -> str:
    """Text from outside as the content of an element."""
    return clean(text, limit).translate(_MARKUP)


def width_of(text: str, size: float) -> float:
    """About the pixels that a text takes at a font size, with a margin for other fonts."""
    return size * sum(_advance(character) for character in text)


def _advance(character: str) -> float:
    """The width of a character in em."""
    if unicodedata.east_asian_width(character) in "WF":
        return 1.0
    if character in " .,:;|'!iIjlt()[]/-":
        return 0.36
    return 1.0 if character in "mwMW@%…" else 0.72 if character.isupper() else 0.6


def fit(text: str, width: float, size: float = 12) -> str:
    """The text, cut with an ellipsis where it is wider than ``width`` pixels."""
    if width_of(text, size) <= width:
        return text
    kept, used = 0, size * _advance("…")
    while kept < len(text) and used + size * _advance(text[kept]) <= width:
        used += size * _advance(text[kept])
        kept += 1
    return text[:kept].rstrip() + "…"


def wrap(text: str, width: float, size: float = 12) -> list[str]:
    """The text in lines of at most ``width`` pixels, broken at spaces."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and width_of(longer, size) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return [fit(line, width, size) for line in lines]


def step_of(top: float, count: int, binary: bool = False) -> float:
    """The distance of ticks that divides 0..top into at most about ``count`` parts.

    1, 2 or 5 times a power of ten; with ``binary`` a power of two.
    """
    rough = top / count
    if not rough > 0:
        return 1.0
    if binary:
        return float(2 ** max(math.ceil(math.log2(rough) - 1e-9), 0))
    scale: float = 10.0 ** math.floor(math.log10(rough))
    return next(scale * m for m in (1, 2, 5, 10) if scale * m >= rough * (1 - 1e-9))


def ticks(top: float, step: float) -> list[float]:
    """0, step, 2 step, ... up to ``top``."""
    return [step * n for n in range(math.floor(top / step + 1e-9) + 1)]


class Canvas:
    """Shapes in the order drawn; ``render`` makes the file.  Coordinates are pixels."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._parts: list[str] = []

    def text(self, x: float, y: float, text: str, style: str = "ink") -> None:
        """Text with its baseline at y; ``style`` are classes (big, head, small, end, mid)."""
        shown = escaped(text, 400)
        self._parts.append(f'<text x="{_n(x)}" y="{_n(y)}" class="{style}">{shown}</text>')

    def rect(self, x: float, y: float, width: float, height: float, style: str) -> None:
        """A filled rectangle."""
        size = f'width="{_n(width)}" height="{_n(height)}"'
        self._parts.append(f'<rect x="{_n(x)}" y="{_n(y)}" {size} class="{style}"/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, style: str) -> None:
        """A straight line."""
        ends = f'x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}"'
        self._parts.append(f'<line {ends} class="{style}"/>')

    def curve(self, points: Iterable[tuple[float, float]], style: str = "curve") -> None:
        """A line through points."""
        at = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self._parts.append(f'<polyline points="{at}" class="{style}"/>')

    def circle(self, x: float, y: float, radius: float, style: str) -> None:
        """A disc, or a ring."""
        self._parts.append(f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" class="{style}"/>')

    def render(self, height: float, title: str, lines: Sequence[str] = ()) -> bytes:
        """The file; ``title`` and ``lines`` say for a screen reader what is seen."""
        size = f'width="{self.width}" height="{_n(height)}"'
        described = escaped(" ".join(lines), 1000)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
            f'viewBox="0 0 {self.width} {_n(height)}" role="img">\n'
            f"<title>{escaped(title)}</title>\n"
            f"<desc>{described}</desc>\n"
            f"<style>{style_sheet()}</style>\n"
            f'<rect {size} class="ground"/>\n'
        )
        return (head + "\n".join(self._parts) + "\n</svg>\n").encode("utf-8")


def style_sheet() -> str:
    """The rules of every picture: shapes, light colours, dark colours where preferred."""
    light = "".join(f".{name}{{{what}:{at}}}" for name, (what, at, _) in _COLOURS.items())
    dark = "".join(f".{name}{{{what}:{at}}}" for name, (what, _, at) in _COLOURS.items())
    return f"{_SHAPES}{light}@media (prefers-color-scheme:dark){{{dark}}}"


def _n(value: float) -> str:
    """A coordinate with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")
