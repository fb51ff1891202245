"""What is read of a GPU's own figures."""

from __future__ import annotations

from benchmarks import gpu_state


def test_medians_are_of_whole_lines() -> None:
    written = "1980, 500.5, 41\n1500, 699.0, 60\n1400, 700.0, 61\n[N/A], 1.0, 2\n13"
    assert gpu_state.medians(written) == {"clock_mhz": 1500.0, "watts": 699.0, "celsius": 60.0}
    assert gpu_state.medians("") == {}


def test_work_is_done_with_and_without_the_tool() -> None:
    found, state = gpu_state.watched(lambda: 7)
    assert found == 7
    assert set(state) in (set(), {"clock_mhz", "watts", "celsius"})
