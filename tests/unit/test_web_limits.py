"""KeyedTokenBuckets, and the answers of an application that has them."""

from __future__ import annotations

from typing import Any

import pytest
from flask import Response, g, request
from werkzeug.test import TestResponse

from tests.doors import doorman
from usher.common.http import rate_limits as web_limits
from usher.common.http.app import create_app
from usher.common.http.auth import Doorman, needs
from usher.common.http.credentials import Credentials, Identity, Role
from usher.common.http.problem import answer
from usher.common.http.proxies import address_of, parse_networks
from usher.common.http.rate_limits import (
    GUESSES_AT_ONCE,
    LINES_AT_ONCE,
    LINES_OF_ALL_AT_ONCE,
    GuessLimit,
    KeyedTokenBuckets,
    RateLimits,
    rarely,
)


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
    # Strangers share a bucket, and harm nobody who has a token.
    assert [ask("/nowhere", f"guess{number}") for number in range(6)] == [401] * 5 + [429]
    assert ask("/rare", "all") == 200


# -- guesses


class Guessed:
    """An application with two tokens, and a clock of the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, proxies: str = "") -> None:
        self.now_s = 50.0
        monkeypatch.setattr(web_limits, "now_s", lambda: self.now_s)
        tokens = {"ann": Identity(Role.VIEWER, "ann"), "ben": Identity(Role.VIEWER, "ben")}
        self.doorman = Doorman(Credentials(tokens), proxies=parse_networks(proxies))
        app = create_app(__name__, self.doorman, 100)
        app.add_url_rule("/thing", "thing", lambda: answer({}))
        app.add_url_rule("/open", "open", needs(Role.ANYBODY)(lambda: answer({"role": g.role})))
        app.add_url_rule("/log-in", "log-in", needs(Role.ANYBODY)(lambda: self._log_in()), methods=["POST"])
        self.client = app.test_client()

    def _log_in(self) -> Response:
        return answer({"is_in": self.doorman.sign_in(request.form["token"], Response()) is not None})

    def ask(self, token: str, address: str = "10.0.0.1", path: str = "/thing", **headers: str) -> TestResponse:
        named = {"Authorization": f"Bearer {token}"} | {name.replace("_", "-"): text for name, text in headers.items()}
        return self.client.get(path, headers=named, environ_base={"REMOTE_ADDR": address})

    def guess(self, count: int, address: str = "10.0.0.1", **headers: str) -> set[int]:
        return {self.ask(f"guess{number}", address, **headers).status_code for number in range(count)}


@pytest.fixture
def guessed(monkeypatch: pytest.MonkeyPatch) -> Guessed:
    return Guessed(monkeypatch)


def test_after_many_wrong_tokens_an_address_is_answered_before_a_token_is_looked_up(guessed: Guessed) -> None:
    assert guessed.guess(GUESSES_AT_ONCE) == {401}
    unheard = guessed.ask("ann")
    assert (unheard.status_code, unheard.get_json()["title"]) == (429, "too_many_wrong_tokens")
    assert unheard.headers["Retry-After"] == "1"
    assert guessed.ask("one more guess").get_json()["detail"] == unheard.get_json()["detail"], (
        "the same, right or wrong"
    )
    assert guessed.ask("ann", "10.0.0.2").status_code == 200, "elsewhere nobody is concerned"
    guessed.now_s += 1.0
    assert guessed.ask("ann").status_code == 200, "one a second"
    assert [guessed.ask("ben").status_code for _ in range(2)] == [200, 200], "a right one costs nothing"


def test_who_guesses_stops_nobody_at_the_same_address_who_was_let_in_before(guessed: Guessed) -> None:
    assert guessed.ask("ann").status_code == 200
    assert guessed.guess(GUESSES_AT_ONCE + 5) == {401, 429}
    assert guessed.ask("ann").status_code == 200
    assert guessed.ask("ben").status_code == 429


def test_a_program_with_an_old_token_uses_nothing_up(guessed: Guessed) -> None:
    assert {guessed.ask("of last year").status_code for _ in range(2 * GUESSES_AT_ONCE)} == {401}
    assert guessed.ask("ann").status_code == 200


def test_what_needs_no_token_is_answered_whatever_was_guessed(guessed: Guessed) -> None:
    guessed.guess(GUESSES_AT_ONCE)
    for token in ("ann", "a guess"):
        assert guessed.ask(token, path="/open").get_json() == {"role": "anybody"}


def _told(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.facts for record in caplog.records if record.getMessage() == "token_refused"]  # type: ignore[attr-defined]


def test_of_many_guesses_a_few_are_logged_and_the_next_line_says_how_many_were_not(
    guessed: Guessed, caplog: pytest.LogCaptureFixture
) -> None:
    guessed.guess(GUESSES_AT_ONCE + 40)
    told = _told(caplog)
    assert told[-1] == {"address": "10.0.0.1", "sent_in": "header", "left": GUESSES_AT_ONCE - LINES_AT_ONCE}
    assert len(told) == LINES_AT_ONCE
    assert guessed.doorman.refused_tokens == GUESSES_AT_ONCE + 40
    guessed.now_s += 10.0
    guessed.guess(2)
    (last,) = _told(caplog)[LINES_AT_ONCE:]
    assert last["left_out"] == GUESSES_AT_ONCE + 40 - LINES_AT_ONCE, "those that were not looked up are among them"


@pytest.mark.parametrize("sent", ["header", "log-in", "basic"])
def test_one_wrong_token_again_and_again_is_logged_a_few_times(
    sent: str, guessed: Guessed, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(200):  # by many of one network, so that no line is as the one before
        address = f"2001:db8::{number + 1:x}"
        if sent == "log-in":
            guessed.client.post("/log-in", data={"token": "of last year"}, environ_base={"REMOTE_ADDR": address})
        else:
            scheme = "Basic" if sent == "basic" else "Bearer"
            guessed.ask("", address, Authorization=f"{scheme} b2xk")
    assert guessed.doorman.refused_tokens == 200
    assert len(_told(caplog)) == LINES_AT_ONCE


def test_wrong_tokens_of_very_many_addresses_fill_no_log_and_hide_nobody_for_long(
    guessed: Guessed, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(300):
        guessed.ask("of last year", f"10.0.{number // 200}.{number % 200}")
    assert len(_told(caplog)) == LINES_OF_ALL_AT_ONCE
    guessed.now_s += 1.0
    guessed.ask("a guess", "10.9.9.9")
    assert (_told(caplog)[-1]["address"], _told(caplog)[-1]["left_out"]) == ("10.9.9.9", 300 - LINES_OF_ALL_AT_ONCE)


def test_a_program_with_an_old_token_hides_no_guesses_of_others(
    guessed: Guessed, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(500):
        guessed.ask("of last year")
    guessed.ask("a guess", "10.0.0.2")
    assert _told(caplog)[-1]["address"] == "10.0.0.2"


def test_the_addresses_of_one_network_of_ipv6_are_one(guessed: Guessed) -> None:
    for number in range(GUESSES_AT_ONCE):
        guessed.ask(f"guess{number}", f"2001:db8::{number + 1:x}")
    assert guessed.ask("ann", "2001:db8::ffff").status_code == 429
    assert guessed.ask("ann", "2001:db8:0:1::1").status_code == 200
    assert guessed.ask("ann", "2001:db8:0:1::2").status_code == 200
    guessed.guess(GUESSES_AT_ONCE, "2001:db8:0:1::3")
    assert guessed.ask("ann", "2001:db8:0:1::4").status_code == 200, "right before, from a neighbour"


def test_one_old_token_at_many_addresses_of_a_network_uses_one_guess(guessed: Guessed) -> None:
    for number in range(2 * GUESSES_AT_ONCE):
        assert guessed.ask("of last year", f"2001:db8::{number + 1:x}").status_code == 401
    assert guessed.ask("ann", "2001:db8::ffff").status_code == 200


def test_a_right_token_asked_for_many_times_at_once_uses_nothing_up() -> None:
    limit = GuessLimit()
    asked = [limit.ask("10.0.0.1", "seal") for _ in range(GUESSES_AT_ONCE)]
    assert set(asked) == {0.0}
    for _ in asked:
        left = limit.note("10.0.0.1", "seal", is_right=True, was_free=False)
    assert left == GUESSES_AT_ONCE


def test_an_old_token_is_logged_with_the_guesses_that_are_left_by_then(
    guessed: Guessed, caplog: pytest.LogCaptureFixture
) -> None:
    guessed.ask("of last year")
    guessed.guess(GUESSES_AT_ONCE - 1)
    guessed.now_s += 3600.0
    guessed.ask("of last year")
    assert caplog.records[-1].facts["left"] == GUESSES_AT_ONCE  # type: ignore[attr-defined]


def test_guesses_of_one_client_of_a_named_proxy_are_not_those_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    guessed = Guessed(monkeypatch, proxies="10.0.0.5,10.0.0.6")
    assert guessed.guess(GUESSES_AT_ONCE, "10.0.0.5", X_Forwarded_For="9.9.9.9, 1.1.1.1, 10.0.0.6") == {401}
    assert guessed.ask("ann", "10.0.0.5", X_Forwarded_For="1.1.1.1").status_code == 429
    assert guessed.ask("ann", "10.0.0.5", X_Forwarded_For="9.9.9.9").status_code == 200, "what a client says is nothing"
    assert guessed.ask("ann", "10.0.0.5").status_code == 200, "the proxy itself"


@pytest.mark.parametrize(
    ("peer", "said", "address"),
    [
        ("10.0.0.5", "2.2.2.2", "2.2.2.2"),
        ("10.0.0.5", "3.3.3.3,2.2.2.2", "2.2.2.2"),
        ("10.0.0.5", "2.2.2.2, 10.0.0.5", "2.2.2.2"),
        ("::ffff:10.0.0.5", "2001:db8::1", "2001:db8::1"),
        ("10.0.0.5", "10.0.0.5", "10.0.0.5"),
        ("10.0.0.5", "", "10.0.0.5"),
        ("10.0.0.5", "2.2.2.2:4711", "10.0.0.5"),
        ("10.0.0.5", "2.2.2.2, unknown", "10.0.0.5"),
        ("10.0.0.7", "2.2.2.2", "10.0.0.7"),
        ("", "2.2.2.2", ""),
    ],
)
def test_whom_a_proxy_asks_for_is_believed_to_the_first_that_is_no_proxy(peer: str, said: str, address: str) -> None:
    environ = {"REMOTE_ADDR": peer, "HTTP_X_FORWARDED_FOR": said}
    assert address_of(environ, parse_networks("10.0.0.5")) == address
    assert address_of(environ, ()) == peer
