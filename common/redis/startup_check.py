"""What a program that runs for good makes of its Redis when it starts."""

from __future__ import annotations

import logging

from usher.common.base.errors import NotNow, StartRefused
from usher.common.base.log import event
from usher.common.redis.client import AUTH, REFUSED, check_reachable

log = logging.getLogger(__name__)


def check_at_start(url: str) -> None:
    """``check_reachable``, but a Redis that is away is only told: it may come up later than the program, which until
    then is alive and not ready.

    Raises StartRefused for what waiting does not mend: Redis refuses us, or is too old.
    """
    try:
        check_reachable(url)
    except StartRefused as refused:
        cause = refused.__cause__
        if not isinstance(cause, NotNow) or cause.kind in (AUTH, REFUSED):
            raise
        event(log, "redis_unreachable", level=logging.WARNING, why=str(refused), means="it is waited for")
