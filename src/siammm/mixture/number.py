"""The number of groups: where the elbow is sharp and the communities are clear.

The two see different things. Elbows (``elbow.py``) see a hundred kinds as well as three, so they say at which *levels*
there may be groups. But the elbow of kinds that overlap is broad, and lies too high, because a tree divides strays
before it has told all kinds apart. The clearness of communities (``clearness.py``) hardly tells a hundred kinds that
overlap from a dozen, but it falls where kinds are cut into parts. So of several levels the one with the clearest
communities is taken, and close to it the number with the best score: its sharpness less the clearness that it lacks.

Legend:  N samples, D dimensions, P principal directions, T numbers that are tried.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from siammm.mixture.clearness import Communities, neighbours_of
from siammm.mixture.elbow import Elbow, elbow, levels, whitened_by_neighbours
from siammm.mixture.graph import Array, Graph, neighbour_graph, path, so_many_communities

# How much of the scatter must be between groups that the other half of the directions gave. Single clouds that are not
# bent have at most .05, sets to develop on at least .1.
LEAST_SHARED = 0.07
# A number whose communities have e times the ratio of others lacks so many times the sharpness of the sharpest elbow.
CLEARNESS = 5.0
# Octaves: numbers are tried so often; the sharpness is averaged over about so many on both sides, because noise has
# sharp bends, too; and the number is at most so many from the level.
_STEP, _SMOOTHING, _CLOSE = 1 / 16, 0.3, 0.5
# The groups count if their ratio is at most so many times that of the clearest communities of the rows as they are. On
# images under a pretrained encoder it is 1 to 1.5 times, more with more kinds; for pixels of digits, which are clearer
# before whitening, it is 2 to 3 times.
_NEARLY_AS_CLEAR = 1.7
# At these resolutions there are one to several hundred communities.
_RESOLUTIONS = 0.05 * 1.25 ** np.arange(35)


@dataclass(frozen=True)
class Level:
    """A level of groups: where its elbow is, and the groups whose number is best close to it."""

    elbow: int
    label_N: Array


def clearest_level(x_ND: Array, z_NP: Array, first: Communities, seed: int) -> Level | None:
    """The groups of the best number, or None where they are not clear, or halves of the directions share too little.

    ``first``: the communities of the rows x, whose Gaussian the groups are compared with.
    """
    bend = elbow(x_ND, seed)
    space_NP = whitened_by_neighbours(z_NP - z_NP.mean(axis=0))
    graph = neighbour_graph(space_NP, neighbours_of(len(space_NP)))
    found = best_number(bend, *clearness(graph, first))
    if found is None:
        return None
    level, number = found
    label_N = so_many_communities(graph, number)
    is_clear = label_N.any() and first.ratio_of(label_N) <= _NEARLY_AS_CLEAR * first.ratio
    return Level(level, label_N) if is_clear else None


def best_number(bend: Elbow, number_T: Array, ratio_T: Array) -> tuple[int, int] | None:
    """The clearest level and the best number close to it, given how clear communities of some numbers are."""
    sharpness_K = bend.sharpness_K()
    most = min(len(sharpness_K) + 1, int(number_T.max()))
    found = [number for number in levels(bend.gain_K) if bend.shared(number) >= LEAST_SHARED and number <= most]
    if not found:
        return None
    octave = np.arange(1, math.log2(most) + 1e-9, _STEP)
    sharpness = _smooth(np.interp(octave, np.log2(np.arange(2, len(sharpness_K) + 2)), sharpness_K))
    lacking = np.interp(octave, np.log2(number_T), np.log(ratio_T))
    level = min(found, key=lambda number: float(np.interp(math.log2(number), octave, lacking)))
    score = np.where(np.abs(octave - math.log2(level)) <= _CLOSE, sharpness - CLEARNESS * lacking, -np.inf)
    return level, round(2 ** float(octave[np.argmax(score)]))


def clearness(graph: Graph, first: Communities) -> tuple[Array, Array]:
    """Numbers of communities, rising, and how clear these are."""
    ratio: dict[int, float] = {1: first.ratio_of(np.zeros(len(graph.degree_K), dtype=np.int64))}
    for label_N, _ in path(graph, _RESOLUTIONS):
        number = int(label_N.max()) + 1
        if number not in ratio:
            ratio[number] = first.ratio_of(label_N)
    number_T = np.array(sorted(ratio))
    return number_T, np.array([ratio[number] for number in number_T.tolist()])


def _smooth(value: Array) -> Array:
    """Averages with the weights of a Gaussian; at the ends the last value goes on."""
    reach = round(3 * _SMOOTHING / _STEP)
    weight = np.exp(-0.5 * (np.arange(-reach, reach + 1) * _STEP / _SMOOTHING) ** 2)
    return np.convolve(np.pad(value, reach, mode="edge"), weight / weight.sum(), mode="valid")
