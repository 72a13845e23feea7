"""The input and the answers of a process that runs the handler only. Pure. Both ends write one JSON object per line."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

DONE, RAISED, LATER, GAVE_UP, INVALID, HUNG, DIED, NOT_RUN = (
    "done",
    "raised",
    "retry_later",
    "gave_up",
    "invalid",
    "hung",
    "died",
    "not_run",
)


#: The key of an order that only says when the lease ends, on the clock ``now_s``; and of the answer that the handler is
#: called next.
LEASE, STARTS = "lease_ends_s", "starts"
#: The frame that calls the handler; the frames below it are ours.
_OURS = re.compile(r'^ +File ".*[/\\]consumer[/\\]isolation[/\\]child\.py".*$', re.MULTILINE)


@dataclass(frozen=True)
class ProcessSpec:
    """The facts that the process needs. ``handler``: as module:function; ``stream``: its ticket stream; ``handler_s``:
    USHER_HANDLER_SECONDS, 0 is no limit; ``log``: level and format of the handler's logging; ``secrets``: texts that no
    log may show; ``program``: its name in the log. ``has_lease``: the asker will say until when the messages are ours
    (``LEASE``). ``group``: the consumer group, for spans."""

    handler: str
    stream: str
    is_gathered: bool
    handler_s: float = 0.0
    log: tuple[str, str] = ("info", "human")
    secrets: tuple[str, ...] = ()
    program: str = "rehearsal"
    is_rehearsal: bool = True
    has_lease: bool = False
    group: str = ""

    def document(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Piece:
    """A message, as a consumer knows it. ``known``: starts, failures, crashes and losses before; ``flat``: names and
    values by turns."""

    ticket: bytes
    stream_id: bytes
    fence: int
    known: tuple[int, int, int, int]
    flat: tuple[bytes, ...]

    def document(self) -> dict[str, Any]:
        """Return the message as a document for the wire: bytes as Latin-1, which has a letter for each.

        >>> one = Piece(b"42", b"5-1", 9, (1, 1, 0, 0), (b"a", b"\\xff"))
        >>> Piece.of(one.document()) == one
        True
        """
        flat = [part.decode("latin-1") for part in self.flat]
        return {
            "ticket": self.ticket.decode("latin-1"),
            "stream_id": self.stream_id.decode("latin-1"),
            "fence": self.fence,
            "known": self.known,
            "flat": flat,
        }

    @classmethod
    def of(cls, document: dict[str, Any]) -> Piece:
        """Read a message back from its document."""
        starts, failures, crashes, losses = document["known"]
        flat = tuple(part.encode("latin-1") for part in document["flat"])
        known = (starts, failures, crashes, losses)
        return cls(
            document["ticket"].encode("latin-1"),
            document["stream_id"].encode("latin-1"),
            document["fence"],
            known,
            flat,
        )


@dataclass(frozen=True)
class CallResult:
    """The result of a handler's call.

    ``how``: done, raised, retry_later, gave_up, invalid, hung (it was ended), died (it ended its process), not_run.
    ``error``: type and text of the exception, else another remark; ``after_s``: seconds that a RetryLater asks for;
    ``seconds``: duration of the call; ``is_in_doubt``: it died, and need not be the reason.
    """

    how: str
    error: str = ""
    error_type: str = ""
    traceback: str = ""
    after_s: float = 0.0
    seconds: float = 0.0
    is_in_doubt: bool = False

    @property
    def is_taken(self) -> bool:
        return self.how == DONE

    def document(self) -> dict[str, Any]:
        return asdict(self)

    def told(self) -> str:
        """Describe the result in a few words.

        >>> CallResult(RAISED, "KeyError: 'x'").told(), CallResult(LATER, after_s=30).told()
        ("raises KeyError: 'x'", 'RetryLater 30 s')
        >>> CallResult(DIED, "by SIGABRT").told()
        'ended its process by SIGABRT'
        """
        if self.how == LATER:
            return f"RetryLater {self.after_s:g} s"
        words = {
            DONE: "done",
            RAISED: "raises ",
            GAVE_UP: "",
            INVALID: "",
            HUNG: "hung: ",
            DIED: "ended its process ",
            NOT_RUN: "not run: ",
        }
        return words[self.how] + ("" if self.how == DONE else self.error)


def calls_of_handler(dump: str) -> str:
    """Return, from a dump of all threads (faulthandler), the calls of the one that runs the handler, innermost first;
    the whole dump where that thread cannot be told.

    >>> calls_of_handler('Thread 1:\\n  File "a.py"\\n  File "/x/consumer/isolation/child.py", line 1\\n\\nThread 2:')
    'Thread 1:\\n  File "a.py"'
    """
    for thread in dump.split("\n\n"):
        found = _OURS.search(thread)
        if found is not None and " in main" not in found[0]:
            return thread[: found.start()].rstrip()
    return dump
