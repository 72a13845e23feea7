"""Effects in Redis, once per message and never under an old fence: one script checks, applies the commands, and
records the uid::

    RedisGuard("redis://effects-server/0").apply(message, ("INCRBY", f"total:{message.ticket_id}", 5))

A refusal of the first command is an error of the handler's, and of a later one a GiveUp, since Redis does not undo the
commands before it. It works on one server or with Sentinel, not on a cluster. docs/sinks.md has the outcomes.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from usher.common.base.errors import GiveUp, NotNow, ReplyUnknown
from usher.common.protocol.message import key_bytes
from usher.common.redis.client import Arg, CommandRefused, Link
from usher.consumer.sinks.outcomes import Marked, SinkMisused, SinkNotNow, StaleFence, fenced_ticket, is_rehearsal

#: A script in a folder of its own: it runs on the Redis of the effects, so Usher's own user does not need its commands
#: (common/redis/acl.py).
_SCRIPT = "guard"
_WEEK_S = 7 * 86_400.0
_AGAIN_S = 0.5
#: Lua's stack ends at about 8,000 values. A script that fails there is not undone: the commands before the failure
#: would be applied at every try.
_MOST_WORDS = 7_000


class Outcome(enum.Enum):
    """The outcome of an effect."""

    APPLIED = "applied"
    DUPLICATE = "duplicate"
    REHEARSED = "rehearsed"


class Applied(NamedTuple):
    """The outcome and the replies of the commands (none for a duplicate and in a rehearsal)."""

    outcome: Outcome
    replies: list[Any]


class RedisGuard:
    """Fenced, exactly-once commands on one Redis (see the module). Threads may share it: each gets its own connection.
    ``name``: one per use, as for SQL sinks; ``keep_s``, ``keep_most``: for how long a ticket's uids are kept, and how
    many."""

    def __init__(
        self, redis_url: str, name: str = "default", *, keep_s: float = _WEEK_S, keep_most: int = 10_000
    ) -> None:
        if redis_url.startswith(("redis+cluster:", "rediss+cluster:")):
            raise SinkMisused(
                "RedisGuard does not work on a cluster: keys of different tickets are on different servers there"
            )
        if not 0 < keep_s < 1e12 or keep_most < 1:
            raise SinkMisused("keep_s and keep_most must be positive: a guard that keeps nothing knows no repeat")
        self._url = redis_url
        self._name = name
        self._keep_ms = max(1, int(keep_s * 1000))
        self._keep_most = keep_most
        self._mine = threading.local()

    def apply(self, message: Marked, *commands: Sequence[Arg], keys: Sequence[str] | None = None) -> Applied:
        """Apply ``commands`` in one atomic step, unless the message's effect is there already. ``keys``: those that
        they touch, where a command's key is not its first word, or it has several. Raises as the module says."""
        words: list[Arg] = []
        for command in commands:
            if len(command) > _MOST_WORDS:
                raise SinkMisused(
                    f"a command has at most {_MOST_WORDS:,} words (this {command[0]!r} has {len(command):,}): make"
                    " several of it"
                )
            words += [len(command), *map(_raw, command)]
        if is_rehearsal(message):
            return Applied(Outcome.REHEARSED, [])  # Redis undoes nothing, so nothing is sent
        touched = (
            [key_bytes("a key", command[1]) for command in commands if len(command) > 1]
            if keys is None
            else [key_bytes("a key", key) for key in keys]
        )
        uid = _raw(message.uid)
        fence = message.fence if fenced_ticket(message) else ""
        arguments: list[Arg] = [fence, uid, self._keep_ms, self._keep_most, *words]
        try:
            own = [f"usher:guard:{self._name}:{fenced_ticket(message)}:{kind}" for kind in ("fence", "uids")]
            kind, *rest = self._linked.run(_SCRIPT, [*own, *touched], arguments)
        except (NotNow, ReplyUnknown) as trouble:
            raise SinkNotNow(
                _AGAIN_S, f"Redis cannot apply it for the moment, or applied it and its reply was lost: {trouble}", True
            ) from trouble
        if kind == b"STALE":
            raise StaleFence(message)
        if kind == b"REFUSED":
            raise CommandRefused(rest[1].decode("utf-8", "replace"))
        if kind == b"PARTLY":
            raise GiveUp(
                f"the effect was applied in part: command {int(rest[0])} was refused"
                f" ({rest[1].decode('utf-8', 'replace')})"
            )
        return Applied(Outcome.DUPLICATE, []) if kind == b"DUPLICATE" else Applied(Outcome.APPLIED, rest)

    def close(self) -> None:
        """Close this thread's connection. The next effect opens its own again."""
        self._linked.close()

    @property
    def _linked(self) -> Link:
        # A forked child has it from its parent; it opens a connection of its own there.
        if not hasattr(self._mine, "link"):
            self._mine.link = Link(self._url, "usher:guard")
        link: Link = self._mine.link
        return link


def _raw(word: Arg) -> Arg:
    return word.encode("utf-8", "surrogateescape") if isinstance(word, str) else word
