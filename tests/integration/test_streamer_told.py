"""What a streamer says of itself: who sends, and since when the outbox was not sent to its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.integration.test_streamer_trouble import _program
from tests.outboxes import STREAM, Hand, Outbox, made_outbox, until
from usher.common.base.clock import now_s
from usher.common.base.errors import SqlTrouble
from usher.common.redis.client import Link
from usher.common.runtime.settings import load
from usher.master.leader.elector import Elector
from usher.master.settings import StreamerSettings
from usher.master.streamer.program import StreamerProgram, streamer_metrics

_LONG_S = 1000.0


def _behind(hand: Hand) -> bool:
    return now_s() - hand.streamer.caught_up_s > _LONG_S / 2


def _said(client: Any) -> dict[str, Any]:
    said: dict[str, Any] = client.get("/api/health").json
    return said


def _long_ago(hand: Hand) -> None:
    hand.streamer.caught_up_s = now_s() - _LONG_S


def test_the_outbox_was_sent_to_its_end_when_a_look_found_no_more_than_was_sent(
    sqlite_outbox: Outbox, hands: Callable[..., Hand]
) -> None:
    hand = hands(sqlite_outbox, batch_rows=10)
    sqlite_outbox.stage_many(25)
    _long_ago(hand)
    hand.turn(2)
    assert _behind(hand), "two full batches: there may be more"
    hand.turn()
    assert not _behind(hand), "the third one was not full"
    _long_ago(hand)
    hand.turn()
    assert not _behind(hand), "nothing is there"


def test_what_is_not_durable_yet_is_behind(sqlite_outbox: Outbox, hands: Callable[..., Hand]) -> None:
    hand = hands(sqlite_outbox, outbox_wait_replicas=1)
    sqlite_outbox.stage_many(1)
    _long_ago(hand)
    hand.turn(2)
    assert _behind(hand)


def test_who_doubts_its_epoch_is_as_far_behind_as_before_and_who_stands_by_is_not(
    sqlite_outbox: Outbox, hands: Callable[..., Hand]
) -> None:
    hand = hands(sqlite_outbox)
    sqlite_outbox.stage_many(1)
    _long_ago(hand)
    epoch = hand.lead.epoch
    assert epoch is not None
    hand.lead.doubt(epoch)
    hand.turn()
    assert _behind(hand), "its rows wait all the same"
    hand.lead.lost(epoch)
    hand.turn()
    assert not _behind(hand), "another one's business"


def test_a_failing_database_leaves_it_behind(sqlite_outbox: Outbox, hands: Callable[..., Hand]) -> None:
    hand = hands(sqlite_outbox)
    with sqlite_outbox.engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE staged_log_records"))
    _long_ago(hand)
    with pytest.raises((SqlTrouble, sa.exc.SQLAlchemyError)):
        hand.turn()
    assert _behind(hand)


def test_who_has_not_extended_its_lease_no_longer_says_that_it_streams(
    sqlite_outbox: Outbox, hands: Callable[..., Hand]
) -> None:
    """Nobody tells it that another one leads by now."""
    hand = hands(sqlite_outbox, lead=False)
    hand.elector._lease_ms = 300
    hand.elect()
    assert hand.lead.holds
    hand.elector._works = lambda: False
    until(lambda: (hand.elector.run_once(), not hand.lead.holds)[1])  # type: ignore[func-returns-value]
    assert hand.lead.is_ours, "as far as it knows"
    hand.elector._works = lambda: True
    until(lambda: (hand.elector.run_once(), hand.lead.holds)[1])  # type: ignore[func-returns-value]


def test_a_lease_that_is_longer_than_health_waits_is_extended_in_time(
    sqlite_outbox: Outbox, hands: Callable[..., Hand]
) -> None:
    hand = hands(sqlite_outbox)
    elector = Elector(hand.elector._link, hand.keys, hand.lead, "one", 600_000, lambda: True)
    assert elector.run_once() < elector.stalls_after_s / 2


def test_metrics_name_the_outbox(sqlite_outbox: Outbox, redis_url: str, link: Link) -> None:
    program = _program(sqlite_outbox.url, redis_url)
    try:
        program.start()
        sqlite_outbox.stage_many(3)
        until(lambda: program.streamer.sent == 3)
        told = {
            sample.name: (sample.labels, sample.value)
            for family in streamer_metrics(program, "mine")
            for sample in family.samples
        }
        assert told["usher_outbox_streams"] == ({"outbox": "mine"}, 1)
        assert told["usher_outbox_sent_rows_total"] == ({"outbox": "mine"}, 3)
        assert told["usher_outbox_refused_rows_total"] == ({"outbox": "mine"}, 0)
        assert told["usher_outbox_behind_seconds"][1] < 5
    finally:
        program.stop()


def test_an_outbox_whose_name_another_one_has_is_unwell(
    sqlite_outbox: Outbox, redis_url: str, link: Link, tmp_path_short: Path
) -> None:
    other = made_outbox(f"sqlite:///{tmp_path_short}/other.db")
    first = _program(sqlite_outbox.url, redis_url)
    served = StreamerProgram(StreamerSettings(outbox_url=other.url, ticket_stream=STREAM), redis_url)
    client = served.app.test_client()
    try:
        first.start()
        until(lambda: first.lead.holds)
        served.start(0, "")
        until(lambda: client.get("/api/health").status_code == 503)
        assert "USHER_OUTBOX_NAME" in " ".join(_said(client)["reasons"])
        first.stop()
        until(lambda: client.get("/api/health").status_code == 200)
        assert _said(client)["streams"] is True
    finally:
        first.stop()
        served.stop()
        other.close()


def test_a_dead_thread_has_the_process_begin_anew(sqlite_outbox: Outbox, redis_url: str) -> None:
    served = StreamerProgram(StreamerSettings(outbox_url=sqlite_outbox.url, ticket_stream=STREAM), redis_url)
    served.start(0, "")
    try:
        assert not served.liveness().stalled
        served.streamer.stop()
        until(lambda: "stream has ended" in served.liveness().stalled)
    finally:
        served.stop()


@pytest.mark.parametrize("path", ["/api/health", "/metrics"])
def test_a_name_of_somewhere_else_leads_to_no_streamer_that_asks_for_no_token(tmp_path: Path, path: str) -> None:
    url = f"sqlite:///{tmp_path}/outbox.db"
    made_outbox(url)
    told = {}
    for token in ("", "t" * 20):
        environ = {"USHER_OUTBOX_URL": url, "USHER_OUTBOX_BIND": "127.0.0.1:8740", "USHER_API_TOKEN": token}
        served = StreamerProgram(load(StreamerSettings, environ), "redis://127.0.0.1:1/0")
        for host in ("evil.example:8740", "127.0.0.1:8740", "[::1]:8740", "localhost:8740", "10.0.0.9"):
            asked = served.app.test_client().get(path, headers={"Host": host})
            told[host, token != ""] = asked.status_code == 421
    assert [host for host, is_refused in told.items() if is_refused] == [("evil.example:8740", False)]
