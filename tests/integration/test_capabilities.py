"""What a real server says it can do: asked, and nothing changed by asking."""

from __future__ import annotations

import pytest

from tests.integration.factories import World
from tests.proxy import Proxy
from usher.common.base.errors import ReplyUnknown
from usher.common.redis.capabilities import Capability, ask
from usher.common.redis.client import Link

ABSENT = "{ticket_stream}:g:absent"


def asked(link: Link, key: str = ABSENT) -> dict[str, Capability]:
    return {capability.name: capability for capability in ask(link, key)}


def test_all_that_is_required_is_there_and_newer_things_are_where_the_server_has_them(world: World) -> None:
    found = asked(world.link)
    assert all(capability.has for capability in found.values() if capability.required)
    assert {name for name, capability in found.items() if capability.required} == {
        "xautoclaim",
        "xpending_idle",
        "xtrim_minid",
    }
    is_seven = world.claiming_drops_the_bodiless
    for name in ("script_flags", "xautoclaim_deleted", "lag", "acl_dryrun"):
        assert found[name].has is is_seven, name
    for name in ("client_tracking", "resp3"):
        assert found[name].has is True, name
    version = tuple(
        map(int, world.link.call("INFO", "server").decode().partition("redis_version:")[2].split()[0].split(".")[:2])
    )
    for name in ("waitaof", "consumer_inactive"):
        assert found[name].has is (version >= (7, 2)), name
    for name in ("xackdel", "xreadgroup_claim", "idmp", "xnack", "xread_maxcount") if version < (8, 2) else ():
        assert found[name].has is False, name


def test_the_answers_agree_with_what_the_server_does(world: World) -> None:
    found = asked(world.link)
    assert (b"lag" in world.stream.group_facts()) is found["lag"].has
    leader = world.elect()
    [entry_id] = world.parked(leader, b"T")
    world.delete(entry_id)
    reply = world.link.call("XAUTOCLAIM", world.keys.stream, "g", "x", 0, "0-0", "JUSTID")
    assert (len(reply) == 3 and reply[2] == [entry_id]) is found["xautoclaim_deleted"].has
    world.link.call("XACK", world.keys.stream, "g", entry_id)


def test_asking_changes_nothing(world: World) -> None:
    leader = world.elect()
    world.owned(leader, world.join("a"), b"T", b"1-1", b"2-1")
    with world.unchanged():
        asked(world.link)
    assert not world.link.call("EXISTS", ABSENT)


def test_the_connection_is_as_it_was(world: World) -> None:
    """RESP3 is tried on it and left again."""
    asked(world.link)
    assert isinstance(world.link.call("HGETALL", world.keys.consumers), list)
    assert world.link.call("CLIENT", "TRACKINGINFO")[1] == [b"off"]


def test_every_answer_says_how_it_was_asked(world: World) -> None:
    for capability in asked(world.link).values():
        assert capability.how
        assert "\n" not in capability.how
        assert capability.good_for
        assert capability.said or capability.has is not False or capability.how.startswith("COMMAND")


@pytest.mark.parametrize("forbidden", ["all of it", "only that"])
def test_what_we_may_not_ask_is_not_known(any_redis_url: str, forbidden: str) -> None:
    rules = ["+client|setname"] if forbidden == "all of it" else ["+@all", "-xautoclaim", "-command", "-eval"]
    admin = Link(any_redis_url, "test:admin")
    admin.call("ACL", "SETUSER", "limited", "reset", "on", ">pw", "~*", *rules)
    link = Link(with_user(any_redis_url, "limited", "pw"), "test")
    try:
        found = asked(link)
        assert found["xautoclaim"].has is None
        assert found["xautoclaim"].said.startswith("NOPERM")
        for name in ("xackdel", "lag", "script_flags"):
            assert found[name].has is None, name
        assert found["xtrim_minid"].has is (True if forbidden == "only that" else None)
    finally:
        link.close()
        admin.call("ACL", "DELUSER", "limited")
        admin.close()


def with_user(url: str, user: str, password: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{user}:{password}@{rest.rpartition('@')[2]}"


def test_while_everything_is_refused_nothing_is_known(world: World) -> None:
    """A server that loads its data, or whose script is busy, says nothing about itself."""
    with Proxy(world.link.url) as proxy:
        link = Link(proxy.url, "test")
        link.call("PING")
        proxy.on_reply = lambda chunk: b"-LOADING Redis is loading the dataset in memory\r\n" * 15
        found = asked(link)
        assert {found[name].has for name in ("xautoclaim", "xackdel", "lag", "script_flags")} == {None}
        link.close()


def test_a_connection_that_breaks_is_trouble_and_no_answer(world: World) -> None:
    with Proxy(world.link.url) as proxy:
        link = Link(proxy.url, "test")
        link.call("PING")
        proxy.on_reply = lambda chunk: None
        with pytest.raises(ReplyUnknown):
            asked(link)
        link.close()
