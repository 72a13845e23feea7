"""Choose the engine of an audit or a proof by the number of rows, and yield a session of it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, MutableMapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from usher.common.base.errors import RedisTrouble, StartRefused
from usher.common.protocol.keys import Keys
from usher.common.redis.client import CommandRefused, Link
from usher.common.redis.endpoints import near
from usher.master.audit.archive.standing import archived_rows
from usher.master.audit.checks.findings import RECORD_RUNS
from usher.master.audit.read.session import SparkPlace, is_elsewhere, local_session, spark_session
from usher.master.audit.settings import AuditSettings

T = TypeVar("T")
#: Up to so many entries and executions, no Spark is needed.
_LOCAL_ROWS = 5_000_000
#: Below both, Spark is started for little data (``SparkPlace.small``).
_SMALL_ENTRIES, _SMALL_RECORDS = 200_000, 400


@contextlib.contextmanager
def session(
    settings: AuditSettings,
    url: str,
    environ: MutableMapping[str, str],
    tell: Callable[[str], None],
    archive: Path | None = None,
) -> Iterator[Any]:
    """Yield a session of the engine that fits the settings and the size of the streams, and that of the ``archive``,
    if all of it is to be read. ``environ``: see ``spark_session``. Raises StartRefused."""
    entries, records = _amount(settings, url)
    rows = entries + records * RECORD_RUNS
    if archive is not None:
        rows += sum(archived_rows(archive, Keys(one, settings.group)) for one in settings.streams)
    can_choose = settings.audit_engine == "auto" and not is_elsewhere(settings.audit_spark_master, environ)
    if settings.audit_engine == "local" or (can_choose and rows <= _LOCAL_ROWS and find_spec("duckdb") is not None):
        with local_session(settings.folder / "local", settings.audit_memory_mib) as made:
            yield made
        return
    is_small = archive is None and entries < _SMALL_ENTRIES and records < _SMALL_RECORDS
    place = dataclasses.replace(place_of(settings), small=is_small)
    tell(f"starting Spark on {place.master}")
    with spark_session(place, environ) as made:
        yield made


def place_of(settings: AuditSettings) -> SparkPlace:
    """Return where Spark runs by these settings."""
    return SparkPlace(
        settings.audit_spark_master, settings.folder / "spark", settings.audit_memory_mib, settings.audit_py_files
    )


def with_link(url: str, do: Callable[[Link, Keys], T], keys: Keys) -> T:
    """Return what ``do`` returns over a connection of its own. Raises StartRefused when Redis does not answer."""
    link = Link(url, "usher:audit", timeout_s=30.0)
    try:
        return do(link, keys)
    except (RedisTrouble, CommandRefused) as trouble:
        raise StartRefused(f"USHER_REDIS_URL: {trouble}") from trouble
    finally:
        link.close()


def _amount(settings: AuditSettings, url: str) -> tuple[int, int]:
    """Return the number of entries and of records to read. Raises StartRefused when a stream or its group does not
    exist, before Java is started for it."""
    from usher.master.audit.read.snapshot import KeyForeign, foreign_keys, stream_facts

    def read(link: Link, keys: Keys) -> tuple[int, int]:
        with contextlib.suppress(KeyForeign):  # the audit says what cannot be read
            if not foreign_keys(link, keys):
                facts = stream_facts(link, keys, settings.run_log_length)
                return max(facts.pending, facts.length if facts.run_records else 0), facts.run_records
        return 0, 0

    sizes = [with_link(near(url, stream), read, Keys(stream, settings.group)) for stream in settings.streams]
    return sum(entries for entries, _ in sizes), sum(records for _, records in sizes)
