"""Dead letter policies of live rules (``master/policy/rules.py``, action ``dead_letter_policy``), as consumers read
them from the ``rules`` hash. Pure."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping
from typing import Any

ACTION = "dead_letter_policy"
#: Policies, and the words for them that Redis keeps (lua/owner/dead_letter.lua).
STORED = {"skip": "skip", "halt": "park", "park": "park", "tail": "tail"}


def letter_policy(rules: Mapping[bytes, bytes], ticket: str) -> str | None:
    """Return the stored word of the policy that a rule sets for a ticket: its own rule's, else that of the newest
    pattern that fits, else that of the newest rule for all tickets. None: no rule says. A rule that cannot be read says
    nothing here: masters pause everything for it.

    >>> rule = b'7 8 {"target": "pattern", "value": "a*", "action": "dead_letter_policy", "to": "halt"}'
    >>> letter_policy({b"1": rule}, "ab"), letter_policy({b"1": rule}, "b"), letter_policy({b"1": b"?"}, "ab")
    ('park', None, None)
    """
    found: list[tuple[int, int, str]] = []
    for value in rules.values():
        try:
            _, set_ms, text = value.split(b" ", 2)
            rule: dict[str, Any] = json.loads(text)
            if rule["action"] == ACTION and (rank := _rank(rule["target"], rule["value"], ticket)):
                found.append((rank, int(set_ms), STORED[rule["to"]]))
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
    return max(found)[2] if found else None


def _rank(target: str, value: str, ticket: str) -> int:
    """Return how closely a rule is about the ticket; 0: it is about others."""
    if target in ("stream", "everything"):
        return 1
    if target == "pattern":
        return 2 * (ticket != "" and fnmatch.fnmatchcase(ticket, value))
    return 3 * (target == "ticket" and ticket == value)
