"""Settings of the audit."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field

from usher.common.protocol.keys import Keys
from usher.common.protocol.sources import SCOPED_TICKET_FIELD, is_work_stream
from usher.common.runtime.settings import CommonSettings

LOCAL = "local[2]"  # where Spark runs by default
#: Leases for which an entry may be idle (renewal touches it thrice in each); how much later the janitor forgets one.
_LEASES, _REAPED_MS = 3, 35_000


def archive_at(place: str, near: Path) -> Path:
    """Return the folder of an archive; of one in an object store that of its copies, which has the URL as its name."""
    return near / "copies" / urllib.parse.quote(place, safe="") if "://" in place else Path(place)


def where(place: Path) -> str:
    """Return a place in an archive as people know it: of a copy (``archive_at``) the URL."""
    for at, part in enumerate(place.parts):
        if re.match(r"\w+%3A%2F%2F", part):
            return "/".join((urllib.parse.unquote(part), *place.parts[at + 1 :]))
    return str(place)


class AuditSettings(CommonSettings):
    audit_dir: str = Field(
        "", description="Folder of archive, pages, spill files, or the archive's URL. Empty: audit in USHER_STATE_DIR."
    )
    audit_engine: Literal["auto", "local", "spark"] = Field(
        "auto", description="What executes the checks: spark, local (DuckDB), or auto: Spark, but for steps of a proof."
    )
    audit_spark_master: str = Field(LOCAL, description="Where Spark runs: local[N], or spark://host:7077.")
    max_attempts: int = Field(
        8, ge=1, le=1000, description="As the consumers have it: more counted attempts are a finding."
    )
    run_log_length: int = Field(
        10_000, ge=0, le=10_000_000, description="As the consumers have it, to know whether the run log was capped."
    )

    @property
    def folder(self) -> Path:
        """Return the audit's folder as an absolute path: Spark takes URIs only."""
        is_here = self.audit_dir and "://" not in self.audit_dir
        return (Path(self.audit_dir).expanduser() if is_here else self.state_folder / "audit").absolute()

    @property
    def archive(self) -> Path:
        place = self.audit_dir.rstrip("/") if "://" in self.audit_dir else self.folder
        return archive_at(f"{place}/archive", self.folder)


class AuditChoices(AuditSettings):
    """The settings, and what options choose for this run; ``redis_url`` is the one that was found."""

    chosen_streams: str = ""
    memory_mib: int = 1024
    py_files: str = ""
    keep_days: int | None = None
    bodies: bool = False
    limits: Mapping[str, int] = {}

    @property
    def streams(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.chosen_streams.split(",") if name.strip()) or (self.work_stream,)

    @property
    def thresholds(self) -> dict[str, int]:
        """Return the table ``limits``, beyond which something is a finding. ``owner_idle_ms``: an incarnation's entry;
        ``parked_ms``: one under ``master`` with nothing of its ticket in processing; ``deliveries``: more than rolling
        restarts make; ``clocks_ms``: between two clocks; ``reaped_ms``: a dead incarnation with nothing pending."""
        idle_ms = int(_LEASES * self.lease_seconds * 1000)
        told = {"owner_idle_ms": idle_ms, "parked_ms": 300_000, "deliveries": 20, "attempts": self.max_attempts}
        return told | {"clocks_ms": 1000, "reaped_ms": idle_ms + _REAPED_MS, **self.limits}

    def keys(self, stream: str) -> Keys:
        return Keys(stream, self.group)

    def field(self, stream: str) -> bytes:
        return SCOPED_TICKET_FIELD if is_work_stream(stream, self.group) else self.ticket_field.encode()
