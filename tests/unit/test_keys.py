from __future__ import annotations

import dataclasses

import pytest

from tests.chaos.rig.facts import STAYING
from usher.common.protocol.keys import HALTED, MASTER, Keys, LogKeys, _Key
from usher.common.protocol.registration import NAME


def _slot_tag(key: str) -> str:
    """What Redis Cluster hashes of a key: the first non-empty ``{...}``, else the whole key."""
    opened = key.find("{")
    closed = key.find("}", opened + 1)
    return key[opened + 1 : closed] if opened >= 0 and closed > opened + 1 else key


def _names(kind: type[Keys] | type[LogKeys]) -> list[str]:
    return [name for name, value in vars(kind).items() if isinstance(value, (property, _Key)) and name != "prefix"]


def _all_of(keys: Keys) -> list[str]:
    own = [getattr(keys, name) for name in _names(Keys)]
    return [*own, keys.lease("c1:7"), keys.inbox("c1:7")]


@pytest.mark.parametrize("stream", ["ticket_stream", "tenant{7}", "{a}b{c}", "{", "a{", "a b", "ünï"])
def test_all_keys_of_a_stream_are_in_its_slot_and_differ(stream: str) -> None:
    keys = Keys(stream, "g")
    assert {_slot_tag(key) for key in _all_of(keys)} == {_slot_tag(stream)}
    assert len(set(_all_of(keys))) == len(_all_of(keys))


@pytest.mark.parametrize("stream", ["ticket_stream", "tenant{7}", "{", "a b"])
def test_the_keys_of_the_log_are_in_the_same_slot_and_no_groups_keys(stream: str) -> None:
    own = [getattr(LogKeys(stream), name) for name in _names(LogKeys)]
    assert {_slot_tag(key) for key in own} == {_slot_tag(stream)}
    assert len(set(own)) == len(own)
    for group in ("streamer-outbox", "checkpoints", "archived", "streamers", "groups"):
        assert not set(own) & set(_all_of(Keys(stream, group)))


def test_the_chaos_rig_knows_all_keys_that_stay() -> None:
    """One that it does not know fails the scenarios that make it, and some of those are run rarely. What none of them
    makes may not stay."""
    keys = Keys("s", "g")
    fixed = {getattr(keys, name).removeprefix(keys.prefix) for name in _names(Keys)} - {"watched"}
    assert fixed - {"audit", "archived", "letters:new"} == set(STAYING)


def test_the_prefix_is_as_documented() -> None:
    assert Keys("ticket_stream", "g").prefix == "{ticket_stream}:g:"
    assert Keys("tenant{7}", "g").prefix == "tenant{7}:g:"


def test_groups_of_one_stream_share_no_key() -> None:
    assert not set(_all_of(Keys("s", "a"))) & set(_all_of(Keys("s", "b")))


def test_no_incarnation_can_take_a_reserved_name() -> None:
    assert dataclasses.is_dataclass(Keys)
    for reserved in (MASTER, HALTED):
        assert b":" not in reserved, "an incarnation is name:generation"
        assert NAME.fullmatch(reserved.decode()), "as a plain consumer name it may be used: its incarnation has a colon"
