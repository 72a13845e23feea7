"""Masters that gather, as services in this process, against a real Redis: found at once, shared, nothing missed and
nothing twice."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import orjson
import pytest

from tests.integration.factories import with_user
from tests.integration.gathered import Gathered
from tests.integration.routers import until
from tests.proxy import Proxy
from tests.topologies import Cluster
from usher.common.doctor import collector
from usher.common.doctor.collector import SourcesReader, collect
from usher.common.doctor.judgements import DoctorSeverity, examine
from usher.common.protocol.keys import Keys, LogKeys
from usher.common.protocol.sources import SHARDS, SourceSelection
from usher.common.redis import tracking
from usher.common.redis.client import Link
from usher.common.redis.locate import resolve_redis_url
from usher.common.redis.replies import pairs
from usher.master.settings import MasterSettings
from usher.master.sources import gatherer as gatherer_module
from usher.master.sources.gatherer import Gatherer, SourceServices


@pytest.fixture
def world(link: Link) -> Gathered:
    made = Gathered(link)
    link.call("DEL", made.keys.shares)
    return made


@contextlib.contextmanager
def running(
    url: str, streams: str = "t:*", *, discover_s: float = 3600, trim_s: float = 10, batch: int = 1000, **settings: Any
) -> Iterator[SourceServices]:
    """A master's gathering, started; it ends as a master that is stopped does."""
    given = MasterSettings(ticket_stream=streams, group="g", **({"leader_lease_seconds": 1.0} | settings))
    assert given.sources is not None
    trims = mock.patch("usher.master.operations.trimming.TRIM_S", trim_s)
    with trims, mock.patch.multiple("usher.master.sources.gatherer", DISCOVER_S=discover_s, BATCH=batch):
        made = SourceServices(
            given, given.sources, Keys(given.work_stream, "g"), url, lambda role: Link(url, f"master:{role}")
        )
    for service in made.services:
        service.start()
    try:
        yield made
    finally:
        for service in made.services:
            service.stop()
        assert all(service.join(20) for service in made.services)


def service(of: SourceServices, name: str) -> Any:
    return next(one for one in of.services if one.name == name)


@pytest.fixture
def unswept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gatherer_module, "_SWEEP_S", 3600.0)


@pytest.mark.usefixtures("unswept")
def test_streams_that_were_there_and_streams_that_come_are_gathered_at_once(world: Gathered, redis_url: str) -> None:
    old = world.send("t:old", "1-1", "1-2")
    world.send("other", "1-1")
    with running(redis_url):
        until(lambda: world.moved("t:old") == old)
        for number in range(20):
            new = world.send(f"t:{number}", "5-1")
            until(lambda number=number, new=new: world.moved(f"t:{number}") == new)  # type: ignore[misc]
        old += world.send("t:old", "2-1")
        until(lambda: world.moved("t:old") == old)
    assert world.moved("other") == []
    assert world.link.call("HGETALL", world.keys.shares) == [], "a master that stops gives everything up"


@pytest.mark.usefixtures("unswept")
def test_connections_that_break_in_the_middle_lose_nothing_and_repeat_nothing(
    world: Gathered, link: Link, redis_url: str
) -> None:
    rng = random.Random(5)
    sent: dict[str, list[bytes]] = {f"t:{number}": [] for number in range(300)}
    with Proxy(redis_url) as proxy, running(proxy.url):
        for turn in range(60):
            for name in rng.sample(sorted(sent), 30):
                sent[name] += world.send(name)
            if turn % 10 == 5:
                proxy.break_all()
        until(lambda: len(world.entries()) >= 60 * 30)
        until(lambda: world.moved("t:7") == sent["t:7"])
    assert world.all_moved() == sent


@pytest.mark.usefixtures("unswept")
def test_sources_that_were_deleted_while_no_master_ran_are_forgotten_and_no_others(
    world: Gathered, link: Link, redis_url: str
) -> None:
    for name in ("t:gone", "t:here", "elsewhere"):
        world.send(name, "5-1")
        world.gather(name)
    link.call("DEL", "t:gone", "elsewhere", world.keys.shares)
    with running(redis_url, "t:*") as made:
        until(lambda: link.call("HGET", world.keys.gathered, "t:gone") is None)
        until(lambda: service(made, "gather").rounds.known == 1)
    assert pairs(link.call("HGETALL", world.keys.gathered)) == {b"": b"", b"t:here": b"5-1", b"elsewhere": b"5-1"}, (
        "who takes that in, will see"
    )
    assert link.call("EXISTS", LogKeys("t:gone").groups) == 0


@pytest.mark.usefixtures("unswept")
def test_a_master_forgets_deleted_sources_of_other_masters_too(world: Gathered, link: Link, redis_url: str) -> None:
    world.share("another")
    with running(redis_url, discover_s=0.5) as gathering:
        names = [f"t:{number}" for number in range(200)]
        for name in names:
            world.send(name, "5-1")
        until(lambda: service(gathering, "gather").rounds.known == 200)
        link.call("DEL", *names[1:])
        until(lambda: service(gathering, "gather").rounds.known == 1)


def test_a_reply_that_is_lost_is_asked_for_again_and_nothing_comes_twice(world: Gathered, redis_url: str) -> None:
    lost = []

    def lose_some(chunk: bytes) -> bytes | None:
        if b"OVER" in chunk and len(lost) < 5:
            lost.append(chunk)
            return None
        return chunk

    with Proxy(redis_url, lose_some) as proxy, running(proxy.url, "a,b"):
        sent = [world.send("a")[0] for _ in range(50)]
        until(lambda: world.moved("a") == sent and len(lost) == 5)
    assert world.moved("a") == sent


def test_two_masters_share_the_sources_and_one_takes_over_what_the_other_had(
    world: Gathered, link: Link, redis_url: str
) -> None:
    sent: dict[str, list[bytes]] = {f"t:{number}": [] for number in range(50)}

    def send() -> None:
        for name in sent:
            sent[name] += world.send(name)

    with running(redis_url) as first, Proxy(redis_url) as way, running(way.url) as second:
        until(lambda: [len(service(one, "gather").held) for one in (first, second)] == [32, 32])
        send()
        until(lambda: len(world.entries()) == 50)
        until(lambda: min(service(one, "gather").moved for one in (first, second)) > 5)  # both did a part
        way.lead_to("redis://127.0.0.1:1")
        way.break_all()
        send()
        until(lambda: len(world.entries()) == 100)
        until(lambda: len(service(first, "gather").held) == 64)
        way.lead_to(redis_url)
        until(lambda: [len(service(one, "gather").held) for one in (first, second)] == [32, 32])
        send()
        until(lambda: len(world.entries()) == 150)
    assert world.all_moved() == sent


@pytest.mark.usefixtures("unswept")
def test_a_flood_in_one_source_does_not_keep_another_ones_message_waiting(
    world: Gathered, link: Link, redis_url: str
) -> None:
    flood = 30_000
    for _ in range(0, flood, 1000):
        link.pipeline([("XADD", "flood", "*", "ticket_id", "T", "body", "x")] * 1000)
    world.stream.create_group(b"0-0")
    with running(redis_url, "flood,quiet", batch=500):
        until(lambda: len(world.read(100)) > 0)
        quiet = world.send("quiet")
        read = 0
        while not world.moved("quiet"):
            read += len(world.read(500))
        assert read < 5000, f"{read} of the flood came first"
        assert world.position("flood") < link.call("XINFO", "STREAM", "flood")[7], "the flood is not over"
    assert world.moved("quiet") == quiet


def test_a_server_that_tells_of_no_changes_is_asked_instead(
    world: Gathered, link: Link, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    link.call("ACL", "SETUSER", "plain", "reset", "on", ">pw", "~*", "+@all", "-client", "+client|setname")
    scheme, _, rest = redis_url.partition("://")
    old = world.send("t:old")
    try:
        with running(f"{scheme}://plain:pw@{rest.rpartition('@')[2]}", "t:*,listed", discover_s=0.5) as made:
            until(lambda: service(made, "watch").why)
            until(lambda: world.moved("t:old") == old)
            for count in range(2, 7):
                old += world.send("t:old")
                until(lambda count=count: len(world.moved("t:old")) == count)  # type: ignore[misc]
            listed = world.send("listed")
            until(lambda: world.moved("listed") == listed)
            new = world.send("t:new")
            until(lambda: world.moved("t:new") == new)
            world.link.call("DEL", "t:new")
            world.link.call("SET", "t:new", "no stream")
            old += world.send("t:old")
            until(lambda: world.moved("t:old") == old)
    finally:
        link.call("ACL", "DELUSER", "plain")
    assert "source_notifications_unavailable" in [record.getMessage() for record in caplog.records]


def test_something_in_between_that_does_not_tell_is_found_out_and_the_sources_are_asked(
    world: Gathered, redis_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gatherer_module, "_SWEEP_S", 0.1)
    monkeypatch.setattr(tracking, "_WAIT_S", 0.1)
    with (
        Proxy(redis_url, lambda chunk: b"" if chunk.startswith(b">2") else chunk) as proxy,
        running(proxy.url, "a,b,c") as made,
    ):
        until(lambda: len(service(made, "gather").held) == 64)

        def is_found_out() -> bool:
            time.sleep(0.05)
            return bool(world.send("a") and world.send("b") and service(made, "watch").why)

        until(is_found_out)
        sent = world.send("c")
        until(lambda: world.moved("c") == sent)
    assert "source_notifications_unavailable" in [record.getMessage() for record in caplog.records]


def test_changes_that_are_told_are_never_taken_for_lost_ones(
    world: Gathered, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gatherer_module, "_SWEEP_S", 0.001)
    with running(redis_url) as made:
        until(lambda: len(service(made, "gather").held) == 64)
        for turn in range(15):
            sent = [world.send(f"t:{number}") for number in range(20)]
            until(lambda turn=turn, sent=sent: len(world.entries()) == (turn + 1) * len(sent))  # type: ignore[misc]
        assert (service(made, "watch").why, service(made, "watch")._lost.total()) == ("", 0)


@pytest.mark.usefixtures("unswept")
def test_after_flushall_it_begins_anew(world: Gathered, link: Link, redis_url: str) -> None:
    with running(redis_url):
        world.send("t:a", "5-1")
        until(lambda: world.moved("t:a") == [b"5-1"])
        link.call("FLUSHALL")
        sent = world.send("t:a", "3-1")
        until(lambda: world.moved("t:a") == sent)


@pytest.mark.usefixtures("unswept")
def test_full_memory_is_waited_for(world: Gathered, link: Link, redis_url: str) -> None:
    with running(redis_url) as made:
        sent = world.send("t:a")
        until(lambda: world.moved("t:a") == sent)
        sent += world.send("t:a")
        until(lambda: world.moved("t:a") == sent)
        link.call("CONFIG", "SET", "maxmemory", 1)
        try:
            gather = service(made, "gather")
            gather.changed([b"t:a"])
            until(lambda: "OOM" in (gather.trouble or ""))
        finally:
            link.call("CONFIG", "SET", "maxmemory", 0)
        sent += world.send("t:a")
        until(lambda: world.moved("t:a") == sent)
        until(lambda: gather.trouble is None)


def as_limited(link: Link, url: str, *rights: str) -> str:
    """The address of a user of its own."""
    link.call("ACL", "SETUSER", "limited", "reset", "on", ">x", *rights)
    return with_user(url, "limited", "x")


@pytest.mark.usefixtures("unswept")
def test_a_source_that_redis_refuses_is_told_and_the_others_go_on(world: Gathered, link: Link, redis_url: str) -> None:
    sent = {name: world.send(name) for name in ("a", "b")}
    try:
        with running(
            as_limited(link, redis_url, "+@all", "~usher:*", "~*:groups", "~a", "~b", "~t:*"), "secret,a,b,t:*"
        ) as made:
            until(lambda: world.all_moved() == sent)
            until(lambda: "NOPERM" in made.says() or "permissions" in made.says())
            sent["t:1"] = world.send("t:1")
            sent["a"] += world.send("a")
            until(lambda: world.all_moved() == sent)
            assert service(made, "gather").rounds.troubles.keys() == {b"secret"}
            assert service(made, "gather").trouble is None
    finally:
        link.call("ACL", "DELUSER", "limited")


@pytest.mark.usefixtures("unswept")
def test_a_work_stream_that_redis_refuses_is_not_laid_on_the_sources(
    world: Gathered, link: Link, redis_url: str
) -> None:
    sent = world.send("a")
    link.call("SET", world.keys.dead, "no stream")
    with running(redis_url, "a,b") as made:
        gather = service(made, "gather")
        until(lambda: gather.trouble is not None)
        assert gather.rounds.troubles == {}
        link.call("DEL", world.keys.dead)
        until(lambda: world.moved("a") == sent)


def test_how_far_each_source_is(world: Gathered, link: Link) -> None:
    for name in ("new", "done", "behind", "ahead"):
        world.send(name, *(f"{number}-1" for number in range(1, 11)))
    world.gather("done", "ahead")
    world.gather("behind", quantum=3)
    link.call("XGROUP", "SETID", "ahead", "g", "99-0")
    link.call("SET", "text", "x")
    names = ("new", "done", "behind", "ahead", "text", "gone")
    flat = world.scripts.run("look_at_sources", names, ("g", 5))
    assert list(zip(flat[::3], flat[1::3], flat[2::3], strict=True)) == [
        (b"no_group", 10, 0),
        (b"ok", 0, 0),
        (b"ok", *((5, 1) if b"lag" not in link.call("XINFO", "GROUPS", "done")[0] else (7, 0))),
        (b"ahead", 0, 0),
        (b"not_a_stream", 0, 0),
        (b"gone", 0, 0),
    ]


class Sharing:
    def __init__(self, world: Gathered, redis_url: str, count: int) -> None:
        none = SourceSelection.parse("none:*")
        links = [Link(redis_url, f"test:share-{number}") for number in range(count)]
        self.masters = [Gatherer(link, world.keys, none, "ticket_id", 1000, lease_ms=60_000) for link in links]

    def beat(self) -> None:
        for master in self.masters:
            master._shared_s = 0.0
            master.run_once()

    @property
    def counts(self) -> list[int]:
        """How many shards each has; none is missing, and none has two masters."""
        assert sorted(shard for one in self.masters for shard in one.held) == list(range(SHARDS))
        return sorted(len(one.held) for one in self.masters)


@pytest.mark.parametrize("masters", [1, 2, 3, 5])
def test_every_master_has_an_even_part_and_one_that_is_gone_none(world: Gathered, redis_url: str, masters: int) -> None:
    world.share("dead", -1)
    world.share("of a clock that was set back", 7_200_000)
    sharing = Sharing(world, redis_url, masters)
    sharing.beat()
    sharing.beat()
    assert max(sharing.counts) - min(sharing.counts) <= 1
    assert world.link.call("HLEN", world.keys.shares) == masters
    gone = sharing.masters.pop()
    gone.on_end()
    assert gone.held == frozenset()
    if sharing.masters:
        sharing.beat()
        assert sum(sharing.counts) == SHARDS
    assert world.link.call("HLEN", world.keys.shares) == masters - 1


def test_what_goes_on_is_told_by_source(world: Gathered, link: Link, redis_url: str) -> None:
    link.call("SET", "text", "no stream")
    for _ in range(3):
        world.send("a", "*")
    with running(redis_url, "a,b,text,t:*", leader_lease_seconds=0.5) as made:
        made.url = "http://one"
        reader = SourcesReader(link, world.keys, MasterSettings(ticket_stream="a,b,text,t:*").sources or pytest.fail())
        until(
            lambda: [master["shards"] for master in reader.overview()["masters"]] == [64] and len(world.moved("a")) == 3
        )
        until(lambda: reader.overview()["masters"][0]["moved"] == 3)
        seen = reader.overview()
        assert (seen["sources"], seen["lag"], seen["lag_is_exact"], seen["worst"]) == (3, 0, True, [])
        assert seen["troubles"] == {"text": "not_a_stream"}
        assert seen["masters"][0]["url"] == "http://one"
    world.send("a", "*")
    world.send("a", "*")
    seen = reader.overview()
    assert seen["masters"] == [] and seen["lag"] == 2
    assert [(one["source"], one["lag"], one["master"]) for one in seen["worst"]] == [("a", 2, "")]


def test_a_master_that_died_is_told_to_gather_no_longer_than_its_lease(world: Gathered, link: Link) -> None:
    reader = SourcesReader(link, world.keys, SourceSelection.parse("a,b"))
    says = {"url": "http://m", "setting": "a,b", "sources": 2, "mode": "polling", "moved": 0, "troubles": []}
    world.share("m1", 500, orjson.dumps(says))
    assert [(one["url"], one["shards"]) for one in reader.overview()["masters"]] == [("http://m", 64)]
    until(lambda: reader.overview()["masters"] == [])
    assert {row["master"] for row in reader.rows("", 0, 10)[0]} == {""}


def test_a_work_stream_that_grows_behind_one_ticket_is_a_trouble(
    world: Gathered, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "_MOST_KEPT", 50)
    sources = SourceSelection.parse("a,b")
    reader = SourcesReader(link, world.keys, sources)
    world.send("a", "1-1", ticket="stuck")
    world.send("b", *(f"{number}-1" for number in range(1, 100)))
    world.gather("a", "b")
    link.call("DEL", world.keys.shares)
    assert reader.overview()["troubles"] == {}, "without a group nothing of it is done"
    world.stream.create_group(b"0-0")
    assert reader.overview()["troubles"] == {}, "what nobody was given is not kept for anybody"
    first, *others = world.read(80)
    link.call("XCLAIM", world.keys.stream, "g", "halted", 0, first)
    assert reader.overview()["troubles"] == {}, "what is pending is not done"
    link.call("XACK", world.keys.stream, "g", *others)
    [(name, told)] = reader.overview()["troubles"].items()
    assert (name, told.partition(":")[0]) == (world.keys.stream, "held_back")
    assert "99" in told and "a/stuck" in told and "halted" in told and first.decode() in told
    found = {finding.check: finding for finding in examine(collect(link, world.keys, 10_000, sources))}
    assert (
        found["source held_back"].severity is DoctorSeverity.WARN
        and "usher dead redrive" in found["source held_back"].do
    )
    link.call("XACK", world.keys.stream, "g", first)
    assert reader.overview()["troubles"] == {}, "the leader cuts it at once"


def test_in_a_cluster_streams_with_one_hash_tag_are_gathered(tmp_path_short: Path) -> None:
    with Cluster(tmp_path_short) as cluster:
        settings = MasterSettings(redis_url=cluster.url, ticket_stream="orders{t},t{t}:*", group="g")
        url = resolve_redis_url(settings)
        with Link(url, "test") as link:
            world = Gathered(link, stream=settings.work_stream)
            link.call("DEL", world.keys.shares)
            sent = {name: world.send(name) for name in ("orders{t}", "t{t}:1", "t{t}:2")}
            with running(url, settings.ticket_stream):
                until(lambda: world.all_moved() == sent)
                sent["t{t}:3"] = world.send("t{t}:3")
                until(lambda: world.all_moved() == sent)
