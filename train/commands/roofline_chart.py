"""Roofline chart: each operator by its arithmetic intensity and rate, below the device's peak rates."""

from __future__ import annotations

import math
from collections.abc import Sequence

from wgrad.autograd.bench.roofline import MEMORY, Machine, Row
from wgrad.train.terminal.svg import FAINT, GRID, INK, shortened, svg_begin, svg_text

WIDTH = 1180
LEFT, RIGHT, TOP, PLOT = 92, 452, 70, 560  # margins, and height of the plot; the list of operators is on the right
_LINE = 13.5  # height of a line of that list
COLORS = {"float32": "#1f5fae", "float16": "#d1495b", "bfloat16": "#2e8b57"}
_ROOF = "#44515e"
_SHORT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


class _Axes:
    """Logarithmic axes: FLOP per byte to the right, FLOP per second upwards, in pixels."""

    def __init__(self, machine: Machine, rows: Sequence[Row]) -> None:
        flop = [roof.per_second for roof in machine.roofs.values() if roof.name != MEMORY]
        self.memory, top = machine.roofs[MEMORY].per_second, max(flop)
        ridge = top / self.memory
        at = [row.intensity for row in rows] + [ridge / 3, ridge * 3]
        rates = [row.flop / row.seconds for row in rows] + [top * 1.5, top / 1000]
        self.x_range = math.floor(math.log10(min(at))), math.ceil(math.log10(max(at)))
        self.y_range = math.floor(math.log10(min(rates))), math.ceil(math.log10(max(rates)))

    def x(self, intensity: float) -> float:
        low, high = self.x_range
        return LEFT + (math.log10(intensity) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(self, rate: float) -> float:
        low, high = self.y_range
        return TOP + PLOT - (math.log10(rate) - low) / (high - low) * PLOT

    @property
    def right(self) -> float:
        return WIDTH - RIGHT


def _unit(rate: float) -> str:
    """Return FLOP per second for people."""
    for factor, name in ((1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s")):
        if rate >= factor:
            return f"{rate / factor:.3g} {name}"
    return f"{rate / 1e3:.3g} kFLOP/s"


def _grid(axes: _Axes) -> list[str]:
    parts = []
    for power in range(axes.x_range[0], axes.x_range[1] + 1):
        x = axes.x(10.0**power)
        parts.append(f'<path d="M{x:.1f} {TOP}V{TOP + PLOT}" stroke="{GRID}"/>')
        parts.append(svg_text(x, TOP + PLOT + 18, f"{10.0**power:g}", more='text-anchor="middle"'))
    for power in range(axes.y_range[0], axes.y_range[1] + 1):
        y = axes.y(10.0**power)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{axes.right}" stroke="{GRID}"/>')
        parts.append(svg_text(LEFT - 8, y + 4, _unit(10.0**power), 11, more='text-anchor="end"'))
    middle = (LEFT + axes.right) / 2
    parts.append(svg_text(middle, TOP + PLOT + 38, "intensity: FLOP per byte of memory", more='text-anchor="middle"'))
    return parts


def _roofs(axes: _Axes, machine: Machine) -> list[str]:
    """Draw the slope of memory bandwidth up to the highest peak rate, and a flat line for each peak rate."""
    parts = []
    flat = [roof for roof in machine.roofs.values() if roof.name != MEMORY]
    top = max(roof.per_second for roof in flat)
    low = max(10.0 ** axes.x_range[0], 10.0 ** axes.y_range[0] / axes.memory)
    parts.append(_line(axes, (low, low * axes.memory), (top / axes.memory, top)))
    label = f"memory {axes.memory / 1e9:,.4g} GB/s"
    x, y = axes.x(low), axes.y(low * axes.memory)
    slope = math.degrees(math.atan2(axes.y(top) - y, axes.x(top / axes.memory) - x))
    turned = f'transform="translate({x + 26:.1f} {y - 34:.1f}) rotate({slope:.1f})"'
    parts.append(svg_text(0, 0, label, 12, _ROOF, turned))
    taken: list[float] = []
    for roof in sorted(flat, key=lambda r: -r.per_second):
        parts.append(_line(axes, (roof.per_second / axes.memory, roof.per_second), (None, roof.per_second)))
        y = axes.y(roof.per_second)
        label_y = y - 6 if not taken or y - taken[-1] > 16 else y + 14
        taken.append(label_y)
        text = f"{roof.name} {_unit(roof.per_second)}"
        parts.append(svg_text(axes.right - 4, label_y, text, 12, _ROOF, 'text-anchor="end"'))
    return parts


def _line(axes: _Axes, begin: tuple[float, float], end: tuple[float | None, float]) -> str:
    """Draw a line between two points (intensity, rate). An end without an intensity is at the right edge."""
    x = axes.right if end[0] is None else axes.x(end[0])
    path = f"M{axes.x(begin[0]):.1f} {axes.y(begin[1]):.1f}L{x:.1f} {axes.y(end[1]):.1f}"
    return f'<path d="{path}" stroke="{_ROOF}" stroke-width="2" fill="none"/>'


def _points(axes: _Axes, rows: Sequence[Row]) -> list[str]:
    parts = []
    for number, row in enumerate(rows, 1):
        x, y = axes.x(row.intensity), axes.y(row.flop / row.seconds)
        color = COLORS.get(row.dtype, INK)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.4" fill="{color}" opacity="0.85"/>')
        parts.append(svg_text(x + 4.5, y + 3, str(number), 8, color))
    return parts


def _list(axes: _Axes, rows: Sequence[Row]) -> list[str]:
    parts = [svg_text(axes.right + 22, TOP - 12, "share of the peak rate that bounds it", 12, INK)]
    for number, row in enumerate(rows, 1):
        y, x = TOP + 4 + (number - 1) * _LINE, axes.right + 22
        kind = _SHORT.get(row.dtype, row.dtype)
        name = shortened(f"{row.name.removesuffix('/' + row.dtype)} {kind}", 29)
        parts.append(svg_text(x + 18, y, str(number), 10, COLORS.get(row.dtype, INK), 'text-anchor="end"'))
        parts.append(svg_text(x + 26, y, name, 10, INK))
        parts.append(f'<rect x="{x + 292}" y="{y - 7:.1f}" width="90" height="7" fill="{GRID}"/>')
        width = 90 * min(row.share, 1.0)
        color = COLORS.get(row.dtype, INK)
        parts.append(f'<rect x="{x + 292}" y="{y - 7:.1f}" width="{width:.1f}" height="7" fill="{color}"/>')
        parts.append(svg_text(x + 422, y, f"{row.share:.0%}", 10, FAINT, 'text-anchor="end"'))
    return parts


def roofline_chart(machine: Machine, rows: Sequence[Row], device: str) -> str:
    """Return an SVG image: peak rates, a point for each operator, and a list of names with their share of the peak."""
    axes = _Axes(machine, rows)
    height = int(max(TOP + PLOT + 60, TOP + 20 + len(rows) * _LINE))
    x, legend = float(LEFT), []
    for dtype in dict.fromkeys(row.dtype for row in rows):
        legend.append(f'<circle cx="{x + 5:.1f}" cy="50" r="4" fill="{COLORS.get(dtype, INK)}"/>')
        legend.append(svg_text(x + 14, 54, dtype, 12, INK))
        x += 90
    parts = [
        svg_begin(WIDTH, height, f"Roofline of {device}"),
        svg_text(LEFT, 30, shortened(device, 62), 17, INK, 'font-weight="600"'),
        *legend,
        *_grid(axes),
        *_roofs(axes, machine),
        *_points(axes, rows),
        *_list(axes, rows),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"
