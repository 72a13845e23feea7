"""Trimming never cuts what somebody needs, however the world changes between looking and cutting.

trim.lua's losing side: a reader that has begun to need what was to be cut. find_entries.lua counts what would go.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from tests.commands import usher
from tests.integration.factories import TRICKY_IDS
from tests.outboxes import STREAM
from usher.common.base.errors import NotNow
from usher.common.doctor.judgements import MemoryUse
from usher.common.observability.metrics import Metrics
from usher.common.protocol.keys import Keys, LogKeys
from usher.common.readers.loop import ReliableStream
from usher.common.redis.client import Link
from usher.common.redis.replies import redis_ms
from usher.master.assembly.program import LeaderServices, MasterContext
from usher.master.operations import trimming
from usher.master.operations.trimming import StillNeeded, Trimmer, Trimming, retention_of
from usher.master.policy.trim import Cut, Nothing, Refused, Retention, decide
from usher.master.settings import MasterSettings

KEYS, LOG_KEYS = Keys(STREAM, "g"), LogKeys(STREAM)
#: Entries of a node of a stream: `MINID ~` cuts whole nodes.
NODE = 100
_FILL = "for n = 1, ARGV[1] do redis.call('XADD', KEYS[1], (ARGV[2] + n) .. '-1', 'f', 'v') end"


def _fill(link: Link, count: int, after_ms: int = 0) -> None:
    """Ids 1-1, 2-1 ..., in nodes of ``NODE`` entries, whatever this server's setting is."""
    name, before = link.call("CONFIG", "GET", "stream-node-max-entries")
    link.call("CONFIG", "SET", name, NODE)
    try:
        for begun in range(0, count, 100_000):
            link.call("EVAL", _FILL, 1, STREAM, min(100_000, count - begun), after_ms + begun)
    finally:
        link.call("CONFIG", "SET", name, before)


def _group(link: Link, delivered: str, name: str = "g") -> None:
    link.call("XGROUP", "CREATE", STREAM, name, delivered)


def _checkpoint(link: Link, last_id: str, name: str = "c") -> None:
    link.call("HSET", LOG_KEYS.checkpoints, name, f"1 {last_id} 1700000000000")


def _length(link: Link) -> int:
    return int(link.call("XLEN", STREAM))


def _cut(link: Link, **options: Any) -> int:
    trimming = Trimming(link, KEYS)
    decision = decide(trimming.facts(), **options)
    return sum(trimming.cut(decision.floor, **options)) if isinstance(decision, Cut) else 0


def test_what_everybody_has_done_goes_and_the_rest_stays(any_redis_url: str) -> None:
    link = Link(any_redis_url, "test")
    _fill(link, 1000)
    _group(link, "900-1")
    _group(link, "800-1", "h")
    _checkpoint(link, "700-1")
    assert _cut(link) == 600
    assert _length(link) == 400
    assert link.call("XRANGE", STREAM, "700-1", "700-1"), "the checkpoint's own entry is kept, as its reader's proof"
    _checkpoint(link, "1000-1")
    link.call("XGROUP", "SETID", STREAM, "h", "1000-1")
    link.call("XREADGROUP", "GROUP", "g", "master", "COUNT", 1, "STREAMS", STREAM, ">")
    link.call("XGROUP", "SETID", STREAM, "g", "1000-1")
    assert _cut(link) == 300, "up to what is pending"
    assert link.call("XPENDING", STREAM, "g", "-", "+", 10)[0][0] == b"901-1"
    link.close()


def test_what_any_of_several_groups_would_read_again_is_kept_also_when_it_is_lost(redis_url: str, link: Link) -> None:
    """Only one of them is the trimmer's own."""
    _fill(link, 1000)
    mine, other = (ReliableStream(link, STREAM, group, "reader") for group in ("g", "h"))
    for reader, done in ((mine, 900), (other, 400)):
        reader.ensure_group()
        reader.acknowledge([message.stream_id for message in reader.read_new(1000, None)[:done]])
        reader.save_position()
    assert _cut(link) == 400
    link.call("XGROUP", "DESTROY", STREAM, "h")
    decision = decide(Trimming(link, KEYS).facts())
    assert isinstance(decision, Refused)
    assert "group h is gone, and would read again from 401-1" in decision.problems[0]
    other.ensure_group()
    assert _cut(link) == 0
    assert other.read_new(1, None)[0].stream_id == b"401-1", "as if nothing had happened"
    other.acknowledge([message.stream_id for message in other.read_new(1000, None)])


@pytest.mark.parametrize(
    "who",
    ["group", "pending", "checkpoint", "archive", "odd checkpoint", "archive is gone", "lost group", "odd position"],
)
def test_who_begins_to_need_it_between_look_and_cut_loses_nothing(link: Link, who: str) -> None:
    _fill(link, 1000)
    _group(link, "900-1")
    link.call("SET", LOG_KEYS.archived, "900-1")
    trimming = Trimming(link, KEYS)
    decision = decide(trimming.facts(), archived_only=True)
    assert isinstance(decision, Cut)
    changes: dict[str, Callable[[], object]] = {
        "group": lambda: _group(link, "899-1", "new"),
        "pending": lambda: link.call("XCLAIM", STREAM, "g", "a", 0, "899-1", "FORCE", "JUSTID"),
        "checkpoint": lambda: _checkpoint(link, "0-0"),
        "odd checkpoint": lambda: link.call("HSET", LOG_KEYS.checkpoints, "c", "nonsense"),
        "archive": lambda: link.call("SET", LOG_KEYS.archived, "899-1"),
        "archive is gone": lambda: link.call("DEL", LOG_KEYS.archived),
        "lost group": lambda: link.call("HSET", LOG_KEYS.groups, "h", "899-1"),
        "odd position": lambda: link.call("HSET", LOG_KEYS.groups, "h", "nonsense"),
    }
    changes[who]()
    with pytest.raises(StillNeeded, match="needs entries below 900-1"):
        list(trimming.cut(decision.floor, archived_only=True))
    assert _length(link) == 1000


def test_ids_are_compared_digit_by_digit(link: Link) -> None:
    """Numbers of Lua would round both halves of an id."""
    huge = (*TRICKY_IDS, b"18446744073709551-18446744073709552", b"18446744073709552-0")
    for entry_id in huge:
        link.call("XADD", STREAM, entry_id, "f", "v")
    trimming = Trimming(link, KEYS)
    for at, checkpoint in enumerate(huge):
        _checkpoint(link, checkpoint.decode())
        for floor in huge[at + 1 :]:
            with pytest.raises(StillNeeded):
                list(trimming.cut(floor))
        for floor in huge[: at + 1]:
            assert list(trimming.cut(floor)) == [], "allowed; and less than a node"


def test_trimming_works_when_memory_is_full(any_redis_url: str) -> None:
    link = Link(any_redis_url, "test")
    _fill(link, 500)
    _group(link, "450-1")
    link.call("CONFIG", "SET", "maxmemory-policy", "noeviction")
    link.call("CONFIG", "SET", "maxmemory", 1)
    try:
        with pytest.raises(NotNow):
            link.call("SET", "more", "x")
        assert _cut(link) == 400
    finally:
        link.call("CONFIG", "SET", "maxmemory", 0)
        link.close()


def test_nodes_that_hold_more_than_is_cut_at_once_go_too(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trimming, "AT_ONCE", NODE // 20)
    _fill(link, 1000)
    _group(link, "900-1")
    assert _cut(link) == 800
    assert _length(link) == 200


def test_counting_what_would_go(link: Link) -> None:
    _fill(link, 2500)
    trimming = Trimming(link, KEYS)
    assert [trimming.count_below(floor) for floor in (b"1-1", b"2-1", b"1001-1", b"2001-1", b"2300-0", b"9999-0")] == [
        0,
        1,
        1000,
        2000,
        2299,
        2500,
    ]
    assert isinstance(decide(trimming.facts()), Nothing)


def test_by_default_a_day_is_kept_and_less_when_memory_is_needed(
    redis_url: str, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids are of the last two days; all is done."""
    now_ms = redis_ms(link)
    for hour in range(48):
        link.call("EVAL", _FILL, 1, STREAM, 100, now_ms - (48 - hour) * 3_600_000)
    _group(link, f"{now_ms}-1")
    settings = MasterSettings(ticket_stream=STREAM, group="g")
    ours = Link(redis_url, "t"), lambda: [STREAM.encode()]
    trimmer = Trimmer(*ours, 10.0, retention_of(settings, work_stream=False), KEYS)
    trimmer.run_once()
    left = _length(link)
    assert 2300 <= left < 2500
    assert link.call("HMGET", KEYS.position, "trim_keep_s", "trim_held_back") == [b"86400.0", b""]
    shares = iter((0.6, 0.6, 0.6, 0.4))
    monkeypatch.setattr(
        trimming, "look_at_memory", lambda link: (now_ms, MemoryUse(int(100 * next(shares)), 100, True))
    )
    monkeypatch.setattr(trimming, "AT_ONCE_FOR_MEMORY", 200)
    trimmer.run_once()
    assert left - 600 <= _length(link) < left - 500, "three times 200, then there was enough"
    trimmer.on_end()
    never = Trimmer(Link(redis_url, "t"), ours[1], 0.0, Retention(), KEYS)
    never.run_once()
    assert _length(link) >= left - 600 and link.call("HGET", KEYS.position, "trim_keep_s") is None
    never.on_end()


@pytest.mark.parametrize(("streams", "archived_only"), [(STREAM, True), ("a,b", False)])
def test_a_work_stream_is_cut_without_an_archive(redis_url: str, streams: str, archived_only: bool) -> None:
    settings = MasterSettings(ticket_stream=streams, group="g", trim_keep="24h archived")
    leading = LeaderServices(MasterContext(settings, redis_url), Metrics())
    [trimmer] = [service for service in leading.services if isinstance(service, Trimmer)]
    assert trimmer._retention.archived_only is archived_only
    assert trimmer._retention.keep_s == (0.0 if streams == "a,b" else 86_400.0), "a work stream is kept short"


# ---- usher trim ----


def _usher(capsys: pytest.CaptureFixture[str], redis_url: str, *words: str) -> tuple[int, str]:
    with mock.patch.dict(os.environ, USHER_REDIS_URL=redis_url):  # a password in a flag is warned of
        code = usher("trim", "--ticket-stream", STREAM, "--group", "g", *words)
    told = capsys.readouterr()
    return code, told.out + told.err


def test_the_command_shows_first_and_cuts_when_told(
    redis_url: str, link: Link, capsys: pytest.CaptureFixture[str]
) -> None:
    _fill(link, 1000)
    _group(link, "900-1")
    _checkpoint(link, "600-1", "totals")
    code, told = _usher(capsys, redis_url)
    assert code == 0
    assert "599 entries below 600-1 may go; the rest is kept for checkpoint totals" in told
    assert _length(link) == 1000
    code, told = _usher(capsys, redis_url, "--apply", "--json")
    document = json.loads(told)
    assert (code, document["cut"], document["floor"], document["kept_for"]) == (0, 500, "600-1", "checkpoint totals")
    assert [reader["name"] for reader in document["readers"]] == ["totals", "g"]
    assert _length(link) == 500
    code, told = _usher(capsys, redis_url, "--apply", "--keep", "1d", "--archived-only")
    assert (code, "nothing is archived yet" in told) == (0, True)


def test_the_command_says_when_all_is_young(redis_url: str, link: Link, capsys: pytest.CaptureFixture[str]) -> None:
    link.all_of([("XADD", STREAM, "*", "f", "v"), ("XGROUP", "CREATE", STREAM, "g", "$")])
    assert "Nothing may go: everything is younger than 1 d." in _usher(capsys, redis_url, "--keep", "1d")[1]


def test_the_command_refuses_when_a_reader_is_lost_and_says_the_way_out(
    redis_url: str, link: Link, capsys: pytest.CaptureFixture[str]
) -> None:
    _fill(link, 1000)
    _group(link, "900-1")
    _checkpoint(link, "2000-1", "lost")
    code, told = _usher(capsys, redis_url, "--apply")
    assert code == 1
    assert "Nothing is cut: a reader is lost" in told
    assert "usher trim --forget lost" in told
    assert _length(link) == 1000
    assert _usher(capsys, redis_url, "--forget", "nobody")[0] == 1
    assert _usher(capsys, redis_url, "--forget", "lost")[0] == 0
    link.call("HSET", LOG_KEYS.groups, "h", "10-1")
    code, told = _usher(capsys, redis_url, "--apply")
    assert (code, "usher trim --forget-group h" in told) == (1, True)
    assert _usher(capsys, redis_url, "--forget-group", "nobody")[0] == 1
    assert _usher(capsys, redis_url, "--forget-group", "h")[0] == 0
    assert _usher(capsys, redis_url, "--apply")[0] == 0
    assert _length(link) == 200


def test_a_key_that_is_no_stream_is_refused(redis_url: str, link: Link, capsys: pytest.CaptureFixture[str]) -> None:
    link.call("SET", STREAM, "x")
    code, told = _usher(capsys, redis_url)
    assert (code, "USHER_TICKET_STREAM" in told) == (2, True)
    assert _usher(capsys, redis_url, "--keep", "soon")[0] == 2


def test_a_problem_is_told_on_one_line_whatever_is_in_a_name(
    redis_url: str, link: Link, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(1, 11):
        link.call("XADD", STREAM, f"{number}-1", "f", "v")
    link.call("HSET", LOG_KEYS.groups, "a; b", "5-1")
    _group(link, "10-1")
    assert usher("trim", "--redis-url", redis_url, "--ticket-stream", STREAM, "--group", "g") == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  group a; b is gone")]
    assert "usher trim --forget-group" in line
