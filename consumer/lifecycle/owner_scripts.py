"""The atomic steps of an owner, typed: one method per script of ``common/lua`` that a lease guards. Each method raises
what ``Link.call`` raises."""

from __future__ import annotations

import contextlib
import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

from usher.common.base.clock import now_s, wall_ms
from usher.common.base.errors import OwnershipLost
from usher.common.base.log import ERROR, event
from usher.common.protocol.attempts import Attempts, encode
from usher.common.protocol.keys import Keys
from usher.common.protocol.last_error import LastError, NotedError
from usher.common.protocol.last_error import decode as decode_error
from usher.common.protocol.registration import Registration
from usher.common.protocol.run_log import FAILURES, RETRY_LATER, encode_kept
from usher.common.protocol.run_log import encode as encode_runs
from usher.common.redis.client import CommandRefused, Link, NotNow, checked
from usher.consumer.policy.outcome import Finished

_NO_ERROR = NotedError()
_NO_ERRORS: Mapping[bytes, NotedError] = MappingProxyType({})
#: Acknowledgements go by the script for so long, once they have to.
_WATCH_AGAIN_S = 1.0
_SOME, _NEW_MS = 40, 60_000  # last errors that are looked at, and how old they may be


class Buried(enum.Enum):
    """The result of the script dead_letter. HALTED: the ticket waits for an operator; RETURNED: nothing was
    left to halt, the ticket went back to ``master``; GONE: the message is not in processing any
    more; STALE: another owner has its ticket."""

    OK = b"OK"
    HALTED = b"HALTED"
    RETURNED = b"RETURNED"
    GONE = b"GONE"
    STALE = b"STALE"


class GiveBack(NamedTuple):
    """A ticket on its way back to ``master``. ``ids``: those of it that its owner knows, in any order; or ``GO_ON``.
    ``due_s``: nothing of it is handed over earlier; ``lane``: held until it is given back."""

    ticket: bytes
    fence: int
    ids: Sequence[bytes] = ()
    due_s: float | None = None
    lane: Any = None


#: In place of ids: the ticket waits in Redis since its fence was ours, and is to wait no longer.
GO_ON = (b"on",)


class Letter(NamedTuple):
    """The record of a message that is given up. Times in milliseconds since the epoch. ``policy``: skip or halt."""

    ticket: bytes
    id: bytes
    reason: str
    error: str
    attempts: int
    first_ms: int
    last_ms: int
    fence: int = 0
    error_type: str = ""
    traceback: str = ""
    policy: str = "skip"
    at: str = ""
    last_error: bytes = b""
    handler: str = ""


class OwnerScripts:
    """The atomic steps of one incarnation. Each raises OwnershipLost when the lease has ended."""

    def __init__(self, link: Link, keys: Keys, registration: Registration) -> None:
        self.link = link
        self._keys = keys
        self._registration = registration
        self.incarnation = self._incarnation = registration.incarnation
        self._lease = keys.lease(registration.incarnation)
        self._has_renewed = False
        # The connection (its number) that watches the lease and the attempts, if the answer behind the WATCH was that
        # there is the former and not the latter; 0: none. Then it is asked again at this time.
        self._watching, self._next_watch_s = 0, 0.0

    def renew(self, lease_ms: int, start: bytes = b"-", left_ms: int = 1) -> tuple[str, int, bytes]:
        """Extend the lease, and touch up to a thousand pending entries of this incarnation, from ``start`` on.
        ``left_ms``: what the lease has left, and keeps if it was revoked. Return its state (live, draining, revoked: it
        was not extended, or "": it is gone), how many were touched, and the id to go on from, empty after the last."""
        first = () if self._has_renewed else (self._keys.unproven(self._incarnation), self._keys.changed)
        keys = (self._lease, self._keys.stream, *first)
        args = (self._keys.group, self._incarnation, lease_ms, start, max(1, left_ms))
        state, touched, following = self.link.run("renew", keys, args)
        self._has_renewed = True
        return "" if state == b"LOST" else state.decode(), touched, following

    def extend(self, lease_ms: int, left_ms: int) -> str:
        """Extend the lease alone, by one plain command; return its state, see ``renew``."""
        state = self.link.call("GETEX", self._lease, "PX", lease_ms)
        if state == b"revoked":
            self.link.call("PEXPIRE", self._lease, max(1, left_ms))
        return (state or b"").decode()

    def ack(
        self,
        ids: Sequence[bytes],
        run_record: bytes = b"",
        run_log_length: int = 0,
        is_again: bool = False,
        answers: Sequence[tuple[Any, ...]] = (),
    ) -> None:
        """Acknowledge messages, and answer the callers of those that this call acknowledged. ``is_again``: the reply to
        the same call was lost before. ``answers``: (reply stream, message id, call, b"", kind, result), and parts of
        results of messages that run: (reply stream, b"", call, "fence attempt number", kind, part)."""
        if not (is_again or answers) and self._acknowledge(ids, run_record, run_log_length):
            return
        keys = self._keys
        script_keys = (keys.stream, self._lease, keys.attempts, keys.runs, keys.errors, *(one[0] for one in answers))
        told = chain.from_iterable(one[1:] for one in answers)
        args = (keys.group, run_record, run_log_length, "1" if is_again else "", *ids, *told)
        try:
            self._check(self.link.run("ack", script_keys, args))
        except CommandRefused as refused:
            if not answers:
                raise
            # For want of rights to a reply stream, say: that must not hold up those who ask for nothing.
            event("answer_not_written", level=ERROR, why=str(refused))
            self.ack(ids, run_record, run_log_length, is_again)

    def _acknowledge(self, ids: Sequence[bytes], record: bytes, length: int) -> bool:
        """Do what ack.lua does where no attempts are noted, by plain commands in one transaction: it does not happen if
        the lease has ended, or attempts are noted, since Redis was last asked. Return False if nothing has happened:
        the script is to be run."""
        keys, link = self._keys, self.link
        commands: list[tuple[Any, ...]] = [("XACK", keys.stream, keys.group, *ids)]
        if record:
            most = max(1, length * 8192 // max(8192, len(record)))  # as in lua/includes/run_log.lua
            commands.append(("XADD", keys.runs, "MAXLEN", "~", most, "*", "batch", record))
        watch = [("WATCH", self._lease, keys.attempts), ("EXISTS", self._lease), ("EXISTS", keys.attempts)]
        if self._watching != link.connections and now_s() >= self._next_watch_s:
            may, empty, *replies = link.pipeline([("MULTI",), ("EXEC",), *watch])
            self._take_watch(replies if (may, empty) == (b"OK", []) else ())
        for _ in range(2):  # a renewal of the lease stops one
            watching, self._watching = self._watching, 0
            if not watching or watching != link.connections:
                return False
            try:
                done, behind = link.transaction(watching, commands, watch)
            except (NotNow, CommandRefused):  # memory may be full: the script works then
                self._take_watch(())
                return False
            self._take_watch(behind)
            if done is not None:
                checked(done)
                return True
        return False

    def _take_watch(self, replies: Sequence[Any]) -> None:
        self._watching = self.link.connections if [*replies] == [b"OK", 1, 0] else 0
        self._next_watch_s = now_s() + (0.0 if self._watching else _WATCH_AGAIN_S)

    def dead_letters(self, letters: Sequence[Letter]) -> list[Buried | Exception]:
        """Give messages up, each in an atomic step of its own, in two round trips. The answer of a step that may not
        have happened is its exception: those before it are written all the same."""
        keys = self._keys
        script_keys = [keys.stream, self._lease, keys.tickets, keys.dead, keys.attempts, keys.changed, keys.errors]
        script_keys.append(keys.letters)
        each = [(script_keys, (keys.group, self._incarnation, *letter)) for letter in letters]
        replies = self.link.try_each("dead_letter", each)
        return [
            self._lost() if reply == b"LOST" else reply if isinstance(reply, Exception) else Buried(reply)
            for reply in replies
        ]

    def charge(
        self,
        attempts: Mapping[bytes, Attempts],
        run_record: bytes = b"",
        run_log_length: int = 0,
        errors: Mapping[bytes, NotedError] = _NO_ERRORS,
        failed: int = 0,
    ) -> None:
        """Note attempts, and last errors, by message id, for the next owner and for people. ``failed``: how many
        executions of the record failed."""
        args: list[Any] = [self._keys.group, self._incarnation, run_record, run_log_length, failed]
        for entry_id, known in attempts.items():
            args += (entry_id, encode(known), *errors.get(entry_id, _NO_ERROR))
        keys = self._keys
        script_keys = (keys.stream, self._lease, keys.attempts, keys.runs, keys.errors, keys.failures)
        self._check(self.link.run("charge", script_keys, args))

    def note_failures(self, failures: Sequence[Finished], run_log_length: int, ran: tuple[Any, ...] = ()) -> None:
        """Note starts that did not end in success. If a message failed more than once, Redis gets its last count, and
        the run log every execution. ``ran``: the handler that ran them, and the fields in which they have marks."""
        outcomes, errors = [run.outcome for run in failures], dict[bytes, NotedError]()
        record = encode_runs(self.incarnation, failures, outcomes, *ran) if run_log_length else b""
        for run in failures:
            if run.error or (run.outcome != RETRY_LATER and run.attempt > 1):  # else its letter tells all
                before, last = errors.get(run.stream_id, _NO_ERROR), run.error and decode_error(run.error.head)
                kept = encode_kept(self.incarnation, run, run.outcome, last.told if last else "")
                kept = before.runs + b"\n" + kept if before.runs else kept
                errors[run.stream_id] = (run.error or before)._replace(runs=kept)
        attempts = {run.stream_id: run.known for run in failures}
        self.charge(attempts, record, run_log_length, errors, sum(outcome in FAILURES for outcome in outcomes))

    def some_errors(self) -> list[LastError]:
        """Return new errors of some messages of the group; none without a right to see them. Not by HRANDFIELD, with
        which who may send it makes Redis write thousands of millions of them, and answer nobody else."""
        found: Sequence[bytes] = ()
        with contextlib.suppress(CommandRefused):  # `usher doctor` tells of rights
            found = self.link.call("HSCAN", self._keys.errors, 0, "COUNT", _SOME)[1]
        return [one for one in map(decode_error, found[1::2]) if one and one.at_ms >= wall_ms() - _NEW_MS]

    def drain(self, lease_ms: int) -> None:
        self._check(self.link.run("drain", (self._lease, self._keys.changed), (self._incarnation, lease_ms)))

    def give_back(self, tickets: Iterable[GiveBack]) -> list[bool]:
        """Give tickets back to ``master`` of which nothing runs, and of which no message that ended waits to be
        acknowledged. Return for the first of them, one at least, whether this call did it: if not, nothing of it under
        its fence is ours, perhaps because an earlier call did. The others are to be asked for again."""
        args: list[Any] = [self._keys.group, self._incarnation]
        now = now_s()
        for ticket, fence, ids, due_s, _ in tickets:
            # Never less than the time that is left, although Redis knows no fraction of a millisecond.
            after_ms = math.ceil(1000 * (due_s - now)) + 1 if due_s is not None and due_s > now else 0
            args += (ticket, fence, b" ".join(ids), "" if due_s is None else after_ms)
        keys = self._keys
        script_keys = (keys.stream, self._lease, keys.tickets, keys.dead, keys.changed, keys.attempts, keys.letters)
        reply = self.link.run("give_back", script_keys, args)
        self._check(reply[0])
        return [answer == b"GIVEN" for answer in reply[1:]]

    def deregister(self) -> bool:
        """Leave for good. Return False when entries are still pending for this incarnation."""
        keys, mine = self._keys, self._registration
        script_keys = (keys.stream, self._lease, keys.inbox(mine.incarnation), keys.consumers, keys.changed)
        reply = self.link.run("deregister", script_keys, (keys.group, mine.incarnation, mine.name, mine.dump()))
        if reply == b"LOST":
            raise self._lost()
        return bool(reply == b"OK")

    def _check(self, answer: bytes) -> None:
        if answer == b"LOST":
            raise self._lost()
        if answer != b"OK":
            event("answer_not_written", level=ERROR, why=str(answer, errors="replace"))

    def _lost(self) -> OwnershipLost:
        return OwnershipLost(f"the lease of {self._incarnation} has ended")
