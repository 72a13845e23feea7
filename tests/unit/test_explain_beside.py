"""Explain: what is said beside what a ticket waits for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.test_explain import FENCE, LEADER, LETTER, NOW, OWNER, PAUSE, RUNS, SLOW, A, B, C, owned, ticket
from usher.master.policy.board.plans import BoardFacts
from usher.master.policy.explain.explain import explain
from usher.master.policy.explain.facts import (
    ConsumerTotals,
    OwnEntry,
    TicketFacts,
)


class TestWhatElseIsSaid:
    def sentences(self, facts: TicketFacts) -> list[str]:
        return [reason.text for reason in explain(facts).reasons]

    def test_a_ticket_that_is_asked_back(self) -> None:
        facts = owned(OwnEntry(A, "queued"), board=BoardFacts("open", 0, True, recalled_for="c5"))
        told = "being recalled from c3 for c5, which has nothing to do, unless it has started there by now"
        assert told in self.sentences(facts)

    def test_starts_beyond_the_limit_are_told_beside_those_that_are_charged(self) -> None:
        """Those that asked to be called later (RetryLater) count as starts, and are in no limit."""
        [first, *_] = self.sentences(owned(replace(RUNS, attempt=7)))
        assert first == f"12-0 started 41 s ago on c3, 7 starts, 0 charged of 5, fencing token {FENCE}"

    def test_what_else_is_known_is_told_beside_what_is_delayed(self) -> None:
        told = self.sentences(ticket(delayed=1, due_ms=NOW + 9_000, unread_is_exact=False, rules=(PAUSE,), leader=None))
        assert told[:2] == [
            "1 message of the ticket is delayed, due in 9 s",
            self.sentences(ticket(parked=(A,), leader=None))[0],
        ]
        assert told[2].endswith("more is unread or waiting than was searched, so it may be further behind")
        assert told[3].startswith("a rule waits for it: the ticket is paused by alice")

    def test_who_waits_behind_whom(self) -> None:
        assert "17-0 waits behind 12-0" in self.sentences(owned(RUNS))
        assert "2 wait behind 12-0, the next is 17-0" in self.sentences(owned(RUNS, parked=(C,)))
        for part in ({"parked_is_exact": False}, {"unread_is_exact": False}):
            assert "at least 2 wait behind 12-0, the next is 17-0" in self.sentences(owned(RUNS, parked=(C,), **part))
        assert "2 wait behind 12-0, the next is 17-0" in self.sentences(
            owned(RUNS, parked=(C,), board=BoardFacts("open", 1, False))
        )
        more = owned(RUNS, board=BoardFacts("open", 70, False))
        assert "at least 71 wait behind 12-0, the next is 17-0" in self.sentences(more)
        assert "1 waits behind 12-0" in self.sentences(owned(RUNS, ids=(A,), board=BoardFacts("open", 1, True))), (
            "which one only the leader knows"
        )

    @pytest.mark.parametrize(
        ("facts", "also"),
        [
            (ticket(parked=(A,)), ["12-0 was read by the leader and is waiting: no consumer has it"]),
            (
                ticket(unread=(A,), lag=1),
                ["12-0 is in the stream and was not read yet; 1 entry of all tickets is unread"],
            ),
            (
                ticket(unread=(A,), lag=9000),
                ["12-0 is in the stream and was not read yet; 9,000 entries of all tickets are unread"],
            ),
            (
                ticket(kind="returned", fence=8, ids=(A, B)),
                [
                    (
                        "12-0 was given back, by a drain, a recall or a redrive: the ticket's next owner begins with it, under"
                        " a fencing token above 8"
                    ),
                    "17-0 waits behind 12-0",
                ],
            ),
        ],
    )
    def test_where_it_is_that_waits(self, facts: TicketFacts, also: list[str]) -> None:
        assert self.sentences(facts)[1:] == also

    def test_a_rule_is_told_where_something_else_is_in_the_way_first(self) -> None:
        told = explain(ticket(parked=(A,), crowd=ConsumerTotals(), rules=(SLOW,)))
        assert [reason.code for reason in told.reasons] == ["no_consumers", "parked", "rule_too"]
        assert (
            told.reasons[-1].text
            == "a rule holds too: the ticket is slowed to 2/s by alice: maintenance (rule 71f1, everything)"
        )
        assert told.commands == (("lifts the rule of everything", "usher rules lift 71f1"),)
        for board in (None, BoardFacts("open", 1, True)):
            [first, *_] = self.sentences(ticket(parked=(A,), rules=(SLOW,), board=board))
            assert first.endswith(
                " http://m1, but not faster than its rule lets it (slowed to 2/s by alice: maintenance (rule 71f1,"
                " everything))"
            )
        assert "rule_too" not in [reason.code for reason in explain(ticket(parked=(A,), rules=(PAUSE,))).reasons]

    def test_how_many_wait_where_nobody_knows_which_one_is_first(self) -> None:
        for parked, has_all, told in ((3, True, "3 entries wait"), (1, False, "at least 1 entry waits")):
            assert self.sentences(ticket(board=BoardFacts("open", parked, has_all)))[-1] == told
        assert self.sentences(owned(ids=(), parked=(B, C)))[-1] == "2 wait behind ?, the next is 17-0"

    def test_what_becomes_of_the_owner(self) -> None:
        assert "the lease of c3 ends in 4 s unless it is renewed" in self.sentences(owned(RUNS))
        assert any(
            told.startswith("consumer c3 is draining: ")
            for told in self.sentences(owned(RUNS, owner=replace(OWNER, state="draining")))
        )
        assert any("was revoked" in told for told in self.sentences(owned(RUNS, owner=replace(OWNER, state="revoked"))))
        told = self.sentences(owned(RUNS, owner=replace(OWNER, paused=PAUSE)))
        assert (
            "consumer c3 was drained by alice: maintenance: it finishes what it has, what comes later goes to others"
            in told
        )

    def test_why_the_rest_stays_parked(self) -> None:
        full = owned(RUNS, parked=(C,), board=BoardFacts("open", 5, True, True))
        assert (
            "5 more are waiting: the owner has as many of the ticket's messages as it may have at a time"
            in self.sentences(full)
        )
        paused = owned(RUNS, parked=(C,), rules=(PAUSE,))
        expected = (
            "what is not handed over yet is paused by alice: maintenance (rule 71f1, everything); what c3 has goes on"
        )
        assert expected in self.sentences(paused)
        for owner in (replace(OWNER, state="draining"), replace(OWNER, paused=PAUSE)):
            waits = "the rest waits until c3 is done with what it has, then others get it"
            for more in ({"parked": (C,)}, {"unread": (C,)}, {"board": BoardFacts("open", 1, True)}):
                assert waits in self.sentences(owned(RUNS, owner=owner, **more))
                assert waits not in self.sentences(owned(RUNS, **more))
            assert waits not in self.sentences(owned(RUNS, owner=owner)), "there is nothing else"
        assert expected in self.sentences(owned(RUNS, rules=(PAUSE,))), (
            "who has paused a ticket is told what goes on all the same"
        )

    def test_the_way_out_of_a_halt(self) -> None:
        told = explain(replace(ticket(kind="halted", ids=(A,)), ticket_id="two words"))
        commands = [command for _, command in told.commands]
        assert commands == [
            "usher dead redrive --all --ticket 'two words'",
            "usher dead drop --all --ticket 'two words'",
        ]

    def test_of_several_streams_it_is_said_what_their_tickets_are_called(self) -> None:
        expected = "tickets of several streams are told apart by the stream here: ask for STREAM/ID, such as shop:3/T"
        assert expected in self.sentences(ticket(by_stream=True))
        assert expected not in self.sentences(replace(ticket(by_stream=True), ticket_id="shop:3/T"))

    @pytest.mark.parametrize("facts", [ticket(kind="halted", ids=(A,)), ticket(delayed=1, due_ms=NOW + 1)])
    def test_that_nobody_leads_is_said_where_it_matters_later(self, facts: TicketFacts) -> None:
        told = [[reason.code for reason in explain(replace(facts, leader=leader)).reasons] for leader in (LEADER, None)]
        assert ["no_leader" in codes for codes in told] == [False, True]

    def test_a_rule_that_waits_for_a_ticket_can_be_lifted(self) -> None:
        assert explain(ticket(rules=(PAUSE,))).commands == (("lifts the rule of everything", "usher rules lift 71f1"),)

    def test_a_halted_ticket_may_be_paused_too(self) -> None:
        told = explain(ticket(kind="halted", ids=(A,), rules=(PAUSE,)))
        assert (told.reasons[-1].code, told.commands[-1][1]) == ("rule_too", "usher rules lift 71f1")

    def test_what_is_finished_may_have_left_a_letter(self) -> None:
        told = explain(ticket(last_letter=replace(LETTER, policy="skip")))
        assert (told.state, told.reasons[1].code) == ("idle", "has_dead_letter")
        assert told.commands == (("runs it again, as a new message", "usher dead redrive 99-0"),)

    @pytest.mark.parametrize(
        ("facts", "parked", "behind"),
        [
            (ticket(kind="halted", ids=(A, B)), 1, "17-0 waits behind 12-0"),
            (
                ticket(kind="halted", ids=(A, B), parked=(C,), board=BoardFacts("halted", 0, False)),
                2,
                "2 wait behind 12-0, the next is 17-0",
            ),
            (ticket(kind="returned", ids=(A, B), board=BoardFacts("open", 2, True)), 2, "17-0 waits behind 12-0"),
            (
                ticket(kind="returned", ids=(A, B), board=BoardFacts("open", 3, True)),
                3,
                "2 wait behind 12-0, the next is 17-0",
            ),
            (owned(RUNS, parked=(C,), board=BoardFacts("open", 1, True)), 1, "2 wait behind 12-0, the next is 17-0"),
            (
                owned(owner=replace(OWNER, state=""), board=BoardFacts("recovering", 2, True)),
                0,
                "17-0 waits behind 12-0",
            ),
        ],
    )
    def test_nothing_is_counted_twice(self, facts: TicketFacts, parked: int, behind: str) -> None:
        assert explain(facts).document()["parked"] == parked
        assert behind in self.sentences(facts)

    def test_until_when(self) -> None:
        assert explain(owned(OwnEntry(A, "waiting", 2, 0, NOW + 9))).until_ms == NOW + 9
        assert explain(owned(owner=replace(OWNER, state=""))).until_ms == NOW + 10_000
        assert explain(owned(RUNS)).until_ms == 0, "nobody can know"

    def test_entries_are_told_in_the_order_in_which_they_run(self) -> None:
        rows = explain(owned(RUNS, parked=(C,), unread=(b"20-0",))).document()["entries"]
        assert [(row["id"], row["state"], row["behind"]) for row in rows] == [
            ("12-0", "running", None),
            ("17-0", "handed_over", "12-0"),
            ("18-0", "waiting", "17-0"),
            ("20-0", "unread", "18-0"),
        ]
        assert (rows[0]["attempt"], rows[0]["started_ms"], rows[1]["attempt"]) == (2, NOW - 41_000, None)
        assert rows[2] == {
            "id": "18-0",
            "state": "waiting",
            "attempt": None,
            "started_ms": None,
            "due_ms": None,
            "behind": "17-0",
        }
        halted = explain(ticket(kind="halted", ids=(A, B), parked=(C,))).entries
        assert [row.state for row in halted] == ["halted", "waiting", "waiting"]

    def test_what_runs_is_told_whatever_else_its_owner_has(self) -> None:
        for entries in ((RUNS, OwnEntry(B, "queued")), (OwnEntry(A, "queued"), replace(RUNS, id=B))):
            assert explain(owned(*entries)).state == "running"
