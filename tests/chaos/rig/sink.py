"""The sink: where handlers put their effects. A database that checks fence, uid and order of commits in one
transaction.

It is a process' thread of the rig with one SQLite database behind a unix socket, and not a file that every handler
opens: a handler that is stopped in mid-transaction must not hold a lock on everybody, as it would not on a database
server.

``open``: a token of a ticket is about to be used; a lower one is refused from now on. ``commit``: the effect, once per
uid, if no higher token has been seen. Both answer with a word: ok, dup (the uid has its effect), fenced.
"""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import sqlite3
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.chaos.rig.records import now_ns

_SCHEMA = """
CREATE TABLE fences (ticket TEXT PRIMARY KEY, tok INTEGER NOT NULL);
CREATE TABLE effects (
    n INTEGER PRIMARY KEY AUTOINCREMENT, uid TEXT NOT NULL, ticket TEXT NOT NULL, tok INTEGER, who TEXT NOT NULL, t INTEGER NOT NULL
);
CREATE TABLE uids (uid TEXT PRIMARY KEY);
CREATE TABLE accounts (ticket TEXT PRIMARY KEY, total INTEGER NOT NULL);
"""


class Sink:
    """The database, and its server. ``with Sink(folder) as sink``; ``sink.address`` is the socket."""

    def __init__(self, folder: Path) -> None:
        self.address = str(folder / "sink.sock")
        self.begun: dict[str, list[str]] = defaultdict(list)  # by uid: who began it, of those that ask
        #: A process that runs handlers has begun. The answer: who owns what it runs.
        self.on_hello: Callable[[str], str] = lambda who: who
        #: What happens to the acknowledgement of a handler that asks for its loss.
        self.on_lose_ack: Callable[[str], None] = lambda who: None
        self._lock = threading.Lock()
        self._database = sqlite3.connect(folder / "sink.db", check_same_thread=False, isolation_level=None)
        self._database.execute("PRAGMA synchronous=OFF")  # the sink itself is not under test
        self._database.execute("PRAGMA journal_mode=MEMORY")
        self._database.executescript(_SCHEMA)
        self._server = _Server(self.address, self)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, name="sink", daemon=True
        )

    def __enter__(self) -> Sink:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join(5)
        self._server.end_connections()
        self._server.server_close()
        with self._lock:
            self._database.close()

    def commits(self) -> list[dict[str, Any]]:
        """All effects in commit order."""
        with self._lock:
            rows = self._database.execute("SELECT n, uid, ticket, tok, who, t FROM effects ORDER BY n").fetchall()
        return [dict(zip(("n", "uid", "ticket", "tok", "who", "t"), row, strict=True)) for row in rows]

    def count(self) -> int:
        with self._lock:
            return int(self._database.execute("SELECT COUNT(*) FROM effects").fetchone()[0])

    def accounts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._database.execute("SELECT ticket, total FROM accounts").fetchall())

    def answer(self, asked: dict[str, Any]) -> str:
        """One transaction, or a wish of the handler."""
        if asked["op"] == "hello":
            return self.on_hello(asked["who"])
        if asked["op"] == "lose_ack":
            self.on_lose_ack(asked["who"])
            return "ok"
        with self._lock:
            if asked["op"] == "begin":
                self.begun[asked["uid"]].append(asked["who"])
                return str(len(self.begun[asked["uid"]]))
            self._database.execute("BEGIN IMMEDIATE")
            try:
                answer = self._open(asked) if asked["op"] == "open" else self._commit(asked)
                self._database.execute("COMMIT")
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
        return answer

    def _open(self, asked: dict[str, Any]) -> str:
        ticket, tok = asked["ticket"], asked["tok"]
        if tok is None:
            return "ok"
        seen = self._database.execute("SELECT tok FROM fences WHERE ticket = ?", (ticket,)).fetchone()
        if seen is not None and seen[0] > tok:
            return "fenced"
        self._database.execute(
            "INSERT INTO fences VALUES (?, ?) ON CONFLICT (ticket) DO UPDATE SET tok = excluded.tok", (ticket, tok)
        )
        return "ok"

    def _commit(self, asked: dict[str, Any]) -> str:
        if self._open(asked) == "fenced":
            return "fenced"
        if self._database.execute("SELECT 1 FROM uids WHERE uid = ?", (asked["uid"],)).fetchone():
            return "dup"
        self._database.execute("INSERT INTO uids VALUES (?)", (asked["uid"],))
        row = (asked["uid"], asked["ticket"], asked["tok"], asked["who"], now_ns())
        self._database.execute("INSERT INTO effects (uid, ticket, tok, who, t) VALUES (?, ?, ?, ?, ?)", row)
        self._database.execute(
            "INSERT INTO accounts VALUES (?, ?) ON CONFLICT (ticket) DO UPDATE SET total = total + excluded.total",
            (asked["ticket"], asked["amount"]),
        )
        return "ok"


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    block_on_close = True

    def __init__(self, address: str, sink: Sink) -> None:
        self.sink = sink
        self._open: set[socket.socket] = set()
        super().__init__(address, _Exchange)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A handler's process was killed while it spoke."""

    def end_connections(self) -> None:
        for request in list(self._open):
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)


class _Exchange(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, _Server)
        for line in self.rfile:
            if not line.endswith(b"\n"):
                return  # its writer was killed
            self.wfile.write(self.server.sink.answer(json.loads(line)).encode() + b"\n")


class SinkClient:
    """A handler's connections, one per thread."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._mine = threading.local()

    def ask(self, op: str, **facts: Any) -> str:
        """Raises OSError when the sink cannot be reached."""
        connection = getattr(self._mine, "connection", None)
        if connection is None:
            plain = socket.socket(socket.AF_UNIX)
            plain.connect(self._address)
            connection = self._mine.connection = plain.makefile("rwb")
        connection.write(json.dumps({"op": op, **facts}).encode() + b"\n")
        connection.flush()
        answer = connection.readline()
        if not answer:
            raise OSError("the sink has gone")
        return str(answer.decode().strip())
