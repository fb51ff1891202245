"""Bars that fit, and the time that is left."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from siammm.core import progress
from siammm.core.progress import FittedProgress, Pace, clock_time
from siammm.core.text import rough_duration


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress, "time", made)
    return made


def test_the_pace_is_that_since_the_earliest_mark(clock: Clock) -> None:
    pace = Pace(marks=2)
    assert pace.left(10) is None
    pace.restart(2)
    assert pace.left(10) is None
    clock.now = 30
    pace.reached(4)
    assert pace.left(10) == 15 * 6
    clock.now = 40
    assert pace.left(10) == 80, "it passes while nothing is heard"
    clock.now = 1000
    assert pace.left(10) == 0
    pace.mark(5)
    clock.now = 1001
    pace.mark(6)  # the first mark is forgotten
    clock.now = 1002
    pace.reached(7)
    assert pace.left(10) == 3
    pace.restart(0)
    assert pace.left(10) is None


def test_an_epoch_of_hours_has_a_time_left(clock: Clock) -> None:
    """Rich forgets what is older than half a minute, and then knows nothing."""
    pace = Pace()
    pace.restart(0)
    clock.now = 7200
    pace.reached(1)
    clock.now = 7200 + 300
    assert pace.left(3) == 2 * 7200 - 300


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-:--:--"), (0, "0:00:00"), (59.9, "0:00:59"), (3661, "1:01:01"), (359_999, "99:59:59"),
     (360_000, "4.2 days"), (86400 * 999, "999.0 days"), (1e12, "years"), (float("inf"), "-:--:--"), (-1, "0:00:00")],
)  # fmt: skip
def test_clock_times(seconds: float | None, text: str) -> None:
    assert clock_time(seconds) == text
    assert len(text) <= 10


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "1 second"), (40, "40 seconds"), (720, "12 minutes"), (7200, "2.0 hours"), (50 * 3600, "2.1 days"),
     (20 * 86400, "20 days"), (47 * 3600, "47 hours")],
)  # fmt: skip
def test_rough_durations(seconds: float, text: str) -> None:
    assert rough_duration(seconds) == text


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("what", ["images", "a description that is much longer than the terminal " * 2])
def test_the_count_and_the_times_are_never_cut(width: int, what: str) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=width, color_system=None)
    with FittedProgress(console=console, disable=False, transient=False) as bars:
        left: dict[str, Any] = {"left": lambda: 359_999.0}
        bars.add_task(what, total=1_281_167, completed=1_000_000, **left)
        bars.add_task("more", total=None)
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[\d*[A-Z]", "", stream.getvalue()))
    lines = [line for line in lines if "/" in line]
    assert lines
    for line in lines:
        assert len(line.rstrip()) <= width
        assert line[2:8] == what[:6], "the bar gives way before the description does"
        assert re.search(r"[━╸╺]{4,} +1,000,000/1,281,167 0:00:0\d 99:59:59 left", line), line
