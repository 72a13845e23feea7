"""Declare losses: log them, and write them down beside the stream (common/protocol/mishaps.py)."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from usher.common.base.errors import NotNow
from usher.common.base.log import event
from usher.common.protocol.keys import Keys
from usher.common.protocol.mishaps import DeclaredLoss, IdRange, format_id_range, gap_of, loss_command
from usher.common.redis.client import Link
from usher.common.redis.replies import span_of

log = logging.getLogger(__name__)


class LossBook:
    """Writer of the losses of one ticket stream. What it is told must have happened: it asks nobody."""

    def __init__(self, link: Link, keys: Keys) -> None:
        self._link = link
        self._keys = keys

    def declare(self, loss: DeclaredLoss) -> None:
        """Write a loss down, before what follows from it where that is ours to do: twice does no harm. Full memory
        refuses it: then only the log has it."""
        [reply] = self._link.pipeline([loss_command(self._keys, loss)])
        if isinstance(reply, Exception):
            event(log, "loss_not_recorded", level=logging.WARNING, loss=loss.describe(), why=str(reply))

    def cut(self, count: int, position: bytes | None = None, source: str = "") -> None:
        """Tell of ``count`` entries that were cut before they were read, if there are any; ``position``: behind it.
        ``source``: they were cut there, from a stream that is gathered."""
        if count:
            behind: dict[str, Any] = {} if position is None else {"behind": position}
            event(
                log,
                "unread_entries_cut",
                level=logging.ERROR,
                stream=source or self._keys.stream,
                count=count,
                **behind,
                why="trimmed or deleted before they were read: MAXLEN or MINID of an XADD, XTRIM or XDEL by hand",
            )
            self.declare(DeclaredLoss("unread_cut", lost=self._gap(position, source), messages=count, stream=source))

    def _gap(self, position: bytes | None, source: str) -> IdRange | None:
        """Return the ids between that position and the first entry; None when Redis does not say now: the count is
        what matters."""
        with contextlib.suppress(NotNow):
            return None if position is None else gap_of(position, span_of(self._link, source or self._keys.stream))
        return None

    def set_back(self, repeats: IdRange | None, lost: IdRange | None) -> None:
        """Tell of what a group was given that knows nothing of that any more."""
        event(
            log,
            "group_set_back",
            level=logging.ERROR,
            stream=self._keys.stream,
            may_repeat=format_id_range(repeats),
            lost=format_id_range(lost),
            why="Redis lost its last moments (power loss, failover), or somebody set the group back",
        )
        self.declare(DeclaredLoss("set_back", repeats, lost))
