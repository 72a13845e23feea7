"""Producers that ask are told "not now" by one key, read along with what they send."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest

from tests.commands import usher
from tests.integration.factories import spent
from usher import Behind, Producer
from usher.common.protocol.keys import Keys, LogKeys
from usher.common.redis.client import Link
from usher.common.sending.producer import Outgoing
from usher.master.insight.stats import BacklogLimits, BacklogWatch
from usher.master.insight.status import StatusReader
from usher.master.leader.elector import Lead

KEYS = Keys("orders", "g")
SIGN = LogKeys("orders").behind


class Watch:
    """A leader's watch with the numbers that a test says."""

    def __init__(self, url: str, link: Link, *limits: int) -> None:
        self.waiting, self.tenants = 0, dict[bytes, int]()
        self.lead = Lead()
        self.lead._set(7, "http://one")
        link.call("SET", KEYS.leader, "7 http://one")
        self.service = BacklogWatch(
            Link(url, "test:watch"), KEYS, self.lead, BacklogLimits(*limits), lambda: self.waiting, lambda: self.tenants
        )

    def look(self, waiting: int, **tenants: int) -> None:
        self.waiting, self.tenants = waiting, {name.encode(): number for name, number in tenants.items()}
        self.service.run_once()


def _look_again(producer: Producer) -> None:
    """As half a second later."""
    assert producer._sign is not None
    producer._sign._asked_s -= 1e6


@pytest.mark.parametrize("dedup_s", [0.0, 3600.0])
def test_a_producer_that_heeds_limits_is_told_and_goes_on_later(redis_url: str, link: Link, dedup_s: float) -> None:
    watch = Watch(redis_url, link, 100)
    heeds = Producer(redis_url, "orders", heed_limits=True, dedup_s=dedup_s)
    other = Producer(redis_url, "orders", dedup_s=dedup_s)
    heeds.send("1", {"n": 1}, uid="a")
    watch.look(100)
    heeds.send("1", {"n": 2}, uid="b")  # learns of it
    with pytest.raises(Behind, match="orders is behind: 100 messages wait; nothing was sent") as told:
        heeds.send("1", {"n": 3}, uid="c")
    assert (told.value.waiting, told.value.tenant, told.value.stream) == (100, "", "orders")
    other.send("1", {"n": 3}, uid="d")
    watch.look(91)
    _look_again(heeds)
    with pytest.raises(Behind):
        heeds.send("1", {"n": 3}, uid="c")
    watch.look(89)
    _look_again(heeds)
    heeds.send("1", {"n": 3}, uid="c")
    assert link.call("XLEN", "orders") == 4
    for producer in (heeds, other):
        producer.close()


def test_the_first_send_asks_and_each_tenant_has_its_own_limit(redis_url: str, link: Link) -> None:
    watch = Watch(redis_url, link, 0, 10)
    watch.look(1000, a=10, b=3)
    assert link.call("HGETALL", SIGN) == [b"g/a", b"10"] and 0 < link.call("PTTL", SIGN) <= 10_000
    for options, field in (({"tenant_field": "customer"}, "customer"), ({"tenant_field": "@ticket:-"}, "x")):
        producer = Producer(redis_url, "orders", heed_limits=True, **options)
        with pytest.raises(Behind, match="orders, tenant a is behind: 10"):
            producer.send("a-1", {field: "a"})
        producer.send("b-1", {field: "b"})
        with pytest.raises(Behind):
            producer.send_many([Outgoing("b-1", {field: "b"}), Outgoing("a-1", {field: "a"})])
        producer.close()
    whole = Producer(redis_url, "orders", heed_limits=True)
    whole.send("a-1", {"customer": "a"})
    of_source = Producer(redis_url, "a", heed_limits="orders", tenant_field="@stream")
    with pytest.raises(Behind):
        of_source.send("1", {"n": 1})
    for producer in (whole, of_source):
        producer.close()


def test_a_send_is_one_round_trip_and_without_the_wish_nothing_is_asked(redis_url: str, link: Link) -> None:
    plain, heeds = Producer(redis_url, "orders"), Producer(redis_url, "orders", heed_limits=True)
    for producer in (plain, heeds):
        producer.send("1", {"n": 0})
    sent = spent(link, lambda: plain.send("1", {"n": 1}))
    assert (sent["xadd"], sent["hgetall"]) == (1, 0)
    pipeline = heeds._link.pipeline
    flights: list[Any] = []
    with mock.patch.object(heeds._link, "pipeline", lambda commands: flights.append(commands) or pipeline(commands)):
        sent = spent(link, lambda: heeds.send_many([Outgoing("1", {"n": at}) for at in range(300)]))
    assert [len(commands) for commands in flights] == [301]
    assert (sent["xadd"], sent["hgetall"]) == (300, 1)
    for producer in (plain, heeds):
        producer.close()


def test_the_sign_is_of_the_leader_alone_and_of_its_group(redis_url: str, link: Link) -> None:
    watch = Watch(redis_url, link, 100, 10)
    link.call("HSET", SIGN, "h", 5, "g2/a", 6)
    watch.look(200, a=20)
    assert link.call("HMGET", SIGN, "g", "g/a", "h", "g2/a") == [b"200", b"20", b"5", b"6"]
    watch.look(200)
    assert link.call("HMGET", SIGN, "g", "g/a", "h") == [b"200", None, b"5"]
    assert StatusReader(link, KEYS).overview()["behind"] == {"g": 200, "h": 5, "g2/a": 6}
    watch.look(10)
    assert sorted(link.call("HKEYS", SIGN)) == [b"g2/a", b"h"]
    link.call("SET", KEYS.leader, "8 http://two")
    watch.look(300)
    assert link.call("HGET", SIGN, "g") is None, "another one leads"
    watch.lead._set(None, "")
    watch.look(300)
    assert watch.service.behind == {}


def test_usher_send_waits(redis_url: str, link: Link, capsys: pytest.CaptureFixture[str]) -> None:
    link.call("HSET", SIGN, "g", 5)
    with mock.patch.dict(os.environ, USHER_REDIS_URL=redis_url):
        words = ("send", "--ticket-stream", "orders", "--ticket", "1", "n=1")
        assert usher(*words) == 0
        assert link.call("XLEN", "orders") == 1, "who does not ask is not told"
        link.call("PEXPIRE", SIGN, 300)
        capsys.readouterr()
        assert usher("send", "--ticket-stream", "orders", "--simulate", "1", "--wait") == 0
    assert (link.call("XLEN", "orders"), link.call("EXISTS", SIGN)) == (2, 0)
    assert "usher: 5 messages wait in orders: this send waits, too" in capsys.readouterr().err
