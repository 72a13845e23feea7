"""Types of fields that bodies and queries share; each describes its own form in the OpenAPI document."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from usher.common.protocol.message import LONGEST_TICKET
from usher.common.protocol.stream_id import is_id

_DIGITS = re.compile(r"[0-9]{1,9}")


def _only_digits(value: object) -> object:
    """Refuse ``1_0``, ``+1`` and digits of other scripts, which Python reads as numbers too."""
    if isinstance(value, str) and not _DIGITS.fullmatch(value):
        raise ValueError("must be a whole number above 0")
    return value


def _ticket_id(value: str) -> str:
    if not 0 < len(value.encode("utf-8", "surrogatepass")) <= LONGEST_TICKET:
        raise ValueError(f"must be text of 1 to {LONGEST_TICKET} bytes")
    return value


def _stream_id(value: str) -> str:
    if not is_id(value):
        raise ValueError("must be a stream id like 1526919030474-55")
    return value


def _one_line(value: str) -> str:
    if not value.isprintable():
        raise ValueError("must be one line of text, without control characters")
    return value


#: Text for people: any markup is shown literally, and nothing can end a line or colour a terminal.
OneLine = Annotated[str, AfterValidator(_one_line)]
#: Any text: a ticket may have any name.
TicketId = Annotated[str, Field(min_length=1, max_length=LONGEST_TICKET), AfterValidator(_ticket_id)]
StreamId = Annotated[
    str, AfterValidator(_stream_id), WithJsonSchema({"type": "string", "pattern": "^[0-9]{1,20}-[0-9]{1,20}$"})
]
#: The length of a page in a query. A larger value means the largest page.
PageLimit = Annotated[int, Field(ge=1, le=10**9 - 1), BeforeValidator(_only_digits)]
