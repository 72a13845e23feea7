"""The model that the board is tested against tells the truth: the same long walks, with every step done by the real
scripts too.

``tests/redis_model.py`` says what turns, ack.lua, give_back.lua and take_back.lua do. Here their answers, the pending list and the index are compared after every call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import pytest

from tests.integration.factories import bury
from tests.redis_model import MASTER, RedisModel
from tests.unit.test_board_model import Walk
from tests.unit.test_ruled_model import RuledRedis, RuledWalk, made_rule
from usher.common.protocol.keys import Keys
from usher.common.protocol.registration import Registration, name_of
from usher.common.redis.client import Link
from usher.common.redis.replies import TicketStream, pairs, parse_record
from usher.consumer.lifecycle.owner_scripts import Buried, GiveBack, Letter, OwnerScripts
from usher.master.leader.entries import NO_NEW_ENTRIES, NewEntries, PeekedEntry
from usher.master.leader.leader_scripts import LeaderScripts, Page
from usher.master.operations.action_log import By
from usher.master.operations.live_rules import LiveRules
from usher.master.operations.shelves import DeadLetters
from usher.master.policy.board.plans import NOTHING, HandOverPlan
from usher.master.policy.rules import RuleAction, Target, rule_id

LEASE_MS = 600_000
#: Longer than any test.
_EVER_MS = 10**13


class Mirror(RedisModel):
    """A model that does everything in a real Redis first."""

    def __init__(self, link: Link) -> None:
        version = next(
            line for line in link.call("INFO", "server").decode().splitlines() if line.startswith("redis_version:")
        )
        super().__init__(claiming_drops_the_bodiless=int(version.partition(":")[2].partition(".")[0]) >= 7)
        self._link = link
        self._keys = Keys("ticket_stream", "g")
        TicketStream(link, self._keys).create_group(b"0-0")
        _, epoch = self._link.run("elect", (self._keys.leader, self._keys.counters), ("http://one", LEASE_MS, ""))
        self._steps = LeaderScripts(self._link, self._keys, int(epoch), "ticket_id")
        self._steps.begin()
        self._letters = DeadLetters(link, self._keys)
        self._told: dict[str, str] = {}
        self._deleted: set[bytes] = set()
        self._inside = False
        self.clock_ms = 1
        self.time_goes_on = False  # what waits for a time is due at once, or never
        self.calls = self.recalls = 0
        self.taken: set[str] = set()  # who had news then

    # ---- what the walk changes without a script ------------------------------------------------------------------------------

    def add(self, entry_id: bytes, ticket: bytes) -> None:
        self._link.call("XADD", self._keys.stream, entry_id, "ticket_id", ticket)
        super().add(entry_id, ticket)

    def read_by(self, stranger: str) -> None:
        self._bring_up_to_date()
        self._link.call("XREADGROUP", "GROUP", self._keys.group, stranger, "STREAMS", self._keys.stream, ">")
        super().read_by(stranger)
        self._compare()

    def finish(self, entry_id: bytes) -> None:
        if not self._inside:
            self._link.call("XACK", self._keys.stream, self._keys.group, entry_id)
        super().finish(entry_id)

    def claim_by_hand(self, entry_id: bytes) -> None:
        self._bring_up_to_date()
        self._link.call("XCLAIM", self._keys.stream, self._keys.group, MASTER, 0, entry_id, "JUSTID")
        super().claim_by_hand(entry_id)
        self._compare()

    def _bring_up_to_date(self) -> None:
        """Leases and bodies are changed by the walk, not by calls."""
        for incarnation in self._told.keys() | self.leases.keys():
            state = self.leases.get(incarnation, "")
            if state != self._told.get(incarnation, ""):
                lease = self._keys.lease(incarnation)
                _ = self._link.call("SET", lease, state, "PX", LEASE_MS) if state else self._link.call("DEL", lease)
                self._told[incarnation] = state
        for entry_id in self.bodiless - self._deleted:
            self._link.call("XDEL", self._keys.stream, entry_id)
        self._deleted |= self.bodiless
        self._inside = True

    def _compare(self) -> None:
        self._inside = False
        self.calls += 1
        rows = self._link.call("XPENDING", self._keys.stream, self._keys.group, "-", "+", 100_000)
        assert {row[0]: row[1].decode() for row in rows} == self.pending
        [group] = [pairs(one) for one in self._link.call("XINFO", "GROUPS", self._keys.stream)]
        assert group[b"last-delivered-id"] == self.delivered
        flat = self._link.call("HGETALL", self._keys.tickets)
        stored = {flat[at]: parse_record(flat[at + 1]) for at in range(0, len(flat), 2)}
        assert {ticket: (record.owner.decode(), record.fence, record.ids) for ticket, record in stored.items()} == {
            ticket: (record.owner, record.fence, record.ids) for ticket, record in self.index.items()
        }

    def _owner_steps(self, incarnation: str) -> OwnerScripts:
        name, _, generation = incarnation.partition(":")
        return OwnerScripts(self._link, self._keys, Registration(name, "", "", 1, 1, generation=int(generation)))

    # ---- the scripts ---------------------------------------------------------------------------------------------------------

    def ack(self, incarnation: str, ids: Sequence[bytes]) -> list[bytes]:
        if ids and self.lives(incarnation):
            self._bring_up_to_date()
            self._owner_steps(incarnation).ack(ids)
            super().ack(incarnation, ids)
            self._compare()
        return super().ack(incarnation, ids)

    def give_back(self, incarnation: str, ticket: bytes) -> None:
        self._bring_up_to_date()
        record = self.index[ticket]
        given = self._owner_steps(incarnation).give_back([GiveBack(ticket, record.fence, self.unfinished(ticket))])
        assert given == [True]
        super().give_back(incarnation, ticket)
        self._compare()

    def tick(self, ms: int) -> None:
        """Time stands still: what waits longer than a second waits for an operator."""

    def put_off(self, incarnation: str, ticket: bytes, after_ms: int) -> None:
        self._bring_up_to_date()
        named = list(self.index[ticket].ids)
        super().put_off(incarnation, ticket, _EVER_MS if after_ms > 1000 else -self.clock_ms)
        ids = self.index[ticket].ids if ticket in self.index else []
        for entry_id in named:
            self._link.call("XCLAIM", self._keys.stream, self._keys.group, MASTER, 0, entry_id, "JUSTID")
        if ids:
            value = b"%s %s" % (self.index[ticket].head, b" ".join(ids))
            self._link.call("HSET", self._keys.tickets, ticket, value)
        else:
            self._link.call("HDEL", self._keys.tickets, ticket)
        self._link.call("XADD", self._keys.changed, "*", "ticket", ticket)
        self._compare()

    def recall(self, incarnation: str, tickets: Sequence[tuple[bytes, bytes, Sequence[bytes]]]) -> bool:
        self._bring_up_to_date()
        asked = self._steps.recall(incarnation, tickets) and super().recall(incarnation, tickets)
        self._compare()
        self.recalls += asked
        return asked

    def answer_recall(self, incarnation: str, ticket: bytes, fence: int) -> None:
        self._bring_up_to_date()
        [answer] = (
            self._owner_steps(incarnation).give_back([GiveBack(ticket, fence)]) if self.lives(incarnation) else [False]
        )
        before = len(self.changed)
        super().answer_recall(incarnation, ticket, fence)
        assert answer == (len(self.changed) > before)
        self._compare()

    def retry(self, ticket: bytes) -> None:
        super().retry(ticket)
        record = self.index[ticket]
        value = b"%s %s" % (record.head, b" ".join(record.ids))
        self._link.call("HSET", self._keys.tickets, ticket, value)
        self._link.call("XADD", self._keys.changed, "*", "ticket", ticket)

    def _dead_letter(self, incarnation: str, ticket: bytes, policy: str, answers: tuple[Buried, Buried]) -> None:
        record, first = self.index[ticket], self.unfinished(ticket)[0]
        is_gone = first in self.bodiless
        letter = Letter(ticket, first, "gave_up", "", 1, 1, 2, record.fence, "", "", policy)
        assert bury(self._owner_steps(incarnation), letter) is answers[is_gone]
        if not is_gone:
            assert bury(self._owner_steps(incarnation), letter) is answers[0], "and so it is when the call is repeated"

    def park(self, incarnation: str, ticket: bytes) -> None:
        self._bring_up_to_date()
        self._dead_letter(incarnation, ticket, "halt", (Buried.HALTED, Buried.RETURNED))
        super().park(incarnation, ticket)
        self._compare()

    def redrive(self, ticket: bytes) -> None:
        self._bring_up_to_date()
        assert self._letters.redrive([self._letters.parked_for([ticket])[ticket].id])[0].word == "resumed"
        super().redrive(ticket)
        self._compare()

    def drop(self, ticket: bytes) -> None:
        self._bring_up_to_date()
        assert self._letters.drop([self._letters.parked_for([ticket])[ticket].id])[0].word == "released"
        super().drop(ticket)
        self._compare()

    def sweep(self, ids: Iterable[bytes]) -> list[PeekedEntry]:
        """Which entries are idle for long cannot be chosen, so the sweep is done by hand here; sweep.lua has tests of
        its own."""
        chosen = list(ids)
        self._bring_up_to_date()
        for entry_id in chosen:
            if entry_id in self.bodiless:
                self._link.call("XACK", self._keys.stream, self._keys.group, entry_id)
            else:
                self._link.call("XCLAIM", self._keys.stream, self._keys.group, MASTER, 0, entry_id, "JUSTID")
        mine = super().sweep(chosen)
        self._compare()
        return mine

    def begin(self) -> None:
        self._bring_up_to_date()
        self._steps.begin()
        super().begin()
        self._compare()

    def read(self, count: int) -> NewEntries:
        self._bring_up_to_date()
        is_new, nothing = not self.ahead, NewEntries(self.dealt, [], True)
        mine = super().read(count)
        if is_new:
            self._steps.look()
            kept, self._steps.changed = self._steps.changed, set()
            answer = self._steps.turn(NOTHING, nothing, count)
            self._steps.changed |= kept
            assert answer is not None
            assert replace(answer[1], position=self.dealt) == mine
        self._compare()
        return mine

    def _know(self) -> None:
        """Take over what the leader knows of rules."""

    def hand_over(
        self,
        plan: HandOverPlan,
        news: NewEntries = NO_NEW_ENTRIES,
        heard: int | None = None,
        index: Mapping[bytes, bytes] = MappingProxyType({}),
    ) -> int | None:
        self._bring_up_to_date()
        self._steps.look()
        knows = heard is None or heard == len(self.changed)
        self._steps.changed = {one for one in self._steps.changed if one[0] == b"ticket" and not knows}
        self._know()
        answer = self._steps.turn(plan, news, 0, index)
        if answer is not None and answer[0]:
            self.fence = answer[0] - 1
        mine = super().hand_over(plan, news, heard, index)
        assert (None if answer is None else answer[0]) == mine
        self._compare()
        owners = {self.pending.get(entry[0], "nobody") for entry in news.found if mine is not None}
        self.taken |= {owner if owner in (MASTER, "nobody") else "an owner" for owner in owners}
        return mine

    def take_back(self, incarnation: str, count: int) -> Page | None:
        self._bring_up_to_date()
        real = self._steps.take_back(incarnation, min(count, 2))
        mine = super().take_back(incarnation, count)
        assert real == mine
        self._compare()
        return real

    def left_behind(self, incarnation: str, held: Sequence[tuple[bytes, Sequence[bytes]]]) -> list[tuple[bytes, bytes]]:
        self._bring_up_to_date()
        real = self._steps.left_behind(incarnation, held)
        assert real == super().left_behind(incarnation, held)
        self._compare()
        return real

    def read_parked(self) -> list[tuple[bytes, bytes]]:
        self._bring_up_to_date()
        real: list[tuple[bytes, bytes]] = []
        after: bytes | None = None
        while True:
            page = self._steps.read_parked(after, 3)
            real += [(found.id, found.ticket or b"") for found in page.found]
            if page.last is None:
                break
            after = page.last
        assert real == super().read_parked()
        self._compare()
        return real


class RuledMirror(Mirror, RuledRedis):
    """The same with live rules."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._live = LiveRules(link, self._keys)

    def change(self, target: Target, value: str, action: RuleAction | None) -> None:
        by = By("alice", "test")
        if action is None:
            self._live.lift(rule_id(target, value), by)
        else:
            self._live.set(made_rule(target, value, action), by)
        super().change(target, value, action)
        assert {rule.id: (rule.target, rule.value, rule.action) for rule in self._live.read().rules} == {
            chosen: (rule.target, rule.value, rule.action) for chosen, rule in self.rules.items()
        }

    def _know(self) -> None:
        self._steps.changed |= {(b"rules", b"")} if self.known != self.version else set()


@pytest.mark.parametrize("seed", [201, 202, 204, 205])
def test_the_scripts_do_what_the_model_says_while_rules_change(link: Link, seed: int) -> None:
    mirror = RuledMirror(link)
    RuledWalk(seed, mirror).go(250)
    assert mirror.calls > 50


@pytest.mark.parametrize("seed", range(100, 112))
def test_the_scripts_do_what_the_model_says(link: Link, seed: int) -> None:
    mirror = Mirror(link)
    Walk(seed, mirror).go(250)
    assert mirror.calls > 50
    assert len(mirror.taken) >= 2
    assert {name_of(handed.target) for handed in mirror.handed_over}
