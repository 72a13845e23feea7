"""Kit: a master and a consumer in one process, without threads, on a real Redis: from XADD to the handler, and to what
Redis has afterwards.

The objects are those of the two programs, moved step by step, so nothing depends on how fast the machine is. Waits for
a retry pass on the kit's own clock, at once, and have no random part: a backoff is as long as it can be.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

from usher.common.base.clock import now_s
from usher.common.observability.metrics import Metrics
from usher.common.outbox.rows import as_json
from usher.common.protocol.attempts import Attempts
from usher.common.protocol.keys import Keys
from usher.common.protocol.message import Key, key_bytes, ticket_key
from usher.common.protocol.registration import NO_LOCK, Registration
from usher.common.protocol.run_log import DONE, MERGED
from usher.common.redis.client import Link
from usher.common.runtime.settings import load
from usher.common.sending.producer import Producer
from usher.consumer.execution.acker import Acker
from usher.consumer.execution.executor import MOST_ABSORBED
from usher.consumer.execution.lanes import Lane
from usher.consumer.execution.pools import BatchCall
from usher.consumer.execution.reporter import Item, Reporter
from usher.consumer.handlers.loader import handler_of, load_handler
from usher.consumer.handlers.message import Message, OwnLease, message_type
from usher.consumer.incarnation import Incarnation
from usher.consumer.isolation.child import HandlerCall
from usher.consumer.isolation.process import Template
from usher.consumer.lifecycle.journal import Journal
from usher.consumer.lifecycle.lease import Taken
from usher.consumer.lifecycle.master_client import MasterClient
from usher.consumer.policy.outcome import Finished
from usher.consumer.settings import ConsumerSettings
from usher.master.dispatch.dispatcher import Dispatcher
from usher.master.dispatch.events import ChangeWatch, Report
from usher.master.leader.elector import Elector, Lead
from usher.master.leader.limits import TICKET_WINDOW, limits_of
from usher.master.membership.registry import Membership, read_registry
from usher.master.operations.shelves import DeadLetters
from usher.master.policy.letters import DeadLetter, LetterFilter
from usher.master.settings import LONGEST_LEASE_S, MasterSettings


def message(
    ticket_id: Key,
    fields: Mapping[str, Any] | None = None,
    *,
    attempt: int = 1,
    fence: int = 1,
    id: str = "1700000000000-0",
    mine: bool = True,
    rehearsal: bool = False,
    stream: str = "ticket_stream",
    **more: Any,
) -> Message:
    """Return a message as a handler gets it, for a test that calls the handler itself.

    ``fields`` and ``more`` are its fields: text, bytes and numbers as ``Producer`` takes them, anything else as JSON.
    ``mine`` False: ``still_mine()`` says that the lease has ended. ``rehearsal``: as in ``usher rehearse``.
    """
    flat = [b"ticket_id", ticket_key(ticket_id)]
    for name, value in {**(fields or {}), **more}.items():
        flat += (key_bytes("the name of a field", name), encoded(value))
    if b"ticket_id" in flat[2::2]:
        raise ValueError("the field 'ticket_id' names the ticket: give it as ticket_id")
    lease = OwnLease(math.inf if mine else 0.0, now_s())
    made = message_type(stream, is_gathered=False, is_rehearsal=rehearsal)(
        flat[1], id.encode(), fence, flat, lease, Attempts(attempt, attempt - 1, 0, 0)
    )
    made.deadline = None
    return made


def encoded(value: Any) -> bytes:
    """Return a field's value as bytes.

    >>> encoded("a"), encoded(1.5), encoded({"n": 1}), encoded(True)
    (b'a', b'1.5', b'{"n":1}', b'true')
    """
    if isinstance(value, (str, bytes, int)) and not isinstance(value, bool):
        return key_bytes("a field", value)
    is_number = isinstance(value, float) and math.isfinite(value)
    return str(float(value)).encode() if is_number else as_json("a field", value)


#: Most turns of the leader in which nothing is left to do, and most calls of one ``run``: beyond them something goes
#: round in a circle.
_MOST_TURNS, _MOST_CALLS = 1_000, 10_000

#: Added to the kit's clock, so that no wait is over by the machine's own.
_FAR_S = 1e7
_MOST_LETTERS = 1_000


@dataclasses.dataclass
class Call:
    """A message given to the handler. ``outcome``: done, merged (another's run absorbed it), failed, retry_later or
    gave_up. ``at_s``: the kit's clock; ``retry_in_s``: how long the message waits then, None when it does not come
    again."""

    ticket_id: str
    id: str
    attempt: int
    outcome: str
    at_s: float
    error: str = ""
    retry_in_s: float | None = None


class _KitAcker(Acker):
    """An acker that notes each outcome."""

    note: Callable[[bytes, bytes, int, str], None]

    def finished(self, item: Message, here: bool = False) -> None:
        self.note(item.ticket, item.stream_id, item.attempt, DONE)
        for one in self._absorbed.get(item.stream_id, ()):
            self.note(one.ticket, one.stream_id, one.attempt, MERGED)
        super().finished(item, here)

    def failed(self, item: Finished) -> None:
        self.note(item.ticket, item.stream_id, item.attempt, item.outcome)
        super().failed(item)


class _KitReporter(Reporter):
    """A reporter without HTTP: the leader, in the same process, hears at once what Redis has accepted."""

    post: Callable[[Report], object]

    def add(self, items: Iterable[Item]) -> None:
        self.post(Report(self._incarnation, [(ticket, list(ids)) for ticket, _, ids in items], wants_answers=False))


class _KitIncarnation(Incarnation):
    acker_type, reporter_type = _KitAcker, _KitReporter


class _WholeBackoff(random.Random):
    """Randomness of which nothing is left: a backoff is its longest."""

    def random(self) -> float:
        return 1.0


class Kit(AbstractContextManager["Kit"]):
    """A master and a consumer with ``handler`` (a function, or ``module:function``), on the empty Redis at ``url``.

    ``settings`` are those of consumers and masters, as in the environment: ``Kit(url, handle, max_attempts=3)``.
    """

    def __init__(self, url: str, handler: Callable[..., Any] | str, **settings: Any) -> None:
        if unknown := settings.keys() - ConsumerSettings.model_fields.keys() - MasterSettings.model_fields.keys():
            raise TypeError(f"no settings of consumers or masters: {', '.join(sorted(unknown))}")
        given = {f"USHER_{name.upper()}": str(value) for name, value in settings.items()}
        environ = {"USHER_CONSUMER_NAME": "kit", "USHER_HANDLER": "kit:handler", "USHER_REDIS_URL": url} | given
        mine, masters = load(ConsumerSettings, environ), load(MasterSettings, environ)
        self.handler = load_handler(handler) if isinstance(handler, str) else handler_of(handler)
        self._keys = keys = Keys(mine.work_stream, mine.group)
        self._links: list[Link] = []
        self.now_s = 0.0  # seconds that have passed on the kit's clock
        self.calls: list[Call] = []
        self._error = ""
        self._broken: list[str] = []
        self._handle = HandlerCall(self.handler)
        self.producer = Producer(self._link(url, "send"), mine.one_stream, mine.ticket_field)
        self._letters = DeadLetters(self._link(url, "letters"), keys)
        self._lead(url, masters)
        self._join(url, mine)

    def _link(self, url: str, role: str) -> Link:
        self._links.append(Link(url, f"kit:{role}"))
        return self._links[-1]

    def _lead(self, url: str, settings: MasterSettings) -> None:
        lead = Lead()
        self._dispatcher = Dispatcher(self._link(url, "dispatch"), self._keys, lead, limits_of(settings))
        self._elector = Elector(
            self._link(url, "elect"), self._keys, lead, "http://kit", 1000 * LONGEST_LEASE_S, lambda: True
        )
        self._roster = self._link(url, "roster")
        self._changes = ChangeWatch(self._link(url, "changes"), self._keys.changed, self._dispatcher.post)
        self._elector.run_once()
        self._dispatcher.run_once()

    def _join(self, url: str, settings: ConsumerSettings) -> None:
        slots, lease_ms = settings.concurrency, 1000 * LONGEST_LEASE_S
        asked = Registration("kit", uuid.uuid4().hex, "http://kit/api/health", slots, settings.capacity, NO_LOCK)
        registered = Membership(self._roster, self._keys, lease_ms).register(asked).registration
        self._consumer = consumer = _KitIncarnation(
            settings,
            url,
            Taken(registered, LONGEST_LEASE_S, now_s(), TICKET_WINDOW),
            self.handler,
            Journal(None, "", registered.incarnation, 1, MOST_ABSORBED),
            lambda why, **_: self._broken.append(why),
            Metrics(),
            Template(),
            MasterClient(["http://127.0.0.1:1"], ""),
        )
        self._executor, self._lanes, self._acker = consumer.executor, consumer.lanes, consumer.acker
        self._acker.hurry()
        cast(_KitAcker, self._acker).note = self._noted
        cast(_KitReporter, consumer.reporter).post = self._dispatcher.post
        self._steps, self._lease_ms = consumer.steps("kit"), lease_ms
        self._links.append(self._steps.link)
        self._executor.all_wait_here = True
        self._executor.clock, self._executor.rng = lambda: _FAR_S + self.now_s, _WholeBackoff()

    # ---- what a test says --------------------------------------------------------------------------------------------

    def send(self, ticket_id: Key | None, fields: Mapping[str, Any] | None = None, **more: Any) -> str:
        """Add a message to the stream, as any producer does; return its id. Values that are not text, bytes or numbers
        become JSON."""
        return self.producer.send(
            ticket_id, {name: encoded(value) for name, value in {**(fields or {}), **more}.items()}
        )

    def run(self, for_s: float = math.inf) -> list[Call]:
        """Hand over and handle until nothing is left to do, retries included, whose waits pass at once; return the
        calls. ``for_s``: stop when so many seconds have passed on the kit's clock, for a handler that never ends to ask
        for a retry; 0 handles only what may start now."""
        first, until_s = len(self.calls), self.now_s + for_s
        while True:
            self._renew()
            self._settle()
            if self._work():
                continue
            due_s = self._due_s()
            if due_s is None or due_s > until_s:
                break
            self.now_s = max(self.now_s, due_s)
            if len(self.calls) - first > _MOST_CALLS:
                raise RuntimeError(f"the handler was called {_MOST_CALLS:,} times: run(for_s=...) ends it by the clock")
        self.now_s = max(self.now_s, until_s) if until_s < math.inf else self.now_s
        return self.calls[first:]

    # ---- what came of it ---------------------------------------------------------------------------------------------

    @property
    def acknowledged(self) -> list[str]:
        """Return the ids of messages that were handled and that Redis does not have as pending any more, in the order
        in which they were handled."""
        pending = self.pending
        return [call.id for call in self.calls if call.outcome in (DONE, MERGED) and call.id not in pending]

    @property
    def pending(self) -> set[str]:
        """Return the ids that the group has and that nobody has acknowledged: they wait for a retry, or behind one."""
        found = self._roster.call("XPENDING", self._keys.stream, self._keys.group, "-", "+", _MOST_CALLS)
        return {row[0].decode() for row in found}

    @property
    def retried(self) -> list[Call]:
        return [call for call in self.calls if call.retry_in_s is not None]

    @property
    def given_up(self) -> list[DeadLetter]:
        """Return the dead letters, oldest first: ``reason``, ``error``, ``ticket``, ``attempts`` and so on."""
        return self._letters.page(LetterFilter(), None, _MOST_LETTERS).letters

    def close(self) -> None:
        for service in self._consumer.services:
            service.on_end()
        for link in self._links:
            link.close()
        self._handle.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _renew(self) -> None:
        self._elector.run_once()
        self._consumer.lease.renewed(now_s())
        self._steps.renew(self._lease_ms)

    def _settle(self) -> None:
        self._dispatcher.post(read_registry(self._roster, self._keys))
        for _ in range(_MOST_TURNS):
            self._changes.look(None)
            if self._dispatcher.run_once() > 0:
                return
        raise RuntimeError("the leader has always more to do")

    def _work(self) -> bool:
        before = len(self.calls)
        self._consumer.reader.read(None)
        with self._lanes.lock:
            self._lanes.wake_due(_FAR_S + self.now_s)
        while (lane := self._lanes.take_now()) is not None:
            if self.handler.batch is not None:
                self._call_batch(lane)
            else:
                self._call(lane)
        was_flushed = self._acker.is_flushed
        while not self._acker.is_flushed:
            self._acker.run_once()
        if self._broken:
            raise RuntimeError(f"Usher itself failed: {self._broken[0]}")
        return len(self.calls) > before or not was_flushed

    def _call(self, lane: Lane) -> None:
        executor = self._executor
        message = executor.next_message(lane)
        if message is None:
            executor.lanes.release(lane)
        elif executor.admit(lane, message, 1):
            _, raised = self._called(message)
            if raised is not None:
                executor.raised(lane, message, raised)
                self._tell_wait(message)
            elif executor.succeeded(lane, message, 1, 2):
                executor.lanes.release(lane, 1, 0.0)

    def _call_batch(self, first: Lane) -> None:
        lanes, batch = [first], self.handler.batch
        assert batch is not None
        while len(lanes) < batch.most and (more := self._lanes.take_now()) is not None:
            lanes.append(more)
        call = BatchCall(self._executor, lanes, batch)
        if call.messages:
            call.end(*self._called(call.messages))
            for message in call.messages:
                self._tell_wait(message)

    def _called(self, given_to: Any) -> tuple[Any, BaseException | None]:
        returned, raised = self._handle.run(given_to)
        if raised is not None and not isinstance(raised, (Exception, SystemExit, asyncio.CancelledError)):
            raise raised  # of the test itself
        self._error = "" if raised is None else f"{type(raised).__name__}: {raised}"
        return returned, raised

    def _noted(self, ticket: bytes, stream_id: bytes, attempt: int, outcome: str) -> None:
        error = "" if outcome == DONE else self._error
        self.calls.append(Call(ticket.decode(), stream_id.decode(), attempt, outcome, self.now_s, error))

    def _tell_wait(self, message: Message) -> None:
        with self._lanes.lock:
            queued, due_s, _ = self._lanes.look(message.ticket)
        if due_s is not None and message in queued:
            call = next(call for call in reversed(self.calls) if call.id == message.id)
            call.retry_in_s = round(due_s - _FAR_S - self.now_s, 6)

    def _due_s(self) -> float | None:
        due_s = self._lanes.next_due_s()
        return None if due_s is None else round(due_s - _FAR_S, 6)
