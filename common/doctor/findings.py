"""All judgements of the doctor, the worst of them, and the promise as it holds here. Pure: facts in, findings out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from usher.common.doctor.facts import DoctorFacts, DoctorFinding, DoctorSeverity
from usher.common.doctor.server import judge_server
from usher.common.doctor.stream import judge_stream
from usher.common.doctor.topology import judge_topology

_ORDER = (DoctorSeverity.OK, DoctorSeverity.UNKNOWN, DoctorSeverity.WARN, DoctorSeverity.BAD)
_SHOWN = 5
_OF_SOURCES: Mapping[str, tuple[str, str]] = {
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
        ("it is not trimmed until a person has looked, so it grows; it is still gathered"),
        "do what its words say; `usher trim --ticket-stream SOURCE` shows who reads it, and takes --forget",
    ),
    "refused": ("Redis does not let its entries be moved", "allow the command that its words name to this user"),
}


class Holds(NamedTuple):
    """A row of the promise: a fault, and what holds then with this Redis."""

    when: str
    what: str


def examine(facts: DoctorFacts) -> list[DoctorFinding]:
    """Run every check, in the order in which a person reads the findings."""
    return [*judge_server(facts), *judge_topology(facts), *judge_stream(facts), *judge_gathering(facts)]


def examine_server(facts: DoctorFacts) -> list[DoctorFinding]:
    return [*judge_server(facts), *judge_topology(facts)]


def worst(findings: Iterable[DoctorFinding]) -> DoctorSeverity:
    return max((finding.severity for finding in findings), key=_ORDER.index, default=DoctorSeverity.OK)


def promise(facts: DoctorFacts) -> list[Holds]:
    """Return what holds here when something fails, by the mode of the append-only file.

    ==============================  ================  ================  ================  =========================
    fault                           no file           always            everysec          no / not known
    ==============================  ================  ================  ================  =========================
    a program of Usher is killed    no loss, order    no loss, order    no loss, order    no loss, order
    redis-server is killed          all is lost       no loss           none seen         none seen / not known
    its host loses power            all is lost       no loss           about a second    half a minute / not known
    a replica is promoted (if any)  the tail is lost  the tail is lost  the tail is lost  the tail is lost
    ==============================  ================  ================  ================  =========================
    """
    held = "nothing is lost, the order holds, one effective execution at a time"
    rows = [Holds("a program of Usher is killed, paused or cut off", held)]
    fsync = facts.setting("appendfsync")
    if facts.told("aof_enabled") == "0":
        gone = (
            "all that Redis had is lost"
            if facts.setting("save") == ""
            else "all since the last snapshot of Redis is lost, if it makes any"
        )
        rows += [Holds("redis-server is killed", gone), Holds("its host loses power", gone)]
    elif facts.told("aof_enabled") is None:
        rows += [Holds("redis-server is killed", "not known"), Holds("its host loses power", "not known")]
    else:
        kills = {"always": "nothing is lost"}
        powers = {
            "always": "nothing is lost, as far as the disk keeps its word",
            "everysec": "up to about a second of sends and acknowledgements is lost: resend; repeats are fenced",
            "no": "what the kernel had not written is lost, half a minute or more",
        }
        killed = kills.get(fsync or "", "no loss was seen in tests; a write that waits for a slow disk may be lost")
        rows += [
            Holds("redis-server is killed", killed),
            Holds("its host loses power", powers.get(fsync or "", "not known")),
        ]
    if facts.number("connected_slaves") or facts.mode != "fixed":
        tail = (
            "what was not copied yet of sends and acknowledgements is lost: resend; repeats are fenced, order holds for"
            " what is left"
        )
        rows.append(Holds("a replica is promoted", tail))
    return rows


def judge_gathering(facts: DoctorFacts) -> Iterator[DoctorFinding]:
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
        do = "give all masters the same USHER_TICKET_STREAM and USHER_TICKET_FIELD, or another USHER_GROUP"
        yield DoctorFinding("sources", DoctorSeverity.BAD, told, means, do)
    else:
        yield DoctorFinding("sources", DoctorSeverity.OK, told, "they are gathered into the work stream")
    yield from _source_troubles(seen["troubles"])


def _source_troubles(troubles: Mapping[str, Any]) -> Iterator[DoctorFinding]:
    by_kind: dict[str, list[str]] = {}
    for source, why in troubles.items():
        by_kind.setdefault(str(why).partition(":")[0], []).append(f"{source}: {why}" if ":" in str(why) else source)
    for kind, sources in by_kind.items():
        means, do = _OF_SOURCES.get(kind, ("they are not gathered", "look at the masters' logs"))
        shown = ", ".join(sources[:_SHOWN]) + (f" and {len(sources) - _SHOWN:,} more" if len(sources) > _SHOWN else "")
        yield DoctorFinding(
            f"source {kind}",
            DoctorSeverity.WARN if kind in ("held_back", "not_trimmed") else DoctorSeverity.BAD,
            shown,
            means,
            do,
        )
