"""Explain what of a ticket is in the outbox of a database: rows that wait for the stream, and refused ones. Pure."""

from __future__ import annotations

from typing import Any

from usher.common.base.text import pluralize
from usher.common.outbox.rows import TicketRows
from usher.common.protocol.ticket_states import TicketState
from usher.master.policy.explain.facts import Reason

#: States of a ticket that has nothing anywhere else: the outbox has the word.
_NOTHING = (TicketState.IDLE, TicketState.NOT_FOUND)


def with_outbox(document: dict[str, Any], rows: TicketRows, trouble: str = "") -> dict[str, Any]:
    """Return an explanation (``TicketExplanation.document``) with what the outbox has of the ticket. ``trouble``: why
    that is not known."""
    reasons = _reasons(rows) if not trouble else [Reason("outbox_not_asked", f"its outbox is not known: {trouble}")]
    if not reasons:
        return document
    shown = [{"code": reason.code, "text": reason.text} for reason in reasons]
    here = [*shown, *document["reasons"]] if document["state"] in _NOTHING else [*document["reasons"], *shown]
    told = {"reasons": here, "sentences": [reason["text"] for reason in here], "summary": here[0]["text"]}
    if document["state"] in _NOTHING and rows.staged:
        parks = any(row.parks for row in rows.refused)
        told |= {"state": TicketState.PARKED_IN_OUTBOX if parks else TicketState.IN_OUTBOX}
        told |= {"waits_for": "its refused row" if parks else "the streamer"}
    return document | told


def _reasons(rows: TicketRows) -> list[Reason]:
    holding = [row for row in rows.refused if row.parks]
    found = []
    if rows.staged and not holding:
        text = f"committed and not sent yet: {pluralize(rows.staged, 'row')} of it in the outbox"
        found.append(Reason("in_outbox", f"{text}, the first ({rows.first_id}) since {rows.since}"))
    if holding:
        first = holding[0]
        text = f"row {first.id} of the outbox was refused at {first.at} ({first.reason}) and parks the ticket"
        behind = f", with {pluralize(rows.staged, 'later row')} behind it" if rows.staged else ""
        end = "until it is put back or deleted in refused_log_records"
        found.append(Reason("parked_in_outbox", f"{text}{behind}, {end}"))
    for row in rows.refused:
        if not row.parks:
            text = f"row {row.id} of the outbox was refused at {row.at} ({row.reason}): no message came of it"
            found.append(Reason("refused_in_outbox", f"{text}, and the ticket went on; refused_log_records has it"))
    return found
