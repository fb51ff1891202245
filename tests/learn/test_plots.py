"""The pictures of a run: whole SVG whatever was measured, every point within its axes."""

from __future__ import annotations

import math
import re
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siammm.learn import plots

SVG = "{http://www.w3.org/2000/svg}"

METRICS: list[dict[str, Any]] = [
    {"epoch": 1, "loss": 2.0, "instance_loss": 1.5, "cluster_loss": 0.5, "n_clusters": 100},
    {"epoch": 2, "loss": 1.0, "instance_loss": 1.2, "cluster_loss": -0.2, "n_clusters": 40},
    {"epoch": 3, "loss": 0.5, "instance_loss": 1.0, "cluster_loss": -0.5, "n_clusters": 10},
]


def lines(picture: str) -> list[list[tuple[float, float]]]:
    """The points of every line."""
    root = ElementTree.fromstring(picture)
    found = []
    for line in root.iter(f"{SVG}polyline"):
        numbers = [float(value) for value in re.split(r"[ ,]", line.attrib["points"])]
        found.append(list(zip(numbers[::2], numbers[1::2], strict=True)))
    return found


def texts(picture: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def check_within(picture: str) -> None:
    for points in lines(picture):
        for x, y in points:
            assert 60 - 0.1 <= x <= 510.1
            assert 36 - 0.1 <= y <= 276.1


def test_the_losses() -> None:
    picture = plots.losses(METRICS)
    assert [len(points) for points in lines(picture)] == [3, 3, 3]
    check_within(picture)
    assert texts(picture)[0] == "Losses"
    for label in ("loss 0.5", "instance loss 1", "cluster loss -0.5", "epoch"):
        assert label in texts(picture)


def test_the_clusters_fall_on_a_logarithmic_scale() -> None:
    picture = plots.clusters([{"epoch": i, "n_clusters": k} for i, k in enumerate((1000, 100, 10))])
    (points,) = lines(picture)
    check_within(picture)
    heights = [y for _, y in points]
    assert heights == sorted(heights)  # down the page
    assert heights[2] - heights[1] == pytest.approx(heights[1] - heights[0], abs=0.2)


def test_an_epoch_without_clusters_is_left_out() -> None:
    metrics: list[dict[str, Any]] = [{"epoch": 1, "loss": 1.0, "instance_loss": 1.0}, *METRICS[1:]]
    assert [len(points) for points in lines(plots.losses(metrics))] == [3, 3, 2]
    assert [len(points) for points in lines(plots.clusters(metrics))] == [2]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_left_out(value: float) -> None:
    metrics = [*METRICS, {"epoch": 4, "loss": value, "instance_loss": 1.0, "cluster_loss": 0.0}]
    assert [len(points) for points in lines(plots.losses(metrics))] == [3, 4, 4]


@pytest.mark.parametrize("metrics", [[], METRICS[:1], [{"epoch": 1}], [{"epoch": 1, "n_clusters": 1}]], ids=str)
def test_little_or_nothing_measured_is_a_picture_all_the_same(metrics: list[dict[str, Any]]) -> None:
    for picture in (plots.losses(metrics), plots.clusters(metrics)):
        ElementTree.fromstring(picture)
        check_within(picture)


def test_text_is_escaped() -> None:
    picture = plots.chart("<a> & b", {'"c" <d>': [(0, 1), (1, 2)]})
    assert "<a> & b" in texts(picture)
    assert any(text.startswith('"c" <d>') for text in texts(picture))


NUMBERS = st.floats(-1e9, 1e9, allow_subnormal=False)


@settings(max_examples=150, deadline=None)
@given(points=st.lists(st.tuples(st.integers(0, 5000), NUMBERS), min_size=1, max_size=20), logarithmic=st.booleans())
def test_any_numbers_make_a_picture(points: list[tuple[float, float]], logarithmic: bool) -> None:
    if logarithmic:
        points = [(x, abs(y) + 1) for x, y in points]
    picture = plots.chart("any", {"line": points}, logarithmic=logarithmic)
    check_within(picture)
    assert len(texts(picture)) < 30


@settings(max_examples=150, deadline=None)
@given(low=st.floats(-1e3, 1e3), width=st.floats(1e-6, 1e9))
def test_a_few_round_ticks_within_the_ends(low: float, width: float) -> None:
    axis = plots._Axis(low, low + width, 0, 100)
    ticks = axis.ticks()
    assert len(ticks) <= 7
    slack = 1e-6 * (axis.high - axis.low)
    assert all(axis.low - slack <= tick <= axis.high + slack for tick in ticks)
    assert ticks == sorted(ticks)
