"""Errors, named by their cause. The docstring is the message unless one is given.

Two classes of trouble with Redis must never be mixed up: ``NotNow`` means that the command *did not happen*,
``ReplyUnknown`` that it may or may not have happened. After the second, Redis is asked before anything else is done.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class UsherError(Exception):
    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (self.__doc__ or "").strip())


class SettingsError(UsherError):
    def __init__(self, problems: list[str]) -> None:
        self.problems = tuple(problems)
        lines = "\n".join(f"  {problem}" for problem in problems)
        super().__init__(f"These settings cannot be used:\n{lines}" if len(problems) > 1 else problems[0])


class StartRefused(UsherError):
    """The program cannot start as it is set up; the message names the setting and the way out."""


class RedisTrouble(UsherError):
    """Redis did not answer as it should; the turn is retried."""


class NotNow(RedisTrouble):
    """Redis refused the command for the moment; it did not happen.

    ``kind`` is the first word of the answer (LOADING, BUSY, READONLY, MISCONF, OOM, NOREPLICAS, CLUSTERDOWN, TRYAGAIN
    ...), ``CONNECT`` when no connection could be made, or ``AUTH`` or ``REFUSED`` when the server refused to let us in.
    """

    def __init__(self, kind: str, message: str) -> None:
        self.kind = kind
        super().__init__(message)


class ReplyUnknown(RedisTrouble):
    """The connection broke after the command was sent: it may or may not have happened."""

    kind = "reply_unknown"


class Behind(UsherError):
    """Masters ask producers to wait: so many messages wait for the stream, or for ``tenant``; or as many wait of
    ``ticket_id`` as its producer allows (``ticket_limit``). ``sent``: so many of the messages were sent before."""

    def __init__(
        self, stream: str, tenant: str, waiting: int, ticket_id: str = "", sent: int = 0, hint: str = ""
    ) -> None:
        self.stream, self.tenant, self.waiting, self.ticket_id, self.sent = stream, tenant, waiting, ticket_id, sent
        of = f", tenant {tenant}" if tenant else f", ticket {ticket_id}" if ticket_id else ""
        before = f"only the first {sent:,} of these were sent" if sent else "nothing was sent"
        super().__init__(f"{stream}{of} is behind: {waiting:,} messages wait; {before}{hint}")


class Failed(UsherError):
    """The message (its ``id``) that was sent with ``call`` is a dead letter, for a ``reason`` such as gave_up;
    ``error``: the handler's."""

    def __init__(self, reason: str, error: str, id: str) -> None:
        self.reason, self.error, self.id = reason, error, id
        super().__init__(f"message {id} is a dead letter: {reason}{': ' * bool(error)}{error}")


class CallTimeout(UsherError, TimeoutError):
    """Nobody has answered a call in time. The work goes on: the message is handled all the same. ``id``: its own, ""
    where it is not known whether Redis took it."""

    def __init__(self, id: str, timeout_s: float) -> None:
        self.id = id
        what = f"the work goes on: message {id} is handled all the same" if id else "the message may be handled or not"
        super().__init__(f"no answer within {timeout_s:g} s; {what}")


class SqlTrouble(UsherError):
    """The SQL transaction failed, or its outcome is unknown; the turn is retried."""


class SqlBusy(SqlTrouble):
    """The SQL database answered that it did not run the transaction: others hold a lock, or it lacks a resource."""


class GroupMissing(RedisTrouble):
    """The consumer group is gone."""

    kind = "nogroup"


class ServerChanged(UsherError):
    """Redis was restarted, or was a replica in between: what was remembered may belong to a history that it has
    lost."""


class OwnershipLost(UsherError):
    """Another owner has this ticket, or the lease of this incarnation has ended."""


class Fenced(UsherError):
    """The leader lease is held under another epoch: this master no longer leads."""


class MessageUndecodable(UsherError):
    """The message cannot be handed to any consumer; it becomes a dead letter with the reason."""

    def __init__(self, reason: str, message: str | None = None) -> None:
        self.reason = reason
        super().__init__(message or reason)


class HandlerUnusable(UsherError):
    """The handler named by USHER_HANDLER cannot be used."""


LONGEST_WAIT_S = 10 * 365 * 86_400.0


class RetryLater(UsherError):
    """Raised by a handler: not done yet, retry this message after ``after_s`` seconds, or a timedelta. Only its ticket
    waits. ``is_away``: what others need too is away, so the consumer tries one message at a time, when it thinks fit.
    Raises TypeError and ValueError for what is no time."""

    is_away = False

    def __init__(self, after_s: Any, reason: str = "", is_away: bool = False) -> None:
        seconds = after_s.total_seconds() if hasattr(after_s, "total_seconds") else after_s
        if not isinstance(seconds, (int, float)):
            raise TypeError(f"RetryLater takes seconds as a number, or a timedelta (not {after_s!r})")
        if not seconds <= LONGEST_WAIT_S:  # nor a NaN
            raise ValueError(f"RetryLater takes seconds, at most ten years of them (not {after_s!r})")
        self.after_s, self.is_away = float(seconds), is_away
        super().__init__(reason or f"the handler asked to be called again in {seconds:g} s")


def parts_of(raised: BaseException) -> list[BaseException]:
    """Return the errors of a group and of the groups in it; of any other error, itself."""
    parts, left = list[BaseException](), [raised]
    for one in left:  # it grows
        if isinstance(one, BaseExceptionGroup):
            left += one.exceptions
        else:
            parts.append(one)
    return parts


def readable(raised: BaseException) -> BaseException:
    """Return ``raised``, or a TypeError in place of one that cannot be looked at, such as a RetryLater without a usable
    ``after_s``: a handler's own subclass may not have called ours. In place of a group: a GiveUp in it, or, where it
    has nothing else, the RetryLater that asks for most."""
    try:
        if isinstance(raised, BaseExceptionGroup):
            parts = parts_of(raised)
            later = [one for one in parts if isinstance(one, RetryLater)]
            given_up = next((one for one in parts if isinstance(one, GiveUp)), None)
            raised = given_up or (max(later, key=lambda one: one.after_s) if len(later) == len(parts) else raised)
        if isinstance(raised, RetryLater) and math.isnan(float(raised.after_s)):
            raise ValueError("not a number")
    except BaseException as problem:
        what = "is a RetryLater whose after_s is not a number of seconds"
        return TypeError(
            f"{type(raised).__name__} {what if issubclass(type(raised), RetryLater) else 'cannot be looked at'}"
            f" ({type(problem).__name__})"
        )
    return raised


class PartialFailure(UsherError):
    """Raised by a batch handler: these messages of the call failed, all others are done.

    ``failed`` maps each of them (the message itself, or its id) to its failure: an exception (RetryLater and GiveUp
    mean what they mean elsewhere), or a text.
    """

    def __init__(self, failed: Mapping[Any, BaseException | str | None]) -> None:
        self.failed = dict(failed)
        super().__init__(f"{len(self.failed)} message(s) of the batch failed")


class GiveUp(UsherError):
    """Raised by a handler: this message can never succeed; it becomes a dead letter now."""

    def __init__(self, reason: str = "the handler gave up") -> None:
        super().__init__(reason)


class Invalid(GiveUp):
    """Raised for, or by, a handler: the message has not the form that the handler wants; it becomes a dead letter now,
    ``invalid``."""
