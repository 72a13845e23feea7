"""The only uses of redis-py's private names, with a test that fails when one of them changes or disappears."""

from __future__ import annotations

from typing import Any


def socket_of(connection: Any) -> Any:
    """Return the socket of a connection, to wait on, read, or shut down; None while it is closed. redis-py has no
    public name for it."""
    return connection._sock
