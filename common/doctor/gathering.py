"""Judge the gathering of several ticket streams: does a master do it, do all agree, which sources are left out.
Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from usher.common.doctor.facts import DoctorFacts, DoctorFinding, DoctorSeverity

_SHOWN = 5
_MEANS: Mapping[str, tuple[str, str]] = {
    "not_a_stream": (
        "the key of this name is not a stream",
        "move that key away, or take the name out of USHER_TICKET_STREAM",
    ),
    "ahead": (
        "its group is beyond its last id, so nothing of it will ever come",
        "XGROUP SETID it back to the last id that was gathered (HGET <work stream>:<group>:gathered <source>)",
    ),
    "before": (
        "its group has pending entries of the time when it was a ticket stream of its own; they must be done first",
        "run a master and a consumer with USHER_TICKET_STREAM set to it alone until nothing is pending",
    ),
    "held_back": (
        (
            "a ticket that is halted or paused for long keeps all that is done above its oldest message in the work"
            " stream, until Redis is full"
        ),
        (
            "let that ticket go on: `usher dead redrive` or `usher dead drop` when it is halted, `usher resume` when it"
            " is paused"
        ),
    ),
    "not_trimmed": (
        ("it is not trimmed (USHER_TRIM_SECONDS) until a person has looked, so it grows; it is still gathered"),
        "do what its words say; `usher trim --ticket-stream SOURCE` shows who reads it, and takes --forget",
    ),
    "refused": ("Redis does not let its entries be moved", "allow the command that its words name to this user"),
}


def judge_gathering(facts: DoctorFacts) -> Iterator[DoctorFinding]:
    """Yield the findings; none when there is one ticket stream."""
    seen = facts.gathering
    if seen is None:
        return
    lag = f"{seen['lag']:,}" if seen["lag_is_exact"] else f"more than {seen['lag']:,}"
    told = f"{seen['sources']:,} streams, {lag} entries not gathered yet, {len(seen['masters'])} masters gather"
    if not seen["masters"]:
        yield DoctorFinding(
            "sources",
            DoctorSeverity.WARN,
            told,
            "nothing is gathered: no master runs",
            "start `usher master` with this USHER_TICKET_STREAM",
        )
    elif len({master["setting"] for master in seen["masters"]}) > 1:
        means = (
            "masters of one group disagree on what to gather: streams that only some of them know wait where others"
            " have their shard"
        )
        do = (
            "give all masters the same USHER_TICKET_STREAM, USHER_TICKET_FIELD and USHER_TICKET_SCOPE, or another"
            " USHER_GROUP"
        )
        yield DoctorFinding("sources", DoctorSeverity.BAD, told, means, do)
    else:
        yield DoctorFinding("sources", DoctorSeverity.OK, told, "they are gathered into the work stream")
    yield from _troubles(seen["troubles"])


def _troubles(troubles: Mapping[str, Any]) -> Iterator[DoctorFinding]:
    by_kind: dict[str, list[str]] = {}
    for source, why in troubles.items():
        by_kind.setdefault(str(why).partition(":")[0], []).append(f"{source}: {why}" if ":" in str(why) else source)
    for kind, sources in by_kind.items():
        means, do = _MEANS.get(kind, ("they are not gathered", "look at the masters' logs"))
        shown = ", ".join(sources[:_SHOWN]) + (f" and {len(sources) - _SHOWN:,} more" if len(sources) > _SHOWN else "")
        yield DoctorFinding(
            f"source {kind}",
            DoctorSeverity.WARN if kind in ("held_back", "not_trimmed") else DoctorSeverity.BAD,
            shown,
            means,
            do,
        )
