"""Bulk reads from Redis: bare hiredis on a connection of ``usher.common.redis.endpoints``, the next page asked for
before the last one is worked on.

redis-py's own reading costs twice the time per entry. Only reads are sent here, so after a break nothing is in doubt;
the page is simply not there, and the caller says so (``Interrupted``).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import hiredis

from usher.common.base.errors import UsherError
from usher.common.base.log import redacted
from usher.common.redis.client import describe_unreachable
from usher.common.redis.endpoints import make_connection
from usher.common.redis.private_names import socket_of

#: Entries of a page of the pending list: with fewer, round trips count; with more, memory (10 MB a page).
PAGE = 10_000
#: The intended bytes of a page of bodies; the number of entries follows from the weight of the last ones.
_BODY_PAGE_BYTES = 4 << 20
_CHUNK = 1 << 20
_LONGEST_SILENCE_S = 60.0

Row = list[Any]


class Interrupted(UsherError):
    """Redis went away in the middle of the audit."""


class NotAllowed(Interrupted):
    """The user of this connection lacks the right for that command."""


class BulkReader:
    """A connection for large replies: ``with BulkReader(url) as reader``. Not for commands that change anything."""

    def __init__(self, url: str, name: str = "usher:audit") -> None:
        self._url = url
        self._connection: Any = make_connection(url, name, _LONGEST_SILENCE_S)
        self._parser = hiredis.Reader()
        self.page_size = 500  # entries of the next page of bodies
        self.bytes_read = 0

    def __enter__(self) -> BulkReader:
        try:
            self._connection.connect()
        except Exception as failed:
            raise Interrupted(describe_unreachable(self._url, failed)) from failed
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.disconnect()

    def send(self, *commands: Sequence[Any]) -> None:
        """Send commands; their replies are taken later, in this order."""
        try:
            self._connection.send_packed_command(self._connection.pack_commands(commands), check_health=False)
        except Exception as failed:
            raise Interrupted(
                f"Redis at {redacted(self._url)} went away in the middle of the audit: {failed}"
            ) from failed

    def take(self) -> Any:
        """Return the next reply. Raises Interrupted when Redis goes away, or answers with an error."""
        reply = self._gets()
        while reply is False:
            self._parser.feed(self._chunk())
            reply = self._gets()
        if isinstance(reply, hiredis.ReplyError):
            kind = NotAllowed if str(reply).startswith("NOPERM") else Interrupted
            raise kind(f"Redis refuses a read of the audit: {reply}")
        return reply

    def _gets(self) -> Any:
        """Parse the bytes received so far, without the garbage collector: it looks through the thousands of new lists
        of a page again and again, which doubles the cost of the page."""
        was_on = gc.isenabled()
        gc.disable()
        try:
            return self._parser.gets()
        finally:
            if was_on:
                gc.enable()

    def _chunk(self) -> bytes:
        try:
            chunk: bytes = socket_of(self._connection).recv(_CHUNK)
        except OSError as failed:
            raise Interrupted(
                f"Redis at {redacted(self._url)} went away in the middle of the audit: {failed}"
            ) from failed
        if not chunk:
            raise Interrupted(f"Redis at {redacted(self._url)} closed the connection in the middle of the audit")
        self.bytes_read += len(chunk)
        return chunk

    def ask(self, *command: Any) -> Any:
        self.send(command)
        return self.take()

    # ---- pages ---------------------------------------------------------------------------------------------------

    def entries(self, stream: str, first: bytes, last: bytes) -> Iterator[list[Row]]:
        """Yield pages of [id, [name, value, ...]] in id order; their length follows the weight of the entries."""
        start = first
        while True:
            before, count = self.bytes_read, self.page_size
            rows = self.ask("XRANGE", stream, start, last, "COUNT", count)
            if rows:
                self.weigh(len(rows), self.bytes_read - before)
                yield rows
            if len(rows) < count or rows[-1][0] == last:
                return
            start = b"(" + rows[-1][0]

    def weigh(self, entries: int, octets: int) -> None:
        """Choose the size of the next page of bodies by the weight of this one, in bytes."""
        self.page_size = max(10, min(PAGE, _BODY_PAGE_BYTES * entries // max(1, octets)))

    def bodies(self, stream: str, ids: Sequence[bytes]) -> Iterator[Row | None]:
        """Yield the entries of these ids one by one; None where there is none."""
        for at in range(0, len(ids), 500):
            part = ids[at : at + 500]
            self.send(*(("XRANGE", stream, entry_id, entry_id) for entry_id in part))
            for _ in part:
                found = self.take()
                yield found[0] if found else None

    def hash_pages(self, key: str) -> Iterator[list[bytes]]:
        """Yield flat pages of names and values of a hash (HSCAN); fields that change meanwhile may come twice or not at
        all."""
        cursor = b"0"
        while True:
            cursor, flat = self.ask("HSCAN", key, cursor, "COUNT", 2000)
            if flat:
                yield flat
            if cursor == b"0":
                return

    def scan(self, pattern: str) -> Iterator[bytes]:
        """Yield keys that match a pattern (SCAN: it walks over every key of the database)."""
        cursor = b"0"
        while True:
            cursor, found = self.ask("SCAN", cursor, "MATCH", pattern, "COUNT", 5000)
            yield from found
            if cursor == b"0":
                return
