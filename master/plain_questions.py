"""Plain questions: many small GETs at a time over connections that stay, on the thread that asks. For ``master.asker``: it says what may be asked.

A thousand health questions in ten seconds are small writes and small reads; a thread for each of them costs several times as much, and takes the
interpreter away from the dispatcher. What is not answered in the usual way (by its length, or until the end of the connection) is left to others.
"""

from __future__ import annotations

import re
import select
import socket
from collections.abc import Mapping
from typing import NamedTuple

from common.clock import now_s

#: Bytes of the head of an answer.
_MOST_HEAD = 65_536
_PIECE = 16_384
#: Connections that are kept, for so many consumers.
_MOST_KEPT = 5000
_HEAD = re.compile(rb"HTTP/1\.([01]) ([2-5][0-9]{2})(?: [^\r\n]*)?\r\n")
_LENGTH = re.compile(rb"^content-length:[ \t]*([0-9]{1,9})[ \t]*\r$", re.IGNORECASE | re.MULTILINE)
_ODD = re.compile(rb"^transfer-encoding:", re.IGNORECASE | re.MULTILINE)
_CLOSES = re.compile(rb"^connection:[^\r]*close", re.IGNORECASE | re.MULTILINE)

Address = tuple[str, int]


class Bounds(NamedTuple):
    """Of a question: seconds to connect, for each piece of the answer, and in all; and bytes that are looked at. The rest is never read."""

    connect_s: float
    read_s: float
    whole_s: float
    most_bytes: int


class Answer(NamedTuple):
    """``status`` 0: none came. ``unfit``: why the URL may not be asked, or ""."""

    status: int = 0
    body: bytes = b""
    unfit: str = ""


class Question(NamedTuple):
    """``at``: an address and a port. ``words``: the whole request."""

    at: Address
    words: bytes


class _Odd(Exception):
    """The answer is whole in a way that is not looked for here."""


class _Call:
    """A question that is under way. ``sock`` is its own."""

    def __init__(self, name: str, question: Question, bounds: Bounds, kept: socket.socket | None) -> None:
        self.name = name
        self.question = question
        self._bounds = bounds
        self._ends_s = now_s() + bounds.whole_s
        self.was_kept = kept is not None
        self._unsent = question.words
        self._heard = b""
        self._body_at = 0  # in what was heard; 0: its head is not whole
        self._length: int | None = None
        self._status = 0
        self.keeps = False
        if kept is None:
            self.sock = socket.socket(socket.AF_INET6 if ":" in question.at[0] else socket.AF_INET, socket.SOCK_STREAM)
            self.sock.setblocking(False)
            self.until_s = min(self._ends_s, now_s() + bounds.connect_s)
            self.sock.connect_ex(question.at)  # what is wrong shows when it is written to
        else:
            self.sock = kept
            self.until_s = min(self._ends_s, now_s() + bounds.read_s)

    @property
    def waits_for(self) -> int:
        return select.POLLOUT if self._unsent else select.POLLIN

    @property
    def heard_nothing(self) -> bool:
        return not self._heard

    def go_on(self) -> Answer | None:
        """Write or read what can be written or read now. The answer when it is there. Raises OSError, _Odd."""
        if self._unsent:
            sent = self.sock.send(self._unsent)
            self._unsent = self._unsent[sent:]
            self._one_more_piece()
            return None
        piece = self.sock.recv(_PIECE)
        self._heard += piece
        self._one_more_piece()
        if not self._body_at:
            self._read_head()
        if not piece and (not self._body_at or self._length is not None):
            raise ConnectionResetError("it ended early")
        return self._whole(ended=not piece) if self._body_at else None

    def _one_more_piece(self) -> None:
        self.until_s = min(self._ends_s, now_s() + self._bounds.read_s)

    def _read_head(self) -> None:
        end = self._heard.find(b"\r\n\r\n")
        if (len(self._heard) if end < 0 else end) > _MOST_HEAD:
            raise ConnectionAbortedError("its head is too long")
        if end < 0:
            if b"\n\n" in self._heard:
                raise _Odd
            return
        head = self._heard[: end + 2]
        status = _HEAD.match(head)
        lengths = _LENGTH.findall(head)
        if status is None or _ODD.search(head) or len(lengths) > 1 or head.count(b"\n") != head.count(b"\r\n"):
            raise _Odd
        self._body_at, self._status = end + 4, int(status[2])
        self._length = 0 if self._status in (204, 304) else int(lengths[0]) if lengths else None
        self.keeps = status[1] == b"1" and self._length is not None and not _CLOSES.search(head)

    def _whole(self, ended: bool) -> Answer | None:
        body = self._heard[self._body_at :]
        most = self._bounds.most_bytes
        if not ended and len(body) < (most if self._length is None else min(most, self._length)):
            return None
        self.keeps = self.keeps and len(body) == self._length
        return Answer(self._status, body[:most])


class PlainQuestions:
    """Of one thread at a time."""

    def __init__(self) -> None:
        self._kept: dict[Address, tuple[socket.socket, float]] = {}  # and when it was asked last

    def ask(self, questions: Mapping[str, Question], bounds: Bounds, asked_s: float) -> dict[str, Answer | None]:
        """What each answers; None: somebody else must ask it. ``asked_s``: the time, as ``forget`` has it."""
        poll = select.poll()
        answers: dict[str, Answer | None] = {}
        calls: dict[int, _Call] = {}

        def begin(name: str, question: Question, may_be_kept: bool) -> None:
            try:
                call = _Call(name, question, bounds, self._take(question.at) if may_be_kept else None)
            except OSError:
                answers[name] = Answer()
                return
            calls[call.sock.fileno()] = call
            poll.register(call.sock, call.waits_for)

        def end(call: _Call, answer: Answer | None) -> None:
            del calls[call.sock.fileno()]
            poll.unregister(call.sock)
            answers[call.name] = answer
            if answer is not None and call.keeps:
                self._keep(call.question.at, call.sock, asked_s)
            else:
                call.sock.close()

        for name, question in questions.items():
            begin(name, question, may_be_kept=True)
        while calls:
            until_s = min(call.until_s for call in calls.values())
            for number, _ in poll.poll(max(0.0, until_s - now_s()) * 1000 + 1):
                call = calls[number]
                try:
                    answer = call.go_on()
                except _Odd:
                    end(call, None)
                except BlockingIOError:
                    pass
                except OSError:
                    end(call, Answer())
                    if call.was_kept and call.heard_nothing:  # it may be closed at the moment at which it is used
                        begin(call.name, call.question, may_be_kept=False)
                else:
                    if answer is not None:
                        end(call, answer)
                    else:
                        poll.modify(call.sock, call.waits_for)
            now = now_s()
            for call in [call for call in calls.values() if call.until_s <= now]:
                call.keeps = False
                end(call, Answer())
        return answers

    def _take(self, at: Address) -> socket.socket | None:
        """The connection that is kept, if it is still open and silent."""
        sock, _ = self._kept.pop(at, (None, 0.0))
        if sock is not None:
            try:
                sock.recv(1)
            except BlockingIOError:
                return sock
            except OSError:
                pass
            sock.close()
        return None

    def _keep(self, at: Address, sock: socket.socket, asked_s: float) -> None:
        if at in self._kept or len(self._kept) >= _MOST_KEPT:
            sock.close()
        else:
            self._kept[at] = sock, asked_s

    def forget(self, before_s: float) -> None:
        """Close the connections to those that were not asked since then."""
        for at in [at for at, (_, asked_s) in self._kept.items() if asked_s <= before_s]:
            self._kept.pop(at)[0].close()

    def close(self) -> None:
        for sock, _ in self._kept.values():
            sock.close()
        self._kept.clear()
