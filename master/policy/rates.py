"""Rates from samples; and who has so much waiting that producers are told to wait. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

#: Share of its limit below which one that was behind is so no more: else the sign would come and go with each message.
_FREE = 0.9


class Sample(NamedTuple):
    """Counts at a moment. ``lag`` None: not known exactly. ``read``: entries that the group was ever given, from Redis
    7.0 on."""

    time_ms: int
    entries: int
    lag: int | None
    pending: int
    read: int | None

    @property
    def sent(self) -> int | None:
        """Entries ever added, or those that the stream holds: only differences count."""
        return self.entries if self.read is None or self.lag is None else self.read + self.lag

    @property
    def done(self) -> int | None:
        if self.read is not None:
            return self.read - self.pending
        return None if self.lag is None else self.entries - self.lag - self.pending


def sample_of(seen: Mapping[str, Any]) -> Sample:
    lag = seen["lag"] if seen["lag_is_exact"] else None
    return Sample(seen["time_ms"], seen["entries"], lag, seen["pending"], seen["read"])


def rates(samples: Sequence[Sample]) -> tuple[float | None, float | None]:
    """Return (sent, done) per second over these samples; None where it is unknown.

    >>> rates([Sample(0, 100, 10, 5, None), Sample(2000, 300, 10, 5, None)])
    (100.0, 100.0)
    """
    if len(samples) < 2:
        return None, None
    first, last = samples[0], samples[-1]
    if (first.read is None, first.lag is None) != (last.read is None, last.lag is None):
        return None, None  # one counts all entries ever, the other those that are there
    seconds = max(0.001, (last.time_ms - first.time_ms) / 1000)
    return _per_second(first.sent, last.sent, seconds), _per_second(first.done, last.done, seconds)


def _per_second(first: int | None, last: int | None, seconds: float) -> float | None:
    """Return the difference per second; None also when the count went down: the stream was trimmed or made anew."""
    return None if first is None or last is None or last < first else round((last - first) / seconds, 1)


class BacklogLimits(NamedTuple):
    """Most messages that wait, of the stream and of each tenant; 0: no limit."""

    of_stream: int = 0
    of_tenant: int = 0

    def exceeded(self, waiting: int, tenants: Mapping[bytes, int], before: Mapping[bytes, int]) -> dict[bytes, int]:
        """Return who is behind, and with how many messages; b"" is the stream. ``before``: who was so until now.

        >>> BacklogLimits(100, 10).exceeded(95, {b"a": 10, b"b": 9}, {})
        {b'a': 10}
        >>> BacklogLimits(100, 10).exceeded(95, {b"a": 8, b"b": 9}, {b"": 100, b"b": 10})
        {b'': 95, b'b': 9}
        """
        counts = [(b"", waiting, self.of_stream)]
        counts += [(name, number, self.of_tenant) for name, number in tenants.items() if name]
        return {
            name: number
            for name, number, limit in counts
            if limit and number >= (limit * _FREE if name in before else limit)
        }
