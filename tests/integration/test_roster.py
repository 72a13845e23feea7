"""The roster: who is registered, and who of them lives; read by the leader only, in two commands whatever their number,
and in one while nothing has changed."""

from __future__ import annotations

from functools import partial
from unittest.mock import Mock

import pytest

from tests.integration.factories import LEASE_MS, World, spent
from usher.common.base.errors import NotNow
from usher.common.doctor.collector import collect
from usher.common.observability.metrics import Metrics
from usher.common.protocol.registration import Registration
from usher.master.assembly.program import LeaderServices, MasterContext
from usher.master.dispatch.events import ChangeWatch, Report
from usher.master.leader.elector import Lead
from usher.master.membership import registry as roster
from usher.master.membership.registry import ConsumerRegistry, Membership, RegisteredConsumer
from usher.master.settings import MasterSettings


class _Reading:
    """A roster reader of a leader, and what it told."""

    def __init__(self, world: World) -> None:
        self.told: list[dict[str, RegisteredConsumer]] = []
        self.lead = Lead()
        self.reader = ConsumerRegistry(world.link, world.keys, self.lead, self.told.append, LEASE_MS)
        self.lead._set(7, None)

    def states(self) -> dict[str, str]:
        """As it told them last."""
        return {name: member.state for name, member in self.told[-1].items()}


def test_only_who_leads_looks(world: World) -> None:
    told: list[dict[str, RegisteredConsumer]] = []
    lead = Lead()
    reader = ConsumerRegistry(world.link, world.keys, lead, told.append, LEASE_MS)
    waits_s = list[float]()
    assert not spent(world.link, lambda: waits_s.append(reader.run_once()))
    assert (0.5 < waits_s[0] < reader.stalls_after_s, told) == (True, []), "who makes it the leader wakes it"
    lead._set(7, None)
    reader.run_once()
    assert told == [{}]


def test_the_next_look_is_when_the_first_lease_could_end_or_a_little_later(world: World) -> None:
    first, _, dead = world.join("a"), world.join("b"), world.join("c")
    world.end_lease(dead)
    reading = _Reading(world)
    assert reading.reader.run_once() == 10.0
    world.link.call("PEXPIRE", world.keys.lease(first.incarnation), 700)
    assert 0.1 < reading.reader.run_once() <= 0.701
    assert spent(world.link, reading.reader.run_once) == {"hgetall": 1, "mget": 1, "pttl": 2}


def test_while_all_live_the_registrations_are_read_again_only_if_somebody_says_so(world: World) -> None:
    one = world.join("a")
    reading = _Reading(world)
    reading.reader.run_once()
    assert spent(world.link, reading.reader.run_once) == {"mget": 1, "pttl": 1}
    other = world.join("b")
    reading.reader.wake()
    assert spent(world.link, reading.reader.run_once) == {"hgetall": 1, "mget": 1, "pttl": 2}
    assert reading.states() == {one.incarnation: "live", other.incarnation: "live"}
    world.end_lease(one)
    reading.reader.run_once()
    assert spent(world.link, reading.reader.run_once) == {"hgetall": 1, "mget": 1, "pttl": 1}, "until it is forgotten"


def test_a_roster_that_could_not_be_read_is_read_at_the_next_look(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.join("a")
    reading = _Reading(world)
    with monkeypatch.context() as patched, pytest.raises(NotNow):
        patched.setattr(world.link, "call", Mock(side_effect=NotNow("BUSY", "a script runs")))
        reading.reader.run_once()
    reading.reader.run_once()
    assert len(reading.states()) == 1


@pytest.mark.parametrize("state", ["", "draining", "revoked"])
def test_a_lease_that_ends_or_changes_is_told_at_the_next_look(world: World, state: str) -> None:
    one, other = world.join("a"), world.join("b")
    reading = _Reading(world)
    reading.reader.run_once()
    if state:
        world.link.call("SET", world.keys.lease(other.incarnation), state, "KEEPTTL")
    else:
        world.end_lease(other)
    reading.reader.run_once()
    assert reading.states() == {one.incarnation: "live", other.incarnation: state}


def test_who_has_not_renewed_yet_is_starting_and_lives_with_the_first_renewal_of_which_all_masters_hear(
    world: World,
) -> None:
    new = world.join("a", renews=False)
    reading, woken = _Reading(world), list[None]()
    changes = ChangeWatch(world.link, world.keys.changed, lambda heard: None, lambda: woken.append(None))
    reading.reader.run_once()
    changes.look(None)
    assert reading.states() == {new.incarnation: "starting"}
    assert [member.accepts for member in reading.told[-1].values()] == [False]
    told = collect(world.link, world.keys, LEASE_MS).stream or ()
    assert "none is alive" in [one.seen for one in told if one.check == "consumers"], "the doctor does not count it"
    woken.clear()
    for _ in range(2):
        new.steps.renew(LEASE_MS)
        changes.look(None)
    reading.reader.run_once()
    assert (woken, reading.states()) == ([None], {new.incarnation: "live"})


def test_a_new_epoch_is_told_all_of_it_and_without_the_lead_nobody_is_known(world: World) -> None:
    world.join("a")
    reading = _Reading(world)
    reading.reader.run_once()
    reading.lead._set(8, None)
    reading.reader.run_once()
    assert len(reading.told) == 2
    assert len(reading.reader.members) == 1
    reading.lead.lost(8)
    reading.reader.run_once()
    assert reading.reader.members == {}


def test_a_consumer_that_registers_at_whichever_master_is_heard_of_by_all(world: World) -> None:
    """By the stream that every master waits at: the leader need not wait until all registrations are read again."""
    heard: list[bytes | Report] = []
    woken: list[None] = []
    changes = ChangeWatch(world.link, world.keys.changed, heard.append, lambda: woken.append(None))
    changes.look(None)
    assert woken == []
    world.join("a")
    changes.look(None)
    assert woken == [None]
    last = world.link.call("XADD", world.keys.changed, "*", "ticket", "T")
    changes.look(None)
    assert (woken, len(heard), heard[-1]) == ([None], 2, last)


def test_who_drains_leaves_or_is_revoked_is_heard_of_and_so_is_a_leader_that_resigns(world: World) -> None:
    told: list[str] = []
    changes = ChangeWatch(world.link, world.keys.changed, lambda heard: None, lambda: told.append("members"))
    changes.on_leader = lambda: told.append("leader")
    leader, draining, leaving, revoked = world.elect(), world.join("a"), world.join("b"), world.join("c")
    changes.look(None)
    of_lead = (world.keys.leader, world.keys.counters, world.keys.changed)
    resigns = partial(world.scripts.run, "elect", of_lead, ("http://one", 0, str(leader.epoch)))
    steps = (
        lambda: draining.steps.drain(LEASE_MS),
        leaving.steps.deregister,
        lambda: leader.revoke(revoked.incarnation),
    )
    for step, heard in (*((step, "members") for step in steps), (resigns, "leader")):
        told.clear()
        step()
        changes.look(None)
        assert told == [heard]


def test_whoever_is_elected_reads_the_roster_and_what_is_due_at_once(redis_url: str) -> None:
    leading = LeaderServices(MasterContext(MasterSettings(ticket_stream="s", group="g"), redis_url), Metrics())
    assert not (leading.roster._wake.is_set() or leading._delayed._wake.is_set())
    leading.lead._set(7, None)
    assert leading.roster._wake.wait(0) and leading._delayed._wake.wait(0)


# ---- a clock of Redis that was set back ----

_TWO_HOURS_MS = 7_200_000


def test_a_lease_that_lasts_longer_than_any_that_was_given_is_shortened_and_keeps_its_state(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its holder died, and Redis' clock was set back by two hours: its tickets and its name would wait for as long."""
    dead, revoked, living, gone = (world.join(name) for name in "abcd")
    world.link.call("SET", world.keys.lease(revoked.incarnation), "revoked", "PX", _TWO_HOURS_MS)
    world.link.call("PEXPIRE", world.keys.lease(dead.incarnation), _TWO_HOURS_MS)
    world.link.call("PEXPIRE", world.keys.lease(living.incarnation), LEASE_MS // 2)
    world.end_lease(gone)
    reading = _Reading(world)
    reading.reader.run_once()
    left = roster.read_left_ms(world.link, world.keys, [one.incarnation for one in (dead, revoked, living, gone)])
    assert LEASE_MS // 2 < left[dead.incarnation] <= LEASE_MS
    assert LEASE_MS // 2 < left[revoked.incarnation] <= LEASE_MS
    assert world.lease(revoked) == b"revoked"
    assert 0 < left[living.incarnation] <= LEASE_MS // 2
    assert left[gone.incarnation] == 0
    assert world.lease(gone) is None


def test_a_lease_that_another_master_gave_for_longer_is_left_alone(world: World) -> None:
    longer = Membership(world.link, world.keys, 10 * LEASE_MS)
    given = longer.register(Registration("b", "u1", "http://127.0.0.1:1/", 4, 100)).registration
    before = roster.read_left_ms(world.link, world.keys, [given.incarnation])[given.incarnation]
    _Reading(world).reader._shorten({world.join("a").incarnation: 1, given.incarnation: before})
    assert before - 1000 < roster.read_left_ms(world.link, world.keys, [given.incarnation])[given.incarnation] <= before
