"""A master with no settings of trimming cuts what is done and old, and nothing that a reader needs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.process.crew import KEYS, Crew, ids_in
from usher import Link

pytestmark = pytest.mark.process

_COUNT, _DAY_MS = 1000, 86_400_000


def test_what_a_slow_group_needs_stays_and_what_is_old_and_done_goes(
    tmp_path: Path, redis_url: str, link: Link
) -> None:
    began_ms = int(time.time() * 1000) - 3 * _DAY_MS
    old = [f"{began_ms + number}-0" for number in range(_COUNT)]
    link.call("XGROUP", "CREATE", KEYS.stream, "slow", "0", "MKSTREAM")
    new = [link.call("XADD", KEYS.stream, one, "ticket_id", f"T{at % 20}") for at, one in enumerate((*old, "*"))][-1]
    given = link.call("XREADGROUP", "GROUP", "slow", "s", "COUNT", _COUNT // 2, "STREAMS", KEYS.stream, ">")[0][1]
    with Crew(tmp_path, redis_url) as crew:
        crew.start(1, ["c1"])
        crew.wait_until_handled([*old, new.decode()], within_s=60)
        crew.wait_until_settled(link)
        assert ids_in(link) == [*old, new.decode()], "three days old, done, and pending in the other group"
        link.call("XACK", KEYS.stream, "slow", *(entry_id for entry_id, _ in given))
        crew.until(lambda: ids_in(link)[0] != old[0], 60, "the master trims")
    left = link.call("XREADGROUP", "GROUP", "slow", "s", "STREAMS", KEYS.stream, ">")[0][1]
    assert [entry_id.decode() for entry_id, _ in left] == [*old[_COUNT // 2 :], new.decode()]
    assert len(ids_in(link)) < _COUNT * 3 // 4, "but for a part of a node, what both have done is gone"
    assert link.call("XLEN", KEYS.losses) == 0
