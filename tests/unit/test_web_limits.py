"""KeyedTokenBuckets, and the answers of an application that has them."""

from __future__ import annotations

import pytest

from tests.doors import doorman
from usher.common.http import rate_limits as web_limits
from usher.common.http.app import create_app
from usher.common.http.auth import needs
from usher.common.http.credentials import Identity, Role
from usher.common.http.problem import answer
from usher.common.http.rate_limits import KeyedTokenBuckets, RateLimits, rarely


def test_a_bucket_gives_what_is_in_it_and_fills_again() -> None:
    buckets = KeyedTokenBuckets(per_s=2.0, most=3.0)
    assert [buckets.take("a", 100.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert buckets.take("b", 100.0) == 0.0
    assert buckets.take("a", 100.25) == 0.25
    assert buckets.take("a", 100.5) == 0.0
    assert [buckets.take("a", 999.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]


def test_only_so_many_buckets_are_kept_and_the_one_in_use_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_limits, "_MOST_BUCKETS", 3)
    buckets = KeyedTokenBuckets(per_s=1.0, most=1.0)
    for other in range(10):
        buckets.take(other, 0.0)
        buckets.take("a", 0.0)
    assert len(buckets._levels) == 3
    assert buckets.take("a", 0.0) == 1.0


def test_who_asks_too_often_is_429_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_limits, "now_s", lambda: 50.0)
    guard = doorman("all", ann=Identity(Role.VIEWER, "ann"))
    app = create_app(__name__, guard, 10, limits=RateLimits(per_s=5, per_minute=2))
    app.add_url_rule("/rare", "rare", rarely(lambda: answer({})))
    app.add_url_rule("/open", "open", needs(Role.ANYBODY)(lambda: answer({})))
    client = app.test_client()

    def ask(path: str, token: str, address: str = "10.0.0.1") -> int:
        given = client.get(path, headers={"Authorization": f"Bearer {token}"}, environ_base={"REMOTE_ADDR": address})
        if given.status_code == 429:
            assert given.get_json()["title"] == "too_many_requests"
            assert given.headers["Retry-After"] in ("1", "30")
        return given.status_code

    assert [ask("/rare", "ann") for _ in range(3)] == [200, 200, 429]
    assert [ask("/open", "ann") for _ in range(3)] == [200, 200, 429]
    assert ask("/rare", "all") == 200
    assert ask("/rare", "ann", "10.0.0.2") == 200
    # Whoever guesses tokens is slowed down too, and harms nobody who has one.
    assert [ask("/nowhere", f"guess{number}") for number in range(6)] == [401] * 5 + [429]
    assert ask("/rare", "all") == 200
