"""What tests of gathering share: sources and a work stream, in an empty Redis."""

from __future__ import annotations

from collections.abc import Sequence

from usher.common.protocol.keys import Keys, LogKeys
from usher.common.protocol.message import LONGEST_TICKET
from usher.common.redis.client import Link
from usher.common.redis.replies import Entry, TicketStream, redis_ms
from usher.master.policy.fair_queue import TurnOutcome, TurnResult


class Gathered:
    """Sources of the group ``g``, gathered into ``keys.stream``."""

    def __init__(self, link: Link, stream: str = "usher:{g}") -> None:
        self.link = link
        self.scripts = link
        self.keys = Keys(stream, "g")
        self.stream = TicketStream(link, self.keys)
        self.ticket_field = "ticket_id"

    def share(self, master: str = "m1", for_ms: int = 60_000, says: bytes = b"{}") -> None:
        """Note a master that runs."""
        self.link.call("HSET", self.keys.shares, master, b"%d %b" % (redis_ms(self.link) + for_ms, says))

    def send(self, source: str, *ids: str, ticket: str = "42") -> list[bytes]:
        return [
            self.link.call("XADD", source, one, "ticket_id", ticket, "body", f"{source} {one}") for one in ids or ("*",)
        ]

    def gather(
        self, *sources: str, most: int = 1000, quantum: int = 1000, link: Link | None = None, text: str = ""
    ) -> list[TurnResult]:
        """One call. ``text``: a script to run instead of gather.lua."""
        keys = self.keys
        names = [name.encode() for name in sources]
        groups = [LogKeys(name).groups for name in sources]
        script_keys = (keys.stream, keys.gathered, keys.dead, keys.counters, *names, *groups, keys.letters)
        args = (keys.group, self.ticket_field, LONGEST_TICKET, most, quantum)
        if text:
            _, _, *flat = self.link.call("EVAL", text, len(script_keys), *script_keys, *args)
        else:
            _, _, *flat = (link if link is not None else self.scripts).run("gather", script_keys, args)
        return [
            TurnResult(TurnOutcome(flat[at].decode()), flat[at + 1], flat[at + 2].decode())
            for at in range(0, len(flat), 3)
        ]

    def entries(self) -> list[Entry]:
        """The work stream."""
        return [Entry(*entry) for entry in self.link.call("XRANGE", self.keys.stream, "-", "+")]

    def moved(self, source: str) -> list[bytes]:
        """Source ids of what was gathered from one source, in the order of the work stream."""
        return self.all_moved().get(source, [])

    def all_moved(self) -> dict[str, list[bytes]]:
        """The same of every source."""
        found: dict[str, list[bytes]] = {}
        for entry in self.entries():
            if entry.fields and entry.fields[0] == b"usher_from":
                source_id, _, name = entry.fields[1].split(b" ", 2)
                found.setdefault(name.decode(), []).append(source_id)
        return found

    def position(self, source: str) -> bytes:
        """How far the group of a source is."""
        return TicketStream(self.link, Keys(source, "g")).last_delivered()

    def read(self, count: int = 1000) -> list[bytes]:
        """The leader reads from the work stream; ids."""
        found = self.link.call("XREADGROUP", "GROUP", "g", "master", "COUNT", count, "STREAMS", self.keys.stream, ">")
        return [entry_id for entry_id, _ in found[0][1]] if found else []


def outcomes(told: Sequence[TurnResult]) -> list[tuple[str, int]]:
    return [(one.outcome.value, one.moved) for one in told]
