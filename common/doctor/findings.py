"""All judgements of the doctor, the worst of them, and the promise as it holds here. Pure: facts in, findings out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from usher.common.doctor.facts import DoctorFacts, DoctorFinding, DoctorSeverity
from usher.common.doctor.gathering import judge_gathering
from usher.common.doctor.server import judge_server
from usher.common.doctor.stream import judge_stream
from usher.common.doctor.topology import judge_topology

_ORDER = (DoctorSeverity.OK, DoctorSeverity.UNKNOWN, DoctorSeverity.WARN, DoctorSeverity.BAD)


class Holds(NamedTuple):
    """A row of the promise: a fault, and what holds then with this Redis."""

    when: str
    what: str


def examine(facts: DoctorFacts) -> list[DoctorFinding]:
    """Run every check, in the order in which a person reads the findings."""
    return [*judge_server(facts), *judge_topology(facts), *judge_stream(facts), *judge_gathering(facts)]


def examine_server(facts: DoctorFacts) -> list[DoctorFinding]:
    """Run the checks that need no stream."""
    return [*judge_server(facts), *judge_topology(facts)]


def worst(findings: Iterable[DoctorFinding]) -> DoctorSeverity:
    """Return the worst severity; OK when there is no finding."""
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
