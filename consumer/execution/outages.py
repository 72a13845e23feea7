"""Outages: what handlers need is away, so different tickets fail alike, with one type of error at one line. Their
messages are not wrong: they wait, uncharged, and one at a time is tried, until one of them is done.

=====================================================  ================================================================
errors alike                                           are an outage
=====================================================  ================================================================
declared (``@handler(away=...)``), or raised by a      at once
sink of ours
whose type, cause, part or HTTP status tells of a      of three tickets: what they need may be of one tenant only; of
connection                                             one, while nothing of its kind was done for a second
any others                                             of three tickets, while nothing of their kind was done for a
                                                       second: of all, of one tenant, or of one kind of message
=====================================================  ================================================================

A ticket that comes for the first time is tried once: nothing tells whether it needs what is away; not where all of its
tenant, or of its kind of message, fail and nothing of them is done. Where other tickets are done meanwhile, one waits
so for an hour; then it is charged, since its own message may name what is not there.
"""

from __future__ import annotations

import errno
import math
import random
import re
import socket
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

from usher.common.protocol.last_error import LastError
from usher.consumer.handlers.message import Message

_ALIKE, _SILENCE_S, _PARTLY_S, _OTHERS_S = 3, 1.0, 3600.0, 60.0
#: Seconds from one try to the next, in each consumer; and for which one that has not ended keeps others from theirs.
PROBE_S, _LONGEST_PROBE_S = 1.0, 30.0
#: Seconds between two tickets that are tried for the first time though all of their kind fail.
_TRIED_S = 0.05
#: So many tickets wait here, in the order in which they are tried: few, since to the leader it is work that this
#: consumer has. The others wait in Redis, for so many seconds, should nobody let them go on (their consumer was lost,
#: say); and so many times longer as there are more than the next number, up to the last one: to come and go is work.
_HERE, _ELSEWHERE_S, _FEW, _MOST_TIMES = 10, (30.0, 60.0), 2_500, 5.0
#: Seconds after which those that go on are not waited for: another consumer may have done them.
_GONE_S = 1.0
#: Where others were done in the last second, those that go on rest for as long as a few of them have worked, at most so
#: long: handlers are short then, and what they wait for is the processor.
_LONGEST_REST_S = 0.25
#: Most tickets of an outage, and kinds of errors, that are remembered; and seconds for which errors that are none are.
_MOST, _MOST_SIGNS, _MOST_KINDS, _FORGOTTEN_S = 100_000, 100, 1000, 120.0
_TOLD_EVERY_S = 60.0
_MOST_ERRORS = 20  # of a chain, or of a group, that are looked at

_WORDS = re.compile(
    "connect|timeout|timedout|unavailable|unreachable|operationalerror|interfaceerror|remoteprotocol|brokenpipe",
    re.IGNORECASE,
)
_NUMBERS = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}
_NUMBERS |= {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE}  # of a disk, which is away as well
#: Too many requests, or a gateway or service that is away.
_STATUSES = {429, 502, 503, 504}
DECLARED, CONNECTION, OTHER = "declared", "connection", ""

#: Type and line of an error.
Sign = tuple[str, str]


def tells_of_connection(raised: BaseException) -> bool:
    """Return whether an error, what caused it, or one of its group says that something elsewhere was not reached.

    >>> tells_of_connection(ConnectionRefusedError()), tells_of_connection(ValueError()), tells_of_connection(OSError())
    (True, False, False)
    """
    errors: list[Any] = [raised]
    try:
        for one in errors:  # it grows
            if isinstance(one, socket.gaierror) or getattr(one, "errno", None) in _NUMBERS:
                return True
            if any(_WORDS.search(base.__name__) for base in type(one).__mro__) or _STATUSES & {*_statuses(one)}:
                return True
            if len(errors) < _MOST_ERRORS:
                context = not one.__suppress_context__ and one.__context__
                errors += filter(None, (*getattr(one, "exceptions", ()), one.__cause__ or context))
    except Exception:  # of a class of the handler's own, which cannot be looked at
        pass
    return False


def _statuses(error: Any) -> Iterator[int]:
    """Yield what may be an HTTP status. A number under a plain name is one only of what has headers, or an answer."""
    response = getattr(error, "response", None)
    is_answer = response is not None or hasattr(error, "headers")
    for of in (error, response):
        found = (getattr(of, name, None) for name in ("status_code", "http_status", *(("status", "code") * is_answer)))
        yield from (status for status in found if isinstance(status, int))
    if isinstance(response, dict):  # of botocore
        yield response["ResponseMetadata"]["HTTPStatusCode"]


def _is_new(message: Message) -> bool:
    """Return whether a message began within a second of its sending: what waited while an outage lasted did not."""
    return message.start_us // 1000 - int(message.stream_id.partition(b"-")[0]) < 1000


class Wait(NamedTuple):
    """Until when a message waits, and whether here. ``tickets`` fail alike since ``since_s``. ``is_news``: people are
    to be told."""

    due_s: float
    is_here: bool
    since_s: float
    tickets: int
    is_news: bool = False


class GoOn(NamedTuple):
    """Tickets that need not wait any longer: ``first`` these, under their fences; 0: they wait here. ``lasted_s``: for
    how long all of them have failed alike, with so many ``probes``; None: the end was told before."""

    alike: Collection[bytes]
    first: list[tuple[bytes, int]]
    sign: Sign
    lasted_s: float | None = None
    probes: int = 0


class Outage:
    """Failures alike. ``failing``: by kind, since when, and which tickets failed without that anything of the kind was
    done; None: of whatever kind. ``waiting``: tickets that wait, under which fence (0: here, not in
    Redis), and until when."""

    def __init__(self, sign: Sign, now_s: float) -> None:
        self.sign, self.since_s, self.last_s = sign, now_s, now_s
        self.is_on = self.is_declared = False
        self.others_s = -math.inf  # when others were done last
        self.tickets: dict[bytes, float] = {}  # and since when each fails
        self.failing: dict[object, tuple[float, set[bytes]]] = {}
        self.waiting, self.going = OrderedDict[bytes, tuple[int, float]](), set[bytes]()
        self.probe = self.probed = b""  # the ticket that is tried now, and the one that was tried last
        self.probed_s, self.slot_s, self.told_s, self.probes = 0.0, 0.0, 0.0, 0
        self.tried_s, self.trying = 0.0, set[bytes]()
        self.heard_s = -math.inf  # when as many failed so at all consumers
        #: Of those that go on: when the first message of the last few of them was done, and until when more than half
        #: of these had more.
        self.first_s, self.busy_s = math.inf, 0.0
        self.least = _ALIKE  # tickets of a kind of which nothing is done

    def fails(self, kind: object, now_s: float) -> bool:
        """Return whether all of a kind fail, as far as is known."""
        since_s, tickets = self.failing.get(kind, (now_s, ()))
        if kind is None:
            return len(tickets) >= _ALIKE or now_s < self.heard_s + _FORGOTTEN_S
        return len(tickets) >= self.least and now_s - since_s >= _SILENCE_S


class Outages:
    """The outages that this consumer sees. Any thread may call it."""

    def __init__(self) -> None:
        self.kinds_of: Callable[[Message], Iterable[object]] = lambda message: ()
        self.known: dict[Sign, Outage] = {}  # empty while nothing fails
        self._of: dict[bytes, Outage] = {}  # by ticket
        self._rng, self._lock = random.Random(), threading.Lock()
        self.probes = 0
        self.slots = 64
        self._wondered_s = 0.0
        self._asked: set[bytes] = set()  # tickets that an operator wants to be tried now
        self._is_quiet = False  # a success has found that it changes nothing, and nothing has failed since

    @property
    def go_on(self) -> int:
        """Number of tickets that go on at a time when it is over, others when half of them have nothing left here: few,
        so that others wait behind few; as many as there are slots where nothing of others was done for a second."""
        return max(2, self.slots // 4)

    @property
    def waiting(self) -> int:
        """Return how many tickets wait: a glance, without the lock."""
        return sum(len(outage.tickets) for outage in [*self.known.values()] if outage.is_on)

    def is_quiet(self, ticket: bytes) -> bool:
        """Return whether neither a start nor a success of this ticket changes anything: a glance, without the lock.
        Where one of a hundred fails, that is so for nearly all."""
        return self._is_quiet and not any(ticket in one.tickets for one in [*self.known.values()])

    def failed(self, message: Message, sign: Sign, how: str, now_s: float) -> Wait | None:
        """Take a failure; return the wait of its message, or None where it is charged."""
        with self._lock:
            self._is_quiet = False
            outage = self.known.get(sign)
            if outage is None:
                if len(self.known) >= _MOST_SIGNS:
                    return None
                outage = self.known[sign] = Outage(sign, now_s)
            is_alike, ticket = self._note(outage, message, how, now_s), message.ticket
            if not (outage.is_on or is_alike):
                return None
            outage.is_declared |= how == DECLARED
            failed_s = now_s - outage.tickets.get(ticket, outage.since_s)
            is_few = len(outage.tickets) < _ALIKE and now_s >= outage.heard_s + _FORGOTTEN_S
            is_partly = is_few or now_s < outage.others_s + _OTHERS_S
            if is_partly and not outage.is_declared and failed_s >= _PARTLY_S:
                return None
            is_news = not outage.is_on or now_s >= outage.told_s + _TOLD_EVERY_S
            outage.is_on, outage.told_s = True, now_s if is_news else outage.told_s
            return self._wait(outage, message, now_s)._replace(is_news=is_news)

    def _note(self, outage: Outage, message: Message, how: str, now_s: float) -> bool:
        outage.last_s, ticket = now_s, message.ticket
        outage.least = 1 if how == CONNECTION else outage.least
        self._join(outage, ticket, now_s)
        for kind in (*(None,) * bool(how), "", *self.kinds_of(message)):
            if kind in outage.failing or len(outage.failing) < _MOST_KINDS:
                _, tickets = outage.failing.setdefault(kind, (now_s, set()))
                tickets.update((ticket,) if len(tickets) < _ALIKE else ())
        return how == DECLARED or any(outage.fails(kind, now_s) for kind in [*outage.failing])

    def _wait(self, outage: Outage, message: Message, now_s: float) -> Wait:
        due_s = max(now_s, outage.slot_s) + PROBE_S
        is_here = due_s <= now_s + _HERE * PROBE_S
        if is_here:
            outage.slot_s = due_s
        else:
            times = min(_MOST_TIMES, max(1.0, len(outage.waiting) / _FEW))
            due_s = now_s + times * self._rng.uniform(*_ELSEWHERE_S)
        return Wait(due_s, is_here, outage.since_s, len(outage.tickets))

    def waits(self, message: Message, wait: Wait) -> bool:
        """Note that a message waits; in Redis not before its fence is closed, for who goes on is not ours any more.
        Return False where the outage is over by now."""
        with self._lock:
            outage = self._of.get(message.ticket)
            if outage is None:
                return len(self._of) >= _MOST  # it is one of those that are not remembered
            if outage.is_on and len(outage.waiting) < _MOST:
                outage.waiting[message.ticket] = 0 if wait.is_here else message.fence, wait.due_s
            return outage.is_on

    def ended(self, ticket: bytes) -> None:
        """Note that a start of a ticket has ended, however it did: another one may be tried."""
        if self.known:
            with self._lock:
                for outage in self.known.values():
                    outage.probe = b"" if outage.probe == ticket else outage.probe
                    outage.trying.discard(ticket)

    def leave(self, ticket: bytes) -> None:
        """Note that a ticket waits for a reason of its own: if it was tried last, that has told nothing."""
        if ticket in self._of:
            with self._lock:
                outage = self._of.pop(ticket, None)
                if outage is not None:
                    outage.tickets.pop(ticket, None)
                    outage.probed_s = 0.0 if outage.probed == ticket else outage.probed_s

    def ask(self, ticket: bytes) -> None:
        """Have a ticket tried at its next start: an operator wants it."""
        if ticket in self._of:
            self._asked.add(ticket)

    def hold(self, message: Message, now_s: float) -> Wait | None:
        """Return the wait of a message that is about to start; None: it may, perhaps as the one that is tried."""
        ticket = message.ticket
        with self._lock:
            if (outage := self._of.get(ticket) or self._fails_whole(message, now_s)) is None:
                return None
            outage.waiting.pop(ticket, None)
            if not outage.is_on or outage.probe == ticket or ticket in self._asked:
                self._asked.discard(ticket)
                return None
            longest_s = _LONGEST_PROBE_S if outage.probe else 0.9 * PROBE_S
            if now_s < outage.probed_s + longest_s:
                return self._wait(outage, message, now_s)
            outage.probe, outage.probed, outage.probed_s = ticket, ticket, now_s
            outage.probes, self.probes = outage.probes + 1, self.probes + 1
            return None

    def wonders(self, now_s: float) -> bool:
        """Return, at most once a second, whether fewer fail here than are an outage: others may at other consumers."""
        known = [*self.known.values()]
        if now_s < self._wondered_s + 1.0 or all(one.least > 1 or len(one.tickets) >= _ALIKE for one in known):
            return False
        self._wondered_s = now_s
        return True

    def hear(self, errors: Iterable[LastError], now_s: float) -> None:
        """Take the last errors of messages of the group, of different tickets, for only the first one of each runs."""
        with self._lock:
            for sign, count in Counter((error.error_type, error.at) for error in errors).items():
                if count >= _ALIKE and sign in self.known:
                    self.known[sign].heard_s = now_s

    def concerns(self, message: Message, now_s: float) -> bool:
        with self._lock:
            return message.ticket in self._of or any(self._is_whole(one, message, now_s) for one in self.known.values())

    def _is_whole(self, outage: Outage, message: Message, now_s: float) -> bool:
        is_many = outage.is_on and len(outage.tickets) >= _ALIKE
        return is_many and any(outage.fails(kind, now_s) for kind in self.kinds_of(message))

    def _fails_whole(self, message: Message, now_s: float) -> Outage | None:
        """Return the outage of all of this message's kind, which its ticket then is one of, untried: but for a few."""
        for outage in self.known.values():
            if not self._is_whole(outage, message, now_s):
                continue
            pause_s = _TRIED_S if len(outage.trying) < max(1, self.go_on // 2) else _LONGEST_PROBE_S
            if now_s < outage.tried_s + pause_s:
                self._join(outage, message.ticket, now_s)
                return outage
            outage.tried_s = now_s
            outage.trying.add(message.ticket)
        return None

    def _join(self, outage: Outage, ticket: bytes, now_s: float) -> None:
        if len(outage.tickets) < _MOST:
            outage.tickets.setdefault(ticket, now_s)
            self._of[ticket] = outage

    def overdue(self, now_s: float) -> list[GoOn]:
        """Return who goes on though nothing is done here any more, since other consumers have done those before."""
        with self._lock:
            self._is_quiet = False
            over = [one for one in self.known.values() if not one.is_on and now_s >= one.last_s + _GONE_S]
            return [GoOn((), self._next(one, now_s, True), one.sign) for one in over if one.waiting]

    def _next(self, outage: Outage, now_s: float, is_first: bool) -> list[tuple[bytes, int]]:
        more: list[tuple[bytes, int]] = []
        if is_first:
            outage.going.clear()
            outage.first_s = math.inf
        is_alone = now_s >= outage.others_s + _SILENCE_S
        most = max(self.go_on, self.slots) if is_alone else self.go_on
        if (going := len(outage.going)) > most // 2:
            outage.busy_s = now_s
            return more
        rest_s = min(_LONGEST_REST_S, outage.busy_s - outage.first_s)
        if not is_alone and now_s < outage.busy_s + rest_s:
            return more
        outage.first_s = math.inf
        while len(more) < most - going and outage.waiting:
            ticket, (fence, due_s) = outage.waiting.popitem(last=False)
            if due_s > now_s:  # else it went on by itself, perhaps at another consumer
                more.append((ticket, fence))
        outage.going.update(ticket for ticket, _ in more)
        outage.last_s = now_s if more else outage.last_s
        return more

    def done(self, message: Message, now_s: float, is_last: bool = True) -> list[GoOn]:
        """Take a success: failures alike are no outage any more if it was one of them, or was of their kind.
        ``is_last``: nothing more of its ticket is here."""
        with self._lock:
            given = message, ("", *self.kinds_of(message)), now_s, is_last
            gone_on = [on for outage in [*self.known.values()] if (on := self._done(outage, *given))]
            self._is_quiet = not any(one.is_on or one.waiting or one.failing for one in self.known.values())
            return gone_on

    def _done(
        self, outage: Outage, message: Message, kinds: Iterable[object], now_s: float, is_last: bool
    ) -> GoOn | None:
        for kind in kinds:
            outage.failing.pop(kind, None)
        was_alike = outage.tickets.pop(message.ticket, None) is not None
        if was_alike:
            self._of.pop(message.ticket, None)
            outage.failing.clear()
        is_other = not was_alike and (outage.is_on or _is_new(message))
        outage.others_s = now_s if is_other else outage.others_s
        outage.probe = b"" if outage.probe == message.ticket else outage.probe
        is_forgotten = now_s >= outage.last_s + _FORGOTTEN_S
        outage.trying.discard(message.ticket)
        is_alike = outage.is_declared or any(outage.fails(kind, now_s + _SILENCE_S) for kind in outage.failing)
        if outage.is_on and not was_alike and is_alike and not is_forgotten:
            return None
        is_first = outage.is_on or now_s >= outage.last_s + _GONE_S
        outage.waiting.pop(message.ticket, None)  # its time had come
        if message.ticket in outage.going:
            outage.first_s = min(outage.first_s, now_s)
            outage.going -= {message.ticket} if is_last else set()
        if outage.is_on:  # first those that wait here: to the leader they are work that this consumer has
            outage.waiting = OrderedDict(sorted(outage.waiting.items(), key=lambda item: item[1][0] > 0))
        first = self._next(outage, now_s, is_first)
        on = GoOn((), first, outage.sign)
        if is_old := outage.is_on or is_forgotten:
            alike = {ticket for ticket in outage.tickets if self._of.get(ticket) is outage}
            for ticket in alike:
                del self._of[ticket]
            self._asked -= alike
            outage.tickets.clear()
        if outage.is_on:
            on = on._replace(alike=alike, lasted_s=now_s - outage.since_s, probes=outage.probes)
        if not (outage.waiting or outage.tickets):
            del self.known[outage.sign]
        elif is_old:
            self.known[outage.sign] = after = Outage(outage.sign, now_s)
            after.waiting, after.going, after.others_s = outage.waiting, outage.going, outage.others_s
        return on if first or on.lasted_s is not None else None
