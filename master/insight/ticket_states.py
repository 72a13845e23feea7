"""Add to the tickets of a page what they are doing, in the words of explain (master/policy/explain/explain.py), as far
as one look at Redis for the whole page can tell.

The owner alone knows whether a handler runs at this moment, and is not asked: such a ticket is ``handed_over``, or
``retrying`` when its first message has been tried before, and failed or asked to be called later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from usher.common.protocol.attempts import NEVER, decode
from usher.common.protocol.keys import MASTER, Keys
from usher.common.protocol.last_error import decode as decode_error
from usher.common.protocol.message import LONGEST_TICKET
from usher.common.protocol.ticket_states import TicketState
from usher.common.redis.client import Link
from usher.common.redis.scripts import ScriptRunner
from usher.master.operations.live_rules import read_rules
from usher.master.policy.explain.tried import tried
from usher.master.policy.rules import Rule, RuleAction

#: The most parked messages that are looked at for their tickets, the oldest ones.
LOOKED_AT = 200


class ParkedRows(NamedTuple):
    """Rows of tickets with parked messages. ``is_all``: False when tickets, or messages of the listed ones, may be
    missing: more is parked than was looked at, or was asked for."""

    rows: list[dict[str, Any]]
    is_all: bool


def add_ticket_states(link: Link, keys: Keys, rows: Sequence[dict[str, Any]]) -> None:
    """Set the state of rows of the index: ``retrying``, by their owner or in a while; ``recovering``, when the lease of
    the owner has ended; ``paused`` (with ``why``), when the ticket was given back and a rule holds it. Add how often
    the first message was tried, and its last error. Makes one round trip for all rows, and one for the rules if any
    ticket was given back."""
    heads = {row["message_ids"][0]: row for row in rows if row.get("message_ids")}
    if heads:
        owners = list(dict.fromkeys(row["owner"] for row in heads.values() if "owner" in row))
        noted, errors, *leases = link.all_of(
            [
                ("HMGET", keys.attempts, *heads),
                ("HMGET", keys.errors, *heads),
                *(("EXISTS", keys.lease(owner)) for owner in owners),
            ]
        )
        alive = {owner for owner, there in zip(owners, leases, strict=True) if there}
        for row, value, error in zip(heads.values(), noted, errors, strict=True):
            known = NEVER if value is None else decode(value)
            row |= tried(known, decode_error(error))
            if row["state"] == TicketState.HANDED_OVER and row["owner"] not in alive:
                row["state"] = TicketState.RECOVERING
            elif (row["state"] == TicketState.HANDED_OVER and known != NEVER) or (
                row["state"] == TicketState.PUT_OFF and known.failures
            ):
                row["state"] = TicketState.RETRYING
    if returned := [row for row in rows if row["state"] == TicketState.RETURNED]:
        book = read_rules(link, keys)
        for row in returned:
            row |= _held(book.of(row["ticket_id"].encode("utf-8", "surrogateescape")), TicketState.RETURNED)


def parked_rows(link: Link, scripts: ScriptRunner, keys: Keys, ticket_field: str, most: int) -> ParkedRows:
    """Return tickets without an owner that have parked messages, the oldest first: ``paused`` by a rule (``why``), or
    ``waiting``. They have no record in the index; of very many parked messages only the oldest are looked at."""
    is_all, flat = scripts.run(
        "pending_heads", (keys.stream,), (keys.group, MASTER, LOOKED_AT + 1, ticket_field, LONGEST_TICKET)
    )
    ids: dict[bytes, list[str]] = {}
    for entry_id, ticket in zip(flat[::2], flat[1::2], strict=True):
        ids.setdefault(ticket, []).append(entry_id.decode())
    if not ids:
        return ParkedRows([], bool(is_all))
    records = link.call("HMGET", keys.tickets, *ids)
    alone = [ticket for ticket, record in zip(ids, records, strict=True) if record is None]
    book = read_rules(link, keys)
    rows = [
        {"ticket_id": one.decode(errors="replace"), "message_ids": ids[one], **_held(book.of(one), TicketState.WAITING)}
        for one in alone[:most]
    ]
    return ParkedRows(rows, bool(is_all) and len(alone) <= most)


def _held(rule: Rule | None, where: TicketState) -> dict[str, str]:
    return (
        {"state": TicketState.PAUSED, "why": rule.told()}
        if rule is not None and rule.action is RuleAction.PAUSE
        else {"state": where}
    )
