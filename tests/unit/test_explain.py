"""Explain: what a ticket waits for in every state of the protocol; and whatever the facts are, there is an
explanation."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from usher.common.protocol.attempts import GIVEN_UP, Attempts
from usher.common.protocol.ticket_states import TicketState
from usher.master.membership.consumer_http import read_answer
from usher.master.policy.board.plans import BoardFacts
from usher.master.policy.explain import OwnEntry, OwnerFacts, OwnerTold, TicketFacts, explain
from usher.master.policy.letters import DeadLetter
from usher.master.policy.rules import Rule, RuleAction, Target
from usher.master.policy.states import Queue

NOW = 1_790_000_000_000
#: A fence that was given 50 s ago.
FENCE = (NOW - 50_000) * 1024
A, B, C = b"12-0", b"17-0", b"18-0"
LEADER = "http://m1"
OWNER = OwnerFacts("c3:7", "live", 4000)
LETTER = DeadLetter(
    b"99-0", A, b"T", "attempts_exhausted", "no disk", "OSError", "", 5, "c3:7", NOW, NOW, "halt", 8, 1, False
)
CROWD = Counter(live=2)
PAUSE = Rule(Target.EVERYTHING, "", RuleAction.PAUSE, None, "maintenance", "alice", 1, NOW, "71f1")
SLOW = replace(PAUSE, action=RuleAction.SLOW, rate_per_second=2.0)


def ticket(**facts: Any) -> TicketFacts:
    return TicketFacts("T", NOW, **{"leader": LEADER, "crowd": CROWD, "room": 10 * ("crowd" not in facts)} | facts)


def owned(*entries: OwnEntry, told: bool = True, **facts: Any) -> TicketFacts:
    said = OwnerTold(entries, 5) if told else None
    return ticket(**{"kind": "owned", "fence": FENCE, "ids": (A, B), "owner": OWNER, "told": said} | facts)


RUNS = OwnEntry(A, "running", 2, NOW - 41_000)
FULL = "Redis, memory: nothing can be sent or handed over"

_TABLE: dict[str, tuple[TicketFacts, str, str, str]] = {
    # name: facts, state, first reason, the first sentence
    "unread, and Redis takes no writes": (
        *(ticket(unread=(A,), refuses_writes=FULL), "unread", "redis_refuses_writes"),
        f"the ticket does not move: {FULL}",
    ),
    "runs, and Redis takes no writes": (
        *(owned(RUNS, refuses_writes=FULL), "running", "handler_runs"),
        f"12-0 has run on c3 for 41 s: attempt 1 of 5 (start 2), fencing token {FENCE}",
    ),
    "runs, and was given up": (
        *(owned(RUNS, attempts={A: Attempts(2, GIVEN_UP)}), "running", "handler_runs"),
        f"12-0 has run on c3 for 41 s: the last attempt, given up by an operator (start 2), fencing token {FENCE}",
    ),
    "runs": (
        owned(RUNS),
        "running",
        "handler_runs",
        f"12-0 has run on c3 for 41 s: attempt 1 of 5 (start 2), fencing token {FENCE}",
    ),
    "waits for its next attempt": (
        *(owned(OwnEntry(A, "waiting", 2, 0, NOW + 90_000)), "retrying", "retry_backoff"),
        f"12-0: an uncharged attempt (start 2) failed on c3 (fencing token {FENCE}). Next attempt in 1 min 30 s.",
    ),
    "asked to be called later": (
        *(owned(OwnEntry(A, "waiting", 2, 0, NOW + 90_000), attempts={A: Attempts(2)}), "retrying", "retry_later"),
        f"12-0 asked c3 (fencing token {FENCE}) to call it again in 1 min 30 s (start 2)",
    ),
    "handed over, no free slot": (
        *(owned(OwnEntry(A, "queued"), OwnEntry(B, "queued")), "handed_over", "waits_for_slot"),
        f"12-0 was handed over to c3 50 s ago (fencing token {FENCE}) and waits there for a free handler slot",
    ),
    "a suspect": (
        *(owned(OwnEntry(A, "apart", 1), attempts={A: Attempts(2, 0, 2)}), "handed_over", "suspect_apart"),
        (f"12-0 waits on c3 (fencing token {FENCE}) for a process of its own. Its process ended 2 times while it ran."),
    ),
    "a suspect that runs": (
        *(owned(OwnEntry(A, "running", 3, NOW - 5_000, 0, True), attempts={A: Attempts(2, 0, 1)}), "running"),
        "suspect_runs",
        (
            f"12-0 has run on c3 for 5 s, in a process of its own: attempt 1 of 5 (start 3), fencing token {FENCE}. Its process"
            " ended 1 time while it ran."
        ),
    ),
    "a suspect without a journal": (
        *(owned(OwnEntry(A, "apart", 0), attempts={A: Attempts(losses=3)}), "handed_over", "suspect_apart"),
        (
            f"12-0 waits on c3 (fencing token {FENCE}) for a process of its own. 3 consumers in a row were lost when it was"
            " the next of its ticket."
        ),
    ),
    "its owner does not answer": (
        *(owned(told=False, attempts={A: Attempts(2, 1)}), "handed_over", "owner_silent"),
        (
            f"12-0 was handed over to c3 50 s ago (fencing token {FENCE}; attempts before: 1 (2 starts)); c3 did not say whether it"
            " runs: if it is dead, others get the ticket once its lease has ended"
        ),
    ),
    "its owner is dead": (
        *(owned(owner=replace(OWNER, state="", successor="c3:8")), "recovering", "owner_lost"),
        (
            f"consumer c3 died with 12-0 (fencing token {FENCE}): the leader http://m1 takes its messages back, oldest first,"
            " and hands them over under a new fencing token, in 10 s at the latest; c3:8 has its name now and gets the"
            " ticket first"
        ),
    ),
    "parked, about to go": (
        ticket(parked=(A,)),
        "waiting",
        "about_to_move",
        "the leader http://m1 hands 12-0 over within moments",
    ),
    "parked, nobody leads": (
        *(ticket(parked=(A,), leader=None), "waiting", "no_leader"),
        "no master leads, so nothing moves (is `usher master` running?)",
    ),
    "parked, no consumer": (
        *(ticket(parked=(A,), crowd=Counter()), "waiting", "no_consumers"),
        "12-0 waits for a consumer, and none is alive (is `usher consumer` running?)",
    ),
    "parked, all drain": (
        *(ticket(parked=(A,), crowd=Counter(draining=2, paused=1, revoked=4)), "waiting", "none_accepts"),
        "12-0 waits: of 7 consumers none takes work (0 starting, 1 paused, 2 draining, 4 revoked);"
        " `usher consumers resume NAME` ends an operator's drain",
    ),
    "parked, all full": (
        *(ticket(parked=(A,), crowd=Counter(live=2)), "waiting", "consumers_full"),
        "12-0 waits for room: 2 consumers that take work, all full",
    ),
    "parked, and others are handled": (
        *(ticket(parked=(A,), crowd=Counter(live=2), queue=Queue(310, 10.0, "noisy", 300)), "queued"),
        "consumers_full",
        (
            "12-0 waits for room: 2 consumers that take work, all full; behind 310 waiting messages, of which 300 are"
            " of tenant noisy: about 31 s at 10.0 per second"
        ),
    ),
    "parked, in a queue": (
        *(ticket(parked=(A,), queue=Queue(310, 10.0), board=BoardFacts("open", 1, True)), "queued", "waits_for_turn"),
        "12-0 waits for its turn behind 310 waiting messages: about 31 s at 10.0 per second",
    ),
    "parked, paused": (
        *(ticket(parked=(A,), rules=(PAUSE,)), "paused", "rule_pause"),
        "12-0 waits because the ticket is paused by alice: maintenance (rule 71f1, everything)",
    ),
    "parked, slowed": (
        *(
            ticket(parked=(A,), rules=(SLOW,), board=BoardFacts("open", 1, True, due_ms=NOW + 500)),
            "waiting",
            "rule_slow",
        ),
        "12-0 waits 500 ms more: the ticket is slowed to 2/s by alice: maintenance (rule 71f1, everything)",
    ),
    "parked, the leader is in doubt": (
        *(ticket(parked=(A,), board=BoardFacts("unsure", 1, True)), "waiting", "leader_unsure"),
        "12-0 waits until the leader has found out who has the ticket (unsure)",
    ),
    "parked, the group is lost": (
        *(ticket(parked=(A,), has_group=False), "waiting", "no_group"),
        "the consumer group is gone: the leader makes it again, where it was",
    ),
    "put off, after failures": (
        *(ticket(kind="put_off", ids=(A,), due_ms=NOW + 17_000, attempts={A: Attempts(3, 3)}), "retrying", "put_off"),
        "12-0: attempt 3 failed. Next attempt at 14:13:37 UTC, in 17 s.",
    ),
    "put off": (
        *(
            ticket(kind="put_off", fence=8, ids=(A, B), due_ms=NOW + 123_000, attempts={A: Attempts(1)}),
            "put_off",
            "put_off",
        ),
        "12-0 asked to be called again at 14:15:23 UTC, in 2 min 3 s",
    ),
    "put off, and due on Redis' clock in a moment": (
        *(
            ticket(kind="put_off", fence=8, ids=(A,), due_ms=NOW, board=BoardFacts("waiting", 1, True)),
            "put_off",
            "put_off",
        ),
        "12-0 waits until 14:13:20 UTC, in 0 s: all of its tenant, or of its kind, fail alike",
    ),
    "returned": (
        *(ticket(kind="returned", fence=8, ids=(A, B)), "returned", "about_to_move"),
        "the leader http://m1 hands 12-0 over within moments",
    ),
    "unread": (
        ticket(unread=(A,), lag=900),
        "unread",
        "lag",
        "the leader http://m1 has not come to 12-0 yet: it reads the stream in order",
    ),
    "unread, its ticket is paused": (  # the leader reads it all the same
        *(
            ticket(unread=(A,), lag=900, rules=(replace(PAUSE, target=Target.PATTERN, value="T*"),)),
            "unread",
            "rule_pause",
        ),
        "12-0 waits because the ticket is paused by alice: maintenance (rule 71f1, pattern T*)",
    ),
    "parked, as only the leader knows": (
        *(ticket(board=BoardFacts("open", 3, True)), "waiting", "about_to_move"),
        "the leader http://m1 hands its next message over within moments",
    ),
    "halted": (
        *(
            ticket(kind="halted", fence=8, ids=(A, B), letter=replace(LETTER, id=b"%d-0" % (NOW - 7_200_000))),
            "halted",
            "halted",
        ),
        (
            "halted: 12-0 became a dead letter 2 h ago after 5 attempts (attempts_exhausted: OSError); the ticket"
            " waits for an operator"
        ),
    ),
    "halted, its letter is old": (
        *(ticket(kind="halted", fence=8, ids=(A,)), "halted", "halted"),
        "halted: 12-0 became a dead letter that was not found; the ticket waits for an operator",
    ),
    "unreadable": (
        *(ticket(kind="unreadable"), "unreadable", "record_unreadable"),
        (
            "the ticket's record in the index cannot be read (did somebody write it by hand?): repair or delete it, and"
            " the ticket moves again"
        ),
    ),
    "delayed": (
        *(ticket(delayed=1, due_ms=NOW + 570_000), "delayed", "delayed"),
        "1 message of the ticket is delayed, due in 9 min 30 s",
    ),
    "idle": (
        *(ticket(), "idle", "nothing_to_do"),
        "the ticket has nothing unread, waiting or in processing: everything is finished, or nothing was ever sent",
    ),
    "idle, but not all letters were looked at": (
        *(ticket(letters_are_all=False), "idle", "nothing_to_do"),
        ("the ticket has nothing unread, waiting or in processing; it may have a dead letter: not all were searched"),
    ),
    "not all streams were looked at": (
        *(ticket(gathered_is_exact=False, by_stream=True), "not_found", "not_looked_through"),
        "nothing of the ticket was found; not all ticket streams were searched, so it may wait in one to be gathered",
    ),
    "not gathered": (
        *(ticket(not_gathered=1, by_stream=True), "not_found", "not_gathered"),
        (
            "the ticket has nothing in the work stream; 1 entry waits in the ticket streams to be gathered, and some"
            " may belong to it"
        ),
    ),
    "not found, more is parked": (
        *(ticket(parked_is_exact=False), "not_found", "not_looked_through"),
        "the ticket has nothing in processing; more is unread or waiting than was searched, so it may be further behind",
    ),
}


@pytest.mark.parametrize(
    ("known", "text"),
    [
        (Attempts(1, 0, 1), "12-0 may end or freeze its process. The last process that ran it ended meanwhile"),
        (Attempts(3, 3, 3, 1), "12-0 may end or freeze its process. The last 3 processes ended meanwhile"),
        (Attempts(0, 0, 0, 2), ""),
    ],
)
def test_owners_that_were_lost_with_the_message_are_told_in_every_state(known: Attempts, text: str) -> None:
    nobody = ticket(parked=(A,), attempts={A: known}, crowd=Counter())
    for facts in (owned(RUNS, attempts={A: known}), nobody):
        told = [reason["text"] for reason in explain(facts)["reasons"] if reason["code"] == "owners_lost"]
        assert [one[: len(text)] for one in told] == [text][: known.crashes]
    assert explain(nobody)["reasons"][0]["code"] == "no_consumers"


@pytest.mark.parametrize("name", _TABLE)
def test_every_state_has_its_words(name: str) -> None:
    facts, state, code, sentence = _TABLE[name]
    told = explain(facts)
    assert (told["state"], told["reasons"][0]["code"], told["reasons"][0]["text"]) == (state, code, sentence)
    assert (told["until_ms"] or NOW) > NOW - 60_000, "a time, or none is known"


def test_every_state_is_in_the_table() -> None:
    of_outbox = {TicketState.IN_OUTBOX, TicketState.HALTED_IN_OUTBOX}  # tests/unit/test_outbox_rows.py
    assert {state for _, state, _, _ in _TABLE.values()} == set(TicketState) - of_outbox


_ids = st.lists(
    st.builds(lambda ms, seq: b"%d-%d" % (ms, seq), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)), max_size=4
).map(tuple)
_numbers = st.integers(-(2**70), 2**70)
_texts = st.text(max_size=8)
_rates = st.one_of(st.none(), st.floats(0.001, 1e6))
_rule = st.builds(
    Rule,
    st.sampled_from(Target),
    _texts,
    st.sampled_from(RuleAction),
    _rates,
    _texts,
    _texts,
    _numbers,
    _numbers,
    _texts,
)
_rules = st.lists(_rule, max_size=2).map(tuple)
_letters = st.one_of(
    st.none(), st.builds(lambda error, attempts: replace(LETTER, error=error, attempts=attempts), _texts, _numbers)
)
_states = st.sampled_from(["", "live", "draining", "revoked", "odd"])
_owners = st.builds(OwnerFacts, _texts, _states, _numbers, _texts, st.one_of(st.none(), st.just(PAUSE)))
_doings = st.sampled_from(["running", "waiting", "queued", "apart", "odd"])
_entries = st.builds(OwnEntry, st.sampled_from([A, B, b"", b"odd"]), _doings, *[_numbers] * 3)
_facts = st.builds(
    TicketFacts,
    *(_texts, _numbers),
    kind=st.sampled_from(["", "owned", "returned", "put_off", "halted", "unreadable"]),
    fence=_numbers,
    ids=st.one_of(_ids, st.just((A, B))),
    owner=st.one_of(st.none(), _owners),
    told=st.one_of(st.none(), st.builds(OwnerTold, st.lists(_entries, max_size=3).map(tuple), _numbers)),
    attempts=st.dictionaries(st.sampled_from([A, B]), st.builds(Attempts, *[_numbers] * 4), max_size=2),
    parked=_ids,
    parked_is_exact=st.booleans(),
    unread=_ids,
    unread_is_exact=st.booleans(),
    lag=_numbers,
    has_group=st.booleans(),
    leader=st.one_of(st.none(), st.just(LEADER)),
    board=st.one_of(st.none(), st.builds(BoardFacts, _texts, _numbers, st.booleans(), st.booleans(), _numbers)),
    crowd=st.dictionaries(st.sampled_from(["live", "starting", "paused"]), _numbers).map(Counter),
    room=_numbers,
    rules=_rules,
    letter=_letters,
    last_letter=_letters,
)


@settings(max_examples=80, deadline=None)
@given(_facts)
def test_whatever_the_facts_are_there_is_an_explanation(facts: TicketFacts) -> None:
    told = explain(facts)
    assert told["state"] in set(TicketState)
    assert told["sentences"]
    assert all(told["sentences"])
    assert [reason["text"] for reason in told["reasons"]] == told["sentences"]
    assert told["summary"] == told["sentences"][0]


class TestTheOwnersAnswer:
    def test_its_times_are_moved_to_our_clock(self) -> None:
        entry = {"id": "12-0", "state": "waiting", "attempt": 2, "started_ms": None, "due_ms": 5_000}
        body = orjson.dumps({"time_ms": 4_000, "max_attempts": 5, "entries": [entry]})
        assert read_answer(body, 14_000) == OwnerTold((OwnEntry(A, "waiting", 2, 0, 15_000),), 5)

    @given(
        st.one_of(
            st.binary(),
            st.sampled_from(
                [b"[]", b"null", b"{}", b'{"time_ms": 1, "max_attempts": 1, "entries": [1]}', b'{"time_ms": []}']
            ),
        )
    )
    def test_anything_odd_is_no_answer(self, body: bytes) -> None:
        assert read_answer(body, 1) is None


class TestWhatElseIsSaid:
    def sentences(self, facts: TicketFacts) -> list[str]:
        return [reason["text"] for reason in explain(facts)["reasons"]]

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
        told = explain(ticket(parked=(A,), crowd=Counter(), rules=(SLOW,)))
        assert [reason["code"] for reason in told["reasons"]] == ["no_consumers", "parked", "rule_too"]
        assert (
            told["reasons"][-1]["text"]
            == "a rule holds too: the ticket is slowed to 2/s by alice: maintenance (rule 71f1, everything)"
        )
        assert told["commands"] == [{"does": "lifts the rule of everything", "command": "usher rules lift 71f1"}]
        for board in (None, BoardFacts("open", 1, True)):
            [first, *_] = self.sentences(ticket(parked=(A,), rules=(SLOW,), board=board))
            assert first.endswith(
                " within moments, as fast as its rule lets it (slowed to 2/s by alice: maintenance (rule 71f1, everything))"
            )
        assert "rule_too" not in [reason["code"] for reason in explain(ticket(parked=(A,), rules=(PAUSE,)))["reasons"]]

    def test_why_the_rest_stays_parked(self) -> None:
        full = owned(RUNS, parked=(C,), board=BoardFacts("open", 5, True, True))
        assert "5 more wait: the owner has as many of the ticket's messages as it may have at a time" in self.sentences(
            full
        )
        paused = owned(RUNS, parked=(C,), rules=(PAUSE,))
        expected = (
            "c3 goes on with what it has; the ticket's other messages are paused by alice: maintenance (rule 71f1,"
            " everything)"
        )
        assert expected in self.sentences(paused)
        for owner in (replace(OWNER, state="draining"), replace(OWNER, paused=PAUSE)):
            waits = "others get the rest when c3 is done with what it has"
            for more in ({"parked": (C,)}, {"unread": (C,)}, {"board": BoardFacts("open", 1, True)}):
                assert waits in self.sentences(owned(RUNS, owner=owner, **more))
                assert waits not in self.sentences(owned(RUNS, **more))
            assert waits not in self.sentences(owned(RUNS, owner=owner)), "there is nothing else"
        assert expected in self.sentences(owned(RUNS, rules=(PAUSE,))), (
            "who has paused a ticket is told what goes on all the same"
        )

    @pytest.mark.parametrize("facts", [ticket(kind="halted", ids=(A,)), ticket(delayed=1, due_ms=NOW + 1)])
    def test_that_nobody_leads_is_said_where_it_matters_later(self, facts: TicketFacts) -> None:
        told = [
            [reason["code"] for reason in explain(replace(facts, leader=leader))["reasons"]]
            for leader in (LEADER, None)
        ]
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
        assert explain(facts)["parked"] == parked
        assert behind in self.sentences(facts)

    def test_entries_are_told_in_the_order_in_which_they_run(self) -> None:
        rows = explain(owned(RUNS, parked=(C,), unread=(b"20-0",)))["entries"]
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
        halted = explain(ticket(kind="halted", ids=(A, B), parked=(C,)))["entries"]
        assert [row["state"] for row in halted] == ["halted", "waiting", "waiting"]

    def test_what_runs_is_told_whatever_else_its_owner_has(self) -> None:
        for entries in ((RUNS, OwnEntry(B, "queued")), (OwnEntry(A, "queued"), replace(RUNS, id=B))):
            assert explain(owned(*entries))["state"] == "running"
