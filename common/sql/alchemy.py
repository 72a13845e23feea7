"""SQLAlchemy, from the extra ``sql``. All other modules take ``sa`` from here, so that a missing extra is named."""

from __future__ import annotations

from usher.common.base.extras import how_to_install

try:
    import sqlalchemy as sa

    # So that sa.orm and sa.dialects are there.
    import sqlalchemy.dialects.postgresql
    import sqlalchemy.dialects.sqlite
    import sqlalchemy.orm  # noqa: F401
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"the outbox and SQL sinks need SQLAlchemy: {how_to_install('sql')} (with PostgreSQL: '.[postgres]', with"
        " MySQL: '.[mysql]')",
        name=missing.name,
    ) from None

__all__ = ["sa"]
