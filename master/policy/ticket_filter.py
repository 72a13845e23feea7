"""Choose the tickets that a list shows, and their order. Pure: rows as ``usher tickets list --json`` has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from usher.common.protocol.last_error import error_name
from usher.common.protocol.ticket_states import TicketState
from usher.master.policy.letters import has_error
from usher.master.policy.states import LISTED


@dataclass(frozen=True)
class TicketFilter:
    """A filter: all that is given must hold. ``states``: none is any; ``error``: see ``has_error``, in texts of errors
    only for who may see them (``sees_texts``)."""

    states: frozenset[str] = frozenset()
    consumer: str = ""
    error: str = ""
    sees_texts: bool = field(default=True, compare=False)

    def fits(self, row: Mapping[str, Any]) -> bool:
        return self.fits_but_for_error(row) and (not self.error or self._has_error(row.get("last_error")))

    def fits_but_for_error(self, row: Mapping[str, Any]) -> bool:
        has_state = not self.states or row["state"] in self.states
        return has_state and self.consumer in ("", row.get("consumer_name", ""))

    def _has_error(self, error: Mapping[str, Any] | None) -> bool:
        if error is None:
            return False
        name, text = error_name(error["error_type"], error["error"]), error["error"] if self.sees_texts else ""
        return has_error(self.error, name, error["at"], text)

    @property
    def wants_waiting(self) -> bool:
        return not self.consumer and (not self.states or bool(self.states & {TicketState.WAITING, TicketState.PAUSED}))


def parse_states(text: str) -> frozenset[str]:
    """Parse a list of states. Raises ValueError.

    >>> sorted(parse_states("halted, retrying")), parse_states("")
    (['halted', 'retrying'], frozenset())
    """
    asked = frozenset(filter(None, (part.strip() for part in text.split(","))))
    if wrong := sorted(asked - set(LISTED)):
        raise ValueError(f"{wrong[0]!r} is no state that a list can tell: {', '.join(LISTED)}")
    return asked


def _age(row: Mapping[str, Any]) -> tuple[int, int]:
    ids = row.get("message_ids")
    high, _, low = ids[0].partition("-") if ids else (str(2**64), "", "0")
    return int(high), int(low)


#: Orders of a list: the keys sort the first row to the front.
ORDERS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "age": _age,
    "attempts": lambda row: (-row.get("attempts", 0), _age(row)),
    "messages": lambda row: (-len(row.get("message_ids") or ()), _age(row)),
    "ticket": lambda row: row["ticket_id"],
}
