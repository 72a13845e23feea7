"""Action log: records what operators did, when, to what and why, and the outcome. It is a capped stream, the newest
lines of which any master shows.

A change of the rules writes its line in the step that makes the change (change_rules.lua). Redrives and drops of
letters are logged when they have been done, one line per command or request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from usher.common.base.errors import RedisTrouble
from usher.common.base.log import WARNING, event
from usher.common.protocol.keys import Keys
from usher.common.protocol.stream_id import milliseconds, rank
from usher.common.redis.client import CommandRefused, Link
from usher.common.redis.replies import pairs

#: Lines kept, roughly.
KEPT = 10_000
#: Appended to the outcome of what was done by then; the outcome of the last step is unknown.
FAILED = ", then Redis failed"


class By(NamedTuple):
    """The actor: a name, the way it came (``http``, ``cli``), and the reason given."""

    who: str
    via: str
    why: str = ""


@dataclass(frozen=True)
class OperatorAction:
    """An action. ``what``: a word like ``pause``, ``lift``, ``drain``, ``redrive``; ``on``: what it was done to, for
    people."""

    by: By
    what: str
    on: str

    def line(self) -> list[bytes]:
        told = ("who", self.by.who, "via", self.by.via, "what", self.what, "on", self.on, "why", self.by.why)
        return [part.encode("utf-8", "surrogateescape") for part in told]


class StepResult(NamedTuple):
    """Result of an action for one of the things it was done to. ``word``: what came of it; ``message_id``: the message
    that was made; ``note``: why it was refused."""

    id: bytes
    word: str
    message_id: bytes = b""
    note: str = ""


def counted(words: Iterable[str]) -> str:
    return ", ".join(f"{word} {count}" for word, count in Counter(words).most_common()) or "nothing"


class ActionLog:
    def __init__(self, link: Link, keys: Keys) -> None:
        self._link = link
        self._key = keys.actions

    def note(self, action: OperatorAction, outcome: str) -> None:
        """Write a line. Never raises: the action has been done, and its log line must not make it look undone."""
        what: dict[str, Any] = {"what": action.what, "on": action.on}
        event("operator_action", **action.by._asdict(), **what, outcome=outcome)
        try:
            self._link.call("XADD", self._key, "MAXLEN", "~", KEPT, "*", "outcome", outcome, *action.line())
        except (RedisTrouble, CommandRefused) as trouble:
            event("operator_action_not_recorded", level=WARNING, **what, why=str(trouble))

    def carry_out(self, action: OperatorAction, steps: Iterable[Any]) -> list[Any]:
        """Return the results of these steps, each with a ``word``. The log has them even when Redis fails in the
        middle."""
        results, ended = list[Any](), FAILED
        try:
            for one in steps:
                results.append(one)
            ended = ""
        finally:
            self.note(action, counted(one.word for one in results) + ended)
        return results

    def page(self, before: bytes | None, limit: int) -> tuple[list[dict[str, Any]], str | None]:
        """Return up to ``limit`` lines below id ``before``, newest first, and the id to go on from; None at the end."""
        if before is not None and not rank(before):
            return [], None  # nothing is below 0-0, and Redis would refuse to look
        end = b"+" if before is None else b"(" + before
        rows = self._link.call("XREVRANGE", self._key, end, "-", "COUNT", limit)
        following = rows[-1][0].decode() if len(rows) == limit else None
        return [_action_document(entry_id, flat) for entry_id, flat in rows], following


def _action_document(entry_id: bytes, flat: list[bytes]) -> dict[str, Any]:
    said = {name.decode(errors="replace"): value.decode(errors="replace") for name, value in pairs(flat).items()}
    shown: dict[str, Any] = {"id": entry_id.decode(), "time_ms": milliseconds(entry_id)}
    shown |= {name: said.get(name, "") for name in ("who", "via", "what", "on", "why", "outcome")}
    return shown | ({"version": int(said["version"])} if said.get("version", "").isdecimal() else {})
