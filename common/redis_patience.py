"""The start of a program that runs for good: Redis may come up later than it, and nobody has to start it again then."""

from __future__ import annotations

import logging
import random
import time

from common.backoff import backoff_s
from common.errors import NotNow, StartRefused
from common.log import event
from common.redis_client import check_reachable

log = logging.getLogger(__name__)

_FIRST_S, _LONGEST_S = 0.5, 5.0


def wait_for_redis(url: str) -> None:
    """``check_reachable``, but while Redis is away it waits, and says so. Raises StartRefused for what waiting does not mend: Redis refuses us,
    or is too old."""
    rng = random.Random()
    failures = 0
    while True:
        try:
            check_reachable(url)
            return
        except StartRefused as refused:
            if not isinstance(refused.__cause__, NotNow):
                raise
            failures += 1
            event(log, "redis_is_away", level=logging.WARNING, why=str(refused), means="nothing starts before it answers")
            time.sleep(backoff_s(failures, _FIRST_S, _LONGEST_S, rng))
