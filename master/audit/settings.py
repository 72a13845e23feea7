"""Settings of the audit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field

from usher.common.protocol.keys import Keys
from usher.common.protocol.sources import SCOPED_TICKET_FIELD, is_work_stream
from usher.common.runtime.settings import CommonSettings

#: Where Spark runs by default.
LOCAL = "local[2]"
#: Leases for which an entry of an incarnation may be idle (its renewal touches it three times in each), and how much
#: later one that is over is forgotten at the latest: the janitor takes its time where all is quiet.
_LEASES, _REAPED_MS = 3, 35_000


class AuditSettings(CommonSettings):
    audit_dir: str = Field(
        "", description="Folder of the audit's archive, pages and spill files. Empty: audit in USHER_STATE_DIR."
    )
    audit_engine: Literal["auto", "local", "spark"] = Field(
        "auto",
        description=(
            "What executes the checks: spark, local (DuckDB in this process, no Java), or auto: Spark where it is"
            " installed, and this process for the steps of a proof."
        ),
    )
    audit_spark_master: str = Field(LOCAL, description="Where Spark runs: local[N], or spark://host:7077.")
    max_attempts: int = Field(
        5, ge=1, le=1000, description="As the consumers have it: more counted attempts are a finding."
    )
    run_log_length: int = Field(
        10_000, ge=0, le=10_000_000, description="As the consumers have it, to know whether the run log was capped."
    )

    @property
    def folder(self) -> Path:
        """Return the audit's folder as an absolute path: Spark takes URIs only."""
        return (Path(self.audit_dir).expanduser() if self.audit_dir else self.state_folder / "audit").absolute()

    @property
    def archive(self) -> Path:
        return self.folder / "archive"


class AuditChoices(AuditSettings):
    """The settings, and what options of the command choose for this run; ``redis_url`` is the one that was found.
    ``keep_days`` and ``bodies``: of the archive."""

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
        """Return the table ``limits``, beyond which something is a finding. ``owner_idle_ms``: an entry of an
        incarnation, living or dead; ``parked_ms``: one under ``master`` with nothing of its ticket in processing;
        ``deliveries``: more than some rolling restarts make of one entry; ``clocks_ms``: how far two clocks may differ
        where nothing bounds them; ``reaped_ms``: a dead incarnation with nothing pending, in the group."""
        idle_ms = int(_LEASES * self.lease_seconds * 1000)
        told = {"owner_idle_ms": idle_ms, "parked_ms": 300_000, "deliveries": 20, "attempts": self.max_attempts}
        return told | {"clocks_ms": 1000, "reaped_ms": idle_ms + _REAPED_MS, **self.limits}

    def keys(self, stream: str) -> Keys:
        return Keys(stream, self.group)

    def field(self, stream: str) -> bytes:
        return SCOPED_TICKET_FIELD if is_work_stream(stream, self.group) else self.ticket_field.encode()
