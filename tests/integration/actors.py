"""Masters and consumers without threads: the real objects of both programs, moved step by step by a test, on real
connections.

What goes wrong between them is chosen per call: a ``TroubledLink`` loses the reply of the next call of a step, or keeps
the call back to send it later, as a socket does whose sender has given up.
"""

from __future__ import annotations

import contextlib
import enum
import math
import re
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from tests.integration.ears import Ear
from tests.integration.factories import FIELD, LEASE_MS, World
from usher.common.base.clock import now_s, run_us
from usher.common.base.errors import RedisTrouble, ReplyUnknown
from usher.common.protocol.attempts import CUT_OFF
from usher.common.protocol.keys import Keys
from usher.common.protocol.registration import NO_LOCK, Registration
from usher.common.protocol.stream_id import rank
from usher.common.redis.client import Arg, CommandRefused, Link, ScriptMissing
from usher.common.redis.endpoints import server_of
from usher.consumer.execution.acker import SKIP, Acker
from usher.consumer.execution.executor import ErrorText, Executor, ProcessEnded
from usher.consumer.execution.inbox_reader import InboxReader
from usher.consumer.execution.lanes import Lane, Lanes
from usher.consumer.execution.reporter import Reporter
from usher.consumer.handlers.message import Message, OwnLease
from usher.consumer.incarnation import Drain, Orders
from usher.consumer.isolation.process import ProcessSpec, Template
from usher.consumer.isolation.worker import SuspectWorker
from usher.consumer.lifecycle.journal import Journal
from usher.consumer.lifecycle.master_client import MasterClient
from usher.consumer.lifecycle.owner_scripts import OwnerScripts
from usher.consumer.lifecycle.process_ending import ProcessEnding
from usher.consumer.policy.outcome import RetryPolicy
from usher.consumer.policy.quarantine import is_unseen
from usher.master.dispatch.dispatcher import Dispatcher
from usher.master.dispatch.events import ChangeWatch, Report
from usher.master.leader.elector import Elector, Lead
from usher.master.leader.limits import LeaderLimits
from usher.master.membership.registry import Membership, read_registry
from usher.master.recovery.repairs import Janitor

#: Starts of a handler for one message.
MAX_ATTEMPTS = 3
_LEASE_S = LEASE_MS / 1000
_STEP = re.compile(r"^(?:#!lua.*\n)?-- (\w+):")


class Trouble(enum.Enum):
    """What happens to a call. Each of them looks the same to the caller: it does not know whether the call has
    happened."""

    REPLY_LOST = "it happens, and the reply is lost"
    NEVER_SENT = "it is lost on the way"
    LATE = "it is on its way until the test lets it arrive"


class TroubledLink(Link):
    """A real connection. ``troubles``: what happens to the next call of a step (a script's name, or a command)."""

    def __init__(self, url: str, name: str) -> None:
        super().__init__(url, name)
        self.troubles: dict[str, Trouble] = {}
        self.late: list[tuple[Arg, ...]] = []
        self._late_turns: list[tuple[Any, list[Sequence[Arg]]]] = []  # with the connections that they were sent over
        self.before: Callable[[str], None] = lambda step: None
        self.after: Callable[[str], None] = lambda step: None
        self.calls: list[str] = []
        self._steps: dict[Any, tuple[str, str]] = {}  # name and text by digest

    def call(self, *command: Arg, block_s: float = 0.0) -> Any:
        step = self._step(command)
        self.calls.append(step)
        self.before(step)
        trouble = self.troubles.pop(step, None)
        if trouble is None:
            reply = super().call(*command, block_s=block_s)
            self.after(step)
            return reply
        if trouble is Trouble.LATE:
            self.late.append(command)
        elif trouble is Trouble.REPLY_LOST:
            try:
                super().call(*command, block_s=block_s)
            except ScriptMissing:
                self.troubles[step] = trouble  # the runner sends the text now
                raise
            self.after(step)
        self.close()
        raise ReplyUnknown(f"{step}: {trouble.value}")

    def pipeline(self, commands: Sequence[Sequence[Arg]], block_s: float = 0.0) -> list[Any]:
        """Its step is called PIPELINE, and a late one is never sent; that of a transaction is called hand_over,
        ack, or read, if it takes nothing."""
        is_turn = len(commands) > 1 and commands[0][0] == "MULTI"
        takes = any(command[0] == "XCLAIM" for command in commands)
        acknowledges = is_turn and commands[1][0] == "XACK"
        step = ("hand_over" if takes else "ack" if acknowledges else "read") if is_turn else "PIPELINE"
        if is_turn:
            self.calls.append(step)
        self.before(step)
        trouble = self.troubles.pop(step, None)
        if trouble is Trouble.LATE and is_turn:
            self._late_turns.append((self._connection, list(commands)))
            self._connection, self._open = server_of(self.url).connection(self._name, self._timeout_s), False
            raise ReplyUnknown(f"{step}: {trouble.value}")
        replies = super().pipeline(commands, block_s) if trouble in (None, Trouble.REPLY_LOST) else []
        if replies and is_turn:
            self.after(step)
        if trouble is None:
            return replies
        self.close()
        raise ReplyUnknown(f"{step}: {trouble.value}")

    def _step(self, command: tuple[Arg, ...]) -> str:
        if command[0] == "EVAL" and (named := _STEP.match(str(command[1]))):
            return named[1]
        return self._steps[command[1]][0] if command[0] == "EVALSHA" else str(command[0])

    def digest(self, name: str) -> str:
        made = super().digest(name)
        self._steps[made] = (name, self._text(name))
        return made

    def arrive(self, other: Link) -> list[Any]:
        """What was late reaches Redis now, by another connection. Its replies; nobody else sees them."""
        late, self.late = self.late, []
        turns, self._late_turns = self._late_turns, []
        replies = []
        for connection, commands in turns:
            connection.send_packed_command(connection.pack_commands(commands), check_health=False)
            for _ in commands:
                with contextlib.suppress(redis.ResponseError):
                    replies.append(connection.read_response())
            connection.disconnect()
        for command in late:
            if command[0] == "EVALSHA":  # this server may not have seen the step yet
                command = ("EVAL", self._steps[command[1]][1], *command[2:])
            try:
                replies.append(other.call(*command))
            except (RedisTrouble, CommandRefused) as refused:
                replies.append(refused)
        return replies


@dataclass(frozen=True)
class Execution:
    """A handler that was started. ``at`` counts starts and ends of the whole test."""

    ticket: bytes
    id: bytes
    fence: int
    who: str
    at: int


@dataclass
class History:
    """What handlers saw."""

    starts: list[Execution] = field(default_factory=list)
    running: dict[int, Execution] = field(default_factory=dict)
    succeeded: set[bytes] = field(default_factory=set)
    overlaps: list[tuple[Execution, Execution]] = field(default_factory=list)
    clock: int = 0

    def start(self, message: Message, who: str) -> Execution:
        self.clock += 1
        begun = Execution(message.ticket, message.stream_id, message.fence, who, self.clock)
        self.overlaps += [(other, begun) for other in self.running.values() if other.ticket == begun.ticket]
        self.starts.append(begun)
        self.running[begun.at] = begun
        return begun

    def end(self, execution: Execution, succeeded: bool) -> None:
        self.clock += 1
        self.running.pop(execution.at, None)
        if succeeded:
            self.succeeded.add(execution.id)

    def die(self, who: str) -> None:
        """All that runs in a process ends with it."""
        self.running = {at: run for at, run in self.running.items() if run.who != who}

    def ids(self, ticket: bytes) -> list[bytes]:
        """Ids of a ticket in the order of their starts, with repetitions."""
        return [run.id for run in self.starts if run.ticket == ticket]

    def ids_of_all(self) -> list[bytes]:
        """Ids of all starts."""
        return [run.id for run in self.starts]

    def first_starts(self, ticket: bytes) -> list[bytes]:
        return list(dict.fromkeys(self.ids(ticket)))

    def by(self, who: str) -> list[bytes]:
        return [run.id for run in self.starts if run.who == who]

    def disorder(self) -> list[str]:
        """Tickets whose messages were started for the first time in another order than that of the stream, and fences
        that fell."""
        found = []
        for ticket in {run.ticket for run in self.starts}:
            first = self.first_starts(ticket)
            if first != sorted(first, key=rank):
                found.append(f"{ticket!r} was started in the order {first}")
        return found


class Run:
    """A handler that runs."""

    def __init__(self, consumer: ConsumerActor, lane: Lane, message: Message) -> None:
        self._consumer = consumer
        self._lane = lane
        self.message = message
        self.execution = consumer.history.start(message, consumer.incarnation)

    def succeed(self) -> None:
        self._consumer.history.end(self.execution, True)
        self._consumer.runs.remove(self)
        executor = self._consumer.executor
        if executor.succeeded(self._lane, self.message, 1, 2):
            executor.lanes.release(self._lane, 1, 0.0)

    @property
    def is_apart(self) -> bool:
        return self._lane.apart

    def die(self, is_blamed: bool = True) -> None:
        """Its child process ends."""
        self.fail(ProcessEnded(False, is_blamed), ErrorText(CUT_OFF))

    def fail(self, problem: BaseException, text: ErrorText | None = None) -> None:
        self._consumer.history.end(self.execution, False)
        self._consumer.runs.remove(self)
        self._consumer.executor.raised(self._lane, self.message, problem, text)


class ConsumerActor:
    """One incarnation: reader, lanes, executor, acker, drain; no thread, and no handler but what the test does with a
    Run."""

    def __init__(
        self,
        url: str,
        keys: Keys,
        registration: Registration,
        history: History,
        *,
        strict: bool = False,
        max_attempts: int = MAX_ATTEMPTS,
        journal: Path | None = None,
        policy: str = SKIP,
    ) -> None:
        self.registration = registration
        self.incarnation = registration.incarnation
        self.history = history
        self.link = TroubledLink(url, f"test:{self.incarnation}")
        self.steps = OwnerScripts(self.link, keys, registration)
        self.lease = OwnLease(_LEASE_S, now_s())
        self.lanes = Lanes()
        self.reporter = Reporter(MasterClient(["http://127.0.0.1:1"], ""), self.incarnation, 8, 1008, 512)
        self.lost: list[str] = []
        self.read_link = TroubledLink(url, f"test:{self.incarnation}:read")
        self.acker = Acker(self.steps, self.lanes, self.reporter, (0.0, 500), 1000, self.lost.append)
        self.acker.policy = policy
        self.journal = Journal(journal, "", self.incarnation, registration.slots)
        self.executor = Executor(
            self.lanes,
            self.acker,
            self.journal,
            self.lease,
            RetryPolicy(max_attempts, 0.0, 0.0),
            strict,
            0.0,
            self.lost.append,
        )
        spec = ProcessSpec("", "", False)
        self.suspects = SuspectWorker(0, self.executor, self.link, self.steps, spec, Template())
        self.reader = InboxReader(self.read_link, keys, self.incarnation, self.lanes, self.lease)
        ending = ProcessEnding(self.steps, lambda: True, self.journal, 0, self.lost.append)
        self.reader.on_order = Orders(self.executor, self.journal, ending, self.steps).obey
        self.drain = Drain(self.steps, self.lanes, self.reader, self.acker, LEASE_MS)
        self.reader.on_recall = self.acker.recall
        self.runs: list[Run] = []
        self.drains = False

    @property
    def name(self) -> bytes:
        return self.incarnation.encode()

    def read(self) -> int:
        return self.reader.read(None)

    def start(self) -> Run | None:
        """Start the next message, as a worker does, or, where none has one to start, as a worker for suspects does."""
        lane = self.lanes.take_now()
        if lane is None:
            return self._start_apart()
        message = self.executor.next_message(lane)
        if message is None:
            self.lanes.release(lane, 0, 0.0)
            return None
        if not self.executor.admit(lane, message, run_us()):
            return None
        run = Run(self, lane, message)
        self.runs.append(run)
        return run

    def _start_apart(self) -> Run | None:
        lane = self.lanes.next_suspect(0.0)
        message = self.executor.next_message(lane) if lane is not None else None
        if lane is None or message is None:
            return None
        if is_unseen(message.known):
            self.suspects._note_ahead(message)
        if not self.executor.admit_apart(lane, message):
            return None
        self.runs.append(Run(self, lane, message))
        return self.runs[-1]

    def flush(self) -> None:
        """Write what ended."""
        self.acker.run_once()

    def work(self) -> None:
        """Read, run everything to success, write it."""
        self.read()
        for _ in range(1000):
            run = self.start()
            if run is not None:
                run.succeed()
                continue
            self.flush()
            if not self.lanes.load()[0]:
                return

    def reports(self) -> list[Report]:
        """What would be posted to a master now, one report per acknowledged batch and ticket."""
        return [
            Report(self.incarnation, [(ticket, list(ids))], wants_answers=False)
            for ticket, _, ids in self.reporter._take()
        ]

    def begin_drain(self) -> None:
        """The first part of Drain.run. Only when all of it worked, anything is given back."""
        self.lanes.pause()
        self.drain._take_no_more()
        self.drain._end_reader()
        self.reader.read_rest()
        self.drains = True

    def give_back(self) -> int:
        self.reader.read_rest()
        if given_back := self.acker.give_all_back():
            self.flush()
        return given_back

    def deregister(self) -> bool:
        return self.steps.deregister()

    def stop_starting(self) -> None:
        """Its time is up: no handler is started any more."""
        self.lease.end()

    def crash(self) -> None:
        self.history.die(self.incarnation)
        self.runs.clear()
        self.close()

    def close(self) -> None:
        self.link.close()
        self.read_link.close()
        self.reporter.on_end()


class MasterActor:
    """One master: elector, dispatcher, janitor; the roster is read when the test says so."""

    def __init__(self, url: str, keys: Keys, name: str, limits: LeaderLimits, *, dispatch_url: str = "") -> None:
        self.keys = keys
        self.lead = Lead()
        self.link = TroubledLink(dispatch_url or url, f"test:{name}:dispatch")
        self.ear = Ear(dispatch_url or url, f"test:{name}:ear", keys.stream)
        self.dispatcher = Dispatcher(self.link, keys, self.lead, limits, self.ear)
        self.elect_link = TroubledLink(url, f"test:{name}:elect")
        self.elector = Elector(self.elect_link, keys, self.lead, f"http://{name}", LEASE_MS, lambda: True)
        self.reap_link = TroubledLink(url, f"test:{name}:reap")
        self.janitor = Janitor(self.reap_link, keys, self.lead, 1.0)
        self._roster_link = Link(url, f"test:{name}:roster")
        self._change_link = Link(url, f"test:{name}:changes")
        self.changes = ChangeWatch(self._change_link, keys.changed, self.dispatcher.post)
        self.failures: list[Exception] = []

    @property
    def board(self) -> Any:
        return self.dispatcher.board

    def elect(self) -> int | None:
        """The elector's turn."""
        self.elector.run_once()
        return self.lead.epoch

    def look(self) -> None:
        """The roster reader's turn."""
        self.dispatcher.post(read_registry(self._roster_link, self.keys))

    def listen(self) -> None:
        """The doorbell hears what is new to the dispatcher."""
        self.ear.listen(self.dispatcher._cursor.last_read)

    def hear(self) -> None:
        """The turn of who waits for changed tickets."""
        self.changes.look(None)

    def turn(self, *reports: Report) -> None:
        """The dispatcher's turn, with these reports; an epoch in doubt is renewed before. As in its thread, a turn that
        fails ends nothing."""
        for report in reports:
            self.dispatcher.post(report)
        try:
            if self.lead.epoch is None:
                self.elect()
            self.dispatcher.run_once()
            if self.dispatcher._cursor._read.found:  # the next one follows at once
                self.dispatcher.run_once()
        except Exception as problem:
            self.failures.append(problem)

    def settle(self, *reports: Report, turns: int = 12) -> None:
        """Turns until nothing moves any more."""
        self.turn(*reports)
        for _ in range(turns):
            self.look()
            self.hear()
            self.turn()

    def sweep(self) -> None:
        """The idle sweep to the end of its pass, without its pauses."""
        sweep = self.dispatcher._idle_sweep
        for _ in range(20):
            sweep._next_s, self.dispatcher._has_pending = 0.0, True
            self.turn()
            if sweep._cursor == b"0-0" or self.dispatcher._idle_sweep is not sweep:
                return

    def reap(self) -> None:
        """The janitor's turn."""
        self.janitor.run_once()

    def crash(self) -> None:
        for link in (self.link, self.elect_link, self.reap_link, self._roster_link, self._change_link, self.ear):
            link.close()

    close = crash


class Stage:
    """One ticket stream in an empty Redis, with the actors on it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.link = Link(url, "test:stage")
        self.world = World(self.link)
        self.keys = self.world.keys
        self.members = Membership(self.link, self.keys, LEASE_MS)
        self.history = History()
        self._open: list[MasterActor | ConsumerActor] = []

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        for actor in self._open:
            actor.close()
        self.link.close()

    def again(self) -> Stage:
        """Another one, in an empty Redis; the actors of this one are gone."""
        self.__exit__()
        self.link.call("FLUSHALL")
        return Stage(self.url)

    def master(
        self, name: str = "m1", *, dispatch_url: str = "", batch: int = 100, window: int = 100, reconcile_s: float = 1e9
    ) -> MasterActor:
        """A master; ``elect`` makes it lead."""
        limits = LeaderLimits(batch, window, math.inf, 10_000, reconcile_s, 1e9, 2 * LEASE_MS, FIELD)
        made = MasterActor(self.url, self.keys, name, limits, dispatch_url=dispatch_url)
        self._open.append(made)
        return made

    def leader(self, name: str = "m1", **settings: Any) -> MasterActor:
        """A master that leads and has adopted."""
        made = self.master(name, **settings)
        assert made.elect() is not None
        made.turn()
        return made

    def consumer(
        self, name: str = "a", *, capacity: int = 100, lock: str = NO_LOCK, renews: bool = True, **settings: Any
    ) -> ConsumerActor:
        """A new incarnation of ``name``, which renews its lease at once."""
        asked = Registration(name, uuid.uuid4().hex, "http://127.0.0.1:1/api/health", 8, capacity, lock)
        made = ConsumerActor(self.url, self.keys, self.members.register(asked).registration, self.history, **settings)
        if renews:
            made.steps.renew(LEASE_MS)
        self._open.append(made)
        return made

    def send(self, ticket: bytes, *ids: bytes) -> list[bytes]:
        return self.world.send(ticket, *ids)

    def end_lease(self, consumer: ConsumerActor) -> None:
        """The lease has ended in Redis, whatever its holder believes."""
        self.link.call("DEL", self.keys.lease(consumer.incarnation))

    def end_lead(self) -> None:
        """The leader's lease has ended."""
        self.link.call("DEL", self.keys.leader)

    def finish(self, master: MasterActor, consumers: Iterable[ConsumerActor], rounds: int = 6) -> None:
        """Nothing goes wrong any more: everything that can be done is done."""
        for _ in range(rounds):
            master.settle(turns=4)
            for consumer in consumers:
                consumer.work()
                master.turn(*consumer.reports())

    def check_done(self, ticket: bytes, ids: list[bytes]) -> None:
        """All of a ticket was run in order, once each, and nothing is left of anything."""
        started, state = self.history.ids(ticket), self.world.state()
        assert started == ids, f"{ticket!r} was started as {started}, not as {ids}"
        assert not self.history.overlaps, f"at the same time: {self.history.overlaps}"
        assert not state.pending, f"still pending: {state.pending}"
        assert not state.index, f"still in the index: {state.index}"
