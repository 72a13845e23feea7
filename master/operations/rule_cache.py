"""The rules for somebody who looks at the same tickets again and again: read anew, and matched anew, only when they
have changed."""

from __future__ import annotations

from usher.common.protocol.keys import Keys
from usher.common.redis.client import Link
from usher.master.operations.live_rules import read_rules
from usher.master.policy.rules import Rule, Rulebook


class RuleWatch:
    """Belongs to one thread."""

    def __init__(self, link: Link, keys: Keys) -> None:
        self._link = link
        self._keys = keys
        self._book = Rulebook()
        self._known: dict[
            bytes, Rule | None
        ] = {}  # by ticket: a thousand patterns are not matched several times a second

    @property
    def command(self) -> tuple[str, ...]:
        """Asks for the version, which goes along with another question."""
        return ("HGET", self._keys.counters, "rules")

    def heard(self, version: bytes | None) -> None:
        """The version is this. Raises what ``Link.call`` raises."""
        if (version or b"") != self._book.version:
            self._book = read_rules(self._link, self._keys)
            self._known.clear()

    def of(self, ticket: bytes) -> Rule | None:
        """The rule that holds for a ticket."""
        if ticket not in self._known:
            self._known[ticket] = self._book.of(ticket)
        return self._known[ticket]

    def forget(self, ticket: bytes) -> None:
        """Nobody looks at it any more."""
        self._known.pop(ticket, None)
