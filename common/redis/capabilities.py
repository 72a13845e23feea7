"""Ask Redis what it can do, instead of guessing from its version number: forks and managed servers count in their own
way.

A question is a command that changes nothing: COMMAND INFO or COMMAND DOCS, or the command itself on a missing key. Its
answer is yes, no, or unknown (we may not ask, or Redis refuses everything for the moment).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from usher.common.base.errors import GroupMissing, RedisTrouble
from usher.common.redis.client import Arg, CommandRefused, Link

#: First words of refusals that mean "unknown command or option"; in lower case, after ERR.
_NOT_KNOWN = (
    "syntax error",
    "unknown command",
    "unknown subcommand",
    "unknown option",
    "invalid stream id",
    "wrong number of arguments",
)
_SCRIPT_WITH_FLAGS = "#!lua flags=no-writes\nreturn 1"


@dataclass(frozen=True)
class Capability:
    """A capability of the server. ``has``: None if unknown. ``how``: the question that was asked; ``said``: Redis'
    words if it refused.

    ``required``: Usher does not work without it. ``used``: Usher uses it if present. ``good_for`` names the benefit,
    ``instead`` the substitute without it.
    """

    name: str
    has: bool | None
    how: str
    said: str
    required: bool
    used: bool
    good_for: str
    instead: str


class _CapabilityProbe(NamedTuple):
    name: str
    ask: tuple[Arg, ...]
    judge: Callable[[Any], bool | None]
    good_for: str
    instead: str = ""


def _is_listed(reply: Any) -> bool | None:
    """Judge a reply of COMMAND INFO for one command: nil in its place when Redis does not know it."""
    return None if isinstance(reply, Exception) else bool(reply) and bool(reply[0])


def _is_understood(reply: Any) -> bool | None:
    """Judge a reply to the command itself on a missing key: anything but "unknown" is a yes."""
    if isinstance(reply, GroupMissing) or not isinstance(reply, Exception):
        return True
    if not isinstance(reply, CommandRefused):
        return None
    text = _words(reply).lower()
    return None if text.startswith("noperm") else not text.removeprefix("err ").startswith(_NOT_KNOWN)


def _is_done(reply: Any) -> bool | None:
    """Judge a reply to a command that must simply succeed."""
    if isinstance(reply, CommandRefused):
        return None if _words(reply).startswith("NOPERM") else False
    return None if isinstance(reply, Exception) else True


def _documents(word: str) -> Callable[[Any], bool | None]:
    """Return a judge of COMMAND DOCS: the command's history must mention ``word``. A server without COMMAND DOCS is
    older than all capabilities asked in this way."""

    def judge(reply: Any) -> bool | None:
        if isinstance(reply, CommandRefused):
            return None if _words(reply).startswith("NOPERM") else False
        return None if isinstance(reply, Exception) else word in repr(reply)

    return judge


def _words(refused: Exception) -> str:
    return str(refused).removeprefix("Redis: ")


def _required(key: str) -> list[_CapabilityProbe]:
    """Return probes of what Usher needs. ``key`` does not exist; it lies in the slot of the stream's keys and under
    their ACL patterns."""
    return [
        _CapabilityProbe(
            "xautoclaim",
            ("XAUTOCLAIM", key, "g", "c", 0, "0-0"),
            _is_understood,
            "finding idle messages without a living owner",
        ),
        _CapabilityProbe(
            "xpending_idle",
            ("XPENDING", key, "g", "IDLE", 0, "-", "+", 1),
            _is_understood,
            "renewing a lease touches idle entries",
        ),
        _CapabilityProbe("xtrim_minid", ("XTRIM", key, "MINID", 0), _is_understood, "trimming the inbox of a consumer"),
    ]


def _used(key: str) -> list[_CapabilityProbe]:
    """Return probes of what Usher uses if present."""
    return [
        _CapabilityProbe(
            "idmp",
            ("XADD", key, "NOMKSTREAM", "IDMP", "p", "i", "*", "f", "v"),
            _is_understood,
            "a message that is sent twice is added once, where the stream is set up for it"
            " (common/sending/producer.py)",
            "a script remembers uids, for producers that ask for it",
        ),
        _CapabilityProbe(
            "script_flags",
            ("EVAL", _SCRIPT_WITH_FLAGS, 1, key),  # serverless services refuse scripts without a key
            _is_done,
            "scripts that free memory run when memory is full",
            "those scripts begin with a write that needs no memory, which has the same effect",
        ),
        _CapabilityProbe(
            "xautoclaim_deleted",
            ("COMMAND", "DOCS", "XAUTOCLAIM"),
            _documents("deleted entries"),
            "the sweep reports entries whose body is gone",
            "the sweep looks at the body of every entry that it finds",
        ),
        _CapabilityProbe(
            "lag",
            ("COMMAND", "DOCS", "XINFO|GROUPS"),
            _documents("`lag`"),
            "counting unread entries",
            "entries above the last delivered id are counted, 100,000 at most",
        ),
        _CapabilityProbe(
            "client_tracking",
            ("CLIENT", "TRACKINGINFO"),
            _is_understood,
            "the stream router hears which streams have changed",
            "the stream router asks all streams in turn (portable mode)",
        ),
        _CapabilityProbe(
            "acl_dryrun",
            ("ACL", "DRYRUN", "default", "PING"),
            _is_understood,
            "checking rights",
            "commands are queued in MULTI and discarded",
        ),
    ]


def _not_used_yet(key: str) -> list[_CapabilityProbe]:
    """Return probes of what would spare Usher some work."""
    return [
        _CapabilityProbe(
            "consumer_inactive",
            ("COMMAND", "DOCS", "XINFO|CONSUMERS"),
            _documents("`inactive`"),
            "telling a consumer that waits from one that works",
            "leases tell which consumers are alive",
        ),
        _CapabilityProbe(
            "waitaof",
            ("COMMAND", "INFO", "WAITAOF"),
            _is_listed,
            "knowing that a send is on disk",
            "appendfsync decides",
        ),
        _CapabilityProbe(
            "xackdel",
            ("COMMAND", "INFO", "XACKDEL"),
            _is_listed,
            "acknowledging and deleting in one step",
            "entries stay until they are trimmed",
        ),
        _CapabilityProbe(
            "xreadgroup_claim",
            ("XREADGROUP", "GROUP", "g", "c", "CLAIM", 1, "STREAMS", key, ">"),
            _is_understood,
            "reading idle and new entries in one call",
            "XAUTOCLAIM",
        ),
        _CapabilityProbe(
            "xnack",
            ("COMMAND", "INFO", "XNACK"),
            _is_listed,
            "giving an entry back",
            "XCLAIM to the reserved consumer `master`",
        ),
        _CapabilityProbe(
            "xread_maxcount",
            ("XREAD", "MAXCOUNT", 1, "STREAMS", key, 0),
            _is_understood,
            "one limit over all streams of a call",
            "a limit per stream",
        ),
    ]


def ask(link: Link, absent_key: str) -> tuple[Capability, ...]:
    """Return all capabilities of the server behind ``link``. ``absent_key`` must not exist; nothing is written.

    Raises RedisTrouble when Redis cannot be reached.
    """
    groups = (
        (_required(absent_key), True, True),
        (_used(absent_key), False, True),
        (_not_used_yet(absent_key), False, False),
    )
    questions = [(question, required, used) for group, required, used in groups for question in group]
    replies = link.pipeline([question.ask for question, _, _ in questions])
    return (*(_answered(*asked, reply) for asked, reply in zip(questions, replies, strict=True)), _resp3(link))


def _answered(question: _CapabilityProbe, required: bool, used: bool, reply: Any) -> Capability:
    said = _words(reply) if isinstance(reply, Exception) and not isinstance(reply, GroupMissing) else ""
    how = " ".join(str(word) for word in question.ask).replace("\n", "\\n")
    return Capability(
        question.name, question.judge(reply), how, said, required, used, question.good_for, question.instead
    )


def _resp3(link: Link) -> Capability:
    """Ask for RESP3 by changing the protocol of this connection and changing it back; an unparsable answer counts as
    unknown."""
    reply: Any
    try:
        reply = link.pipeline([("HELLO", 3), ("HELLO", 2)])[0]
    except RedisTrouble as trouble:
        reply = trouble
    said = _words(reply) if isinstance(reply, Exception) else ""
    return Capability(
        "resp3",
        _is_done(reply),
        "HELLO 3",
        said,
        False,
        True,
        "receiving changes on the connection that reads",
        "as without client_tracking",
    )
