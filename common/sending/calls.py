"""Calls: messages whose senders wait for what becomes of them. One stream takes all answers of a process, and a thread
reads it with one blocking read, only while somebody waits. An answer is written in the step that acknowledges the
message, or makes it a dead letter; of several groups, or after a redrive, the first one counts.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import secrets
import threading
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import orjson

from usher.common.base.clock import now_s
from usher.common.base.errors import CallTimeout, Failed, UsherError
from usher.common.protocol.keys import LogKeys
from usher.common.protocol.stream_id import ZERO
from usher.common.redis.client import Arg, CommandRefused, Link
from usher.common.redis.replies import pairs
from usher.common.runtime.service import Service

#: Longest blocking read, and longest time between two looks whether somebody waits; entries of one read.
_BLOCK_S, _IDLE_S, _PAGE = 5.0, 60.0, 100


class Answers:
    """Answers to a call, in ``came``: parts, if its handler sends any, then ``result``. ``run``: the number of the
    execution that sent the last part; when it grows, the handler began anew: it had failed, or its process had ended.
    ``per_part``: the time-out is for the next part, not for the result."""

    def __init__(self, timeout_s: float, came: queue.SimpleQueue[Any] | asyncio.Queue[Any]) -> None:
        if not timeout_s > 0:  # nan, too
            raise ValueError(f"timeout_s must be a number of seconds above 0 (it is {timeout_s})")
        self.came: Any = came
        self.producer: object = None
        self.loop = asyncio.get_running_loop() if isinstance(came, asyncio.Queue) else None
        self.per_part = True
        self.result: Any = None
        self.run = 0
        self.id = ""
        self._timeout_s, self._until_s = timeout_s, now_s() + timeout_s
        self._at: tuple[int, ...] = ()
        self._is_over = False

    def __iter__(self) -> Answers:
        return self

    def __next__(self) -> Any:
        self._until_s = now_s() + self._timeout_s if self.per_part else self._until_s
        while not self._is_over:
            try:
                came = self.came.get(timeout=max(0.0, self._until_s - now_s()))
            except queue.Empty:
                raise self._late() from None
            for part in self._part_of(came):
                return part
        raise StopIteration

    def __aiter__(self) -> Answers:
        return self

    async def __anext__(self) -> Any:
        self._until_s = now_s() + self._timeout_s if self.per_part else self._until_s
        while not self._is_over:
            try:
                async with asyncio.timeout(max(0.0, self._until_s - now_s())):
                    came = await self.came.get()
            except TimeoutError:
                raise self._late() from None
            for part in self._part_of(came):
                return part
        raise StopAsyncIteration

    def _late(self) -> CallTimeout:
        self._is_over = True
        return CallTimeout(self.id, self._timeout_s)

    def _part_of(self, came: dict[bytes, bytes] | Exception) -> tuple[Any, ...]:
        """Return the part in what came, if it is a new one. Raises what ended the call."""
        self._is_over = isinstance(came, Exception) or b"part" not in came
        if isinstance(came, Exception):
            raise came
        if b"failed" in came:
            raise Failed(*(came.get(name, b"").decode(errors="replace") for name in (b"failed", b"error", b"id")))
        value = came[b"bytes"] if b"bytes" in came else orjson.loads(came[b"json"])
        if self._is_over:
            self.result = value
            return ()
        at = tuple(map(int, came[b"part"].split()))  # fence, attempt, number
        if at <= self._at:  # it was sent again, because the answer to it was lost
            return ()
        self.run += at[:2] != self._at[:2]
        self._at = at
        return (value,)


class Calls(Service):
    """The calls of one process that wait, and the thread that reads what comes for them."""

    name = "usher-calls"

    def __init__(self, link: Link, stream: str) -> None:
        super().__init__()
        self._link = link
        self._key = LogKeys(stream).replies(secrets.token_hex(16)).encode()
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()  # a producer may be forgotten, and stop this, at any moment
        # Who has forgotten its call waits no more.
        self._waiting: WeakValueDictionary[int, Answers] = WeakValueDictionary()
        self._read: list[bytes] = []  # of the last page: ids, to be deleted

    def begin(self, answers: Answers) -> bytes:
        """Let ``answers`` wait for what comes to the address that is returned. Called from any thread."""
        number = next(self._numbers)
        with self._lock:
            self._waiting[number] = answers
            if self.last_turn_s is None:
                self.start()
        self.wake()
        return b"%b %d" % (self._key, number)

    def interrupt(self) -> None:
        self._tell_all(UsherError("the producer was closed"))
        if self.alive:  # not in a forked child, whose connection is its parent's
            self._link.interrupt()

    def run_once(self) -> float:
        if not self._waiting:
            return _IDLE_S
        # From the beginning, since nothing is left of what was read: a stream that was made anew may have lower ids.
        done: list[tuple[Arg, ...]] = [("XDEL", self._key, *self._read)] if self._read else []
        read = ("XREAD", "COUNT", _PAGE, "BLOCK", int(1000 * _BLOCK_S), "STREAMS", self._key, ZERO)
        try:
            for reply in self._link.pipeline([*done, read], block_s=_BLOCK_S):
                if isinstance(reply, Exception):
                    raise reply
        except CommandRefused as refused:
            self._tell_all(refused)
            return _IDLE_S
        self._read = []
        for _, entries in reply or ():
            self._read = [entry_id for entry_id, _ in entries]
            came = [one for _, flat in entries if (one := pairs(flat)).get(b"call", b"").isdigit()]  # not a stranger's
            with self._lock:
                waiting = self._waiting
                told = [(waiting.get if b"part" in one else waiting.pop)(int(one[b"call"]), None) for one in came]
            self.tell(zip(told, came, strict=True))
        return 0.0

    def _tell_all(self, problem: Exception) -> None:
        with self._lock:
            everyone = list(self._waiting.values())
            self._waiting.clear()
        self.tell((answers, problem) for answers in everyone)

    @staticmethod
    def tell(told: Iterable[tuple[Answers | None, Any]]) -> None:
        some = [(answers, came) for answers, came in told if answers is not None]
        for loop, of_loop in itertools.groupby(some, lambda one: one[0].loop):
            put = _put if loop is None else partial(loop.call_soon_threadsafe, _put)
            with suppress(RuntimeError):  # the loop is closed: nobody waits there any more
                put([*of_loop])


def _put(told: list[tuple[Answers, Any]]) -> None:
    for answers, came in told:
        answers.came.put_nowait(came)
