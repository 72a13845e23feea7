"""Choose the engine of an audit or a proof, and yield it with a folder for what is read."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator, MutableMapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from usher.common.base.errors import RedisTrouble, StartRefused
from usher.common.protocol.keys import Keys
from usher.common.redis.client import CommandRefused, Link
from usher.common.redis.endpoints import near
from usher.master.audit.settings import AuditChoices

if TYPE_CHECKING:  # both need an extra, which help and refusals do not
    from usher.master.audit.engine import Engine
    from usher.master.audit.spark import SparkPlace

T = TypeVar("T")
#: Below both, Spark is started for little data (``SparkPlace.small``).
_SMALL_ENTRIES, _SMALL_RECORDS = 200_000, 4_000


@contextlib.contextmanager
def session(
    settings: AuditChoices,
    url: str,
    environ: MutableMapping[str, str],
    tell: Callable[[str], None],
    *,
    local: bool = False,
    rows: int = 0,
) -> Iterator[tuple[Engine, Path]]:
    """Yield the engine of the settings, and a folder. ``local``: where the settings leave it open, this process;
    ``rows``: of an archive, to be read too. ``environ``: see ``spark_engine``. Raises StartRefused."""
    from usher.master.audit.engine import local_engine
    from usher.master.audit.spark import is_elsewhere, spark_engine

    entries, records = _amount(settings, url) if url else (0, 0)
    with contextlib.ExitStack() as opened:
        place = settings.folder / "reading"
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = Path(opened.enter_context(tempfile.TemporaryDirectory(dir=place)))
        except OSError as unusable:
            raise StartRefused(
                f"USHER_AUDIT_DIR: the folder {settings.folder} cannot be used: {unusable}"
            ) from unusable
        is_free = settings.audit_engine == "auto" and not is_elsewhere(settings.audit_spark_master, environ)
        if settings.audit_engine == "local" or (is_free and (local or not _has_spark())):
            yield opened.enter_context(local_engine(folder, settings.memory_mib)), folder
            return
        small = entries + rows < _SMALL_ENTRIES and records < _SMALL_RECORDS
        where = dataclasses.replace(place_of(settings), small=small)
        tell(f"starting Spark on {where.master}")
        yield opened.enter_context(spark_engine(where, environ)), folder


def _has_spark() -> bool:
    try:
        return find_spec("pyspark") is not None
    except ValueError:  # somebody has said that it must not be imported
        return False


def place_of(settings: AuditChoices) -> SparkPlace:
    """Return where Spark runs by these settings."""
    from usher.master.audit.spark import SparkPlace

    return SparkPlace(settings.audit_spark_master, settings.folder / "spark", settings.memory_mib, settings.py_files)


def with_link(url: str, do: Callable[[Link, Keys], T], keys: Keys) -> T:
    """Return what ``do`` returns over a connection of its own. Raises StartRefused when Redis does not answer."""
    link = Link(url, "usher:audit", timeout_s=30.0)
    try:
        return do(link, keys)
    except (RedisTrouble, CommandRefused) as trouble:
        raise StartRefused(f"USHER_REDIS_URL: {trouble}") from trouble
    finally:
        link.close()


def _amount(settings: AuditChoices, url: str) -> tuple[int, int]:
    """Return the number of entries and of records to read. Raises StartRefused when a stream or its group does not
    exist, before Java is started for it."""
    from usher.master.audit.snapshot import KeyForeign, foreign_keys, stream_facts

    def read(link: Link, keys: Keys) -> tuple[int, int]:
        with contextlib.suppress(KeyForeign):  # the audit says what cannot be read
            if not foreign_keys(link, keys):
                facts = stream_facts(link, keys, settings.run_log_length)
                return max(facts.pending, facts.length if facts.run_records else 0), facts.run_records
        return 0, 0

    sizes = [with_link(near(url, stream), read, Keys(stream, settings.group)) for stream in settings.streams]
    return sum(entries for entries, _ in sizes), sum(records for _, records in sizes)
