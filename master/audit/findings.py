"""The checks of an audit and the words of their findings. Pure.

A check is one file, ``checks/<name>.sql``: its severity (and the section of the runbook, if it is another one than the
audit's) with what to look at (``LOOKS``), and its words, as comments, then one SELECT of (stream, id, ticket, owner,
detail), a row for each place where its rule does not hold. Checks without a SELECT are judged where Redis is read
(``snapshot``). What several checks read is a table of its own, ``tables/*.sql``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import resources
from typing import NamedTuple

from usher.common.protocol.keys import HALTED, MASTER, Keys

#: Names of the group that are no incarnations, and that no lease is asked of.
RESERVED = frozenset({MASTER.decode(), HALTED.decode()})
#: A fence is at least the milliseconds of Redis' clock when it was given, times this (common/lua/includes).
FENCES_PER_MS = 1024
#: The most suspects of one check and stream that are looked at again, lowest ids first; the others are only counted.
LOOKED_AT = 2000
#: Seconds before the second look at suspects: what was half done when it was read is over by then.
SETTLE_S = 1.0
#: Findings that a report shows of each check and stream.
SHOWN = 10
_FILES = resources.files("usher.master.audit")
#: What is looked at closer -> its command line.
LOOKS = {
    "runs": "usher audit --streams {stream} --group {group} runs --message {id}",
    "ticket": "usher audit --streams {stream} --group {group} runs --ticket {ticket}",
    "pending": "redis-cli XPENDING {stream} {group} {id} {id} 1",
    "held": "redis-cli XPENDING {stream} {group} - + 10 {owner}",
    "entry": "redis-cli XRANGE {stream} {id} {id}",
    "log": "redis-cli XRANGE {runs} {id} {id}",
    "record": "redis-cli HGET {prefix}tickets {ticket}",
    "attempts": "redis-cli HGET {prefix}attempts {id}",
    "inbox": "redis-cli XRANGE {prefix}inbox:{owner} - + COUNT 10",
    "lease": "redis-cli PTTL {prefix}lease:{owner}",
    "letters": "redis-cli XREVRANGE {dead} + - COUNT 10",
    "members": "redis-cli XINFO CONSUMERS {stream} {group}",
    "groups": "redis-cli XINFO GROUPS {stream}",
    "stream": "redis-cli XINFO STREAM {stream}",
    "time": "redis-cli TIME",
    "keys": "redis-cli --scan --pattern {prefix}*",
}
#: A word of a hint that something is filled into, without the punctuation around it.
_FILLED = re.compile(r"(?:[\w:]*\{\w+\}[\w*]*)+")
#: (check, its cause, what both are about): what follows from another finding is not told beside it.
_DERIVED = (("owners_differ", "ticket_owned_twice", "ticket"), ("index_without_pending", "lost", "id"))
#: Checks of the run log alone: facts of the past, which need no second look; a proof from the archive makes them, too.
OF_RUNS = (
    *("overlap", "owners_overlap", "out_of_order", "fence_shared", "fence_fell", "times_impossible", "run_unreadable"),
    *("effect_twice", "repeat_declared", "stale_counted", "clock_wrong"),
)
#: Checks of stream and run log together: a proof makes them of entries that were not over.
OF_ENTRIES = (
    *("lost", "overtaken", "dead_and_done", "dead_and_pending", "letters_twice", "letter_missing", "ticket_differs"),
    "unread_and_run",
)
#: Checks of names, leases and inboxes, which the second look makes anew as a whole.
OF_MEMBERS = ("owner_dead", "stranger_owns", "consumer_leaked", "key_leaked", "lease_orphan", "unregistered")


class AuditCheck(NamedTuple):
    """``severity``: bad (the promise was broken, or work stands still) or warn (allowed once, but an operator should
    look); both make the exit code 1. ``section``: of deploy/runbook.md, that goes on where ``repair`` ends; ``look``:
    names of ``LOOKS``; ``source``: a table without which there is nothing to find, or ""; like lines to look ``repair``
    has {id} {ticket} {owner} {prefix} {dead} {runs} in it; ``select`` is "" where Python judges."""

    name: str
    severity: str
    section: str
    look: tuple[str, ...]
    source: str
    rule: str
    means: str
    repair: str
    select: str


class Example(NamedTuple):
    """A place where a rule does not hold. Empty texts are unknown or do not apply."""

    stream: str
    id: str = ""
    ticket: str = ""
    owner: str = ""
    detail: str = ""


@dataclass(frozen=True)
class AuditFinding:
    """``count`` places are left after a second look at the ``suspects`` of the first."""

    check: AuditCheck
    stream: str
    count: int
    suspects: int
    examples: tuple[Example, ...] = ()


def text(name: str) -> str:
    return (_FILES / f"{name}.sql").read_text(encoding="utf-8")


def table(name: str) -> str:
    return text(f"tables/{name}")


def _check(name: str) -> AuditCheck:
    told = re.fullmatch(
        r"-- (bad|warn)(?:, ([\w ]+))?: ([\w ]+?)(?: \((\w+)\))?\n"
        r"-- rule: (.*)\n-- means: (.*)\n-- repair: (.*)\n((?s:.*))",
        text(f"checks/{name}"),
    )
    assert told is not None, name
    severity, section, look, source, *words = told.groups("")
    return AuditCheck(name, severity, section or "Audit", tuple(look.split()), source, *words)


CHECKS = {name: _check(name) for name in sorted(one.name[:-4] for one in (_FILES / "checks").iterdir())}


def fold(found: Iterable[AuditFinding]) -> tuple[AuditFinding, ...]:
    of = {(one.check.name, one.stream): one for one in found}
    for derived, cause, about in _DERIVED:
        for (name, stream), one in list(of.items()):
            if name == derived and (reason := of.get((cause, stream))):
                known = {getattr(each, about) for each in reason.examples}
                left = tuple(each for each in one.examples if getattr(each, about) not in known)
                of[name, stream] = replace(one, count=one.count - len(one.examples) + len(left), examples=left)
    kept = [one for one in of.values() if one.count]
    return tuple(sorted(kept, key=lambda one: (one.check.severity, one.check.name, one.stream)))


def commands(check: AuditCheck, example: Example, keys: Keys) -> list[str]:
    """Return the command lines to look closer; those that need an unknown value are left out."""
    known = _known(example, keys)
    lines = [LOOKS[name] for name in check.look]
    return [_filled(line, known) for line in lines if all(known[one] for one in re.findall(r"\{(\w+)\}", line))]


def repair(check: AuditCheck, example: Example, keys: Keys) -> str:
    return _filled(check.repair, _known(example, keys))


def _known(example: Example, keys: Keys) -> dict[str, str]:
    names = {"group": keys.group, "prefix": keys.prefix, "dead": keys.dead, "runs": keys.runs}
    return example._asdict() | names


def _filled(text: str, known: dict[str, str]) -> str:
    """Fill everything in; parts for a command line are quoted for a shell."""
    return _FILLED.sub(lambda found: shlex.quote(found[0].format(**known)), text)
