"""The loss curve of a run as a self-contained SVG file."""

from __future__ import annotations

import bisect
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from wgrad.device.files import write_text
from wgrad.device.shown import counted
from wgrad.train.terminal.svg import FAINT, GRID, INK, legible, shortened, svg_begin, svg_text

LOSS_CURVE_FILE = "loss.svg"

WIDTH, HEIGHT = 860, 480  # of the image, in px
LEFT, RIGHT, TOP, BOTTOM = 70, 28, 98, 56  # margins around the axes
LEGEND = 76  # y of the legend
MAX_POINTS = 1200  # most points of a line; more cannot be told apart at this width

RAW, SMOOTH, HELD_OUT, NOT_FINITE = "#a9c7ea", "#1f5fae", "#d1495b", "#f3d9a4"

Point = tuple[float, float]
Span = tuple[float, float]  # first and last step


def smooth(losses: Sequence[float], horizon: float) -> list[float]:
    """Return the mean of two exponential moving averages over about `horizon` steps, from the left and from the right.

    One average alone lags behind a falling curve. Both are corrected for their start, like Adam's.
    """
    beta = 1.0 - 1.0 / max(horizon, 1.0)

    def average(values: Iterable[float]) -> list[float]:
        total = weight = 0.0
        result = []
        for value in values:
            total, weight = beta * total + value, beta * weight + 1.0
            result.append(total / weight)
        return result

    return [(a + b) / 2 for a, b in zip(average(losses), reversed(average(reversed(losses))))]


def nice_ticks(low: float, high: float, wanted: int, whole: bool = False) -> list[float]:
    """Return about `wanted` round numbers from low to high, in steps of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / max(wanted, 1)
    power = 10.0 ** math.floor(math.log10(raw)) if raw > 1e-300 else 1.0
    step = next((m * power for m in (1, 2, 5) if m * power >= raw * 0.999), 10 * power)
    step = max(step, 1.0) if whole else step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]


def _thin(points: list[Point]) -> list[Point]:
    """Reduce a line to about MAX_POINTS points: the lowest and the highest of each bucket, in order."""
    if len(points) <= MAX_POINTS:
        return points
    size = math.ceil(2 * len(points) / MAX_POINTS)
    kept = []
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        kept.extend(sorted({min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])}))
    return kept


class _Axes:
    """Linear axes of step and loss, in pixels."""

    def __init__(self, steps: tuple[float, float], losses: tuple[float, float]) -> None:
        self.steps, self.losses = steps, losses

    def x(self, step: float) -> float:
        low, high = self.steps
        return LEFT + (step - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(self, loss: float) -> float:
        low, high = self.losses
        return HEIGHT - BOTTOM - (loss - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def line(self, points: list[Point], color: str, width: float) -> str:
        if len(points) == 1:  # a line of one point would be invisible
            return f'<circle cx="{self.x(points[0][0]):.1f}" cy="{self.y(points[0][1]):.1f}" r="4" fill="{color}"/>'
        path = " ".join(f"{self.x(s):.1f},{self.y(v):.1f}" for s, v in _thin(points))
        style = f'fill="none" stroke="{color}" stroke-width="{width}" stroke-linejoin="round" stroke-linecap="round"'
        return f'<polyline clip-path="url(#plot)" {style} points="{path}"/>'


def _range(raw: list[float], smoothed: list[float], held_out: list[float]) -> tuple[float, float]:
    """Return the range of the loss axis: all held-out and smoothed values, and the raw ones except the outermost 0.5 %
    at each end."""
    ordered = sorted(raw) or [0.0, 1.0]
    cut = len(ordered) // 200
    shown = [ordered[cut], ordered[-1 - cut], *smoothed, *held_out]
    low, high = min(shown), max(shown)
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin


def _grid(axes: _Axes) -> list[str]:
    parts = []
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    ticks = nice_ticks(*axes.losses, 6)
    digits = max(0, -math.floor(math.log10(ticks[1] - ticks[0]) + 1e-9)) if len(ticks) > 1 else 2
    for tick in ticks:
        y = axes.y(tick)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="{GRID}"/>')
        parts.append(svg_text(LEFT - 10, y + 4, f"{tick:.{digits}f}", more='text-anchor="end"'))
    for tick in nice_ticks(*axes.steps, 8, whole=True):
        x = axes.x(tick)
        parts.append(f'<path d="M{x:.1f} {bottom}v5" stroke="{FAINT}"/>')
        parts.append(svg_text(x, bottom + 20, f"{tick:,.0f}", more='text-anchor="middle"'))
    parts.append(f'<path d="M{LEFT} {bottom}H{right}" stroke="{FAINT}"/>')
    parts.append(svg_text((LEFT + right) / 2, HEIGHT - 12, "step", more='text-anchor="middle"'))
    middle = (TOP + bottom) / 2
    parts.append(
        svg_text(24, middle, "loss (nats per token)", more=f'text-anchor="middle" transform="rotate(-90 24 {middle})"')
    )
    return parts


def _legend(has_train: bool, has_smooth: bool, has_held_out: bool, has_gaps: bool) -> list[str]:
    parts, x = [], float(LEFT)
    for shown, name, color, mark in (
        (has_train, "training", RAW if has_smooth else SMOOTH, "line"),
        (has_smooth, "training, smoothed", SMOOTH, "line"),
        (has_held_out, "held out", HELD_OUT, "dot"),
        (has_gaps, "loss not finite", NOT_FINITE, "band"),
    ):
        if not shown:
            continue
        if mark == "line":
            parts.append(f'<path d="M{x} {LEGEND}h20" stroke="{color}" stroke-width="3" stroke-linecap="round"/>')
        elif mark == "dot":
            parts.append(f'<circle cx="{x + 10}" cy="{LEGEND}" r="5" fill="{color}"/>')
        else:
            parts.append(f'<rect x="{x}" y="{LEGEND - 6}" width="20" height="12" fill="{color}"/>')
        parts.append(svg_text(x + 28, LEGEND + 4, name, color=INK))
        x += 52 + 6.4 * len(name)
    return parts


def _held_out_marks(axes: _Axes, points: list[Point]) -> list[str]:
    parts = []
    if len(points) > 2:  # a line between only two points would suggest a course that was not measured
        dashes = " ".join(f"{axes.x(s):.1f},{axes.y(v):.1f}" for s, v in points)
        style = f'fill="none" stroke="{HELD_OUT}" stroke-width="1.2" stroke-dasharray="2 5" opacity="0.7"'
        parts.append(f'<polyline {style} points="{dashes}"/>')
    for number, (step, loss) in enumerate(points):
        x, y = axes.x(step), axes.y(loss)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{HELD_OUT}" stroke="white" stroke-width="1.5"/>')
        if number in (0, len(points) - 1):  # the first and the last are labeled
            end = x > WIDTH - RIGHT - 60
            shift, anchor = (-10, "end") if end else (10, "start")
            halo = f'font-weight="600" text-anchor="{anchor}" paint-order="stroke" stroke="white" stroke-width="4"'
            parts.append(svg_text(x + shift, y - 9, f"{loss:.3f}", 13, HELD_OUT, halo))
    return parts


def _not_finite(records: Sequence[Mapping[str, Any]]) -> list[Span]:
    """Return the first and last step of each stretch of losses that are not finite (null in metrics.jsonl)."""
    spans: list[Span] = []
    last_was = False
    for record in records:
        step, is_one = float(record["step"]), record.get("loss") is None
        if is_one:
            spans[-1:] = [(spans[-1][0], step)] if last_was else [*spans[-1:], (step, step)]
        last_was = is_one
    return spans


def _unbroken(points: list[Point], gaps: list[Span]) -> list[list[Point]]:
    """Split points into the stretches between `gaps`."""
    parts: list[list[Point]] = [[] for _ in range(len(gaps) + 1)]
    starts = [first for first, _ in gaps]
    for point in points:
        parts[bisect.bisect(starts, point[0])].append(point)
    return [part for part in parts if part]


def _bands(axes: _Axes, spans: list[Span]) -> list[str]:
    parts = []
    for first, last in spans:
        x = axes.x(first - 0.5)
        box = f'x="{x:.1f}" y="{TOP}" width="{max(axes.x(last + 0.5) - x, 1.0):.1f}" height="{HEIGHT - TOP - BOTTOM}"'
        parts.append(f'<rect clip-path="url(#plot)" {box} fill="{NOT_FINITE}"/>')
    return parts


def _summary(last: float, marks: list[Point], records: Sequence[Mapping[str, Any]], gaps: list[Span]) -> str:
    text = counted(int(last), "step")
    if marks:
        text += f", held-out loss {marks[0][1]:.3f}" + (f" → {marks[-1][1]:.3f}" if len(marks) > 1 else "")
    if gaps:
        count = sum(record.get("loss") is None for record in records)
        where = f"{'from ' if count > 1 else 'at '}step {gaps[0][0]:,.0f}"
        text += f"; {counted(count, 'loss', 'losses')} not finite, {where}"
    return text


def loss_curve(records: Sequence[Mapping[str, Any]], held_out: Sequence[Point] = (), title: str = "") -> str:
    """Draw a loss curve.

    Args:
        records: Steps of metrics.jsonl (loss is null if it was not finite).
        held_out: Held-out losses, as (step, loss).
        title: Title of the image.

    Returns:
        The SVG text.
    """
    title = legible(title)
    train = [(float(r["step"]), float(r["loss"])) for r in records if r.get("loss") is not None]
    marks = sorted(((float(s), float(v)) for s, v in held_out if math.isfinite(v)), key=lambda mark: mark[0])
    gaps = _not_finite(records)
    stretches = _unbroken(train, gaps)
    smoothed: list[list[Point]] = []
    if len(train) >= 30:
        for part in stretches:
            values = smooth([v for _, v in part], len(train) / 25)
            smoothed.append([(s, v) for (s, _), v in zip(part, values)])
    last = max([s for s, _ in train] + [s for s, _ in marks] + [end for _, end in gaps] + [0.0])
    levels = [v for _, v in train], [v for part in smoothed for _, v in part], [v for _, v in marks]
    axes = _Axes((0.0, max(last, 1.0)), _range(*levels))
    summary = _summary(last, marks, records, gaps)
    width = WIDTH - LEFT - RIGHT
    box = f'x="{LEFT}" y="{TOP}" width="{width}" height="{HEIGHT - TOP - BOTTOM}"'
    parts = [
        svg_begin(WIDTH, HEIGHT, f"{title or 'Training loss'}: {summary}"),
        f'<defs><clipPath id="plot"><rect {box}/></clipPath></defs>',
        svg_text(LEFT, 30, shortened(title or "Training loss", width / 17), 17, INK, 'font-weight="600"'),
        svg_text(LEFT, 52, summary, 13),
        *_legend(bool(train), bool(smoothed), bool(marks), bool(gaps)),
        *_bands(axes, gaps),
        *_grid(axes),
        *(axes.line(part, RAW if smoothed else SMOOTH, 1.2 if smoothed else 2.0) for part in stretches),
        *(axes.line(part, SMOOTH, 2.4) for part in smoothed),
        *_held_out_marks(axes, marks),
        "</svg>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def save_loss_curve(
    path: str | os.PathLike[str],
    records: Sequence[Mapping[str, Any]],
    held_out: Sequence[Point] = (),
    title: str = "",
) -> None:
    """Write `loss_curve` to `path`, atomically. WgradError: it cannot be written."""
    write_text(path, loss_curve(records, held_out, title))
