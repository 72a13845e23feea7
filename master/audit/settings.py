"""Settings of the audit."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from usher.common.runtime.settings import CommonSettings

#: Where Spark runs by default.
LOCAL = "local[2]"


class AuditSettings(CommonSettings):
    """All settings of an audit."""

    audit_streams: str = Field(
        "",
        description=(
            "Ticket streams to audit, comma separated, or patterns (tickets:*). Empty: the one that USHER_TICKET_STREAM"
            " works on."
        ),
    )
    audit_dir: str = Field(
        "", description="Folder of the audit's history, page and spill files. Empty: audit in USHER_STATE_DIR."
    )
    audit_every_minutes: float = Field(60.0, ge=0.1, le=43_200, description="Time between audits with --schedule.")
    audit_prove_minutes: float = Field(
        5.0,
        ge=0,
        le=43_200,
        description="Time between proofs: `usher audit --schedule prove`, which `usher up` runs. 0: not there.",
    )
    audit_settle_seconds: float = Field(1.0, ge=0, le=600, description="Wait before the second look at suspects.")
    audit_idle_seconds: float = Field(
        0.0, ge=0, le=86_400, description="Longest an entry of an incarnation may be idle. 0: three leases."
    )
    audit_parked_seconds: float = Field(
        300.0, ge=1, le=604_800, description="Longest an entry may wait with nothing of its ticket running."
    )
    audit_deliveries: int = Field(
        20, ge=1, le=100_000, description="More deliveries of an entry than this are a finding."
    )
    audit_clock_seconds: float = Field(
        1.0, ge=0, le=3600, description="How far clocks of two consumers may differ where nothing bounds them."
    )
    audit_memory_mib: int = Field(
        1024, ge=512, le=1_048_576, description="Heap of the audit's JVM in MiB; what does not fit goes to disk."
    )
    audit_engine: Literal["auto", "local", "spark"] = Field(
        "auto",
        description=(
            "What executes the checks: spark, local (DuckDB in this process, no Java), or auto: Spark where it is"
            " installed, and this process for the steps of a proof."
        ),
    )
    audit_spark_master: str = Field(LOCAL, description="Where Spark runs: local[N], or spark://host:7077.")
    audit_py_files: str = Field("", description="Zip with common and master for executors on other machines.")
    audit_sink_url: str = Field(
        "", description="SQLAlchemy URL of a SqlSink: every success must have its effect there. Empty: not looked at."
    )
    audit_sink_name: str = Field("default", min_length=1, description="The name of that SqlSink.")
    max_attempts: int = Field(
        5, ge=1, le=1000, description="As the consumers have it: more counted attempts are a finding."
    )
    run_log_length: int = Field(
        10_000, ge=0, le=10_000_000, description="As the consumers have it, to know whether the run log was capped."
    )

    @property
    def streams(self) -> tuple[str, ...]:
        """Return the streams as they are set, patterns included."""
        return tuple(name.strip() for name in self.audit_streams.split(",") if name.strip()) or (self.work_stream,)

    @property
    def folder(self) -> Path:
        """Return the audit's folder as an absolute path: Spark takes URIs only."""
        return (Path(self.audit_dir).expanduser() if self.audit_dir else self.state_folder / "audit").absolute()
