"""The checks of an audit and the words of their findings. Pure.

A check is one file, ``checks/<name>.sql``: its severity and marks (and the section of the runbook, if it is another
one than the audit's), its rule and its words, as comments, then one SELECT of (stream, id, ticket, owner, detail), a
row for each place where its rule does not hold. What several checks read is a table of its own, ``tables/*.sql``.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from importlib import resources
from typing import NamedTuple

from usher.common.protocol.keys import Keys

#: The most suspects of one check and stream that are looked at again, lowest ids first; the others are only counted.
LOOKED_AT = 2000
SETTLE_S = 1.0  # seconds before the second look at suspects: what was half done when it was read is over by then
SHOWN = 10  # findings that a report shows of each check and stream
FILES = resources.files("usher.master.audit")
#: A word of a hint that something is filled into, without the punctuation around it.
_FILLED = re.compile(r"(?:[\w:]*\{\w+\}[\w*]*)+")


class AuditCheck(NamedTuple):
    """``severity``: bad (the promise was broken, or work is stuck) or warn (allowed once, but an operator should look).
    ``marks``: ``again``, when it is of what moves while it is read, so that it is made once more; ``proof``, when a
    proof makes it, too. ``section``: of deploy/runbook.md, that goes on where ``repair`` ends."""

    name: str
    severity: str
    marks: str
    section: str
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
    """``count`` places are left after a second look."""

    check: AuditCheck
    stream: str
    count: int
    examples: tuple[Example, ...] = ()


def text(name: str) -> str:
    """Return the SQL of a file; a moment in it (``at_utc``) is put into words where findings are read."""
    return (FILES / f"{name}.sql").read_text(encoding="utf-8").replace("at_utc(", "concat(chr(1), ")


def _check(name: str) -> AuditCheck:
    told = re.fullmatch(
        r"-- (bad|warn)(?: \(([\w, ]+)\))?(?:, ([\w ]*\w))?: (.*)\n-- means: (.*)\n-- repair: (.*)\n((?s:.*))",
        text(f"checks/{name}"),
    )
    assert told is not None, name
    severity, marks, section, *words = told.groups("")
    return AuditCheck(name, severity, marks, section or "Audit", *words)


CHECKS = {name: _check(name) for name in sorted(one.name[:-4] for one in (FILES / "checks").iterdir())}
MOVING, PROVES = (tuple(name for name, one in CHECKS.items() if mark in one.marks) for mark in ("again", "proof"))


def filled(text: str, example: Example, keys: Keys) -> str:
    """Fill a hint in; parts for a command line are quoted for a shell."""
    known = example._asdict() | {"group": keys.group, "prefix": keys.prefix, "runs": keys.runs}
    return _FILLED.sub(lambda found: shlex.quote(found[0].format(**known)), text)
