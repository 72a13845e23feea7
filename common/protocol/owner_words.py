"""Words that stand in a ticket's record where its owner would (lua/includes/records.lua): nobody has the ticket."""

from __future__ import annotations

import re

#: A drain or a recall gave the ticket back, or a dead letter of it was redriven: it is under ``master``.
RETURNED = b"returned"
#: The ticket waits for an operator.
HALTED = b"halted"

_WAITS = re.compile(rb"waits@([0-9]{1,16})")


def due_ms_of(owner: bytes) -> int | None:
    """Return when a ticket goes on that was given back until then, by Redis' clock; None: the owner is no such word.

    >>> due_ms_of(b"waits@1790000000000"), due_ms_of(b"returned"), due_ms_of(b"waits:7")
    (1790000000000, None, None)
    """
    found = _WAITS.fullmatch(owner) if owner.startswith(b"waits@") else None
    return None if found is None else int(found[1])


def is_waiting(owner: bytes) -> bool:
    return due_ms_of(owner) is not None


def is_given_back(owner: bytes) -> bool:
    """Return whether all that the record names is under ``master``, and the next owner must begin with its lowest id.

    >>> is_given_back(b"waits@1790000000000"), is_given_back(b"returned"), is_given_back(b"halted")
    (True, True, False)
    """
    return owner == RETURNED or is_waiting(owner)
