"""Two small pictures of a run, as SVG that any browser shows: the losses, and the number of clusters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_WIDTH, _HEIGHT = 640, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 130, 36, 44
_COLOURS = ("#2a6fbb", "#d1495b", "#3d8361", "#8d6a9f")
_TICKS = 5

Points = Sequence[tuple[float, float]]


def losses(metrics: Sequence[Mapping[str, Any]]) -> str:
    """The loss and its parts over the epochs."""
    names = {"loss": "loss", "instance_loss": "instance loss", "cluster_loss": "cluster loss"}
    return chart("Losses", {label: _series(metrics, name) for name, label in names.items()})


def clusters(metrics: Sequence[Mapping[str, Any]]) -> str:
    """The number of clusters over the epochs, on a logarithmic scale."""
    return chart("Clusters", {"K": _series(metrics, "n_clusters")}, logarithmic=True)


def chart(title: str, lines: Mapping[str, Points], *, logarithmic: bool = False) -> str:
    """A line chart over epochs; lines without points are left out."""
    shown = {label: points for label, points in lines.items() if points}
    x = [point[0] for points in shown.values() for point in points] or [0.0, 1.0]
    y = [point[1] for points in shown.values() for point in points] or [0.0, 1.0]
    x_axis = _Axis(min(x), max(x), _LEFT, _WIDTH - _RIGHT)
    y_axis = _Axis(min(y), max(y), _HEIGHT - _BOTTOM, _TOP, logarithmic=logarithmic)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="12" role="img" aria-label="{escape(title)}">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="15">{escape(title)}</text>',
    ]
    for value in y_axis.ticks():
        place = y_axis.place(value)
        parts.append(f'<path d="M{_LEFT} {place:.1f}H{_WIDTH - _RIGHT}" stroke="#e3e3e3"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{place + 4:.1f}" text-anchor="end">{_written(value)}</text>')
    parts += [
        f'<text x="{x_axis.place(value):.1f}" y="{_HEIGHT - 24}" text-anchor="middle">{_written(value)}</text>'
        for value in x_axis.ticks()
    ]
    parts.append(f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">epoch</text>')
    for number, (label, points) in enumerate(shown.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(f"{x_axis.place(a):.1f},{y_axis.place(b):.1f}" for a, b in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        place = y_axis.place(points[-1][1])
        parts.append(
            f'<text x="{_WIDTH - _RIGHT + 6}" y="{place + 4:.1f}" fill="{colour}">{escape(label)} '
            f"{_written(points[-1][1])}</text>"
        )
    return "\n".join([*parts, "</svg>", ""])


class _Axis:
    """Values along a line of the picture."""

    def __init__(self, low: float, high: float, start: float, end: float, *, logarithmic: bool = False) -> None:
        self._log = logarithmic and low > 0
        self.low, self.high = (math.log(low), math.log(high)) if self._log else (low, high)
        if self.high <= self.low:
            self.low, self.high = self.low - 0.5, self.high + 0.5
        self._start, self._end = start, end

    def place(self, value: float) -> float:
        value = math.log(value) if self._log else value
        return self._start + (value - self.low) / (self.high - self.low) * (self._end - self._start)

    def ticks(self) -> list[float]:
        """A few round values between the ends."""
        if self._log:
            spread = [math.exp(self.low + (self.high - self.low) * i / (_TICKS - 1)) for i in range(_TICKS)]
            return sorted({float(f"{value:.2g}") for value in spread if value > 0})
        step = 10 ** math.floor(math.log10((self.high - self.low) / _TICKS))
        step *= next(factor for factor in (1, 2, 5, 10) if (self.high - self.low) / (step * factor) <= _TICKS)
        first = math.ceil(self.low / step)
        return [i * step for i in range(first, math.floor(self.high / step) + 1)]


def _series(metrics: Sequence[Mapping[str, Any]], name: str) -> Points:
    return [(row["epoch"], row[name]) for row in metrics if name in row and math.isfinite(row[name])]


def _written(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"
