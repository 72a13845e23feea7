"""Request and reply without Usher: each caller waits at a list of its own, on a connection of its own."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import redis.asyncio


def asking(url: str, stream: str, field: str, count: int, within_s: float) -> Callable[[int], Coroutine[Any, Any, Any]]:
    """Return what asks once: it names its list in ``field``. ``count``: so many ask at a time."""
    pool = redis.asyncio.ConnectionPool.from_url(url, max_connections=count + 10, socket_connect_timeout=within_s)
    client = redis.asyncio.Redis(connection_pool=pool)

    async def ask(number: int) -> None:
        message: Any = {"ticket_id": str(number), field: f"{url} reply:{number}"}
        await client.xadd(stream, message)
        if await client.blpop([f"reply:{number}"], timeout=within_s) is None:
            raise TimeoutError(number)

    return ask
