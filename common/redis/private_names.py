"""Private names of redis-py: the only module that uses them, with a test that fails when one changes or goes."""

from __future__ import annotations

from typing import Any


def socket_of(connection: Any) -> Any:
    """Return the socket of a connection, to wait on, read, or shut down; None while it is closed. redis-py gives it to
    nobody."""
    return connection._sock
