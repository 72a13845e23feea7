"""Effects in another service, over HTTP: the handler sends uid and fence along, and the service checks them where it
stores the effect. Both sides: docs/sinks.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, unquote

from usher.consumer.sinks.outcomes import Marked, SinkMisused, SinkNotNow, StaleFence, fenced_ticket, is_rehearsal

IDEMPOTENCY_KEY = "Idempotency-Key"
FENCE = "Usher-Fence"
TICKET = "Usher-Ticket"
#: Sent in a rehearsal only.
REHEARSAL = "Usher-Rehearsal"
_SAFE = "!#$&'()*+,-./:;<=>?@[]^_`{|}~"  # all printable ASCII except the quote, the backslash and the percent sign
_FENCE, _LARGEST_FENCE = re.compile("[0-9]{1,19}"), 2**63 - 1
_AGAIN_S = 1.0


@dataclass(frozen=True)
class Received:
    """The message behind a request, as far as a service knows it; a sink's ``transaction`` takes it like a message."""

    ticket_id: str
    uid: str
    fence: int
    is_rehearsal: bool = False


def headers(message: Marked) -> dict[str, str]:
    """Return the headers for a request: ``Idempotency-Key`` (the uid), ``Usher-Fence`` and ``Usher-Ticket``; in a
    rehearsal ``Usher-Rehearsal`` too. Characters that a header cannot hold are percent-encoded."""
    made = {IDEMPOTENCY_KEY: _encoded(message.uid), FENCE: str(message.fence), TICKET: _encoded(fenced_ticket(message))}
    return made | {REHEARSAL: "1"} if is_rehearsal(message) else made


def received(given: Mapping[str, str]) -> Received:
    """Read a request's headers (of any framework whose mapping finds them under these names). Raises SinkMisused when
    they are missing or malformed: answer 400."""
    missing = [name for name in (IDEMPOTENCY_KEY, FENCE) if not given.get(name)]
    missing += [TICKET] if given.get(TICKET) is None else []  # it is empty for a message without a ticket
    if missing:
        raise SinkMisused(f"headers are missing: {', '.join(missing)}")
    fence = given[FENCE]
    if not _FENCE.fullmatch(fence) or int(fence) > _LARGEST_FENCE:
        raise SinkMisused(f"{FENCE} must be a whole number below 2^63")
    return Received(_decoded(given[TICKET]), _decoded(given[IDEMPOTENCY_KEY]), int(fence), bool(given.get(REHEARSAL)))


def refuse_by_status(message: Marked, status: int) -> None:
    """Raise the error that a handler should raise on this answer: StaleFence for 409, SinkNotNow for 408, 425, 429 and
    5xx. Do nothing otherwise: only the handler knows whether another refusal is an error, a GiveUp or fine."""
    if status == 409:
        raise StaleFence(message)
    if status in (408, 425, 429) or status >= 500:
        raise SinkNotNow(_AGAIN_S, f"the service answered {status}", status in (502, 503, 504))


def _encoded(text: str) -> str:
    return quote(text.encode("utf-8", "surrogateescape"), safe=_SAFE)


def _decoded(text: str) -> str:
    return unquote(text, "utf-8", "surrogateescape")
