"""The picture of a roofline: where the bytes go, and how the ceiling falls with the context.

Two charts.  The bars answer what to make smaller: the groups of one step's bytes, weights
apart from cache and state.  The curve answers how far a benchmark can go: the most tokens a
second that the bandwidth allows at each context up to the model's maximum, and the
benchmarks themselves as points below it.  Without a bandwidth there is no ceiling, and the
curve shows the bytes.

Whoever sees only the picture must not believe more than the record says: the bandwidth's
source, what is UNPROVEN and which points do not count are written into it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ikit_mcp.evidence.record import Device
from ikit_ops.decode import groups
from ikit_ops.decode.curve import Curve, Point, differs
from ikit_ops.decode.tally import Counts, Options
from ikit_ops.pictures import svg

MEDIA_TYPE = svg.MEDIA_TYPE
WIDTH, MARGIN = 880, 28
_LABELS = 190  # room for the names of the groups
_VALUES = 158  # room for their sizes
_PLOT_LEFT, _PLOT_HEIGHT = 88, 250
NAMES = {
    "embedding_row": "embedding row",
    "per_layer_embedding_row": "per-layer embedding row",
    "router": "router",
    "routed_experts": "routed experts",
    "shared_experts": "shared experts",
    "mlp": "MLP",
    "lm_head": "LM head",
    "aux": "quantiser's auxiliaries",
    "other": "other",
}


@dataclass(frozen=True)
class Subject:
    """What the picture is of.

    Attributes:
        model: its name.
        counts, options: the count, and what it was asked for.
        curve: the count at other contexts.
        bandwidth_gbs: None draws bytes instead of a ceiling.
        source: where the bandwidth comes from, in words.
        rate_of: tokens (or steps) a second of a step of so many bytes; None without bandwidth.
        rate_unit: tok/s or steps/s.
        device: whose bandwidth it is, None when nobody knows.
        doubt: why the bandwidth is in doubt, None when it is not.
        points: benchmarks.
    """

    model: str
    counts: Counts
    options: Options
    curve: Curve
    bandwidth_gbs: float | None
    source: str
    rate_of: Callable[[int], float | None]
    rate_unit: str
    device: Device | None = None
    doubt: str | None = None
    points: tuple[Point, ...] = ()

    @property
    def one(self) -> str:
        """What the bytes are of: a token, or a step."""
        return "step" if self.options.batch > 1 or self.options.include_mtp else "token"

    @property
    def bounded(self) -> bool:
        """Whether the curve is a ceiling."""
        return self.bandwidth_gbs is not None and self.curve.proven_bytes[-1] > 0


def draw(subject: Subject) -> bytes:
    """The SVG file, as bytes."""
    canvas = svg.Canvas(WIDTH)
    y, said = _heading(canvas, subject)
    y = _bars(canvas, subject, y + 34)
    y = _chart(canvas, subject, y + 34)
    y = _legend(canvas, subject, y)
    title = f"Decode roofline of {svg.clean(subject.model, 100)}"
    return canvas.render(y + MARGIN - 8, title, said)


def _heading(canvas: svg.Canvas, subject: Subject) -> tuple[float, list[str]]:
    """Model, conditions, bandwidth and doubts; the last baseline, and the lines."""
    counts, options = subject.counts, subject.options
    room = WIDTH - 2 * MARGIN
    title = svg.fit(svg.clean(subject.model, 120), room, 17 * svg.BOLD)
    canvas.text(MARGIN, 38, title, "ink big")
    conditions = [
        f"weights {counts.dtype or 'none'}",
        "from headers" if counts.method == "headers" else "from config.json alone",
        f"context {options.context:,} tokens",
        f"batch {options.batch:,}",
    ]
    if counts.kv:
        layout = counts.kv.get("mla_cache")
        kept = "fp8_ds_mla" if layout == "fp8_ds_mla" else options.kv_dtype
        conditions.insert(1, f"KV {kept}" + (f" ({layout})" if layout == "expanded" else ""))
    if options.tensor_parallel > 1:
        conditions.append(f"one of {options.tensor_parallel:,} devices")
    if options.include_mtp:
        conditions.append("with prediction layers")
    lines = [(" · ".join(conditions), "muted")]
    gbs = subject.bandwidth_gbs
    if gbs is None:
        lines.append(("Bandwidth: none given, so no ceiling in tokens per second", "muted"))
    else:
        lines.append((f"Bandwidth {_short(gbs)} GB/s: {subject.source}", "muted"))
    if subject.doubt:
        lines.append((f"In doubt: {subject.doubt}", "warn"))
    terms = sorted({str(item["term"]) for item in counts.unproven})
    if terms:
        bound = "; the ceiling is an upper bound" if subject.bounded else ""
        lines.append((f"UNPROVEN: {', '.join(terms)}{bound}", "warn"))
    y = 38.0
    for text, style in lines:
        for line in svg.wrap(svg.clean(text, 400), room)[:2]:
            y += 19
            canvas.text(MARGIN, y, line, style)
    return y, [title, *(svg.clean(text, 400) for text, _ in lines)]


def _bars(canvas: svg.Canvas, subject: Subject, y: float) -> float:
    """The bytes of one step by group, largest first; where the chart ends."""
    counts = subject.counts
    parts = [
        (NAMES.get(name, name), counts.groups[name], "one")
        for name in groups.READ
        if counts.groups.get(name)
    ]
    if counts.kv_bytes:
        parts.append(("KV cache", counts.kv_bytes, "two"))
    if counts.state_bytes:
        parts.append(("state (read + written)", counts.state_bytes, "three"))
    parts.sort(key=lambda part: -part[1])
    total = counts.step_bytes
    canvas.text(MARGIN, y, f"Bytes of one {subject.one}: {size_text(total)}", "ink head")
    used = dict.fromkeys(style for _, _, style in parts)
    _key(canvas, y, [(_KEYS[style], style) for style in ("one", "two", "three") if style in used])
    y += 14
    left = MARGIN + _LABELS
    room = WIDTH - MARGIN - _VALUES - left
    largest = parts[0][1] if parts else 1
    for name, size, style in parts:
        canvas.text(left - 10, y + 13, name, "ink end")
        length = max(room * size / largest, 1)
        canvas.rect(left, y + 2, length, 14, style)
        share = 100 * size / total
        percent = f"{share:.1f} %" if share >= 0.05 else "< 0.1 %"
        canvas.text(left + length + 8, y + 13, f"{size_text(size)}, {percent}", "muted")
        y += 21
    return y


_KEYS = {"one": "weights", "two": "KV cache", "three": "recurrent state"}


def _key(canvas: svg.Canvas, y: float, entries: list[tuple[str, str]]) -> None:
    """The meaning of the colours, at the right of a heading."""
    x = float(WIDTH - MARGIN)
    for name, style in reversed(entries):
        x -= svg.width_of(name, 12)
        canvas.text(x, y, name, "muted")
        canvas.rect(x - 16, y - 9.5, 11, 11, style)
        x -= 34


def _chart(canvas: svg.Canvas, subject: Subject, y: float) -> float:
    """The ceiling (or the bytes) against the context; where the chart ends."""
    curve, options = subject.curve, subject.options
    values, unit = _values(subject)
    if subject.bounded:
        together = ", all sequences together" if options.batch > 1 else ""
        what = f"Ceiling against context{together}"
    else:
        what = f"Bytes of one {subject.one} against context"
    canvas.text(MARGIN, y, what, "ink head")
    plot = _Plot(
        left=_PLOT_LEFT,
        top=y + 34,
        width=WIDTH - MARGIN - 12 - _PLOT_LEFT,
        height=_PLOT_HEIGHT,
        right_value=float(curve.contexts[-1] or 1),
        top_value=max([*values, *(point.highest for point in subject.points)]) * 1.06 or 1.0,
    )
    _axes(canvas, plot, unit, curve.contexts[-1])
    canvas.curve([(plot.x(c), plot.y(v)) for c, v in _thinned(curve.contexts, values, plot)])
    stated = curve.stated
    if stated is not None and stated < curve.contexts[-1]:
        canvas.line(plot.x(stated), plot.top, plot.x(stated), plot.bottom, "mark")
        side = "warn small end" if plot.x(stated) > plot.left + plot.width / 2 else "warn small"
        at = plot.x(stated) + (-6 if side.endswith("end") else 6)
        canvas.text(at, plot.top + 12, f"stated maximum {stated:,}", side)
    _asked(canvas, subject, plot, values, unit)
    for number, point in enumerate(subject.points, 1):
        x = plot.x(point.context)
        canvas.line(x, plot.y(point.lowest), x, plot.y(point.highest), "hollow")
        canvas.circle(x, plot.y(point.rate), 4, "four" if point.valid else "hollow ground")
        canvas.text(x + 8, plot.y(point.rate) + 4, str(number), "ink small")
    return plot.bottom + 42


def _values(subject: Subject) -> tuple[list[float], str]:
    """The height of the curve at each of its contexts, and the unit."""
    if subject.bounded:
        return [subject.rate_of(n) or 0.0 for n in subject.curve.proven_bytes], subject.rate_unit
    sizes = subject.curve.step_bytes
    unit, scale = _unit(sizes[-1])
    return [size / scale for size in sizes], unit


@dataclass(frozen=True)
class _Plot:
    """Where a value is in the picture."""

    left: float
    top: float
    width: float
    height: float
    right_value: float
    top_value: float

    @property
    def bottom(self) -> float:
        return self.top + self.height

    def x(self, value: float) -> float:
        return self.left + self.width * value / self.right_value

    def y(self, value: float) -> float:
        return self.bottom - self.height * value / self.top_value


def _axes(canvas: svg.Canvas, plot: _Plot, unit: str, last: int) -> None:
    """Grid, ticks, and what the axes are."""
    step = svg.step_of(plot.top_value, 5)
    for value in svg.ticks(plot.top_value, step):
        y = plot.y(value)
        canvas.line(plot.left, y, plot.left + plot.width, y, "grid" if value else "axis")
        canvas.text(plot.left - 8, y + 4, _tick(value, step), "muted small end")
    step = max(svg.step_of(last, 5, binary=last % 1024 == 0), 1)
    for value in svg.ticks(last, step):
        x = plot.x(value)
        canvas.line(x, plot.bottom, x, plot.bottom + 5, "axis")
        if value and last - value < step * 0.6 and value != last:
            continue
        label = f"{value:,.0f}"
        if x + svg.width_of(label, 11) / 2 > WIDTH - 4:
            canvas.text(WIDTH - 8, plot.bottom + 18, label, "muted small end")
        else:
            canvas.text(x, plot.bottom + 18, label, "muted small mid")
    canvas.text(plot.left, plot.top - 12, unit, "muted small")
    middle = plot.left + plot.width / 2
    canvas.text(middle, plot.bottom + 36, "context (cached tokens)", "muted small mid")


def _asked(
    canvas: svg.Canvas, subject: Subject, plot: _Plot, values: list[float], unit: str
) -> None:
    """The value at the context that was asked for."""
    context = subject.options.context
    value = values[bisect_left(subject.curve.contexts, context)]
    x, y = plot.x(context), plot.y(value)
    canvas.circle(x, y, 4.5, "one")
    text = f"{_short(value)} {unit} at {context:,}"
    # beside the curve: above a falling one at the left, below it at the right
    at_left = x < plot.left + plot.width * 0.7
    below = at_left != subject.bounded
    across = x + 10 if at_left else x - 8
    canvas.text(across, y + (18 if below else -9), text, "ink" if at_left else "ink end")


def _legend(canvas: svg.Canvas, subject: Subject, y: float) -> float:
    """What each point is, and which do not count; the last baseline."""
    room = WIDTH - 2 * MARGIN
    lines = []
    if subject.curve.stated is None:
        shown = f"{subject.curve.contexts[-1]:,}"
        lines.append((f"The configuration states no longest context: drawn to {shown}.", "muted"))
    if subject.points:
        filled = "Points: median of a benchmark's rounds, with their range; hollow: not valid."
        lines.append((filled, "muted"))
    lines += [
        (f"{number}  {point_text(subject, point)}", "ink")
        for number, point in enumerate(subject.points, 1)
    ]
    for text, style in lines:
        for row, line in enumerate(svg.wrap(svg.clean(text, 300), room - 18)[:2]):
            y += 18 if not row else 15
            canvas.text(MARGIN + 18 * row, y, line, style)
    return y


def point_text(subject: Subject, point: Point) -> str:
    """A benchmark in words; its share of the ceiling only where that may be said."""
    text = f"{point.label}: {_short(point.rate)} tok/s at {point.context:,}"
    share = share_of(subject, point)
    if share is not None:
        text += f", {100 * share:.1f} % of the ceiling"
    if share is not None and share > 1:
        text += ": more than is possible"
    if point.valid is not True:
        text += ", not valid" if point.valid is False else ", validity unknown"
    if differs(subject.device, point):
        text += ", the bandwidth is of another device"
    return text


def point_json(subject: Subject, point: Point) -> dict[str, Any]:
    """A benchmark as the record keeps it beside the picture (``data.benches``)."""
    at = bisect_left(subject.curve.contexts, point.context)
    return {
        "evidence_id": point.evidence_id,
        "context": point.context,
        "decode_tok_s": point.rate,
        "ceiling_tok_s": subject.rate_of(subject.curve.proven_bytes[at]),
        "share_of_ceiling": share_of(subject, point),
    }


def share_of(subject: Subject, point: Point) -> float | None:
    """The share of the ceiling at the point's context; None where the two do not fit."""
    at = bisect_left(subject.curve.contexts, point.context)
    ceiling = subject.rate_of(subject.curve.proven_bytes[at])
    if not point.valid or differs(subject.device, point) or not ceiling:
        return None
    return point.rate / ceiling


def _thinned(contexts: list[int], values: list[float], plot: _Plot) -> list[tuple[int, float]]:
    """The curve without points that would be drawn on the one before them."""
    kept = [(contexts[0], values[0])]
    for context, value in zip(contexts[1:], values[1:], strict=True):
        if context == contexts[-1] or plot.x(context) - plot.x(kept[-1][0]) >= 1:
            kept.append((context, value))
    return kept


def size_text(size: int) -> str:
    """Bytes with a decimal unit and about four digits."""
    unit, scale = _unit(size)
    if scale == 1:
        return f"{size:,} B"
    return f"{size / scale:.{3 if size < 100 * scale else 1}f} {unit}"


def _unit(size: int) -> tuple[str, float]:
    """The decimal unit that a size is told in, and its bytes."""
    units = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    return next(((unit, scale) for unit, scale in units if size >= scale), ("B", 1))


def _short(value: float) -> str:
    """A number with about four digits."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _tick(value: float, step: float) -> str:
    """The label of a tick: as many decimals as the step needs."""
    if value >= 1e7:
        return f"{value:.3g}"
    decimals = next((d for d in range(7) if abs(step - round(step, d)) < step * 1e-6), 6)
    return f"{value:,.{decimals}f}"
