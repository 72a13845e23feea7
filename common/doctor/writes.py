"""Tell from three sections of INFO alone whether Redis refuses writes: cheap enough for a page to ask every second."""

from __future__ import annotations

from typing import Any, NamedTuple

from usher.common.doctor.facts import DoctorFacts, DoctorSeverity
from usher.common.doctor.growth import info_of
from usher.common.doctor.server import refused_writes

#: The commands whose replies ``write_trouble`` reads. One section each: only Redis 7 takes several in one command.
INFO_COMMANDS = (("INFO", "persistence"), ("INFO", "memory"), ("INFO", "replication"))


class WriteTrouble(NamedTuple):
    """A reason against writing. ``is_certain``: Redis refuses writes; else it does so only with a setting that INFO
    does not show."""

    text: str
    is_certain: bool


def write_trouble(*replies: Any) -> WriteTrouble | None:
    """Return what the replies of ``INFO_COMMANDS`` say against writing; None when they say nothing, or Redis does not
    tell this user."""
    told = info_of(*replies)
    found = refused_writes(DoctorFacts(info=told)) if told else None
    return (
        WriteTrouble(f"Redis, {found.check}: {found.means}; {found.do}", found.severity is DoctorSeverity.BAD)
        if found is not None
        else None
    )
