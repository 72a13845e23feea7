"""Send messages with care: a message that has a uid may be sent again, and is added once; and wait for what becomes of
them. No producer needs this: ``XADD`` from any language is a valid message.

A uid is remembered for ``dedup_s`` seconds from its first send, with the id of its entry: some 150 bytes and the uid. A
failover that lost the last moments forgets it: an effect that must not happen twice is guarded where it takes place.

One stream takes all answers to the calls of a process, and a thread reads it with one blocking read, only while
somebody waits. An answer is written in the step that acknowledges the message, or makes it a dead letter; of several
groups, or after a redrive, the first one counts.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import math
import os
import queue
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import orjson

from usher.common.base.backoff import backoff_s
from usher.common.base.clock import CHANCE, now_s
from usher.common.base.errors import Behind, CallTimeout, Failed, NotNow, ReplyUnknown, UsherError
from usher.common.observability.tracing import context_fields, sending
from usher.common.protocol.keys import REPLY_FIELD, Keys, LogKeys, uid_key, waiting_key
from usher.common.protocol.marks import MarkFields
from usher.common.protocol.message import DUE_FIELD, UID_FIELD, Key, check_ticket, key_bytes, ticket_key, ticket_value
from usher.common.protocol.stream_id import ZERO
from usher.common.redis.client import Arg, CommandRefused, Link, checked
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
            *_, reply = checked(self._link.pipeline([*done, read], block_s=_BLOCK_S))
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


T = TypeVar("T")
Value = str | bytes | int | float
#: The uid, and names and values, as they go to Redis.
Prepared = tuple[bytes | None, list[bytes]]

#: Messages of one round trip, and bytes after which no further one joins it; more is no faster. Large ones go out few
#: at a time: a batch that is cut off is in doubt as a whole and is sent again, and Redis stands still while it takes
#: it.
BATCH, BATCH_BYTES = 500, 262_144
#: Lua's stack ends at about 8,000 values.
_MOST_FIELDS = 3500
LONGEST_UID = 512
#: Highest ``ticket_limit``; and ms for which a ticket's waiting messages are kept behind its last one.
_HIGHEST_LIMIT, _KEPT_MS = 10_000, 7 * 86_400_000
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
#: Latest due time: later ones are no time in milliseconds (lua/sending/due_delayed.lua).
LATEST_MS = 10**15
#: Times of this century in seconds: as milliseconds they are the first months of 1970, which nobody means.
SECONDS = range(10**9, 10**10)
#: Seconds until a sign that was up is looked at again.
_AGAIN_S = 0.5


class Outgoing(NamedTuple):
    """A message on its way into a stream. ``uid`` None: the field ``uid``, if there is one. ``reply_to``: of ``call``.

    ``ticket_id`` None: the ticket is in a field, as a ticket field with dots says; else it is refused.
    """

    ticket_id: Key | None
    fields: Mapping[str, Value]
    uid: Key | None = None
    reply_to: bytes = b""


class Sent(NamedTuple):
    """The result of a send. ``repeated``: the uid was known, from an earlier send or from an attempt of this call whose
    reply was lost."""

    id: str
    repeated: bool


class Producer(AbstractContextManager["Producer"]):
    """Adds messages to one ticket stream. ``redis``: a URL, or a redis-py client of one server, beside which it opens a
    connection of its own; or a Link that is its own.

    Threads may share it: one batch at a time goes out. So may forked children: each has a connection of its own.
    ``send`` waits for Redis: on an event loop use ``AsyncProducer``.

    ``dedup_s`` 0 (the default) remembers nothing: a uid is then only a field. A call that Redis does not answer is
    repeated for up to ``patience_s`` seconds: always when it certainly did not happen, and otherwise only when every
    message of it can be recognised.

    ``heed_limits``: raise Behind while masters say that too much waits (USHER_BACKLOG_LIMIT) for this stream; of a
    stream that is gathered, name the work stream. ``tenant_field``: as masters have it (USHER_TENANT_FIELD), to heed
    limits of tenants too. The sign is read along with what is sent, so it is heeded from the next send on.

    ``ticket_limit``: raise Behind, and add nothing, where more than so many messages of a ticket would wait, the one
    that runs included: those that producers with a limit have added and that ``group`` has not ended. Counted in the
    step that adds them; delayed messages are not. 0: no limit. Of a stream that is gathered nothing can be counted,
    interrupted or cleared here: a producer of the work stream does that, of ``stream/ticket``.
    """

    def __init__(
        self,
        redis: Link | str | Any,
        stream: str = "ticket_stream",
        ticket_field: str = "ticket_id",
        dedup_s: float = 0.0,
        patience_s: float = 10.0,
        heed_limits: bool | str = False,
        tenant_field: str = "",
        ticket_limit: int = 0,
        group: str = "concurrency_stream_group",
    ) -> None:
        if not stream or not ticket_field:
            raise ValueError("stream and ticket_field are names: an empty one leads to nobody")
        if dedup_s != 0 and not 0.001 <= dedup_s < LATEST_MS / 1000:
            raise ValueError(f"dedup_s must be 0, or at least 0.001 seconds, and no infinity (it is {dedup_s})")
        if not patience_s >= 0:  # nan: it would end never
            raise ValueError(f"patience_s must be a number of seconds (it is {patience_s})")
        if type(ticket_limit) is not int or not 0 <= ticket_limit <= _HIGHEST_LIMIT:
            raise ValueError(f"ticket_limit must be a whole number up to {_HIGHEST_LIMIT:,} (it is {ticket_limit!r})")
        self._ticket_limit, self._group = ticket_limit, group
        self._link = link = linked(redis)
        self._place = link.url if isinstance(redis, Link) else redis
        self._stream = stream
        self._ticket_field = ticket_field.encode()
        self._dedup_s = dedup_s
        self._patience_s = patience_s
        limits_of = heed_limits if isinstance(heed_limits, str) else stream if heed_limits else ""
        self._sign = LimitSign(link, limits_of) if limits_of else None
        self._marks = MarkFields(tenant_field)
        # By process: in a forked child another thread's lock is never released.
        self._locks: dict[int, threading.Lock] = {}
        self._calls: dict[int, Calls] = {}

    def send(
        self, ticket_id: Key | None, fields: Mapping[str, Value], uid: Key | None = None, due_ms: int | None = None
    ) -> str:
        """Add one message; return the id of its entry, also when it is a repeat. Raises what ``send_many`` raises."""
        return self.send_many([Outgoing(ticket_id, fields, uid)], due_ms)[0].id

    def interrupt(self, ticket_id: Key) -> bool:
        """Tell the run of the ticket's message to end (``message.cancelled``). Return False if no consumer has the
        ticket. Raises NotNow, and ReplyUnknown: it may have been told."""
        keys, ticket = Keys(self._stream, self._group), ticket_key(ticket_id)

        def ask() -> bool:
            owner = bytes(self._link.call("HGET", keys.tickets, ticket) or b"").partition(b" ")[0]
            if b":" not in owner:
                return False
            # Without the inbox its owner has ended; who has the ticket by now does not run what ran then.
            told = ("order", "interrupt", "ticket", ticket, "id", "")
            return bool(self._link.call("XADD", keys.inbox(owner.decode()), "NOMKSTREAM", "*", *told))

        return self._patiently(ask, False)  # asked again, it could meet the next run

    def send_followed(self, ticket_id: Key | None, fields: Mapping[str, Value], uid: Key) -> str:
        """Add one message; what its handler tells can be read from a master: GET /api/messages/{uid}/events."""
        to = LogKeys(self._stream).followed(key_bytes("uid", uid))
        return self.send_many([Outgoing(ticket_id, fields, uid, to)])[0].id

    def call(self, ticket_id: Key | None, fields: Mapping[str, Value], timeout_s: float) -> Any:
        """Add one message, wait until it is handled, and return its result: what its handler returned, or gave to
        ``message.result``. Raises Failed when it is a dead letter, CallTimeout when it was not handled in ``timeout_s``
        seconds (it is later), and what ``send_many`` raises."""
        answers = self.stream(ticket_id, fields, timeout_s)
        answers.per_part = False
        deque(answers, 0)
        return answers.result

    def stream(self, ticket_id: Key | None, fields: Mapping[str, Value], timeout_s: float) -> Answers:
        """Add one message; return an iterator over what its handler gives to ``message.progress``, as it comes. It has
        the ``result`` at the end, and meanwhile the number of the ``run``: if that grows, the handler began anew.
        Raises what ``call`` raises; ``timeout_s`` is the longest wait for the next part."""
        answers = Answers(timeout_s, queue.SimpleQueue())
        answers.producer = self  # whose end is that of its calls
        self.begin([(answers, Outgoing(ticket_id, fields))])
        return answers

    def begin(self, batch: Sequence[tuple[Answers, Outgoing]]) -> None:
        """Send messages together, and let their answers come, or what they are refused for."""
        if (calls := self._calls.get(os.getpid())) is None:
            calls = self._calls.setdefault(os.getpid(), Calls(linked(self._place), self._stream))
            weakref.finalize(self, calls.stop)
        sent: list[Sent] = []
        try:
            self.send_into(sent, [one._replace(reply_to=calls.begin(answers)) for answers, one in batch])
        except ReplyUnknown:
            pass  # what Redis has taken is answered
        except Exception as problem:
            if len(batch) > 1 and isinstance(problem, Behind):
                for one in batch:
                    self.begin([one])
            else:
                calls.tell([(answers, problem) for answers, _ in batch[len(sent) :]])
        for (answers, _), one_sent in zip(batch, sent, strict=False):
            answers.id = one_sent.id

    def close(self) -> None:
        """Close the connections. The next send opens its own again; who waits for an answer gets an error."""
        if calls := self._calls.pop(os.getpid(), None):
            calls.stop()
        with self._lock():
            self._link.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def ms_from_now(seconds: float) -> int:
        """Return the ``due_ms`` of a message that is to be sent in so many seconds, by the clock of this machine."""
        if not math.isfinite(seconds):
            raise ValueError(f"a delay is a number of seconds (this one is {seconds})")
        return time.time_ns() // 1_000_000 + int(seconds * 1000)

    def send_many(self, messages: Iterable[Outgoing], due_ms: int | None = None) -> list[Sent]:
        """Add messages in their order, in batches of up to 500, or of 256 KiB. A batch happens as a whole, or (refused
        in its middle) up to a message. With ``due_ms`` (since the epoch) they wait until then, and get their place in
        the stream, and another id, when they are due.

        Raises TypeError, ValueError and MessageUndecodable for messages that could never be handled (nothing was
        sent), Behind (of ``ticket_limit``: but ``sent`` of them), NotNow (the last batch did not happen), ReplyUnknown
        (the outcome is unknown, and not every message has a uid), CommandRefused. Calling again with the same messages
        is safe where all have uids, within ``dedup_s``.
        """
        sent: list[Sent] = []
        self.send_into(sent, list(messages), due_ms)
        return sent

    def send_into(self, sent: list[Sent], messages: Sequence[Outgoing], due_ms: int | None = None) -> None:
        """Add messages as ``send_many`` does; ``sent`` gets what was sent, also where it raises."""
        stream = self._stream if due_ms is None else LogKeys(self._stream).delayed
        is_number = isinstance(due_ms, (int, float)) and not isinstance(due_ms, bool)
        if due_ms is not None and (not is_number or not 0 <= due_ms < LATEST_MS or int(due_ms) in SECONDS):
            seconds = ", which are seconds" * (is_number and 0 <= due_ms < LATEST_MS)
            raise ValueError(
                f"due_ms is a time in milliseconds since the epoch, below {LATEST_MS} (it is {due_ms!r}{seconds}):"
                " int(when.timestamp() * 1000)"
            )
        with sending(self._stream, len(messages)):
            context = [part.encode() for field in context_fields().items() for part in field]
            prepared = [self._prepared(message, context, due_ms) for message in messages]
            if (sign := self._sign) is not None:
                self._patiently(lambda: sign.check({self._tenant(flat) for _, flat in prepared}), True)
            for batch in _batches(prepared):
                recognisable = self._dedup_s > 0 and all(uid is not None for uid, _ in batch)
                sent += self._patiently(partial(self._add, stream, batch, len(sent)), recognisable)

    def _tenant(self, flat: list[bytes]) -> bytes:
        if self._marks.tenant == "@stream":
            return self._stream.encode()
        ticket = flat[flat.index(self._ticket_field) + 1] if self._ticket_field in flat[:4:2] else b""
        return b"" if self._marks.is_empty else self._marks.of(b"", ticket, flat).tenant

    def _prepared(self, message: Outgoing, context: list[bytes], due_ms: int | None) -> Prepared:
        fields = {key_bytes("the name of a field", name): value for name, value in message.fields.items()}
        if len(fields) < len(message.fields):
            raise ValueError("two of the fields have one name: as text and as bytes, or as a number and as text")
        head = [] if due_ms is None else [DUE_FIELD, b"%d" % due_ms]
        if REPLY_FIELD in fields:
            raise ValueError(f"the field {REPLY_FIELD.decode()!r} says who waits for the result: send it with call()")
        if head and DUE_FIELD in fields:
            raise ValueError("the field 'due_ms' says when a delayed message is due: give it as due_ms")
        head += [REPLY_FIELD, message.reply_to] if message.reply_to else []
        uid = None if message.uid is None else key_bytes("uid", message.uid)
        if UID_FIELD in fields:
            given = key_bytes("the field 'uid'", fields.pop(UID_FIELD))
            uid = given if uid is None else uid
        flat: list[bytes] = []
        for name, value in fields.items():
            if name == self._ticket_field:
                raise ValueError(f"the field {name.decode(errors='replace')!r} names the ticket: give it as ticket_id")
            flat += (name, _value(name, value))
        if uid is not None:
            if not 0 < len(uid) <= LONGEST_UID:
                raise ValueError(f"a uid has 1 to {LONGEST_UID} bytes (this one has {len(uid)})")
            flat += (UID_FIELD, uid)
        if context and context[0] not in fields:
            flat += context
        count = len(head + flat) // 2 + (message.ticket_id is not None)
        if not 1 <= count <= _MOST_FIELDS:
            raise ValueError(f"a message has 1 to {_MOST_FIELDS:,} fields (this one has {count:,})")
        if message.ticket_id is None and b"." in self._ticket_field:
            check_ticket(ticket_value(flat, self._ticket_field))
            return uid, [*head, *flat]
        return uid, [*head, self._ticket_field, ticket_key(message.ticket_id), *flat]

    def _patiently(self, call: Callable[[], T], recognisable: bool) -> T:
        # Both sends of a repeat must lie within the window; half of it leaves room for clocks and delays.
        until_s = now_s() + (min(self._patience_s, self._dedup_s / 2) if self._dedup_s else self._patience_s)
        failures = 0
        while True:
            try:
                with self._lock():  # replies come in the order of the commands: one thread at a time waits for its own
                    return call()
            except (NotNow, ReplyUnknown) as trouble:
                failures += 1
                pause_s = backoff_s(failures, _FIRST_PAUSE_S, _LONGEST_PAUSE_S, CHANCE)
                if (isinstance(trouble, ReplyUnknown) and not recognisable) or now_s() + pause_s > until_s:
                    raise
                time.sleep(pause_s)

    def _lock(self) -> threading.Lock:
        return self._locks.get(os.getpid()) or self._locks.setdefault(os.getpid(), threading.Lock())

    def _add(self, stream: str, batch: Sequence[Prepared], before: int) -> list[Sent]:
        is_limited = self._ticket_limit and stream == self._stream
        if not (self._dedup_s or is_limited):
            ids = self._pipelined([("XADD", stream, "*", *flat) for _, flat in batch])
            return [Sent(entry_id, False) for entry_id in ids]
        sign = stream if self._sign is None else self._sign.key
        keys: list[str | bytes] = [stream, sign, Keys(self._stream, self._group).taken]
        args: list[Arg] = [int(self._dedup_s * 1000), self._ticket_limit if is_limited else 0, self._group, _KEPT_MS]
        tickets = [ticket_value(flat, self._ticket_field) or b"" for _, flat in batch] if is_limited else []
        for place, (uid, flat) in enumerate(batch):
            keys.append(stream if uid is None or not self._dedup_s else uid_key(self._stream, uid))
            if is_limited:
                keys.append(waiting_key(self._stream, self._group, tickets[place]))
            args += (len(flat), *flat)
        rows, told = self._link.run("send", keys, args)
        if rows and isinstance(rows[0], int):
            ticket = tickets[rows[0] - 1].decode(errors="replace")
            unread = f"; no master reads it as group {self._group} (or it is gathered: then nothing can be counted)"
            raise Behind(self._stream, "", told[0], ticket, before, "" if told[1] else unread)
        if self._sign is not None:
            self._sign.learn(told)
        return [Sent(entry_id.decode(), bool(repeated)) for entry_id, repeated in rows]

    def _pipelined(self, commands: Sequence[Sequence[Arg]]) -> list[str]:
        replies = self._link.pipeline([*commands, *([] if self._sign is None else [self._sign.command])])
        told = None if self._sign is None else replies.pop()
        for reply in replies:
            if isinstance(reply, NotNow) and not all(isinstance(other, NotNow) for other in replies):
                # Others of the batch may have been added: the batch as a whole is not undone.
                raise ReplyUnknown(f"a part of the batch was refused: {reply}") from reply
            if isinstance(reply, Exception):
                raise reply
        if self._sign is not None and not isinstance(told, Exception):
            self._sign.learn(told)
        return [bytes(reply).decode() for reply in replies]


class AsyncProducer(AbstractAsyncContextManager["AsyncProducer"]):
    """A producer for an event loop, which goes on while a thread waits for Redis. The arguments and methods are those
    of ``Producer``; the client may be one of ``redis.asyncio`` too.

    One batch at a time goes out, so many messages are faster with one ``send_many``. A send that is cancelled may
    happen all the same.
    """

    def __init__(self, redis: Link | str | Any, stream: str = "ticket_stream", **options: Any) -> None:
        self._producer = Producer(redis, stream, **options)
        self.ms_from_now = Producer.ms_from_now
        # By process: a thread of its own, for the loop's are the application's, which look names up on them.
        self._threads: dict[int, ThreadPoolExecutor] = {}
        self._outboxes: dict[asyncio.AbstractEventLoop, list[tuple[Answers, Outgoing]]] = {}

    async def send(
        self, ticket_id: Key | None, fields: Mapping[str, Value], uid: Key | None = None, due_ms: int | None = None
    ) -> str:
        return await self._in_thread(self._producer.send, ticket_id, fields, uid, due_ms)

    async def send_followed(self, ticket_id: Key | None, fields: Mapping[str, Value], uid: Key) -> str:
        return await self._in_thread(self._producer.send_followed, ticket_id, fields, uid)

    async def send_many(self, messages: Iterable[Outgoing], due_ms: int | None = None) -> list[Sent]:
        return await self._in_thread(self._producer.send_many, list(messages), due_ms)

    async def interrupt(self, ticket_id: Key) -> bool:
        return await self._in_thread(self._producer.interrupt, ticket_id)

    async def call(self, ticket_id: Key | None, fields: Mapping[str, Value], timeout_s: float) -> Any:
        answers = self.stream(ticket_id, fields, timeout_s)
        answers.per_part = False
        async for _ in answers:
            pass
        return answers.result

    def stream(self, ticket_id: Key | None, fields: Mapping[str, Value], timeout_s: float) -> Answers:
        answers, loop = Answers(timeout_s, asyncio.Queue()), asyncio.get_running_loop()
        message = Outgoing(ticket_id, {**context_fields(), **fields})  # the trace is the caller's
        self._producer._prepared(message, [], None)  # one that is refused is no other's trouble
        if loop not in self._outboxes:  # what comes in this turn of the loop goes out together
            self._outboxes[loop] = []
            loop.call_soon(lambda: self._in_thread(self._producer.begin, self._outboxes.pop(loop)))
        self._outboxes[loop].append((answers, message))
        return answers

    async def close(self) -> None:
        """Close the connection. The next send opens it again."""
        await self._in_thread(self._producer.close)
        if thread := self._threads.pop(os.getpid(), None):
            thread.shutdown(wait=False)

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _in_thread(self, call: Callable[..., T], *given: Any) -> asyncio.Future[T]:
        thread = self._threads.get(os.getpid()) or self._threads.setdefault(
            os.getpid(), ThreadPoolExecutor(1, "usher-producer")
        )
        run = contextvars.copy_context().run  # the caller's trace
        return asyncio.get_running_loop().run_in_executor(thread, run, call, *given)


class LimitSign:
    """The sign of masters that too much waits (USHER_BACKLOG_LIMIT) for ``stream``, as the last look told: read along
    with what is sent, asked for only while it is up."""

    def __init__(self, link: Link, stream: str) -> None:
        self._link = link
        self.key = LogKeys(stream).behind
        self.command = ("HGETALL", self.key)
        self._stream = stream
        self._behind: dict[bytes, int] = {}  # by tenant; b"": the stream
        self._asked_s = -math.inf

    def learn(self, reply: Any) -> None:
        """Take in a reply of ``command``. Raises what it is, when it is an error."""
        if isinstance(reply, Exception):
            raise reply
        self._behind = {}
        for name, number in pairs(reply).items():
            tenant = name.partition(b"/")[2]
            self._behind[tenant] = max(int(number), self._behind.get(tenant, 0))
        self._asked_s = now_s()

    def check(self, tenants: Iterable[bytes]) -> None:
        """Raise Behind when too much waits for one of these. Asks Redis the first time, and while the sign is up."""
        if self._asked_s == -math.inf or (self._behind and now_s() - self._asked_s > _AGAIN_S):
            try:
                self.learn(self._link.call(*self.command))
            except ReplyUnknown as lost:  # a look: nothing was sent
                raise NotNow("CONNECT", str(lost)) from lost
        for tenant in (b"", *tenants):
            if tenant in self._behind:
                raise Behind(self._stream, tenant.decode(errors="replace"), self._behind[tenant])


def linked(place: Link | str | Any) -> Link:
    """Return the link to a URL, or beside a redis-py client; a Link as it is. Raises TypeError and ValueError."""
    return place if isinstance(place, Link) else Link(place, "usher:producer")


def _batches(prepared: Iterable[Prepared]) -> Iterator[list[Prepared]]:
    batch: list[Prepared] = []
    size = 0
    for message in prepared:
        batch.append(message)
        size += sum(map(len, message[1]))
        if len(batch) == BATCH or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _value(name: bytes, value: object) -> bytes:
    """Encode the value of a field. Raises TypeError for a value without a text of its own: no reader could use Python's
    name for it; and ValueError for a number that is none."""
    field = f"the field {name.decode(errors='replace')!r}"
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{field} is {value}, which is no number: leave it out, or give a text")
        return str(float(value)).encode()
    if isinstance(value, bool) or not isinstance(value, (str, bytes, int)):
        raise TypeError(
            f"{field} is of type {type(value).__name__}: give str, bytes, int or float (str(value) of a UUID, a Decimal"
            " or a time; int(value) of a bool; a mapping or list as JSON), or leave it out"
        )
    return key_bytes(field, value)
