"""Make messages to send: the rows of a CSV file, or a made-up incident workload: the same seed gives the same messages
on every machine, so that two runs can be compared."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import itertools
import random
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from usher.common.base.errors import MessageUndecodable, StartRefused, UsherError
from usher.common.protocol.message import LONGEST_TICKET, check_ticket
from usher.common.sending.producer import Outgoing

#: Longest value that Redis takes (proto-max-bulk-len). Python's own limit is 128 KiB.
_LONGEST_CELL = 512 * 1024 * 1024
#: What databases and pandas write for a value that is not there: no ticket of all rows without one.
_NULLS = frozenset(("\\N", "NULL", "null", "None", "nan", "NaN", "NaT", "<NA>"))
_GZIP_MAGIC = b"\x1f\x8b"
_STATES = ("Active", "Awaiting User Info", "Resolved", "Closed")
_PRIORITIES = ("1 - Critical", "2 - High", "3 - Moderate", "4 - Low")
_GROUPS = 40


class WorkloadUnusable(UsherError):
    """The input cannot be sent."""


def incidents(count: int, tickets: int, seed: int) -> Iterator[Outgoing]:
    """Yield ``count`` updates of ``tickets`` made-up incidents; the frequency of tickets is Zipf distributed with
    exponent 1.

    The n-th most frequent ticket comes with probability 1 / (n * H), H = 1 + 1/2 + ... + 1/tickets: few tickets are
    hot, most are rare. ``number`` counts the updates of a ticket from 1, so that a reader sees the order.
    """
    rng = random.Random(seed)
    weights = list(itertools.accumulate(1.0 / rank for rank in range(1, tickets + 1)))
    ranks, updates = range(1, tickets + 1), Counter[int]()
    for _ in range(count):
        rank = rng.choices(ranks, cum_weights=weights)[0]
        updates[rank] += 1
        fields = {
            "number": str(updates[rank]),
            "state": "New" if updates[rank] == 1 else rng.choice(_STATES),
            "priority": _PRIORITIES[rank % len(_PRIORITIES)],
            "group": f"Group {rank % _GROUPS + 1}",
        }
        yield Outgoing(f"INC{rank:07d}", fields)


def numbered(messages: Iterable[Outgoing], name: str) -> Iterator[Outgoing]:
    for number, message in enumerate(messages, 1):
        yield Outgoing(message.ticket_id, {**message.fields, "uid": f"{name}-{number}"})


class CsvSource(contextlib.AbstractContextManager["CsvSource"]):
    """A CSV file whose rows are messages: column ``key`` names the ticket, every column becomes a field.

    ``path`` may be ``-`` for standard input; gzip is recognised by its first bytes. Text is UTF-8; other bytes travel
    through unchanged except in the key column, where they are an error. ``with CsvSource(...) as rows: for message in
    rows``. Raises StartRefused when the file or its header cannot be used, WorkloadUnusable (file, line, column) at a
    bad row.
    """

    def __init__(self, path: str, key: str, ticket_field: str = "ticket_id") -> None:
        self._shown = "standard input" if path == "-" else path
        self._key = key
        self._raw = self._opened(path)
        self._lines = self._rows()
        try:
            self.columns = self._read_header(ticket_field)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        if self._raw is not getattr(sys.stdin, "buffer", None):
            self._raw.close()

    def __iter__(self) -> Iterator[Outgoing]:
        header, place = self.columns, self.columns.index(self._key)
        others = [(index, _raw(name)) for index, name in enumerate(header) if name != self._ticket_field]
        for row in self._guarded():
            if not row:
                continue  # an empty line
            if len(row) != len(header):
                raise self._wrong(f"has {len(row)} columns, the header has {len(header)}")
            ticket = row[place]
            self._check_ticket(ticket)
            yield Outgoing(ticket, {name: _raw(row[index]) for index, name in others})

    def _check_ticket(self, ticket: str) -> None:
        if ticket in _NULLS:
            raise self._wrong(f"column {self._key!r} is {ticket}, which is no key: leave the row out, or give it one")
        raw = ticket.encode("utf-8", "surrogateescape")
        try:
            check_ticket(raw)
        except MessageUndecodable as wrong:
            told = {
                "empty_ticket_id": "is empty; it names the ticket",
                "ticket_id_too_long": f"has {len(raw)} bytes; a ticket id has at most {LONGEST_TICKET}",
                "ticket_id_not_utf8": "is not UTF-8; it names the ticket",
            }
            raise self._wrong(f"column {self._key!r} {told.get(wrong.reason, wrong.reason)}") from None

    def _opened(self, path: str) -> io.BufferedReader:
        try:
            return cast(io.BufferedReader, sys.stdin.buffer) if path == "-" else Path(path).open("rb")
        except AttributeError:
            raise StartRefused("--csv: standard input is closed") from None
        except OSError as problem:
            raise StartRefused(f"--csv: {path} cannot be read: {problem.strerror}") from problem

    def _rows(self) -> Any:
        packed = self._raw.peek(2)[:2] == _GZIP_MAGIC
        plain: Any = gzip.GzipFile(fileobj=self._raw) if packed else self._raw
        csv.field_size_limit(_LONGEST_CELL)  # of the whole process: this one has no other reader
        return csv.reader(io.TextIOWrapper(plain, "utf-8-sig", errors="surrogateescape", newline=""), strict=True)

    def _read_header(self, ticket_field: str) -> list[str]:
        try:
            header = next(self._guarded(), [])
        except WorkloadUnusable as problem:
            raise StartRefused(f"--csv: {problem}") from problem
        if not header:
            raise StartRefused(f"--csv: {self._shown} is empty; its first line must name the columns")
        twice = sorted({name for name in header if header.count(name) > 1})
        if twice:
            raise StartRefused(f"--csv: {self._shown}:1: column {twice[0]!r} appears twice")
        if self._key not in header:
            raise StartRefused(f"--key: {self._shown} has no column {self._key!r}; it has: {', '.join(header)}")
        if ticket_field in header and ticket_field != self._key:
            raise StartRefused(
                f"--key: {self._shown} has a column {ticket_field!r}, the ticket field; use --key {ticket_field} or"
                " another USHER_TICKET_FIELD"
            )
        self._ticket_field = ticket_field
        return header

    def _guarded(self) -> Iterator[list[str]]:
        try:
            yield from self._lines
        except csv.Error as problem:
            raise self._wrong(f"is not CSV: {problem}") from problem
        except (EOFError, zlib.error, gzip.BadGzipFile) as problem:
            raise self._wrong(f"cannot be unpacked: {problem}") from problem
        except OSError as problem:
            raise self._wrong(f"cannot be read: {problem.strerror or problem}") from problem

    def _wrong(self, what: str) -> WorkloadUnusable:
        return WorkloadUnusable(f"{self._shown}:{self._lines.line_num}: {what}")


def _raw(text: str) -> Any:
    """Return a text; the bytes that it was where they are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogateescape")
    return text
