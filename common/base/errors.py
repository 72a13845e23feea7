"""Errors, named by whose fault it is. The docstring is the message unless one is given.

Two classes of trouble with Redis must never be mixed up: ``NotNow`` means the command *did not happen*,
``ReplyUnknown`` means nobody knows. After the second, Redis is asked before anything else happens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class UsherError(Exception):
    """Something went wrong in Usher."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (self.__doc__ or "").strip())


class SettingsError(UsherError):
    """These settings cannot be used."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = tuple(problems)
        lines = "\n".join(f"  {problem}" for problem in problems)
        super().__init__(f"These settings cannot be used:\n{lines}" if len(problems) > 1 else problems[0])


class StartRefused(UsherError):
    """The program cannot start as it is set up; the message names the setting and the way out."""


class RedisTrouble(UsherError):
    """Redis did not answer as it should; the turn is tried again."""


class NotNow(RedisTrouble):
    """Redis refused the command for the moment; it did not happen.

    ``kind`` is the first word of the answer (LOADING, BUSY, READONLY, MISCONF, OOM, NOREPLICAS, CLUSTERDOWN, TRYAGAIN
    ...), ``CONNECT`` when no connection could be made, or ``AUTH`` or ``REFUSED`` when the server answered that it does
    not let us in.
    """

    def __init__(self, kind: str, message: str) -> None:
        self.kind = kind
        super().__init__(message)


class ReplyUnknown(RedisTrouble):
    """The connection broke after the command was sent: it may or may not have happened."""


class SqlTrouble(UsherError):
    """The SQL database did not do it, or nobody knows whether it did; the turn is tried again."""


class SqlBusy(SqlTrouble):
    """The SQL database answers, and did not do it: others hold what is needed, or it is short of something."""


class GroupMissing(RedisTrouble):
    """The consumer group is gone."""


class ServerChanged(UsherError):
    """Redis is another process than before, or was a replica in between: what was remembered may be of a history that
    it lost."""


class OwnershipLost(UsherError):
    """Another owner has this ticket, or this incarnation's lease has ended."""


class Fenced(UsherError):
    """The leader lease is held under another epoch: this master no longer leads."""


class MessageUndecodable(UsherError):
    """The message cannot be handed to anybody; it goes to the dead letters with the reason."""

    def __init__(self, reason: str, message: str | None = None) -> None:
        self.reason = reason
        super().__init__(message or reason)


class HandlerUnusable(UsherError):
    """The handler named by USHER_HANDLER cannot be used."""


class RetryLater(UsherError):
    """Raised by a handler: not done yet, try this message again after ``after_s`` seconds. Its ticket waits; nothing
    else does."""

    def __init__(self, after_s: float, reason: str = "") -> None:
        self.after_s = float(after_s)
        super().__init__(reason or f"the handler asked to be called again in {after_s:g} s")


def readable(raised: BaseException) -> BaseException:
    """``raised``, or what a RetryLater is that does not say when: a handler's own kind of it may never have called
    ours."""
    if isinstance(raised, RetryLater):
        try:
            float(raised.after_s)
        except Exception as problem:
            return TypeError(
                f"{type(raised).__name__} is a RetryLater whose after_s is no number of seconds"
                f" ({type(problem).__name__})"
            )
    return raised


class PartialFailure(UsherError):
    """Raised by a batch handler: these messages of the call failed, all others are done.

    ``failed`` maps each of them (the message itself, or its id) to what went wrong: an exception (RetryLater and GiveUp
    mean what they mean elsewhere), or a text.
    """

    def __init__(self, failed: Mapping[Any, BaseException | str | None]) -> None:
        self.failed = dict(failed)
        super().__init__(f"{len(self.failed)} message(s) of the batch failed")


class GiveUp(UsherError):
    """Raised by a handler: this message can never succeed; it becomes a dead letter now."""

    def __init__(self, reason: str = "the handler gave up") -> None:
        super().__init__(reason)
