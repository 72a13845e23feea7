"""The outcome for each lane of a call with messages of several lanes. Pure.

Per ticket only the first messages of a call can be done: an acknowledged prefix. Messages after a failed one are tried
again, in order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from usher.common.base.errors import PartialFailure, RetryLater, UsherError, readable
from usher.common.base.text import format_error
from usher.consumer.handlers.message import Message


class MessageFailed(UsherError):
    """The batch handler named this message as failed."""


class TriedTogether(RetryLater):
    """The error of each message of a call that failed as a whole: which message caused it shows when each is tried by
    itself. It is not charged as a failure."""

    def __init__(self, raised: BaseException) -> None:
        super().__init__(0.0, f"a call with several messages failed: {format_error(raised)}")
        self.__cause__ = raised


#: The outcome for the messages of one lane: so many are done, and the next one failed with this (None: all are done).
LaneOutcome = tuple[int, BaseException | None]


def goes_alone(message: Message) -> bool:
    """Return whether a message must not share a call: it failed before (its neighbours are not to be judged by it), or
    its handler will never be called."""
    return message.alone or not message.plain or message.failures > 0


def judge(parts: Sequence[Sequence[Message]], returned: Any, raised: BaseException | None) -> list[LaneOutcome]:
    """Return the verdicts in the order of ``parts`` (per lane, its messages in order; none is empty).

    ==============================================  =============================================================
    the handler                                     verdict
    ==============================================  =============================================================
    returned None, or an empty mapping              all done
    raised PartialFailure, or returned a mapping    done up to the first failed message of each lane
    raised RetryLater (to return is to raise)       all tried again after the time that it asked for
    raised anything else, one message in the call   that is its error
    raised anything else, several in the call       none done, each tried again by itself (``TriedTogether``)
    ==============================================  =============================================================

    Any other return value, or one that names a message that was not in the call, is an error of the handler, as if it
    had raised it.
    """
    raised = _error_of(returned) if raised is None else raised
    if raised is not None:
        raised = readable(raised)  # a RetryLater without a time is an error like any other
    if isinstance(raised, PartialFailure):
        returned = None
        with contextlib.suppress(Exception):  # a subclass of the handler's own may not have called our __init__
            returned = raised.failed
        raised = (
            None
            if isinstance(returned, Mapping)
            else TypeError(f"{type(raised).__name__} is a PartialFailure without a mapping of failures")
        )
    if raised is None:
        try:
            failed = _named(parts, returned)
        except Exception as problem:  # keys or errors of the handler's own types may fail to be read
            failed = TypeError(f"the failures that a batch handler names cannot be read: {format_error(problem)}")
        if not isinstance(failed, TypeError):
            places = [next((at for at, one in enumerate(part) if one.id in failed), len(part)) for part in parts]
            return [(at, failed[part[at].id] if part[at:] else None) for at, part in zip(places, parts, strict=True)]
        raised = failed
    if isinstance(raised, RetryLater) or sum(map(len, parts)) == 1:
        return [(0, raised) for _ in parts]
    return [(0, TriedTogether(raised)) for _ in parts]


def _named(parts: Sequence[Sequence[Message]], returned: Any) -> dict[str, BaseException] | TypeError:
    if returned is None:
        return {}
    if not isinstance(returned, Mapping):
        return TypeError(
            "a batch handler returns None, or a mapping of the messages that failed; this one returned"
            f" {type(returned).__name__}"
        )
    known = {message.id for part in parts for message in part}
    failed: dict[str, BaseException] = {}
    for named, error in returned.items():
        message_id = named if isinstance(named, str) else getattr(named, "id", None)
        if message_id not in known:
            return TypeError(
                "a batch handler named something as failed that is no message of the call, nor the id of one"
            )
        failed[message_id] = _error_of(error) or MessageFailed(str(error) if error else None)
    return failed


def _error_of(value: Any) -> BaseException | None:
    """Return the error that a handler names, made of its class if it is one; None: it is none."""
    if issubclass(type(value), type) and issubclass(value, BaseException):
        try:
            value = value()
        except Exception as problem:
            return problem
    return value if isinstance(value, BaseException) else None
