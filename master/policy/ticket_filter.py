"""Choose the tickets that a list shows. Pure: rows as ``usher tickets list --json`` has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from usher.common.protocol.last_error import error_name
from usher.common.protocol.registration import name_of
from usher.common.protocol.ticket_states import TicketState
from usher.master.policy.letters import has_error
from usher.master.policy.states import LISTED, OF_KIND, kind_of


@dataclass(frozen=True)
class TicketFilter:
    """A filter: all that is given must hold. ``states``: none is any; ``error``: see ``has_error``, in texts of errors
    only for who may see them (``sees_texts``)."""

    states: frozenset[str] = frozenset()
    consumer: str = ""
    error: str = ""
    sees_texts: bool = field(default=True, compare=False)

    def fits(self, row: Mapping[str, Any]) -> bool:
        """Return whether a ticket without an owner fits, and so without an error."""
        return self.has_state(row["state"]) and not self.error

    def has_state(self, state: str) -> bool:
        return not self.states or state in self.states

    def has_error(self, error: Mapping[str, Any] | None) -> bool:
        if error is None:
            return False
        name, text = error_name(error["error_type"], error["error"]), error["error"] if self.sees_texts else ""
        return has_error(self.error, name, error["at"], text)

    def may_fit(self, owner: bytes) -> bool:
        """Return whether a ticket may fit whose record names this owner."""
        kind, states = kind_of(owner), self.states
        is_of = not self.consumer or (kind == "owned" and name_of(owner.decode()) == self.consumer)
        return is_of and (not states or "unreadable" in states or not states.isdisjoint(OF_KIND.get(kind, ())))

    @property
    def wants_waiting(self) -> bool:
        without_owner = {TicketState.WAITING, TicketState.PAUSED}
        return not (self.consumer or self.error) and not (self.states and self.states.isdisjoint(without_owner))


def parse_states(text: str) -> frozenset[str]:
    """Parse a list of states. Raises ValueError.

    >>> sorted(parse_states("halted, retrying")), parse_states("")
    (['halted', 'retrying'], frozenset())
    """
    asked = frozenset(filter(None, (part.strip() for part in text.split(","))))
    if wrong := sorted(asked - set(LISTED)):
        raise ValueError(f"{wrong[0]!r} is no state that a list can tell: {', '.join(LISTED)}")
    return asked
