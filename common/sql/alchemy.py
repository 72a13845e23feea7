"""SQLAlchemy, from the extra ``sql``. All other modules take ``sa`` from here, so that a missing extra is named."""

from __future__ import annotations

from typing import Any

from usher.common.base.extras import how_to_install

try:
    import sqlalchemy as sa

    # So that sa.orm and sa.dialects are there.
    import sqlalchemy.dialects.postgresql
    import sqlalchemy.dialects.sqlite
    import sqlalchemy.orm
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"the outbox and SQL sinks need SQLAlchemy: {how_to_install('sql')} (with PostgreSQL: '.[postgres]', with"
        " MySQL: '.[mysql]')",
        name=missing.name,
    ) from None

__all__ = ["sa"]


#: Options by which libpq notices that a server has vanished: it waits 5 s for a connection, and after that 15 to 25 s
#: for a sign of life.
_WAITS = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}


def postgres_args(url: sa.engine.URL) -> dict[str, Any]:
    """Return ``connect_args`` for create_engine; timeouts in the URL win over ours. {} for other databases.

    Prepared statements are off: a pooler that gives each transaction another server connection (PgBouncer) finds none
    there, or one that another client has prepared under the same name. A URL cannot ask psycopg for that.
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
