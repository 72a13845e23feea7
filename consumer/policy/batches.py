"""What follows for each lane from how a call with messages of several lanes ended. Pure.

Per ticket only the first messages of a call can be done: an acknowledged prefix. What is behind a failed one goes
again, in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from usher.common.base.errors import PartialFailure, RetryLater, UsherError, readable


class InCall(Protocol):
    """A message, as far as calls care. Hashable by what it is, not by what is in it."""

    alone: bool
    plain: bool
    failures: int

    @property
    def id(self) -> str: ...


class MessageFailed(UsherError):
    """The batch handler named this message as failed."""


class TriedTogether(RetryLater):
    """The call failed as a whole; whose fault it was will show when each message is tried by itself. No failure of this
    one."""

    def __init__(self, error: str) -> None:
        super().__init__(0.0, f"a call with several messages failed: {error}")


class LaneOutcome(NamedTuple):
    """For the messages of one lane: so many of them, from the first on, are done, and this is what the next one failed
    with."""

    done: int
    error: BaseException | None


def goes_alone(message: InCall) -> bool:
    """Whether a message must not share a call: it failed before (its neighbours are not to be judged by it), or it will
    never be called."""
    return message.alone or not message.plain or message.failures > 0


def judge(parts: Sequence[Sequence[InCall]], returned: Any, raised: BaseException | None) -> list[LaneOutcome]:
    """Verdicts in the order of ``parts`` (per lane, its messages in order; none is empty).

    ==============================================  =============================================================
    the handler                                     verdict
    ==============================================  =============================================================
    returned None, or an empty mapping              all done
    raised PartialFailure, or returned a mapping    done up to the first failed one of each lane
    raised RetryLater                               all again when it asked for
    raised anything else, one message in the call   that is its error
    raised anything else, several in the call       none done, each again by itself (``TriedTogether``)
    ==============================================  =============================================================

    What is returned otherwise, or names a message that was not in the call, is an error of the handler: as if it had
    raised it.
    """
    if raised is not None:
        raised = readable(raised)  # a RetryLater that does not say when is an error like any other
    if isinstance(raised, PartialFailure):
        returned = _failed_of(raised)
        raised = (
            None
            if isinstance(returned, Mapping)
            else TypeError(f"{type(raised).__name__} is a PartialFailure without a mapping of failures")
        )
    if raised is None:
        try:
            failed = _named(parts, returned)
        except Exception as problem:  # names or errors of a handler's own kind may fail to say what they are
            failed = TypeError(f"what a batch handler says of failures cannot be read: {_format_failure(problem)}")
        if not isinstance(failed, TypeError):
            return [_first_failed(part, failed) for part in parts]
        raised = failed
    if isinstance(raised, RetryLater) or sum(map(len, parts)) == 1:
        return [LaneOutcome(0, raised) for _ in parts]
    return [LaneOutcome(0, TriedTogether(_format_failure(raised))) for _ in parts]


def _failed_of(raised: PartialFailure) -> Any:
    """What it says of failures; None where that cannot be had."""
    try:
        return raised.failed
    except Exception:  # a handler's own kind of it may never have called ours
        return None


def _named(parts: Sequence[Sequence[InCall]], returned: Any) -> dict[str, BaseException] | TypeError:
    """Errors by message id."""
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
        failed[message_id] = error if isinstance(error, BaseException) else MessageFailed(str(error) if error else None)
    return failed


def _first_failed(part: Sequence[InCall], failed: Mapping[str, BaseException]) -> LaneOutcome:
    for place, message in enumerate(part):
        if message.id in failed:
            return LaneOutcome(place, failed[message.id])
    return LaneOutcome(len(part), None)


def _format_failure(raised: BaseException) -> str:
    try:
        return f"{type(raised).__name__}: {raised}"
    except Exception:  # its text cannot be had
        return type(raised).__name__
