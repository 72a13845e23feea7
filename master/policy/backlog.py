"""Backlog limits: who of the stream and its tenants has so much waiting that producers are told to wait. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

#: Share of its limit below which one that was behind is so no more: else the sign would come and go with each message.
_FREE = 0.9


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
