"""The capture as a picture: how much of each slice of time which category took.

One bar for each of sixty slices, its height the share of the slice that kernels and copies
ran (several streams or devices can pass 100 %, the bar is then cut at the top), stacked by
category, the largest at the bottom.  It is SVG made of rectangles and a few fixed words: no
text of the capture goes in, no script, no link, so that it is safe to open.
"""

from __future__ import annotations

from ikit_ops.profilers.capture import Timeline
from ikit_ops.profilers.categories import CATEGORIES

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 960, 260, 48, 16, 56
COLOURS = {
    "gemm": "#4269d0", "attention": "#efb118", "moe": "#ff725c", "norm": "#6cc5b0",
    "sampling": "#3ca951", "memcpy": "#ff8ab7", "communication": "#a463f2", "other": "#9c9c9c",
}  # fmt: skip


def svg(timeline: Timeline, devices: int = 1) -> bytes:
    """The picture of a timeline; ``devices`` is how many worked, whose time 100 % is."""
    totals = {name: sum(times) for name, times in timeline.categories.items()}
    order = sorted(totals, key=lambda name: (-totals[name], name))
    count = max((len(times) for times in timeline.categories.values()), default=1)
    full = timeline.slice_ns * max(devices, 1)
    parts = [_axes(timeline, count)]
    step = (WIDTH - LEFT) / count
    for number in range(count):
        used = 0.0
        for name in order:
            share = min(timeline.categories[name][number] / full, 1.0 - used)
            if share <= 0.0005:
                continue
            parts.append(_bar(LEFT + number * step, used, share, step, COLOURS[name]))
            used += share
    parts.append(_legend(order, totals))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="11" role="img" '
        f'aria-label="GPU time by category over time">\n{body}\n</svg>\n'
    ).encode("ascii")


def _bar(x: float, used: float, share: float, step: float, colour: str) -> str:
    height = HEIGHT - TOP - BOTTOM
    y = TOP + height * (1 - used - share)
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{step * 0.92:.2f}" '
        f'height="{height * share:.2f}" fill="{colour}"/>'
    )


def _axes(timeline: Timeline, count: int) -> str:
    """The frame, 0 and 100 %, and the length of the capture."""
    base = HEIGHT - BOTTOM
    lines = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>']
    for share in (0, 50, 100):
        y = base - (base - TOP) * share / 100
        lines.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH}" stroke="#e0e0e0"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{share} %</text>')
    span = timeline.slice_ns * count / 1e6
    lines.append(f'<text x="{LEFT}" y="{base + 16}">0 ms</text>')
    lines.append(f'<text x="{WIDTH - 4}" y="{base + 16}" text-anchor="end">{span:.4g} ms</text>')
    return "\n".join(lines)


def _legend(order: list[str], totals: dict[str, int]) -> str:
    """Each category that occurs, with its share of the time."""
    whole = sum(totals.values()) or 1
    words = []
    for number, name in enumerate(order):
        x = LEFT + number * 112
        y = HEIGHT - 14
        words.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{COLOURS[name]}"/>')
        words.append(f'<text x="{x + 14}" y="{y}">{name} {totals[name] / whole * 100:.1f} %</text>')
    return "\n".join(words)


if set(COLOURS) != set(CATEGORIES):  # pragma: no cover -- a colour is part of adding a category
    raise AssertionError("each category has a colour")
