"""Trimming what was gathered: each source goes as far as nobody needs it, whoever asks and however often, and thousands
of them cost little."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import orjson
import pytest

from tests.abuse import check_contract
from tests.integration.gathered import Gathered
from tests.integration.routers import until
from tests.integration.test_gathering import as_limited, running, service
from tests.proxy import Proxy
from usher.common.base.errors import ReplyUnknown
from usher.common.doctor.judgements import _OF_SOURCES, MemoryUse
from usher.common.protocol.keys import LogKeys
from usher.common.protocol.sources import SHARDS, SourceSelection
from usher.common.redis.acl import programs
from usher.common.redis.client import Arg, Link
from usher.master.operations import trimming
from usher.master.operations.trimming import Trimmer, cut_call
from usher.master.policy.trim import Retention
from usher.master.sources.gatherer import Gatherer

#: Entries of a node of a stream: whole nodes are cut.
NODE = 10
ALL = frozenset(range(SHARDS))


@pytest.fixture
def world(link: Link) -> Iterator[Gathered]:
    name, before = link.call("CONFIG", "GET", "stream-node-max-entries")
    link.call("CONFIG", "SET", name, NODE)
    yield Gathered(link)
    link.call("CONFIG", "SET", name, before)


class Master:
    """What gathers and trims all sources, turn by turn."""

    def __init__(
        self,
        world: Gathered,
        url: str,
        sources: Sequence[str],
        link: Link | None = None,
        archived_only: bool = False,
        keep_s: float = 0.0,
    ) -> None:
        self.world = world
        self.link = link or Link(url, "test:trim")
        self.gatherer = Gatherer(Link(url, "test:gather"), world.keys, SourceSelection.parse("t:*"), "ticket_id", 1000)
        self.gatherer.hold(ALL)
        self.gatherer.rounds.found(name.encode() for name in sources)
        retention = Retention(keep_s, archived_only=archived_only)
        self.trimmer = Trimmer(self.link, lambda: self.gatherer.rounds.mine, 5.0, retention, gathered_by="g")

    def gather(self) -> None:
        self.world.stream.create_group(b"0-0")
        while self.gatherer.run_once() == 0.0:
            self.world.read(100_000)  # or it is full

    def trim(self) -> None:
        """A round."""
        self.trimmer.run_once()
        while self.trimmer._rest:
            self.trimmer.run_once()

    def troubles(self) -> dict[bytes, str]:
        return dict(self.trimmer.troubles())


def _ids(first: int, last: int) -> list[str]:
    return [f"{number}-1" for number in range(first, last + 1)]


def _left(world: Gathered, source: str) -> tuple[int, bytes | None]:
    """How many entries it has, and the first one."""
    found = world.link.call("XRANGE", source, "-", "+")
    return len(found), found[0][0] if found else None


def test_what_was_gathered_goes_and_what_was_not_stays(world: Gathered, redis_url: str) -> None:
    sent = {name: world.send(name, *_ids(1, 100)) for name in ("t:1", "t:2")}
    world.send("other", *_ids(1, 100))
    master = Master(world, redis_url, ["t:1", "t:2"])
    master.gather()
    sent["t:1"] += world.send("t:1", *_ids(101, 150))
    master.trim()
    assert (_left(world, "t:1"), _left(world, "t:2"), _left(world, "other")) == (
        (60, b"91-1"),
        (10, b"91-1"),
        (100, b"1-1"),
    )
    master.gatherer.look_at_all()
    master.gather()
    assert world.all_moved() == sent
    master.trim()
    assert _left(world, "t:1") == (10, b"141-1")


@pytest.mark.parametrize("who", ["group", "pending", "checkpoint", "saved position", "archive", "nothing is archived"])
def test_what_somebody_needs_stays_and_goes_later_although_nothing_more_comes(
    world: Gathered, redis_url: str, link: Link, who: str
) -> None:
    world.send("t:1", *_ids(1, 100))
    log_keys = LogKeys("t:1")
    needs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "group": (
            lambda: link.call("XGROUP", "CREATE", "t:1", "h", "50-1"),
            lambda: link.call("XGROUP", "SETID", "t:1", "h", "100-1"),
        ),
        "pending": (
            lambda: (
                link.call("XGROUP", "CREATE", "t:1", "h", "100-1"),
                link.call("XCLAIM", "t:1", "h", "a", 0, "50-1", "FORCE", "JUSTID"),
            ),
            lambda: link.call("XACK", "t:1", "h", "50-1"),
        ),
        "checkpoint": (
            lambda: link.call("HSET", log_keys.checkpoints, "c", "1 50-1 1700000000000"),
            lambda: link.call("HSET", log_keys.checkpoints, "c", "2 100-1 1700000000000"),
        ),
        "saved position": (
            lambda: (
                link.call("XGROUP", "CREATE", "t:1", "h", "100-1"),
                link.call("HSET", log_keys.groups, "h", "50-1"),
            ),
            lambda: link.call("HSET", log_keys.groups, "h", "100-1"),
        ),
        "archive": (
            lambda: link.call("SET", log_keys.archived, "50-1"),
            lambda: link.call("SET", log_keys.archived, "100-1"),
        ),
        "nothing is archived": (lambda: None, lambda: link.call("SET", log_keys.archived, "100-1")),
    }
    begin, end = needs[who]
    begin()
    master = Master(world, redis_url, ["t:1"], archived_only="archive" in who)
    master.gather()
    kept = (100, b"1-1") if who == "nothing is archived" else (60, b"41-1")
    for _ in range(3):
        master.trim()
        assert _left(world, "t:1") == kept
    end()
    master.trim()
    assert _left(world, "t:1") == (10, b"91-1")
    assert master.troubles() == {}


@pytest.mark.parametrize("why", ["no group yet", "ahead"])
def test_what_is_not_gathered_stays_although_others_have_read_it(
    world: Gathered, redis_url: str, link: Link, why: str
) -> None:
    """trim.lua and policy/trim.py know of a group only that it reads: that it gathers, and has not begun, or cannot,
    they do not."""
    world.send("t:1", *_ids(1, 100))
    link.call("XGROUP", "CREATE", "t:1", "h", "100-1")
    if why == "ahead":
        link.call("XGROUP", "CREATE", "t:1", "g", "999-0")
    master = Master(world, redis_url, ["t:1"])
    master.trim()
    assert _left(world, "t:1") == (100, b"1-1")
    link.call("XGROUP", "SETID", "t:1", "g", "0") if why == "ahead" else None
    master.gatherer.look_at_all()
    master.gather()
    master.trim()
    assert _left(world, "t:1") == (10, b"91-1")
    assert len(world.moved("t:1")) == 100


@pytest.mark.parametrize("copy", [("COPY", "t:1", "t:2"), ("RENAME", "t:1", "t:2")])
def test_a_stream_that_came_with_its_group_under_another_name_stays_until_it_is_gathered(
    world: Gathered, redis_url: str, link: Link, copy: tuple[str, ...]
) -> None:
    """Somebody's backup, or what was set aside: the pattern meets it too, and who has read only a part of it has noted
    that under the former name."""
    sent = world.send("t:1", *_ids(1, 100))
    link.call("HSET", LogKeys("t:1").checkpoints, "c", "1 20-1 1700000000000")
    master = Master(world, redis_url, ["t:1"])
    master.gather()
    link.call(*copy)
    master.gatherer.rounds.found([b"t:2"])
    for _ in range(2):
        master.gather()
        master.trim()
    assert _left(world, "t:2") == (100, b"1-1")
    assert link.run("trim", *cut_call("t:2", b"100-1", 100, False, "g"))[0] == b"NEEDED"
    link.call("HSET", LogKeys("t:2").groups, "h", "100-1")
    assert link.run("trim", *cut_call("t:2", b"100-1", 100, False, "g"))[0] == b"NEEDED"
    link.call("DEL", LogKeys("t:2").groups)
    more = world.send("t:2", "101-1")
    master.gatherer.changed([b"t:2"])
    master.gather()
    master.trim()
    assert _left(world, "t:2") == (1, b"101-1")
    assert world.all_moved() == {"t:1": sent, "t:2": more}


@pytest.mark.parametrize("group", [None, "0-0", "40-1", "100-1", "999-0"])
def test_another_stream_in_its_place_between_look_and_cut_loses_nothing(
    world: Gathered, redis_url: str, link: Link, group: str | None
) -> None:
    """Also when it has been gathered in part by then, and for a master that stood still all the while and has lost the
    shard."""
    world.send("t:1", *_ids(1, 100))
    master = Master(world, redis_url, ["t:1"])
    master.gather()
    floors = master.trimmer._floors([b"t:1"])
    assert floors == {b"t:1": b"100-1"}
    link.call("DEL", "t:1")
    world.send("t:1", *_ids(2, 80))
    if group is not None:
        link.call("XGROUP", "CREATE", "t:1", "g", group)
    master.trimmer._cut(floors)
    assert _left(world, "t:1") == (79, b"2-1")
    verdict, told = link.run("trim", *cut_call("t:1", b"100-1", 100, False, "g"))
    assert (verdict, told) == (
        b"NEEDED",
        b"group g" if group in ("0-0", "40-1") else b"group g, which has not gathered it,",
    )


@pytest.mark.parametrize("which", ["embedded", "shipped"])
def test_a_last_id_that_was_set_back_between_look_and_cut_loses_nothing(
    server_urls: Callable[[str], str], which: str
) -> None:
    """The group is ahead then, with all that is noted of it: what comes meanwhile is not gathered, and lies below all
    that. From Redis 7 on, it has a lag all the same."""
    with Link(server_urls(which), "test") as link:
        link.call("FLUSHALL")
        world = Gathered(link)
        world.send("t:1", *_ids(1, 100))
        master = Master(world, server_urls(which), ["t:1"])
        master.gather()
        floors = master.trimmer._floors([b"t:1"])
        link.call("XTRIM", "t:1", "MAXLEN", 0)
        link.call("XSETID", "t:1", "0-1")
        world.send("t:1", *_ids(2, 80))
        master.trimmer._cut(floors)
        master.trim()
        assert _left(world, "t:1") == (79, b"2-1")


def test_a_source_that_was_deleted_and_comes_back_is_gathered_before_it_is_cut(
    world: Gathered, redis_url: str, link: Link
) -> None:
    master = Master(world, redis_url, ["t:1"])
    sent = world.send("t:1", *_ids(1, 100))
    master.gather()
    link.call("DEL", "t:1")
    master.trim()
    sent += world.send("t:1", *_ids(2, 50))
    link.call("XGROUP", "CREATE", "t:1", "h", "50-1")
    master.trim()
    assert _left(world, "t:1") == (49, b"2-1")
    master.gatherer.changed([b"t:1"])
    master.gather()
    assert world.moved("t:1") == sent
    master.trim()
    assert _left(world, "t:1")[0] <= NODE
    link.call("DEL", "t:1")
    master.gatherer.changed([b"t:1"])
    master.gather()
    master.trim()
    assert link.call("EXISTS", "t:1") == 0 and master.troubles() == {}


def test_a_source_with_a_trouble_is_told_once_and_holds_up_no_other(
    world: Gathered, redis_url: str, link: Link, caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"t:{number}" for number in range(1, 7)]
    for name in names:
        world.send(name, *_ids(1, 100))
    allowed = [f"~{key}" for key in ("usher:*", "{*", *names) if key != "t:2"]
    master = Master(world, redis_url, names, link=Link(as_limited(link, redis_url, "+@all", *allowed), "test:trim"))
    try:
        master.gather()
        link.call("SET", LogKeys("t:3").checkpoints, "no hash")
        link.call("DEL", "t:4")
        link.call("SET", "t:4", "no stream")
        link.call("HSET", LogKeys("t:5").checkpoints, "c", "1 999-1 1700000000000")  # is lost
        for _ in range(3):
            master.trim()
        assert [_left(world, name)[0] for name in ("t:1", "t:2", "t:3", "t:5", "t:6")] == [10, 100, 100, 100, 10]
        told = master.troubles()
        assert sorted(told) == [b"t:2", b"t:3", b"t:4", b"t:5"]
        assert "WRONGTYPE" in told[b"t:3"] and "WRONGTYPE" in told[b"t:4"] and "usher trim --forget c" in told[b"t:5"]
        assert caplog.text.count("trim_refused") == 4
        link.call("ACL", "SETUSER", "limited", "~*")
        link.call("DEL", LogKeys("t:3").checkpoints, LogKeys("t:5").checkpoints, "t:4")
        master.trim()
        assert master.troubles() == {}
        assert [_left(world, name)[0] for name in ("t:2", "t:3", "t:5")] == [10, 10, 10]
    finally:
        master.link.close()
        link.call("ACL", "DELUSER", "limited")


def test_what_is_young_stays_unless_memory_is_needed(
    world: Gathered, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hour, now_ms = 3_600_000, [2_000_000_000_000]
    share = [0.1]
    monkeypatch.setattr(trimming, "look_at_memory", lambda link: (now_ms[0], MemoryUse(int(100 * share[0]), 100, True)))
    world.send("t:1", *(f"{now_ms[0] - 48 * hour + at * hour // 10}-1" for at in range(480)))
    master = Master(world, redis_url, ["t:1"], keep_s=86_400.0)
    master.gather()
    master.trim()
    assert 240 <= _left(world, "t:1")[0] < 240 + NODE
    now_ms[0] += 2 * hour
    master.trim()
    assert 210 <= _left(world, "t:1")[0] < 220 + NODE
    share[0] = 1.0
    master.trim()
    assert _left(world, "t:1")[0] <= NODE


def test_masters_that_have_no_more_rights_than_they_need_may_trim(world: Gathered, redis_url: str, link: Link) -> None:
    _, _, _, _, _, *rights = (
        next(one for one in programs("usher:{g}", "g", ("t:*",)) if one.name == "master").line().split()
    )
    world.send("t:1", *_ids(1, 100))
    master = Master(
        world, redis_url, ["t:1"], Link(as_limited(link, redis_url, *rights), "test:trim"), archived_only=True
    )
    try:
        link.call("SET", LogKeys("t:1").archived, "100-1")
        master.gather()
        master.trim()
        assert (_left(world, "t:1"), master.troubles()) == ((10, b"91-1"), {})
    finally:
        master.link.close()
        link.call("ACL", "DELUSER", "limited")


def test_a_reply_that_is_lost_is_asked_for_again(world: Gathered, redis_url: str) -> None:
    names = [f"t:{number}" for number in range(120)]
    sent = {name: world.send(name, *_ids(1, 30)) for name in names}
    lost = []

    def lose(chunk: bytes) -> bytes | None:
        if b"CUT" in chunk and len(lost) < 3:
            lost.append(chunk)
            return None
        return chunk

    with Proxy(redis_url, lose) as proxy:
        master = Master(world, redis_url, names, link=Link(proxy.url, "test:trim"))
        master.gather()
        for _ in range(3):
            with pytest.raises(ReplyUnknown):
                master.trim()
        master.trim()
        master.link.close()
    assert {name: _left(world, name) for name in names} == dict.fromkeys(names, (10, b"21-1"))
    assert world.all_moved() == sent


def test_what_a_lost_reply_has_moved_is_cut_too(world: Gathered, redis_url: str) -> None:
    world.send("t:1", *_ids(1, 5))
    master = Master(world, redis_url, ["t:1"])
    master.gather()
    master.trim()
    world.send("t:1", *_ids(6, 100))
    master.gatherer.changed([b"t:1"])
    run = master.gatherer._link.run
    lost = [ReplyUnknown("lost")]

    def lose(*given: Any) -> Any:
        told = run(*given)
        if lost:
            raise lost.pop()
        return told

    master.gatherer._link.run = lose  # type: ignore[method-assign]
    with pytest.raises(ReplyUnknown):
        master.gather()
    master.gather()
    master.trim()
    assert _left(world, "t:1") == (10, b"91-1")


class _Counting(Link):
    flights = 0

    def call(self, *command: Arg, **options: Any) -> Any:
        self.flights += 1
        return super().call(*command, **options)

    def pipeline(self, commands: Sequence[Sequence[Arg]]) -> list[Any]:
        self.flights += bool(commands)
        return super().pipeline(commands)


@pytest.mark.slow
def test_many_sources_cost_few_round_trips(world: Gathered, redis_url: str, link: Link) -> None:
    names = [f"t:{number}" for number in range(2000)]
    for name in names:
        link.pipeline([("XADD", name, "*", "ticket_id", "1") for _ in range(2 * NODE)])
    link.pipeline([("XGROUP", "CREATE", name, "slow", "0-0") for name in names[1000:]])  # others keep all of these
    counting = _Counting(redis_url, "test:trim")
    master = Master(world, redis_url, names, link=counting)
    master.gather()
    assert len(world.entries()) == 2 * NODE * len(names)
    master.trim()
    assert [_left(world, name)[0] for name in (names[0], names[999], names[1000])] == [10, 10, 20]
    assert counting.flights <= 2000 // 50 * 9
    counting.flights = 0
    master.trim()
    assert counting.flights <= 2000 // 50 * 5, "nothing is cut"
    link.pipeline([("XGROUP", "DESTROY", name, "slow") for name in names[1000:]])
    master.trim()
    assert {_left(world, name)[0] for name in names} == {10}
    counting.close()


def test_masters_that_gather_and_trim_the_same_lose_nothing(world: Gathered, redis_url: str) -> None:
    names = [f"t:{number}" for number in range(20)]
    sent: dict[str, list[bytes]] = {name: [] for name in names}
    masters = [Master(world, redis_url, names) for _ in range(3)]
    stop = threading.Event()
    failed: list[BaseException] = []

    def trim(master: Master) -> None:
        try:
            while not stop.is_set():
                master.trim()
        except BaseException as problem:
            failed.append(problem)

    threads = [threading.Thread(target=trim, args=(master,)) for master in masters]
    for thread in threads:
        thread.start()
    for number in range(16):
        for name in names:
            sent[name] += world.send(name, *_ids(1 + 10 * number, 10 + 10 * number))
        master = masters[number % 2]
        master.gatherer.changed([name.encode() for name in names])
        master.gather()
    stop.set()
    for thread in threads:
        thread.join(30)
    assert failed == [] and world.all_moved() == sent
    masters[1].trim()
    assert {_left(world, name)[0] for name in names} == {10}


def test_a_shard_that_is_another_masters_is_left_to_it(world: Gathered, redis_url: str) -> None:
    world.send("t:1", *_ids(1, 100))
    master = Master(world, redis_url, ["t:1"])
    master.gather()
    master.gatherer.hold(frozenset())
    master.trim()
    assert _left(world, "t:1") == (100, b"1-1")
    master.gatherer.hold(ALL)
    master.trim()
    assert _left(world, "t:1") == (10, b"91-1"), "who takes it over knows nothing of its last cut"


def test_a_master_trims_what_it_gathers_unless_it_must_not_and_tells_what_it_cannot(
    world: Gathered, link: Link, redis_url: str
) -> None:
    link.call("DEL", world.keys.shares)
    with running(redis_url, trim_keep="forever") as off:
        assert "trim-sources" not in [one.name for one in off.services]
    link.call("HSET", LogKeys("t:2").checkpoints, "c", "1 999-1 1700000000000")
    for name in ("t:1", "t:2"):
        world.send(name, *_ids(1, 100))
    with running(redis_url, trim_s=0.1, trim_keep="0s") as made:
        until(lambda: _left(world, "t:1") == (10, b"91-1"))
        until(lambda: orjson.loads(made.says())["troubles"] != [])
        [(source, kind, words)] = orjson.loads(made.says())["troubles"]
        assert (source, kind, kind in _OF_SOURCES) == ("t:2", "not_trimmed", True)
        assert "checkpoint c is at 999-1" in words
        world.send("t:1", *_ids(101, 200))
        until(lambda: _left(world, "t:1") == (10, b"191-1"))
        assert service(made, "trim-sources").trouble is None


def test_it_survives_the_abuse_of_its_contract(world: Gathered, redis_url: str) -> None:
    check_contract(lambda: Master(world, redis_url, ["t:1"]).trimmer)
