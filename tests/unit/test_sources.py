"""What USHER_TICKET_STREAM may name, and what follows from it."""

from __future__ import annotations

import inspect

import pytest

from usher.common.base.errors import SettingsError, StartRefused
from usher.common.protocol.keys import Keys, LogKeys
from usher.common.protocol.sources import SourceSelection
from usher.common.redis.locate import resolve_redis_url
from usher.common.runtime.settings import CommonSettings, load


@pytest.mark.parametrize("several", ["orders,billing", "tickets:*", "tickets:?,orders", " orders , billing "])
def test_several_are_gathered_into_a_stream_that_is_named_after_the_group(several: str) -> None:
    settings = CommonSettings(ticket_stream=several, group="g")
    assert settings.sources is not None
    assert (settings.work_stream, settings.work_ticket_field) == ("usher:{g}", "usher_ticket")
    assert not settings.sources.takes(settings.work_stream.encode())


def test_where_only_one_stream_will_do_the_error_says_how_to_choose() -> None:
    with pytest.raises(SettingsError, match=r"USHER_TICKET_STREAM names several .*--ticket-stream NAME"):
        assert CommonSettings(ticket_stream="a,b").one_stream


@pytest.mark.parametrize(
    "wrong", ["a,,b", ",", "a,", "a,a", "a[bc]*", "x*\\", "*{a}{", "a}*", "{a*}b", "x" * 513 + ",a"]
)
def test_what_cannot_be_a_stream_or_a_pattern_is_refused_with_the_name_of_the_setting(wrong: str) -> None:
    with pytest.raises(SettingsError, match="USHER_TICKET_STREAM"):
        load(CommonSettings, {"USHER_TICKET_STREAM": wrong})


@pytest.mark.parametrize("names", ["usher:{g},orders", "orders*,usher:{g}", "a{7},usher:g{7}"])
def test_the_work_stream_cannot_be_one_of_the_streams_that_are_gathered_into_it(names: str) -> None:
    with pytest.raises(SettingsError, match=r"USHER_TICKET_STREAM: usher:\S+ is the work stream of USHER_GROUP g"):
        load(CommonSettings, {"USHER_TICKET_STREAM": names, "USHER_GROUP": "g"})
    load(CommonSettings, {"USHER_TICKET_STREAM": names, "USHER_GROUP": "other"})
    load(CommonSettings, {"USHER_TICKET_STREAM": "usher:{g}", "USHER_GROUP": "g"})


def _streams(keys: Keys) -> list[str]:
    """All keys of Usher that are streams, as common/protocol/keys.py says."""
    names = {name for name, made in vars(Keys).items() if (inspect.getdoc(made) or "").startswith("Stream")}
    assert {"dead", "inbox"} <= names
    return [own if isinstance(own := getattr(keys, name), str) else own("c:1") for name in sorted(names)]


def test_a_pattern_takes_no_stream_that_usher_keeps_for_itself() -> None:
    sources = SourceSelection.parse("*")
    of_others, ours = Keys("orders", "g"), Keys(sources.work_stream("g"), "g")
    for keys in (of_others, ours, Keys("orders{7}", "g.x")):
        of_all = LogKeys(keys.stream)
        for own in (*_streams(keys), of_all.groups, of_all.delayed, of_all.replies("0" * 32)):
            assert not sources.takes(own.encode()), own
    assert not sources.takes(ours.stream.encode())
    assert not sources.takes(SourceSelection.parse("a{t},b{t}").work_stream("g").encode())
    assert sources.takes(b"orders") and sources.takes(b"orders{7}") and sources.takes(b"a:b:dead")


def test_a_pattern_takes_what_redis_would_and_no_name_that_cannot_be_part_of_a_ticket_id() -> None:
    sources = SourceSelection.parse("t:?:*")
    taken = (b"t:1:", b"t:1:x\ny", "t:1:\N{SNOWMAN}".encode())
    assert all(map(sources.takes, taken))
    assert not any(map(sources.takes, (b"t::x", b"T:1:x", b"xt:1:x", b"t:1:\xff", b"t:1:" + b"x" * 600)))


def test_changes_are_asked_for_under_prefixes_that_do_not_overlap_because_redis_refuses_those() -> None:
    assert SourceSelection.parse("a,ab,b:*,b:c*,c").prefixes() == (b"a", b"b:", b"c")
    assert SourceSelection.parse("*,a").prefixes() == (b"",)


def test_in_a_cluster_all_must_share_a_hash_tag_and_the_error_says_so() -> None:
    url = "redis+cluster://127.0.0.1:1"
    for apart in ("orders,billing", "orders{1},billing{2}", "tickets:*", "orders{1},billing"):
        with pytest.raises(StartRefused, match="USHER_TICKET_STREAM.*hash tag"):
            resolve_redis_url(CommonSettings(redis_url=url, ticket_stream=apart))
    settings = CommonSettings(redis_url=url, ticket_stream="orders{1},tickets{1}:*", group="g")
    assert settings.work_stream == "usher:g{1}"
    assert resolve_redis_url(settings).startswith(url)
