"""A number that a caller gives is looked at before a script writes anything: none loops to it, none breaks off half-way.
What users other than masters may run is tried under their own rights (tests/process/test_acl.py)."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from tests.integration.factories import World
from tests.integration.test_scripts_and_wrong_types import _CALLS, _stage
from usher.common.base.errors import RedisTrouble
from usher.common.protocol.keys import LogKeys
from usher.common.redis.client import CommandRefused, Link
from usher.common.redis.scripts import _NUMBERS, _texts, source

_WRONG = ("1e18", "1000000000000000001", "-1", "nan", "inf", "1e308", "0x10", "", "abc", "1.5")
_TEXTS = _texts()[0]


def _declared(name: str) -> dict[int, str]:
    found = _NUMBERS.search(_TEXTS[name])
    kinds = [part.split() for part in found[1].split(", ") if part] if found else []
    return {int(place): kind for kind, *places in kinds for place in places}


@pytest.mark.parametrize("name", _TEXTS)
def test_each_number_of_a_script_is_checked(name: str) -> None:
    text = re.sub(r"--[^-\n].*", "", _TEXTS[name])
    used = re.findall(r"tonumber\(ARGV\[(\d+)\]\)|'(?:PX|COUNT|LIMIT|MAXLEN|~|IDLE)', ARGV\[(\d+)\]", text)
    used += re.findall(r"(?:'PEXPIRE', \w+(?:\[\d\])?, |note_run\(KEYS\[\d\], )ARGV\[(\d+)\]()", text)
    unchecked = {int(one or other) for one, other in used} - set(_declared(name))
    assert not unchecked


@pytest.mark.parametrize("step", _CALLS)
def test_a_wrong_number_changes_nothing_and_is_answered_at_once(
    world: World, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, living, dead = _stage(world)
    calls: list[tuple[str, list[Any], list[Any]]] = []
    real = Link.run

    def noted(self: Link, name: str, keys: Any, args: Any, *more: Any) -> Any:
        calls.append((name, list(keys), list(args)))
        return real(self, name, keys, args, *more)

    head = world.head(b"T")
    monkeypatch.setattr(Link, "run", noted)
    _CALLS[step](world, leader, living, dead, head)
    for name, keys, args in calls:
        digest = world.link.call("SCRIPT", "LOAD", source(name))
        for place in range(len(args)):
            for wrong in _WRONG:
                given = [*args]
                given[place] = wrong
                before, began = world.everything() if place + 1 in _declared(name) else None, time.monotonic()
                try:
                    world.link.call("EVALSHA", digest, len(keys), *keys, *given)
                except (CommandRefused, RedisTrouble) as refused:
                    assert before is None or "no whole number up to" in str(refused), (name, place, wrong)
                else:
                    assert before is None, (name, place, wrong)
                assert time.monotonic() - began < 1, (name, place, wrong)
                assert before is None or world.everything() == before, (name, place, wrong)
    world.link.call("FLUSHALL")
    world.make_group()


@pytest.mark.parametrize("sizes", ["[2]", "[1,1]", "[2,-1]", "[0.5,0.5]", "[null]", "5", "[]", "[1e18]", '["1"]'])
def test_sizes_that_do_not_fit_the_ids_are_refused(world: World, sizes: str) -> None:
    """Each of 100,000 of them is a loop of its own."""
    leader, owner = world.elect(), world.join("a")
    [held] = world.owned(leader, owner, b"T")
    keys = world.keys
    script_keys = (
        *(keys.stream, keys.lease(owner.incarnation), keys.tickets),
        *(keys.attempts, keys.runs, keys.errors),
    )
    with world.unchanged(), pytest.raises(CommandRefused):
        arguments = (keys.group, owner.incarnation, "", 100, f'["{held.decode()}"]', sizes, b"T")
        world.scripts.run("ack", script_keys, arguments)


@pytest.mark.parametrize("wrong", _WRONG)
def test_a_guard_of_wrong_numbers_does_nothing(world: World, wrong: str) -> None:
    right = ["1", "u", "60000", "10", "3", "SET", "k", "v", "2", "DEL", "k"]
    for place in (2, 3, 4, 8):
        with world.unchanged(), pytest.raises(CommandRefused, match="no whole number up to"):
            given = [*right[:place], wrong, *right[place + 1 :]]
            world.scripts.run("guard", ("fence", "uids", "k"), given)


def test_digits_without_an_end_hold_nobody_up(world: World) -> None:
    """Whoever may add a delayed message gives its due_ms: of 20,000 digits Redis 6.2 looked for minutes for a number."""
    leader = world.elect()
    world.link.call("XADD", LogKeys(world.keys.stream).delayed, "*", "ticket_id", "T", "due_ms", "9" * 1_000_000 + "x")
    began = time.monotonic()
    assert len(leader.due_delayed(10).unreadable) == 1
    assert time.monotonic() - began < 1
