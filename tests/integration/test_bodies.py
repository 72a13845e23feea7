"""A consumer gets the bodies of what its inbox names in the same round trip, and runs nothing that it had before."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest

from tests.integration.actors import ConsumerActor, Stage, Trouble
from tests.integration.factories import FIELD, bodies_of, hand_over, plan, read
from usher.common.base.errors import ReplyUnknown
from usher.common.protocol.attempts import Attempts
from usher.consumer.handlers.message import Message
from usher.master.leader.leader_scripts import LeaderScripts

_HIGHEST = b"18446744073709551615-18446744073709551615"
#: Records that a reader leaves in its inbox at most, if they are small.
_MOST_LEFT = 17


class Play:
    """A leader that hands over to one consumer, which the test moves."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.world, self.history = stage, stage.world, stage.history
        self.leader: LeaderScripts = self.world.elect()
        self.consumer: ConsumerActor = stage.consumer("a")

    def give(self, parts: Mapping[bytes, Sequence[bytes]]) -> int:
        """Hand over what came last; one record. Its fence."""
        heads = {ticket: self.world.head(ticket) for ticket in parts}
        reply = hand_over(self.leader, plan(self.consumer.incarnation, parts, heads), read(self.leader, 1000))
        return reply.fence

    def messages(self) -> list[Message]:
        """What waits in the lanes, in the order in which it is run now; what succeeds is written when nothing goes on
        without that."""
        found = []
        while True:
            run = self.consumer.start()
            if run is not None:
                found.append(run.message)
                run.succeed()
                continue
            self.consumer.flush()
            if not self.consumer.lanes.ready:
                return found

    def in_inbox(self) -> int:
        return int(self.world.link.call("XLEN", self.world.keys.inbox(self.consumer.incarnation)))

    def set_back(self, position: bytes) -> None:
        """The group is given again what is above ``position``."""
        self.world.link.call("XGROUP", "SETID", self.world.keys.stream, self.world.keys.group, position)


@pytest.fixture
def play(any_redis_url: str) -> Iterator[Play]:
    """Afterwards everything that was handed over was run and is done."""
    with Stage(any_redis_url) as stage:
        made = Play(stage)
        yield made
        made.consumer.work()
        assert (made.world.state().pending, made.world.state().index, made.world.dead()) == ({}, {}, [])
        assert not made.consumer.lost


def test_records_and_all_bodies_come_in_one_round_trip(play: Play) -> None:
    ids: list[bytes] = []
    for number in range(5):
        ids += play.world.send(b"T", b"%d-1" % (number + 8))
        play.give({b"T": ids[-1:]})
    trips: list[str] = []
    play.consumer.read_link.before = trips.append
    before = play.world.deliveries()
    assert play.consumer.read() == 5
    assert (trips, play.world.deliveries()) == (["PIPELINE"], before), "the pending list is not read"
    assert [message.stream_id for message in play.messages()] == ids


def test_large_bodies_are_read_from_the_own_pending_list_and_no_others(play: Play) -> None:
    ids = play.world.send(b"T", b"1-1")
    ids += [play.world.add(b"1-5", FIELD, b"T", b"body", b"x" * 9000), *play.world.send(b"T", b"2-1")]
    play.give({b"T": ids})
    before = play.world.deliveries()
    assert play.consumer.read() == 3
    assert play.world.deliveries() == before | {ids[1]: before[ids[1]] + 1}
    assert [message.stream_id for message in play.messages()] == ids


def test_a_body_that_came_is_run_although_its_entry_was_deleted_since(play: Play) -> None:
    ids = play.world.send(b"T", b"1-1", b"2-1")
    play.give({b"T": ids})
    play.world.delete(ids[0])
    assert play.consumer.read() == 2
    assert [message.stream_id for message in play.messages()] == ids


def test_a_message_at_the_highest_id_is_run(play: Play) -> None:
    ids = play.world.send(b"T", b"1-1", _HIGHEST)
    play.give({b"T": ids})
    play.consumer.work()
    assert play.history.ids(b"T") == ids


@pytest.mark.parametrize("trouble", [Trouble.REPLY_LOST, Trouble.NEVER_SENT])
def test_what_is_read_is_run_once_when_the_first_read_fails(play: Play, trouble: Trouble) -> None:
    ids = play.world.send(b"T", b"1-1", b"2-1")
    play.give({b"T": ids})
    play.consumer.read_link.troubles["PIPELINE"] = trouble
    with pytest.raises(Exception, match=re.escape(trouble.value)):
        play.consumer.read()
    assert (play.consumer.read(), play.consumer.read()) == (2, 0)
    play.consumer.work()
    assert play.history.ids(b"T") == ids


# ---- what this process has read before ----


def _run_but_not_written(play: Play) -> list[bytes]:
    """Two messages that were run; their acknowledgement came, and then the group is given them again."""
    ids = play.world.send(b"T", b"1-1", b"2-1")
    play.give({b"T": ids})
    play.consumer.work()
    assert play.history.ids(b"T") == ids
    play.set_back(b"0-0")
    play.give({b"T": ids})
    return ids


def test_after_a_read_that_was_cut_off_one_record_comes(play: Play) -> None:
    """Each may bring much, and over a bad network less comes through."""
    ids = _give_many(play, 5, lambda: None)
    play.consumer.read_link.troubles["PIPELINE"] = Trouble.REPLY_LOST
    with pytest.raises(ReplyUnknown):
        play.consumer.read()
    assert (play.consumer.read(), play.consumer.read()) == (1, 4)
    assert sorted(message.stream_id for message in play.messages()) == sorted(ids)


def test_what_is_handed_over_anew_and_was_acknowledged_since_is_not_run_again(play: Play) -> None:
    """The acknowledgement of before was sent again, as after a lost reply."""
    ids = _run_but_not_written(play)
    play.consumer.steps.ack(ids)
    assert play.consumer.read() == 0
    assert (play.messages(), play.history.ids(b"T")) == ([], ids)


def test_a_body_of_an_earlier_record_is_not_that_of_a_later_one(play: Play) -> None:
    """The stream was made again in between, with another message of that id."""
    play.give({b"T": play.world.send(b"T", b"5-1")})
    play.world.link.call("DEL", play.world.keys.stream, play.world.keys.tickets)
    play.world.make_group()
    play.world.add(b"5-1", FIELD, b"T", b"body", b"another")
    play.give({b"T": [b"5-1"]})
    assert play.consumer.read() == 1
    assert [message.body for message in play.messages()] == [b"another"]


@pytest.mark.parametrize("is_read", [True, False])
def test_what_is_here_is_run_once_although_a_group_made_anew_brings_it_with_its_body(play: Play, is_read: bool) -> None:
    """By hand, and for a new leader, which knows of nothing before."""
    ids = play.world.send(b"T", b"1-1", b"2-1")
    play.give({b"T": ids})
    assert not is_read or play.consumer.read() == 2
    play.world.link.call("XGROUP", "DESTROY", play.world.keys.stream, play.world.keys.group)
    play.world.make_group()
    play.world.link.call("DEL", play.world.keys.leader)
    play.leader = play.world.elect("http://two")
    play.give({b"T": ids})
    assert bodies_of(play.world.inbox_records(play.consumer.incarnation)[-1:]).keys() == set(ids)
    assert play.consumer.read() == (0 if is_read else 2)
    assert [message.stream_id for message in play.messages()] == ids


def test_what_is_handed_over_anew_and_is_pending_is_looked_up_and_run_again(play: Play) -> None:
    ids = _run_but_not_written(play)
    new = play.world.send(b"T", b"3-1")
    play.give({b"T": new})
    assert play.consumer.read() == 3
    assert [message.stream_id for message in play.messages()] == ids + new


def test_of_what_is_handed_over_anew_only_what_is_pending_is_run_and_new_messages_are(play: Play) -> None:
    ids = _run_but_not_written(play)
    play.consumer.steps.ack(ids[:1])
    new = play.world.send(b"U", b"3-1", b"4-1")
    play.give({b"U": new})
    assert play.consumer.read() == 3
    assert sorted(message.stream_id for message in play.messages()) == ids[1:] + new


# ---- the inbox ----


def _give_many(play: Play, count: int, after_each: Callable[[], object]) -> list[bytes]:
    ids: list[bytes] = []
    for _ in range(count):
        ids += play.world.send(b"T%d" % (len(ids) % 7))
        play.give({b"T%d" % ((len(ids) - 1) % 7): ids[-1:]})
        after_each()
    return ids


def test_the_inbox_stays_short(play: Play) -> None:
    lengths = []

    def read() -> None:
        lengths.append(play.in_inbox())
        assert play.consumer.read() == 1

    ids = _give_many(play, 320, read)
    assert max(lengths) <= _MOST_LEFT
    assert len(ids) == 320
    assert sorted(message.stream_id for message in play.messages()) == sorted(ids)


def test_an_inbox_that_has_grown_long_is_read_and_trimmed_in_a_few_reads(play: Play) -> None:
    ids = _give_many(play, 320, lambda: None)
    assert [play.consumer.read() for _ in range(21)] == [16] * 20 + [0]
    assert play.in_inbox() <= _MOST_LEFT
    assert sorted(message.stream_id for message in play.messages()) == sorted(ids)


def test_the_inbox_is_trimmed_when_nothing_comes_any_more(play: Play) -> None:
    _give_many(play, 5, play.consumer.read)
    assert play.in_inbox() == 5
    assert [play.consumer.read(), play.consumer.read()] == [0, 0]
    assert play.in_inbox() == 0


def test_large_records_do_not_stay_in_the_inbox_until_there_are_many(play: Play) -> None:
    ids = [play.world.add(b"%d-1" % number, FIELD, b"T%d" % number, b"body", b"x" * 7000) for number in range(1, 40)]
    for at in range(0, 39, 13):
        play.give({b"T%d" % (number + 1): [ids[number]] for number in range(at, at + 13)})
        assert play.consumer.read() == 13
    assert play.in_inbox() == 1


# ---- messages ----

_ODD = (
    b"nul\0\xff", b"\0\n\r\n", b"", b"", b"body", b"1", b"body", b"2", b"fence", b"9", b"ids", b"1-1 2-2", b"uid",
    b"u-1",
)  # fmt: skip


def test_a_message_has_all_that_was_sent_and_its_attempts(play: Play) -> None:
    ticket = b"nul\0 and\nline"
    first = play.world.add(b"1-1", FIELD, ticket, *_ODD)
    fence = play.give({ticket: [first]})
    second = play.world.add(b"2-1", *_ODD, FIELD, ticket)
    play.world.link.call("HSET", play.world.keys.attempts, second, "2 1 0 0")
    assert play.give({ticket: [second]}) == 0, "the ticket keeps its fence"
    play.consumer.read()
    with play.consumer.lanes.lock:
        waiting, _, _ = play.consumer.lanes.look(ticket)
    one, two = waiting
    assert (one.ticket, one.id, one.fence, one._flat) == (ticket, "1-1", fence, [FIELD.encode(), ticket, *_ODD])
    assert (two.ticket, two.id, two.fence, two._flat) == (ticket, "2-1", fence, [*_ODD, FIELD.encode(), ticket])
    assert [(message.uid, message.body, message.body_is_gone) for message in waiting] == [("u-1", b"1", False)] * 2
    assert [(message.known, message.plain) for message in waiting] == [
        (Attempts(), True),
        (Attempts(2, 1, 0, 0), False),
    ]


def test_what_was_read_and_not_started_is_given_back_by_a_drain_and_is_run_by_the_next_owner(play: Play) -> None:
    ids = play.world.send(b"T", b"1-1")
    play.give({b"T": ids})
    assert play.consumer.read() == 1
    ids += play.world.send(b"T", b"2-1")
    play.give({b"T": ids[1:]})
    play.consumer.begin_drain()
    play.consumer.give_back()
    assert (play.world.pending(), play.history.starts) == ({b"master": ids}, [])
    play.consumer = play.stage.consumer("b")
    hand_over(play.leader, plan(play.consumer.incarnation, {b"T": ids}, {b"T": play.world.head(b"T")}))
    play.consumer.work()
    assert play.history.ids(b"T") == ids
