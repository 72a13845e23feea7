"""A script is not rolled back. So what could fail is looked at first: a key that holds something else than it should
stops a step before it has changed anything, whichever key and whichever step it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.integration.factories import LEASE_MS, Owner, World, bury
from usher.common.base.errors import RedisTrouble
from usher.common.protocol.attempts import Attempts
from usher.common.redis.client import CommandRefused
from usher.consumer.lifecycle.journal import Former
from usher.consumer.lifecycle.owner_scripts import Letter
from usher.consumer.lifecycle.process_ending import note_crash
from usher.consumer.policy.quarantine import Left
from usher.master.leader.entries import Rejected
from usher.master.leader.leader_scripts import LeaderScripts
from usher.master.operations.shelves import DeadLetters

_KEYS = (
    "stream", "leader", "tickets", "counters", "consumers", "attempts", "dead", "runs", "changed", "lease", "inbox",
)  # fmt: skip


def _stage(world: World) -> tuple[LeaderScripts, Owner, Owner]:
    """A living owner with a ticket, a dead one with two, something parked, something unusable, some unread; some bodies
    are gone."""
    leader, living, dead = world.elect(), world.join("living"), world.join("dead")
    world.owned(leader, living, b"T", b"1-1", b"2-1", b"3-1")
    world.owned(leader, dead, b"U", b"4-1", b"5-1")
    world.owned(leader, dead, b"V", b"6-1")
    world.parked(leader, b"W", b"7-1", b"8-1")
    world.parked(leader, b"", b"9-1")
    world.send(b"X", b"10-1", b"11-1")
    world.link.call("HSET", world.keys.attempts, "1-1", 1)
    world.delete(b"3-1", b"5-1", b"8-1", b"11-1")
    world.end_lease(dead)
    return leader, living, dead


_LEFT = Left(b"U", b"4-1", 5, Attempts(1), 1, False)
#: (world, leader, the living owner, the dead one, head of the living one's ticket)
_Call = Callable[[World, LeaderScripts, Owner, Owner, bytes], object]
_CALLS: dict[str, _Call] = {
    "elect": lambda w, leader, a, b, head: w.scripts.run(
        "elect", (w.keys.leader, w.keys.counters), ("http://x", LEASE_MS, str(leader.epoch))
    ),
    "read_parked": lambda w, leader, a, b, head: leader.read_parked(None, 10),
    "reject": lambda w, leader, a, b, head: leader.reject([Rejected(b"9-1", b"", "empty_ticket_id")]),
    "take_back": lambda w, leader, a, b, head: leader.take_back(b.incarnation, 10),
    "left_behind": lambda w, leader, a, b, head: leader.left_behind("x:1", [(b"U", [b"9-1"])]),
    "sweep": lambda w, leader, a, b, head: leader.sweep([a.incarnation], 0, b"0-0", 100),
    "revoke": lambda w, leader, a, b, head: leader.revoke(a.incarnation),
    "reap": lambda w, leader, a, b, head: leader.reap("x:1", "x", b""),
    "register": lambda w, leader, a, b, head: w.join("c"),
    "renew": lambda w, leader, a, b, head: a.steps.renew(LEASE_MS),
    "forget_attempts": lambda w, leader, a, b, head: leader.forget_attempts(w.keys.attempts, b"0", 100),
    "charge": lambda w, leader, a, b, head: a.steps.charge({b"1-1": Attempts(2, 2)}, b"run", 100),
    "note_crash": lambda w, leader, a, b, head: note_crash(
        w.scripts, w.keys, Former(b.incarnation, False, [_LEFT]), 100
    ),
    "ack": lambda w, leader, a, b, head: a.steps.ack([b"1-1"], b"run", 100),
    "dead_letter": lambda w, leader, a, b, head: bury(a.steps, Letter(b"T", b"1-1", "gave_up", "", 1, 1, 2)),
    "drain": lambda w, leader, a, b, head: a.steps.drain(LEASE_MS),
    "deregister": lambda w, leader, a, b, head: a.steps.deregister(),
}
#: Steps that have done something when they fail, and why that is better than nothing.
_HARMLESS = {
    ("register", "consumers"): "a generation was drawn, and nobody has it",
    ("register", "changed"): "a generation was drawn, and nobody has it",
    ("ack", "attempts"): "what was handled is acknowledged all the same; the call that is repeated says GONE",
    ("ack", "runs"): "what was handled is acknowledged all the same; only the run log misses it",
    ("charge", "runs"): "the attempts are noted all the same; only the run log misses it",
    ("note_crash", "runs"): "the attempts are noted all the same; only the run log misses it",
    ("dead_letter", "attempts"): "the letter is there and the message is over; the call that is repeated says GONE",
}
#: A revoked lease is written anew, whatever it was.
_WRITTEN_ANEW = ("revoke", "lease")


def _key(world: World, name: str, owner: Owner) -> str:
    keys = world.keys
    if name in ("lease", "inbox"):
        return keys.lease(owner.incarnation) if name == "lease" else keys.inbox(owner.incarnation)
    return str(getattr(keys, name))


@pytest.mark.parametrize("policy", ["skip", "halt"])
def test_errors_of_another_type_hold_no_message_up(world: World, policy: str) -> None:
    leader, a = world.elect(), world.join("a")
    world.owned(leader, a, b"U", b"4-1")
    world.link.call("SET", world.keys.errors, "x")
    assert note_crash(world.scripts, world.keys, Former(a.incarnation, False, [_LEFT]), 100)
    assert world.link.call("HGET", world.keys.failures, "failed") == b"1"
    assert world.give_up(a, b"U", policy).name == {"skip": "OK", "halt": "HALTED"}[policy]
    assert len(DeadLetters(world.link, world.keys).redrive(world.letter_ids())) == 1
    assert world.letter_ids() == []


@pytest.mark.parametrize("spoilt", _KEYS)
@pytest.mark.parametrize("step", _CALLS)
def test_a_key_of_the_wrong_type_stops_a_step_before_it_changed_anything(world: World, step: str, spoilt: str) -> None:
    leader, living, dead = _stage(world)
    key = _key(world, spoilt, living)
    head = world.head(b"T")
    try:
        world.link.call("DEL", key)
        world.link.call("RPUSH", key, "somebody else's")
        before = world.everything()
        try:
            _CALLS[step](world, leader, living, dead, head)
        except (CommandRefused, RedisTrouble):
            assert world.everything() == before or (step, spoilt) in _HARMLESS
        else:
            untouched = world.link.call("TYPE", key) == b"list"
            assert untouched or (step, spoilt) == _WRITTEN_ANEW, "it needed this key and did not say what was wrong"
    finally:
        world.link.call("FLUSHALL")
        world.make_group()
