"""One plain connection to Redis that says whether a command happened: nothing is repeated, nothing re-shaped.

Not Usher's own client on purpose: what the harness knows of Redis must not pass through the code that it judges.
"""

from __future__ import annotations

from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry


class Refused(Exception):
    """The command did not happen."""


class Unknown(Exception):
    """The command may have happened."""


class Wire:
    """Used by one thread. Connects by itself."""

    def __init__(self, port: int, timeout_s: float = 2.0) -> None:
        self._connection = redis.Connection(
            host="127.0.0.1",
            port=port,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            decode_responses=False,
        )

    def call(self, *command: Any, block_s: float | None = None) -> Any:
        """Raises Refused or Unknown."""
        try:
            self._connection.connect()
        except (redis.RedisError, OSError) as failed:
            self._connection.disconnect()
            raise Refused(str(failed)) from failed
        try:
            self._connection.send_command(*command, check_health=False)
            if block_s is None:
                return self._connection.read_response()
            return self._connection.read_response(timeout=block_s)
        except redis.ResponseError as refused:
            raise Refused(str(refused)) from refused
        except (redis.RedisError, OSError) as failed:
            self._connection.disconnect()
            raise Unknown(str(failed)) from failed

    def close(self) -> None:
        self._connection.disconnect()


def mapping(flat: list[Any]) -> dict[bytes, Any]:
    """Name, value, name, value ... as a mapping."""
    return dict(zip(flat[::2], flat[1::2], strict=True))
