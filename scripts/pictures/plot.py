"""Panels as SVG: what Prometheus has answered, drawn without Grafana."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from scripts.pictures.units import shown

COLOURS = (
    "#3274d9", "#e0752d", "#37872d", "#8f3bb8", "#c4162a", "#1f9e9e", "#b7950b", "#7b7f84",
    "#5794f2", "#ff9830", "#73bf69", "#b877d9",
)  # fmt: skip
LEFT, RIGHT, TOP, BOTTOM = 58, 10, 8, 20
NUM_GRID_LINES = 4
MAX_LEGEND = 8


@dataclass(frozen=True, slots=True)
class Line:
    """`points` are (unix seconds, value)."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Frame:
    """Size of the drawing in pixels, and the time that it shows."""

    width: int
    height: int
    begin: float
    end: float

    def x(self, at: float) -> float:
        share = (at - self.begin) / (self.end - self.begin)
        return LEFT + share * (self.width - LEFT - RIGHT)

    def y(self, value: float, most: float) -> float:
        return self.height - BOTTOM - value / most * (self.height - TOP - BOTTOM)


def lines_svg(
    lines: Sequence[Line], frame: Frame, unit: str, *, is_stacked: bool, most: float | None
) -> str:
    drawn = _stacked(lines) if is_stacked else list(lines)
    values = [value for line in drawn for _, value in line.points if math.isfinite(value)]
    top = most or _round_up(max(values, default=1.0))
    paths = [_path(line, frame, top) for line in drawn]
    parts = [_axes(frame, unit, top)]
    for index, path in enumerate(paths):
        colour = COLOURS[index % len(COLOURS)]
        if is_stacked and not any(value > 0 for _, value in lines[index].points):
            continue  # it would hide the line that it lies on
        if is_stacked and path:
            floor = frame.height - BOTTOM
            below = paths[index - 1] if index else [(path[0][0], floor), (path[-1][0], floor)]
            area = _joined([*path, *reversed(below)])
            parts.append(f'<polygon points="{area}" fill="{colour}" fill-opacity="0.35"/>')
        parts.append(
            f'<polyline points="{_joined(path)}" fill="none" stroke="{colour}" stroke-width="1.4"/>'
        )
    return _svg(frame, parts) + _legend([line.name for line in lines])


def _path(line: Line, frame: Frame, top: float) -> list[tuple[float, float]]:
    return [
        (frame.x(at), frame.y(min(value, top), top))
        for at, value in line.points
        if math.isfinite(value)
    ]


def _joined(path: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in path)


def heat_svg(buckets: Sequence[Line], frame: Frame, unit: str) -> str:
    """`buckets` by upper bound, rising; cumulative counts, as Prometheus has them."""
    bounds = [float(bucket.name) for bucket in buckets]
    counts = [dict(bucket.points) for bucket in buckets]
    times = sorted({at for points in counts for at in points})
    grown = [
        [
            max(0.0, points.get(at, 0.0) - (counts[index - 1].get(at, 0.0) if index else 0.0))
            for at in times
        ]
        for index, points in enumerate(counts)
    ]
    used = [index for index, row in enumerate(grown) if any(value > 0 for value in row)] or [0]
    low, high = max(0, used[0] - 1), min(len(bounds) - 1, used[-1] + 1)
    hottest = max((value for row in grown for value in row), default=0.0) or 1.0
    row_height = (frame.height - TOP - BOTTOM) / (high - low + 1)
    width = (frame.width - LEFT - RIGHT) / max(1, len(times))
    parts = []
    for index in range(low, high + 1):
        y = frame.height - BOTTOM - (index - low + 1) * row_height
        for column, value in enumerate(grown[index]):
            if value > 0:
                heat = (value / hottest) ** 0.5
                parts.append(
                    f'<rect x="{LEFT + column * width:.1f}" y="{y:.1f}" width="{width + 0.4:.1f}" '
                    f'height="{row_height:.1f}" fill="{_orange(heat)}"/>'
                )
    every = max(1, round((high - low + 1) / 6))
    for index in range(low, high + 1, every):
        y = frame.height - BOTTOM - (index - low + 1) * row_height
        text = "inf" if math.isinf(bounds[index]) else shown(bounds[index], unit)
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    parts.append(_clock(frame))
    return _svg(frame, parts)


def figure_html(lines: Sequence[Line], unit: str) -> str:
    """The last value of each line."""
    values = [
        f'<div class="figure"><b>{shown(line.points[-1][1], unit)}</b>'
        f"<small>{html.escape(line.name)}</small></div>"
        for line in lines
        if line.points
    ]
    return f'<div class="figures">{"".join(values) or "–"}</div>'


def bars_html(lines: Sequence[Line], unit: str) -> str:
    last = [(line.name, line.points[-1][1]) for line in lines if line.points]
    top = max((value for _, value in last), default=0.0) or 1.0
    rows = [
        f'<div class="bar"><span>{html.escape(name)}</span>'
        f'<i style="width:{60 * value / top:.1f}%"></i>{shown(value, unit)}</div>'
        for name, value in last
    ]
    return f'<div class="bars">{"".join(rows)}</div>'


def _stacked(lines: Sequence[Line]) -> list[Line]:
    """Each on top of those before; a line counts as 0 where it has no value."""
    times = sorted({at for line in lines for at, _ in line.points})
    below = dict.fromkeys(times, 0.0)
    stacked = []
    for line in lines:
        own = dict(line.points)
        for at in times:
            value = own.get(at, 0.0)
            below[at] += value if math.isfinite(value) else 0.0
        stacked.append(Line(line.name, list(below.items())))
    return stacked


def _axes(frame: Frame, unit: str, top: float) -> str:
    parts = []
    for step in range(NUM_GRID_LINES + 1):
        value = top * step / NUM_GRID_LINES
        y = frame.y(value, top)
        parts.append(
            f'<line x1="{LEFT}" x2="{frame.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
            f'stroke="#e4e7eb"/><text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">'
            f"{shown(value, unit)}</text>"
        )
    return "".join(parts) + _clock(frame)


def _clock(frame: Frame) -> str:
    """Seconds since the begin, at the bottom."""
    parts = []
    for step in range(5):
        at = frame.begin + (frame.end - frame.begin) * step / 4
        anchor = "end" if step == 4 else "middle" if step else "start"
        parts.append(
            f'<text x="{frame.x(at):.1f}" y="{frame.height - 5}" text-anchor="{anchor}">'
            f"{at - frame.begin:.0f} s</text>"
        )
    return "".join(parts)


def _legend(names: Sequence[str]) -> str:
    items = [
        f'<span><i style="background:{COLOURS[index % len(COLOURS)]}"></i>'
        f"{html.escape(name)}</span>"
        for index, name in enumerate(names[:MAX_LEGEND])
    ]
    more = f"<span>and {len(names) - MAX_LEGEND} more</span>" if len(names) > MAX_LEGEND else ""
    return f'<div class="legend">{"".join(items)}{more}</div>'


def _svg(frame: Frame, parts: Sequence[str]) -> str:
    size = f'width="{frame.width}" height="{frame.height}"'
    return f'<svg {size} font-size="10" fill="#53585f">{"".join(parts)}</svg>'


def _round_up(value: float) -> float:
    if value <= 0:
        return 1.0
    power = 10 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if step * power >= value)


def _orange(heat: float) -> str:
    """From nearly white to dark."""
    stops = ((255, 245, 235), (253, 174, 107), (230, 85, 13), (127, 39, 4))
    place = min(heat, 0.9999) * (len(stops) - 1)
    low, share = int(place), place - int(place)
    mixed = [
        round(one + (other - one) * share)
        for one, other in zip(stops[low], stops[low + 1], strict=True)
    ]
    return f"rgb({mixed[0]},{mixed[1]},{mixed[2]})"
