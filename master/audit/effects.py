"""Read the effects that a SQL sink (``usher.consumer.sinks.sql``) has stored: every success has its own.

The table holds a row per ticket and uid, so no effect can be there twice; the possible fault is a missing one. Every
handler of the streams must use the sink: one that does not has no rows. A message's uid is in its entry, so trimmed
entries are not judged; nor are those older than the oldest row, which the sink may have pruned.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from usher.common.base.errors import StartRefused
from usher.common.base.extras import how_to_install
from usher.master.audit.engine import Engine, few

_SCHEMA = pa.schema([("key_ticket", pa.string()), ("key_uid", pa.string())])
_PAGE = 10_000


def read(engine: Engine, url: str, sink: str, tolerance_ms: int, folder: Path) -> str:
    """Make the tables ``effects`` and ``sink``. Returns what cannot be said, as a sentence, or "". Raises
    StartRefused."""
    try:
        import sqlalchemy as sa
    except ImportError as missing:
        raise StartRefused(f"USHER_AUDIT_SINK_URL needs SQLAlchemy: {how_to_install('sql')}") from missing
    uids = sa.table("usher_uids", sa.column("sink"), sa.column("ticket"), sa.column("uid"), sa.column("at_s"))
    oldest = sa.select(sa.func.min(uids.c.at_s)).where(uids.c.sink == sink)
    file = folder / "effects.parquet"
    try:
        database = sa.create_engine(url)
    except (sa.exc.ArgumentError, ModuleNotFoundError) as wrong:
        raise StartRefused(f"USHER_AUDIT_SINK_URL cannot be used: {wrong}") from wrong
    try:
        with (
            database.connect().execution_options(stream_results=True) as sql,
            pq.ParquetWriter(file, _SCHEMA) as writer,
        ):
            if sql.scalar(oldest) is None:
                return (
                    f"the sink {sink} has stored nothing, so nothing can be said of effects (USHER_AUDIT_SINK_URL,"
                    " --sink)"
                )
            stored = sql.execute(sa.select(uids.c.ticket, uids.c.uid).where(uids.c.sink == sink))
            for rows in stored.partitions(_PAGE):
                columns = [pa.array(column, pa.string()) for column in zip(*rows, strict=True)]
                writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=_SCHEMA))
            kept_from_s = sql.scalar(oldest)  # after the reading: rows may have been pruned meanwhile
    except sa.exc.SQLAlchemyError as failed:
        raise StartRefused(f"USHER_AUDIT_SINK_URL: {str(failed).splitlines()[0]}") from failed
    finally:
        database.dispose()
    engine.files("effects", [file], _SCHEMA)
    floor_ms = 1 << 62 if kept_from_s is None else (int(kept_from_s) + 1) * 1000 + tolerance_ms
    engine.arrow("sink", few(pa.schema([("floor_ms", pa.int64())]), [{"floor_ms": floor_ms}]))
    return ""
