"""Mishaps: accidents of a stream, as scripts count them (lua/includes/util.lua: count_up) beside its epochs and fences.
Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

from usher.common.protocol.keys import Keys


class Mishaps(NamedTuple):
    """Numbers of entries that were cut before they were read, and that were claimed again because nobody had them
    pending any more; and when each happened last, in seconds."""

    unread_cut: int = 0
    unread_cut_s: int = 0
    restored: int = 0
    restored_s: int = 0


def mishaps_command(keys: Keys) -> tuple[str, ...]:
    """Return the command that asks for the mishaps."""
    return ("HMGET", keys.counters, *Mishaps._fields)


def parse_mishaps(reply: Any) -> Mishaps:
    """Parse the mishaps; none, when they may not be asked for."""
    return Mishaps() if isinstance(reply, Exception) else Mishaps(*(int(number or 0) for number in reply))
