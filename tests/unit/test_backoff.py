from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from usher.common.base.backoff import backoff_s


@given(st.integers(1, 10_000), st.integers(0, 1000))
def test_the_wait_is_between_half_of_the_delay_and_the_delay(failures: int, seed: int) -> None:
    delay = min(30.0, 0.1 * 2.0 ** min(failures - 1, 60))
    assert delay / 2 <= backoff_s(failures, 0.1, 30.0, random.Random(seed)) <= delay


def test_many_clients_do_not_come_back_together() -> None:
    rng = random.Random(1)
    assert len({round(backoff_s(5, 0.1, 60.0, rng), 3) for _ in range(100)}) > 50
