"""Report of entries that were cut from a stream before they were read."""

from __future__ import annotations

import logging
from typing import Any

from usher.common.base.log import event

log = logging.getLogger(__name__)


def report_cut(cut: int, stream: str, position: bytes | None = None) -> None:
    """Log entries that were cut before they were read, if there are any; ``position``: behind it."""
    if cut:
        behind: dict[str, Any] = {} if position is None else {"behind": position}
        event(
            log,
            "unread_entries_cut",
            level=logging.ERROR,
            stream=stream,
            count=cut,
            **behind,
            why="trimmed or deleted before they were read: MAXLEN or MINID of an XADD, XTRIM or XDEL by hand",
        )
