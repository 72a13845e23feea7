"""Rule cache for a thread that looks at the same tickets again and again: the rules are read anew, and matched anew,
only when they have changed."""

from __future__ import annotations

from usher.common.protocol.keys import Keys
from usher.common.redis.client import Link
from usher.master.operations.live_rules import read_rules
from usher.master.policy.rules import Rule, Rulebook


class RuleWatch:
    """The rules of one ticket stream, cached. Belongs to one thread."""

    def __init__(self, link: Link, keys: Keys) -> None:
        self._link = link
        self._keys = keys
        self._book = Rulebook()
        # By ticket: a thousand patterns are not matched several times a second.
        self._known: dict[bytes, Rule | None] = {}

    @property
    def command(self) -> tuple[str, ...]:
        """The command that asks for the version, to be sent along with another one."""
        return ("HGET", self._keys.counters, "rules")

    def heard(self, version: bytes | None) -> None:
        """Note the version that ``command`` returned, and read the rules if it is new. Raises what ``Link.call``
        raises."""
        if (version or b"") != self._book.version:
            self._book = read_rules(self._link, self._keys)
            self._known.clear()

    def of(self, ticket: bytes) -> Rule | None:
        """Return the rule that holds for a ticket, or None."""
        if ticket not in self._known:
            self._known[ticket] = self._book.of(ticket)
        return self._known[ticket]

    def forget(self, ticket: bytes) -> None:
        """Forget a ticket that is no longer looked at."""
        self._known.pop(ticket, None)
