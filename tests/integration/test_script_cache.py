"""Scripts are known by their digest. A server that forgot them (restart, failover, SCRIPT FLUSH) gets the text again,
and runs it once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.factories import FIELD, World, commands, fetch, hand_over, plan, read
from tests.proxy import Proxy
from usher.common.base.errors import ReplyUnknown
from usher.common.redis.client import CommandRefused, Link, ScriptMissing
from usher.common.redis.embedded import EmbeddedRedis
from usher.common.redis.scripts import source, with_memory_flag
from usher.master.leader.leader_scripts import LeaderScripts
from usher.master.policy.board.plans import NOTHING

_LUA = Path(__file__).parents[2] / "common" / "lua"
_ALL = sorted(file.stem for file in _LUA.glob("*/*.lua") if file.parent.name not in ("includes", "sinks"))


def test_after_a_flush_every_step_goes_on_and_happens_once(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    for n in range(1, 4):
        world.link.call("SCRIPT", "FLUSH")
        world.send(b"T")
        found = fetch(leader, 10)
        world.link.call("SCRIPT", "FLUSH")
        hand_over(leader, plan(a, {b"T": [found[0].id]}, {b"T": world.head(b"T")}))
        assert len(world.inbox(a)) == n
    world.link.call("SCRIPT", "FLUSH")
    ids = world.pending()[a.name]
    a.steps.ack(ids, b"run", 100)
    assert world.link.call("XLEN", world.keys.runs) == 1


def test_the_text_is_sent_only_when_the_server_does_not_know_it(world: World) -> None:
    world.link.call("SCRIPT", "FLUSH")
    world.elect()
    world.link.call("CONFIG", "RESETSTAT")
    world.scripts.run("next_generation", (world.keys.counters,), ())
    assert {name: count for name, count in commands(world.link).items() if name.startswith("eval")} == {
        "evalsha": 1,
        "eval": 1,
    }
    for _ in range(5):
        world.scripts.run("next_generation", (world.keys.counters,), ())
    calls = commands(world.link)
    assert (calls["evalsha"], calls["eval"], calls["hset"]) == (6, 1, 6), "seven requests, six numbers"


def test_a_number_is_drawn_once_however_often_the_server_forgets(world: World) -> None:
    world.link.call("HSET", world.keys.counters, "generation", 1 << 52)
    for n in range(1, 6):
        world.link.call("SCRIPT", "FLUSH")
        assert world.scripts.run("next_generation", (world.keys.counters,), ()) == b"%d" % ((1 << 52) + n)


def test_two_connections_share_what_the_server_knows(world: World, any_redis_url: str) -> None:
    world.link.call("SCRIPT", "FLUSH")
    world.elect()
    with Link(any_redis_url, "test:other") as other:
        world.link.call("CONFIG", "RESETSTAT")
        for link in (other, world.link):
            link.run("next_generation", (world.keys.counters,), ())
    calls = commands(world.link)
    assert calls["evalsha"] == 2
    assert calls["eval"] in (1, 4), "the text once; Redis 6.2 refuses a `#!lua` line once per runner"


def test_a_reply_that_was_lost_is_not_a_script_that_is_missing(world: World, any_redis_url: str) -> None:
    """Nobody knows whether it happened: it is not sent again."""
    leader = world.elect()
    world.send(b"T", b"1-1", b"2-1")
    with Proxy(any_redis_url) as proxy:
        far = Link(proxy.url, "far")
        steps = LeaderScripts(far, world.keys, leader.epoch, FIELD)
        assert [found.id for found in fetch(steps, 1)] == [b"1-1"]
        news = read(steps, 1)
        proxy.on_reply = lambda chunk: None
        with pytest.raises(ReplyUnknown):
            steps.turn(NOTHING, news)
        far.close()
    assert world.pending() == {b"master": [b"1-1", b"2-1"]}


def test_a_reply_lost_after_a_flush_happened_once_or_not_at_all(world: World, any_redis_url: str) -> None:
    """EVALSHA is answered NOSCRIPT, the reply to EVAL is lost: one execution."""
    world.link.call("HSET", world.keys.counters, "generation", 1 << 52)
    with Proxy(any_redis_url) as proxy:
        far = Link(proxy.url, "far")
        far.run("next_generation", (world.keys.counters,), ())
        world.link.call("SCRIPT", "FLUSH")
        proxy.on_reply = lambda chunk: chunk if chunk.startswith(b"-NOSCRIPT") else None
        with pytest.raises(ReplyUnknown):
            far.run("next_generation", (world.keys.counters,), ())
        far.close()
    assert world.link.call("HGET", world.keys.counters, "generation") == b"%d" % ((1 << 52) + 2)


def test_an_error_inside_a_script_is_not_a_script_that_is_missing(world: World) -> None:
    world.link.call("SET", world.keys.counters, "no hash")
    with pytest.raises(CommandRefused) as refused:
        world.scripts.run("next_generation", (world.keys.counters,), ())
    assert not isinstance(refused.value, ScriptMissing)
    assert "WRONGTYPE" in str(refused.value)


@pytest.mark.parametrize("name", _ALL)
def test_every_script_is_understood_by_the_server_with_and_without_its_first_line(world: World, name: str) -> None:
    world.link.call("SCRIPT", "LOAD", source(name))
    if world.claiming_drops_the_bodiless:
        world.link.call("SCRIPT", "LOAD", with_memory_flag(source(name)))


def test_after_a_restart_of_the_server_the_first_call_succeeds(tmp_path_short: Path) -> None:
    with EmbeddedRedis(tmp_path_short, port=None, durable=False) as server, Link(server.url, "test") as link:
        link.run("next_generation", ("counters",), ())
        server.stop()
        server.start()
        with pytest.raises(ReplyUnknown):
            link.run("next_generation", ("counters",), ())  # the old connection
        assert int(link.run("next_generation", ("counters",), ())) > 0


def test_all_scripts_are_read_at_once_and_none_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    source("renew")
    monkeypatch.setattr("io.open", lambda *_args, **_more: (_ for _ in ()).throw(OSError(24, "Too many open files")))
    assert "failures" in source("charge")
