"""Check Redis at the start of a long-running program."""

from __future__ import annotations

import logging

from usher.common.base.errors import NotNow, StartRefused
from usher.common.base.log import event
from usher.common.redis.client import AUTH, REFUSED, check_reachable

log = logging.getLogger(__name__)


def check_at_start(url: str) -> None:
    """Call ``check_reachable``, but only log a Redis that is away: it may come up later than the program, which until
    then is alive and not ready.

    Raises StartRefused for faults that waiting does not mend: Redis refuses us, or is too old.
    """
    try:
        check_reachable(url)
    except StartRefused as refused:
        cause = refused.__cause__
        if not isinstance(cause, NotNow) or cause.kind in (AUTH, REFUSED):
            raise
        event(log, "redis_unreachable", level=logging.WARNING, why=str(refused), means="waiting for it")
