"""The only uses of redis-py's private names, with a test that fails when one of them changes or disappears."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def socket_of(connection: Any) -> Any:
    """Return the socket of a connection, to wait on, read, or shut down; None while it is closed. redis-py has no
    public name for it."""
    return connection._sock


def hear_changes(connection: Any, heard: Callable[[list[bytes] | None], object]) -> None:
    """Have ``heard`` called with the keys that a report of CLIENT TRACKING names, None for all, whenever one is read.
    redis-py offers it for a cache of its own only."""
    connection._parser.set_invalidation_push_handler(lambda report: heard(report[1]))
