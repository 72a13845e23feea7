"""The doctor at a real server: it sees what is set, tells what it may not see, and changes nothing."""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.integration.factories import World
from tests.proxy import Proxy
from usher.common.base.errors import NotNow
from usher.common.base.text import info_lines
from usher.common.doctor.collector import collect, startup_findings
from usher.common.doctor.judgements import DoctorFacts, DoctorFinding, DoctorSeverity, examine
from usher.common.protocol.keys import Keys, LogKeys
from usher.common.protocol.sources import SourceSelection
from usher.common.redis.client import Link
from usher.common.redis.embedded import EmbeddedRedis, free_port
from usher.common.redis.replies import redis_ms
from usher.master.__main__ import log_doctor_findings

ROOT = Path(__file__).resolve().parents[2]
LEASE_MS = 10_000
KEYS = Keys("ticket_stream", "g")
OK, UNKNOWN, WARN, BAD = DoctorSeverity.OK, DoctorSeverity.UNKNOWN, DoctorSeverity.WARN, DoctorSeverity.BAD


@pytest.fixture(scope="module")
def durable_server(tmp_path_factory: pytest.TempPathFactory, short_tmp: Path) -> Iterator[EmbeddedRedis]:
    """As the embedded one is in production, to be reconfigured by the tests of this file."""
    with EmbeddedRedis(short_tmp / "doctor", port=None) as server:
        yield server


@pytest.fixture
def link(durable_server: EmbeddedRedis) -> Iterator[Link]:
    made = Link(durable_server.url, "test")
    made.call("FLUSHALL")
    yield made
    for name, value in {
        "maxmemory-policy": "noeviction",
        "appendfsync": "everysec",
        "timeout": "0",
        "min-replicas-to-write": "0",
        "maxmemory": "0",
    }.items():
        made.call("CONFIG", "SET", name, value)
    made.call("REPLICAOF", "NO", "ONE")
    for user in made.call("ACL", "USERS"):
        if user != b"default":
            made.call("ACL", "DELUSER", user)
    made.close()


def look(link: Link) -> tuple[DoctorFacts, dict[str, DoctorFinding]]:
    facts = collect(link, KEYS, LEASE_MS)
    return facts, {finding.check: finding for finding in examine(facts)}


def usher_doctor(url: str, *words: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "USHER_REDIS_URL": url, "USHER_GROUP": "g"}
    command = [sys.executable, str(ROOT / "usher" / "__main__.py"), "doctor", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)


def limited(link: Link, *rules: str) -> Link:
    """A link of a user with these rights."""
    link.call("ACL", "SETUSER", "limited", "reset", "on", ">pw", *rules)
    scheme, _, rest = link.url.partition("://")
    return Link(f"{scheme}://limited:pw@{rest.rpartition('@')[2]}", "test:limited")


def test_an_idle_system_on_the_embedded_redis_has_nothing_bad(link: Link) -> None:
    world = World(link)
    leader = world.elect()
    owner = world.join("a")
    ids = world.owned(leader, owner, b"T", f"{time.time_ns() // 1_000_000}-1".encode())
    owner.steps.ack(ids)
    leader.save_position()
    facts, found = look(link)
    untold = {"rights": UNKNOWN} if facts.missing is None else {}  # before Redis 7
    assert {check: finding.severity for check, finding in found.items() if finding.severity is not OK} == untold
    assert (found["leader"].seen, found["consumers"].seen) == ("http://one", "1 alive")
    assert found["stream"].seen == "ticket_stream: 1 entries, 0 unread"
    assert found["fsync"].seen == "appendfsync everysec"


def test_looking_changes_nothing(world: World) -> None:
    """On every server: no key, no consumer of the group, no idle time that begins anew."""
    leader = world.elect()
    world.owned(leader, world.join("a"), b"T", b"1-1", b"2-1")
    world.send(b"T", b"3-1")
    with world.unchanged():
        names = world.stream.pending_counts()
        facts, found = look(world.link)
        assert world.stream.pending_counts() == names
    assert facts.refused.keys() <= {"ACL DRYRUN"}  # which Redis 6.2 does not know
    assert found["stream"].seen.endswith(("1 unread", "unread not counted"))


def test_what_is_set_badly_is_seen_and_the_exit_code_is_1(link: Link) -> None:
    link.call("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    link.call("CONFIG", "SET", "appendfsync", "no")
    link.call("CONFIG", "SET", "timeout", "60")
    _, found = look(link)
    assert (found["eviction"].severity, found["fsync"].severity, found["idle connections"].severity) == (
        BAD,
        WARN,
        WARN,
    )
    done = usher_doctor(link.url)
    assert done.returncode == 1, done.stderr
    assert "allkeys-lru" in done.stdout
    assert "Verdict: something is critical" in done.stdout


def test_the_document_has_all_of_it_and_no_password(link: Link) -> None:
    done = usher_doctor(link.url, "--json")
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    assert document["verdict"] in ("warn", "unknown")
    assert {"check", "severity", "seen", "means", "do"} == set(document["findings"][0])
    assert {row["when"] for row in document["promise"]} >= {"redis-server is killed", "its host loses power"}
    assert ":***@" in document["redis"]
    password = link.url.split("@")[0].rpartition(":")[2]
    assert password not in done.stdout


def test_a_lost_group_and_a_key_of_another_type_are_seen(link: Link) -> None:
    world = World(link)
    world.parked(world.elect(), b"T")
    link.call("HSET", KEYS.position, "delivered", "1-1", "oldest_pending", "1-1")
    link.call("XGROUP", "DESTROY", KEYS.stream, KEYS.group)
    assert look(link)[1]["group"].seen == "the group is gone"
    link.call("SET", KEYS.stream, "somebody else's")
    assert look(link)[1]["stream"].severity is BAD


def test_dead_consumers_and_strangers_are_seen(link: Link) -> None:
    world = World(link)
    leader = world.elect()
    dead = world.join("dead")
    world.owned(leader, dead, b"T")
    world.end_lease(dead)
    world.send(b"U")
    link.call("XREADGROUP", "GROUP", "g", "stranger", "STREAMS", KEYS.stream, ">")
    _, found = look(link)
    assert found["dead consumers"].seen == f"{dead.incarnation} (1 pending)"
    assert found["strangers"].seen == "stranger (1 pending)"
    assert found["consumers"].severity is BAD


_ADD, _MAKE = "XADD {k.stream} {old}-0 a b", "XGROUP CREATE {k.stream} g 0 MKSTREAM"
_TAKE, _LEAD = _MAKE + "; " + _ADD + "; XREADGROUP GROUP g {by} STREAMS {k.stream} >", "; SET {k.leader} '1 http://one'"
_GONE, _FULL = "HSET {k.position} delivered 1-1 oldest_pending 1-1", "; CONFIG SET maxmemory {full}"
_FAST = _ADD + "; XADD {k.stream} * a {large}"
_KEEP, _HELD = "; HSET {k.position} trim_keep_s 86400", "; HSET {k.position} trim_held_back slow"


@pytest.mark.parametrize(
    ("given", "check", "severity"),
    [
        ("HSET {k.counters} epoch {late}", "clock went back", WARN),
        (_ADD, "clock went back", None),
        ("XADD {k.stream} {soon}-0 a b", "ids", WARN),
        ("XADD {k.stream} 9999999999999-0 a b", "ids", BAD),
        ("XADD {k.stream} 18446744073709551615-18446744073709551615 a b", "ids", BAD),
        (_ADD, "group", WARN),
        (_GONE, "group", BAD),
        (_GONE + _LEAD, "group", WARN),
        (_MAKE, "leader", WARN),
        (_ADD, "leader", BAD),
        (_TAKE, "leader", BAD),
        (_ADD + "; XGROUP CREATE {k.stream} g 5-1", "leader", BAD),  # what is unread is not counted
        (_ADD + "; XGROUP CREATE {k.stream} g 5-1", "consumers", BAD),
        (_MAKE + "; " + _ADD, "consumers", BAD),
        (_MAKE, "consumers", WARN),
        (_TAKE, "dead consumers", BAD),
        (_TAKE + _LEAD, "dead consumers", WARN),
        (_MAKE + "; XGROUP CREATECONSUMER {k.stream} g {by}", "dead consumers", None),
        (_TAKE.replace("{by}", "halted"), "strangers", None),
        ("XADD {k.dead} * a b", "dead letters", WARN),
        (_ADD, "log", None),
        ("HSET {log.checkpoints} a 1", "log", WARN),
        ("HSET {log.checkpoints} a 1; CONFIG SET appendfsync always", "log", OK),
        (_FAST, "growth", OK),
        (_FAST + _FULL, "growth", WARN),
        (_FAST + _KEEP + _FULL, "growth", OK),
        (_FAST + _KEEP + _HELD + _FULL, "growth", WARN),
        ("XADD {k.losses} * kind group_lost", "declared loss", WARN),
        ("XADD {k.losses} 1-1 kind group_lost", "declared loss", OK),
    ],
)
def test_what_is_wrong_with_the_stream_is_found_and_says_what_to_do(
    link: Link, given: str, check: str, severity: DoctorSeverity | None
) -> None:
    now_ms, used = redis_ms(link), int(info_lines(link.call("INFO", "memory"))["used_memory"])
    known: dict[str, Any] = {"k": KEYS, "log": LogKeys(KEYS.stream), "by": "c1:1", "large": "x" * 99_999}
    known |= {"soon": now_ms + 20_000, "old": now_ms - 61_000, "late": (now_ms + 3_600_000) * 1024}
    for words in filter(None, given.format(**known, full=used + 1_500_000).split("; ")):
        link.call(*shlex.split(words))
    found = look(link)[1].get(check)
    assert (found and found.severity) == severity
    assert found is None or (found.means and (found.do or severity is OK or check == "dead consumers"))


# ---- rights ----


@pytest.mark.parametrize(
    ("rules", "missing"),
    [
        (("~*", "+@all"), ()),
        (("~*", "+@all", "-xclaim", "-hset"), ("XCLAIM", "HSET")),
        (("~ticket_stream", "+@all"), ("XREAD",)),
    ],
    ids=["all", "some commands", "some keys"],
)
def test_missing_rights_are_named(world: World, rules: tuple[str, ...], missing: tuple[str, ...]) -> None:
    """As far as Redis tries them; of keys, one command of each is tried."""
    world.elect()
    with limited(world.link, *rules) as user, world.unchanged():
        facts, found = look(user)
    world.link.call("ACL", "DELUSER", "limited")
    if not world.claiming_drops_the_bodiless:  # Redis 6.2
        assert (facts.missing, found["rights"].severity) == (None, UNKNOWN)
        return
    assert facts.missing is not None
    assert set(facts.missing["master"]) == set(missing)
    assert found["rights"].severity is (BAD if missing else OK)


def test_a_managed_redis_that_forbids_config_is_told_as_unknown(link: Link) -> None:
    user = limited(link, "~*", "+@all", "-config")
    facts, found = look(user)
    user.close()
    assert "appendfsync" not in facts.told
    assert (found["fsync"].severity, found["append-only file"].severity, found["eviction"].severity) == (
        UNKNOWN,
        OK,
        OK,
    )
    assert "NOPERM" in found["fsync"].seen
    assert not [finding for finding in found.values() if finding.severity is BAD]


def test_a_user_without_any_right_hears_so(link: Link) -> None:
    user = limited(link, "+client|setname")
    _, found = look(user)
    done = usher_doctor(user.url)
    user.close()
    assert {
        found[check].severity for check in ("version", "append-only file", "memory", "role", "clock", "stream")
    } == {UNKNOWN}
    assert found["rights"].severity is UNKNOWN
    assert done.returncode == 0, done.stderr


# ---- it cannot be asked ----


def test_a_redis_that_cannot_be_asked_is_exit_code_2(link: Link) -> None:
    for url in (link.url.replace("://:", "://:s3cret"), "redis://:s3cret@h:no-port"):
        done = usher_doctor(url)
        assert done.returncode == 2, done.stdout
        assert "USHER_REDIS_URL" in done.stderr
        assert "s3cret" not in done.stderr
        assert "Traceback" not in done.stderr


def test_a_server_that_loads_its_data_is_asked_later(link: Link) -> None:
    told = [b"-LOADING Redis is loading the dataset in memory\r\n" * 3]
    with Proxy(link.url) as proxy:
        far = Link(proxy.url, "test")
        far.call("PING")
        proxy.on_reply = lambda _chunk: told.pop() if told else b""
        with pytest.raises(NotNow):
            collect(far, KEYS, LEASE_MS)
        far.close()


@pytest.mark.parametrize(
    ("answer", "told", "seen"),
    [(b"*-1\r\n", b"*0\r\n", "EXEC ran"), (b"+OK\r\n", b"-ERR unknown command 'WATCH'\r\n", "unknown command")],
    ids=["ignores it", "refuses it"],
)
def test_a_proxy_that_keeps_no_watch_is_told(link: Link, answer: bytes, told: bytes, seen: str) -> None:
    left = [told]
    with Proxy(link.url) as proxy:
        far = Link(proxy.url, "test")
        far.call("PING")
        proxy.on_reply = lambda chunk: (
            chunk.removesuffix(answer) + left.pop() if left and chunk.endswith(answer) else chunk
        )
        [found] = [one for one in startup_findings(far, KEYS) if one.check == "transactions"]
        far.close()
    assert (found.severity, seen in found.seen) == (BAD, True), found


# ---- at the start of a master ----


def test_a_master_logs_what_is_bad_when_it_starts_and_goes_on(link: Link, caplog: pytest.LogCaptureFixture) -> None:
    assert startup_findings(link, KEYS) == []
    log_doctor_findings(link.url, KEYS)
    assert not caplog.records
    link.call("CONFIG", "SET", "maxmemory-policy", "volatile-lru")
    assert [finding.check for finding in startup_findings(link, KEYS)] == ["eviction"]
    log_doctor_findings(link.url, KEYS)
    [record] = caplog.records
    assert (record.levelno, record.getMessage()) == (logging.ERROR, "redis_check_failed")
    assert record.__dict__["facts"]["check"] == "eviction"


def test_a_redis_that_goes_away_in_between_does_not_keep_a_master_from_starting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log_doctor_findings(f"redis://127.0.0.1:{free_port()}", KEYS)
    assert [record.getMessage() for record in caplog.records] == ["redis_check_skipped"]


def test_of_several_ticket_streams_it_tells_what_is_not_taken_in_and_that_nobody_gathers(link: Link) -> None:
    sources = SourceSelection.parse("orders,text,t:*")
    keys = Keys(sources.work_stream("g"), "g")
    link.call("SET", "text", "no stream")
    link.call("XADD", "orders", "*", "ticket_id", "1")
    found = {finding.check: finding for finding in examine(collect(link, keys, 10_000, sources))}
    assert found["sources"].severity is DoctorSeverity.WARN and "no master runs" in found["sources"].means
    assert found["source not_a_stream"].severity is DoctorSeverity.BAD and "text" in found["source not_a_stream"].seen
    for holder, setting in (("m1", "orders,text,t:*"), ("m2", "orders")):
        says = orjson.dumps(
            {
                "url": holder,
                "setting": setting,
                "sources": 2,
                "mode": "x",
                "moved": 0,
                "troubles": [["t:1", "before", ""]],
            }
        )
        link.call("HSET", keys.shares, holder, b"%d %b" % (redis_ms(link) + 60_000, says))
    found = {finding.check: finding for finding in examine(collect(link, keys, 10_000, sources))}
    assert found["sources"].severity is DoctorSeverity.BAD and "USHER_TICKET_STREAM" in found["sources"].do
    assert "until nothing is pending" in found["source before"].do


def test_a_server_that_is_far_away_has_a_clock_all_the_same_and_is_told_as_far(link: Link) -> None:
    """To connect is a handful of round trips: measured from before them, Redis' clock seemed to jump, and was to be
    slewed."""
    with Proxy(link.url, lambda chunk: (time.sleep(0.15), chunk)[1]) as far:
        _, found = look(Link(far.url, "test:far"))
    assert found["clock"].severity is OK, found["clock"]
    assert float(found["round trip"].seen.split()[0]) >= 150
