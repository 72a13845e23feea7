"""How Usher connects to PostgreSQL where it is given a URL; who makes an engine says all of this for himself."""

from __future__ import annotations

from typing import Any

from usher.common.sql.alchemy import sa

#: How libpq finds out that a server is gone without a word: it waits 5 s for a connection, and 15 to 25 s for a sign of
#: life after that.
_WAITS = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}


def postgres_args(url: sa.engine.URL) -> dict[str, Any]:
    """``connect_args`` for create_engine; what the URL says of timeouts goes before ours. {} for other databases.

    Without prepared statements: a pooler that gives each transaction another connection of the server (PgBouncer) finds
    none there, or one that another client has prepared under the same name. A URL has no way to ask psycopg for that.
    """
    if url.get_backend_name() != "postgresql":
        return {}
    driver = url.get_dialect().driver
    waits = (
        {name: value for name, value in _WAITS.items() if name not in url.query}
        if driver in ("psycopg", "psycopg2")
        else {}
    )
    return waits | ({"prepare_threshold": None} if driver == "psycopg" else {})
