"""Compute the pause before another try. Pure: randomness is an argument."""

from __future__ import annotations

import random


def backoff_s(failures: int, base_s: float, cap_s: float, rng: random.Random) -> float:
    """Return the seconds to wait after the ``failures``-th failure in a row (1 = the first): exponential, capped, with
    "equal jitter".

    Half of the delay is fixed so that a failing dependency is never hit at once again, half is random so that many
    clients do not come back together. After "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
    """
    delay = min(cap_s, base_s * 2.0 ** min(failures - 1, 60))
    return delay / 2 + rng.random() * delay / 2
