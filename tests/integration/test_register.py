"""register.lua, next_generation.lua and master/membership/registry.py: a name belongs to one living incarnation at
a time."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.integration.factories import LEASE_MS, World
from usher.common.protocol.registration import NO_LOCK, Registration
from usher.common.redis.client import CommandRefused, Link
from usher.master.insight.status import StatusReader
from usher.master.membership.registry import Membership, NameInUse, RegistrationOver, read_registry


def _lock(moment: int = 1) -> str:
    """Evidence of one and the same lock, held at ``moment``."""
    return f"boot:1:2:{moment}"


def _asked(name: str = "a", lock: str = NO_LOCK) -> Registration:
    return Registration(name, uuid.uuid4().hex, "http://127.0.0.1:1/api/health", 4, 100, lock)


def _register(
    world: World, believed: bytes, new: Registration, former: str = "none:0", proof: str = "0"
) -> list[object]:
    """The bare script."""
    keys = world.keys
    lines = (
        keys.consumers,
        keys.lease(former),
        keys.lease(new.incarnation),
        keys.changed,
        keys.counters,
        keys.inbox(former),
        keys.unproven(new.incarnation),
        keys.unproven(former),
    )
    return list(world.scripts.run("register", lines, (new.name, believed, new.dump(), LEASE_MS, proof, new.generation)))


# ---- the script ----


@pytest.mark.parametrize("believed", [b"", b"somebody else"])
def test_who_believes_wrongly_is_told_and_changes_nothing(world: World, believed: bytes) -> None:
    _register(world, b"", replace(_asked(), generation=7))
    with world.unchanged():
        assert _register(world, believed, replace(_asked(), generation=8), "a:7", "1") == [b"CHANGED"]


@pytest.mark.parametrize("state", ["live", "draining", "revoked"])
def test_while_the_former_lease_lives_the_name_is_held_and_it_is_told_for_how_long(world: World, state: str) -> None:
    former = replace(_asked(), generation=7)
    _register(world, b"", former)
    world.link.call("SET", world.keys.lease("a:7"), state, "KEEPTTL")
    with world.unchanged():
        held, left_ms = _register(world, former.dump(), replace(_asked(), generation=8), "a:7")
    assert held == b"HELD"
    assert isinstance(left_ms, int)
    assert 0 < left_ms <= LEASE_MS


def test_with_proof_that_the_former_process_is_dead_its_lease_ends_at_once(world: World) -> None:
    former, new = replace(_asked(), generation=7), replace(_asked(), generation=8)
    _register(world, b"", former)
    assert _register(world, former.dump(), new, "a:7", "1") == [b"REGISTERED"]
    assert world.link.call("EXISTS", world.keys.lease("a:7")) == 0
    assert world.link.call("GET", world.keys.lease("a:8")) == b"live"


def test_the_mark_of_a_former_one_that_never_renewed_goes_with_its_registration(world: World) -> None:
    """Nothing was handed over to it, so the janitor never hears of it; and a clock that was set back would keep the
    mark for as long."""
    former = world.members.register(_asked()).registration
    world.link.call("PEXPIRE", world.keys.unproven(former.incarnation), 3_600_000)
    world.end_lease(former)
    new = world.members.register(_asked()).registration
    assert world.link.call("KEYS", "*:unproven") == [world.keys.unproven(new.incarnation).encode()]


def test_the_inbox_of_the_former_goes_with_its_registration_by_which_alone_the_janitor_may_know_of_it(
    world: World,
) -> None:
    """The group was lost before anything was taken back, and no record names the dead one: nobody heard of its inbox
    any more."""
    leader, dead = world.elect(), world.join("a")
    ids = world.owned(leader, dead, b"T")
    inbox = world.keys.inbox(dead.incarnation)
    with pytest.raises(NameInUse):
        world.join("a")
    assert world.link.call("EXISTS", inbox) == 1, "it may live"
    world.end_lease(dead)
    successor = world.join("a")
    assert world.link.call("EXISTS", inbox) == 0
    assert [found.id for found in leader.take_back(dead.incarnation, 10).found] == ids, (
        "what it had is in the pending list"
    )
    world.owned(leader, successor, b"U", b"9-1")
    assert world.link.call("EXISTS", world.keys.inbox(successor.incarnation)) == 1


def test_generations_grow_also_when_redis_lost_its_tail(world: World) -> None:
    def draw() -> int:
        return int(world.scripts.run("next_generation", (world.keys.counters,), ()))

    first, second = draw(), draw()
    assert second > first
    assert len(str(first)) == 16
    world.link.call("HSET", world.keys.counters, "generation", first - 5000)
    time.sleep(0.002)
    assert draw() > second


def test_epochs_fences_and_generations_are_counted_apart(world: World) -> None:
    world.link.call("HSET", world.keys.counters, "epoch", 1 << 52, "fence", 2 << 51)
    world.scripts.run("next_generation", (world.keys.counters,), ())
    assert world.link.call("HMGET", world.keys.counters, "epoch", "fence") == [b"%d" % (1 << 52), b"%d" % (2 << 51)]


# ---- membership ----


def test_a_consumer_gets_a_generation_and_a_lease(world: World) -> None:
    registered = world.members.register(_asked())
    assert registered.created
    incarnation = registered.registration.incarnation
    assert incarnation == f"a:{registered.registration.generation}"
    assert world.link.call("GET", world.keys.lease(incarnation)) == b"live"


def test_the_same_process_again_is_the_same_incarnation(world: World) -> None:
    """The first answer was lost."""
    asked = _asked()
    first = world.members.register(asked)
    with world.unchanged():
        again = world.members.register(asked)
    assert (again.registration, again.created) == (first.registration, False)
    assert 0 < again.left_ms <= LEASE_MS


def test_the_same_process_again_may_tell_another_health_url(world: World) -> None:
    asked = _asked()
    given = world.members.register(asked)
    again = world.members.register(replace(asked, health_url="http://127.0.0.1:2/api/health"))
    assert (again.created, again.registration.incarnation) == (False, given.registration.incarnation)
    registered = read_registry(world.link, world.keys)[given.registration.incarnation]
    assert (registered.state, registered.registration) == ("starting", again.registration)
    assert again.registration.health_url == "http://127.0.0.1:2/api/health"


def test_the_same_process_again_after_its_lease_must_begin_under_a_new_uuid(world: World) -> None:
    """Nobody can tell whether it lives: its request may have lain in a stopped master."""
    asked = _asked(lock=_lock(1))
    first = world.members.register(asked).registration
    world.link.call("DEL", world.keys.lease(first.incarnation))
    with world.unchanged(), pytest.raises(RegistrationOver):
        world.members.register(asked)
    again = world.members.register(_asked(lock=_lock(2)))
    assert again.created
    assert again.registration.generation > first.generation


def test_a_dead_process_whose_request_comes_late_does_not_take_the_lease_of_its_living_successor(world: World) -> None:
    """It asked a master that was stopped just then, and died; its successor took the lock and registered elsewhere; now
    that master goes on."""
    dead, successor = _asked(lock=_lock(1)), _asked(lock=_lock(2))
    living = world.members.register(successor).registration
    with world.unchanged(), pytest.raises(RegistrationOver):
        world.members.register(dead)
    assert world.link.call("EXISTS", world.keys.lease(living.incarnation)) == 1


def test_a_dead_process_whose_request_comes_late_gets_nothing_also_when_its_successor_is_gone(world: World) -> None:
    living = world.members.register(_asked(lock=_lock(2))).registration
    world.link.call("DEL", world.keys.lease(living.incarnation))
    with world.unchanged(), pytest.raises(RegistrationOver):
        world.members.register(_asked(lock=_lock(1)))


def test_the_repetition_of_a_dead_process_gives_it_no_longer_lease(world: World) -> None:
    """It was registered; its second request lay in a stopped master when it died."""
    asked = _asked()
    incarnation = world.members.register(asked).registration.incarnation
    world.link.call("PEXPIRE", world.keys.lease(incarnation), 5000)
    again = world.members.register(asked)
    assert (again.created, again.registration.incarnation) == (False, incarnation)
    assert 0 < again.left_ms <= 5000
    assert 0 < world.link.call("PTTL", world.keys.lease(incarnation)) <= 5000


def test_the_repetition_of_a_dead_process_gives_it_no_lease_after_its_successor_has_one(world: World) -> None:
    asked, successor = _asked(lock=_lock(1)), _asked(lock=_lock(2))
    dead, living = (world.members.register(one).registration for one in (asked, successor))
    with world.unchanged(), pytest.raises(RegistrationOver):
        world.members.register(asked)
    assert world.link.call("EXISTS", world.keys.lease(dead.incarnation), world.keys.lease(living.incarnation)) == 1


@pytest.mark.parametrize("state", ["draining", "revoked"])
def test_the_same_process_again_cannot_shake_off_what_was_decided_about_its_lease(world: World, state: str) -> None:
    """Its own lock proves nothing about itself."""
    asked = _asked(lock=_lock())
    incarnation = world.members.register(asked).registration.incarnation
    world.link.call("SET", world.keys.lease(incarnation), state, "KEEPTTL")
    with world.unchanged(), pytest.raises(NameInUse):
        world.members.register(asked)


def test_a_process_that_begins_again_under_a_new_uuid_proves_that_the_old_one_is_over(world: World) -> None:
    """The answers to its first requests were lost for longer than a lease; whatever of them comes later is of an
    earlier moment."""
    first, second = _asked(lock=_lock(1)), _asked(lock=_lock(2))
    world.members.register(first)
    assert world.members.register(second).created
    with world.unchanged(), pytest.raises(RegistrationOver):
        world.members.register(first)


def test_no_lock_on_both_sides_is_no_proof(world: World) -> None:
    world.members.register(_asked(lock=NO_LOCK))
    with pytest.raises(NameInUse):
        world.members.register(_asked(lock=NO_LOCK))


@pytest.mark.parametrize(
    "lock", ["boot:1:3:2", "other:1:2:2", "boot:1:2:2 ", "boot:1:2", "boot:1:2:", "1:2:2", "boot:1:2:1", NO_LOCK, ""]
)
def test_another_lock_or_the_same_moment_is_no_proof(world: World, lock: str) -> None:
    world.members.register(_asked(lock=_lock(1)))
    with pytest.raises(NameInUse):
        world.members.register(_asked(lock=lock))


@pytest.mark.parametrize("former", ["boot:1", "boot:1:2", "1:2:1"])
def test_a_former_without_a_moment_is_not_proven_dead(world: World, former: str) -> None:
    """It was registered by an older Usher: its device and inode must not be read as a moment."""
    world.members.register(_asked(lock=former))
    with pytest.raises(NameInUse):
        world.members.register(_asked(lock=former.replace("1", "9")))


def test_the_same_lock_later_proves_that_the_predecessor_is_dead(world: World) -> None:
    leader = world.elect()
    dead = world.join("a", lock=_lock(1))
    ids = world.owned(leader, dead, b"T")
    successor = world.join("a", lock=_lock(2))
    assert world.lease(dead) is None
    assert dead.steps.renew(LEASE_MS)[0] == ""
    assert [found.id for found in leader.take_back(dead.incarnation, 10).found] == ids
    assert successor.registration.generation > dead.registration.generation


def test_a_registration_that_nobody_can_read_is_replaced(world: World) -> None:
    for value in (b"garbage", b"", b"\xff", b"1 2 3 4 5"):
        world.link.call("HSET", world.keys.consumers, "a", value)
        assert world.members.register(_asked()).created


def test_of_many_processes_that_want_a_name_at_once_one_gets_it(world: World) -> None:
    def ask(n: int) -> str:
        members = Membership(Link(world.link.url, f"test:{n}"), world.keys, LEASE_MS)
        try:
            return members.register(_asked()).registration.incarnation
        except NameInUse:
            return ""
        finally:
            members.close()

    with ThreadPoolExecutor(8) as pool:
        got = [incarnation for incarnation in pool.map(ask, range(16)) if incarnation]
    assert len(got) == 1
    theirs = {world.keys.lease(got[0]).encode(), world.keys.unproven(got[0]).encode()}
    assert set(world.link.call("KEYS", world.keys.lease("*"))) == theirs


def test_one_process_that_asks_several_masters_at_once_is_one_incarnation(world: World) -> None:
    asked = _asked(lock=_lock())

    def ask(n: int) -> str:
        members = Membership(Link(world.link.url, f"test:{n}"), world.keys, LEASE_MS)
        try:
            return members.register(asked).registration.incarnation
        finally:
            members.close()

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(ask, range(16)))) == 1


def test_when_others_always_come_first_it_is_given_up_for_now(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process takes and leaves the name between our look and our call, again and again."""
    other = Link(world.link.url, "test:other")
    run: Callable[..., object] = Link.run

    def run_late(scripts: Link, name: str, *rest: object) -> object:
        if name == "register":
            other.call("HSET", world.keys.consumers, "a", replace(_asked(), generation=1).dump())
        return run(scripts, name, *rest)

    monkeypatch.setattr(Link, "run", run_late)
    with pytest.raises(Exception, match="registered again and again"):
        world.members.register(_asked())
    assert world.link.call("KEYS", world.keys.lease("*")) == []
    other.close()


def test_who_is_proven_dead_keeps_his_lease_when_the_call_fails(world: World) -> None:
    """By ``changed`` the leader hears of the new one: what is no stream fails before anything has changed."""
    former = replace(_asked(), generation=7)
    _register(world, b"", former)
    world.link.call("DEL", world.keys.changed)
    world.link.call("SET", world.keys.changed, "somebody else's")
    with world.unchanged(), pytest.raises(CommandRefused):
        _register(world, former.dump(), replace(_asked(), generation=8), "a:7", "1")
    world.link.call("DEL", world.keys.changed)


def test_who_asks_again_at_a_master_that_gives_longer_leases_gets_none_that_is_longer_than_what_is_noted(
    world: World,
) -> None:
    """What lasts longer than that is shortened, as of another clock (master/membership/registry.py)."""
    asked = _asked()
    assert world.members.register(asked).lease_ms == LEASE_MS
    assert Membership(world.link, world.keys, 10 * LEASE_MS).register(asked).lease_ms == LEASE_MS
    assert Membership(world.link, world.keys, 10 * LEASE_MS).register(_asked("b")).lease_ms == 10 * LEASE_MS
    assert Membership(world.link, world.keys, LEASE_MS // 2).register(asked).lease_ms == LEASE_MS // 2


def test_who_asks_again_when_the_clock_of_redis_was_set_back_is_not_told_that_as_much_is_left(world: World) -> None:
    asked = _asked()
    given = world.members.register(asked).registration
    world.link.call("PEXPIRE", world.keys.lease(given.incarnation), 7_200_000)
    assert world.members.register(asked).left_ms == LEASE_MS


def test_the_list_of_consumers_names_the_tickets_that_each_has_in_processing(world: World) -> None:
    leader, a, b = world.elect(), world.join("a"), world.join("b")
    world.owned(leader, a, b"T", b"1-1")
    world.owned(leader, a, b"S", b"2-1")
    rows = StatusReader(world.link, world.keys).consumers()
    assert {row["incarnation"]: row["ticket_ids"] for row in rows} == {a.incarnation: ["S", "T"], b.incarnation: []}
