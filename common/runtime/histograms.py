"""Histograms that cost a tenth of a microsecond per value: one thread adds whole batches, the metrics page reads."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

#: Upper bounds in microseconds, from the time of a handler that does nothing to the longest that a person waits.
SHORT_US = tuple(int(1000 * ms) for ms in (0.1, 0.5, 1, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 10_000, 60_000))
#: Upper bounds in microseconds for durations of seconds to minutes.
LONG_US = tuple(
    1000 * ms for ms in (10, 100, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 30_000, 60_000, 120_000, 300_000, 900_000)
)


class DurationHistogram:
    """A histogram of durations. Written by one thread; a reader may see a value that the sum does not include yet.

    >>> timings = DurationHistogram((10, 20))
    >>> timings.add([5, 10, 11, 99])
    >>> timings.cumulative()
    [(1e-05, 2), (2e-05, 3), (inf, 4)]
    """

    def __init__(self, bounds_us: tuple[int, ...] = SHORT_US) -> None:
        self._bounds_us = bounds_us
        self._counts = [0] * (len(bounds_us) + 1)
        self._sum_us = 0

    def add(self, values_us: Iterable[int]) -> None:
        """Add durations in microseconds; one below zero (of two clocks) counts as zero."""
        counts, bounds = self._counts, self._bounds_us
        total = 0
        for value in values_us:
            counts[bisect_left(bounds, value)] += 1
            if value > 0:
                total += value
        self._sum_us += total

    @property
    def sum_s(self) -> float:
        return self._sum_us / 1e6

    def cumulative(self) -> list[tuple[float, int]]:
        """Return pairs (upper bound in seconds, number of values up to it), the last bound infinite."""
        total, rows = 0, []
        for bound, count in zip((*(us / 1e6 for us in self._bounds_us), float("inf")), self._counts, strict=True):
            total += count
            rows.append((bound, total))
        return rows
