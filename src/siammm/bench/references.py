"""Machines to compare with: the table that ``siammm bench`` prints beside its own figures and ``docs/speed.md`` shows.

This is the one place where it is kept; a test holds the page to it. A figure that nobody has measured is None.
"""

from __future__ import annotations

from dataclasses import dataclass

from siammm.settings.config import PresetName


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What one machine did with one preset."""

    machine: str
    preset: PresetName
    batch_size: int
    images_per_second: float | None
    """Full steps, with the cluster loss."""
    images_per_second_alone: float | None
    """Steps without the cluster loss."""
    share_of_peak: float | None
    """Of a large matrix product in the same precision on the same machine."""
    clustering_share: float | None
    """Of an epoch."""
    search_teraflops: float | None
    """Of the search for the 5 nearest of the preset's clusters."""
    memory_gigabytes: float | None
    """The peak of the step."""
    hours: float | None
    """For all of the preset's epochs."""
    source: str
    """Where the figures come from."""


REFERENCES: tuple[Reference, ...] = (
    Reference(
        machine="NVIDIA H200",
        preset="cifar",
        batch_size=256,
        images_per_second=32_516,
        images_per_second_alone=32_726,
        share_of_peak=0.38,
        clustering_share=0.033,
        search_teraflops=137.0,
        memory_gigabytes=2.31,
        hours=0.0883,
        source="benchmarks/results/2026-11-16-bench-h200.md",
    ),
    Reference(
        machine="AMD EPYC, 2 threads",
        preset="cifar",
        batch_size=32,
        images_per_second=19.1,
        images_per_second_alone=19.0,
        share_of_peak=1.07,
        clustering_share=0.000423,
        search_teraflops=0.482,
        memory_gigabytes=2.03,
        hours=145.0,
        source="benchmarks/results/2026-11-15-bench-epyc.md",
    ),
)

HEADER = (
    "machine", "preset", "batch", "images/s", "images/s without clusters", "share of peak", "clustering's share",
    "search, TFLOP/s", "memory, GB", "hours", "source",
)  # fmt: skip


def references_for(preset: str) -> list[Reference]:
    """What is known of a preset."""
    return [reference for reference in REFERENCES if reference.preset == preset]


def markdown() -> str:
    """The table as ``docs/speed.md`` shows it."""
    lines = ["| " + " | ".join(HEADER) + " |", "|---|---|" + "---:|" * 8 + "---|"]
    lines += ["| " + " | ".join(cells(reference)) + " |" for reference in REFERENCES]
    return "\n".join(lines)


def cells(reference: Reference) -> list[str]:
    """One row; what is not measured yet is left empty."""
    return [
        reference.machine,
        f"`{reference.preset}`",
        str(reference.batch_size),
        rate(reference.images_per_second),
        rate(reference.images_per_second_alone),
        share(reference.share_of_peak),
        share(reference.clustering_share),
        number(reference.search_teraflops),
        number(reference.memory_gigabytes),
        number(reference.hours),
        reference.source,
    ]


def rate(value: float | None) -> str:
    """Images a second."""
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def share(value: float | None) -> str:
    """A share in percent."""
    return "" if value is None else f"{100 * value:.2g} %" if value < 0.1 else f"{100 * value:.0f} %"


def number(value: float | None) -> str:
    """Any other number, with three digits that count."""
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
