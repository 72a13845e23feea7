"""Explain: what is said beside what a ticket waits for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.test_explain import LEADER, NOW, OWNER, PAUSE, RUNS, SLOW, A, B, C, owned, ticket
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

    @pytest.mark.parametrize("facts", [ticket(kind="halted", ids=(A,)), ticket(delayed=1, due_ms=NOW + 1)])
    def test_that_nobody_leads_is_said_where_it_matters_later(self, facts: TicketFacts) -> None:
        told = [[reason.code for reason in explain(replace(facts, leader=leader)).reasons] for leader in (LEADER, None)]
        assert ["no_leader" in codes for codes in told] == [False, True]

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
