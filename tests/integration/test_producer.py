"""common/sending/producer.py and send.lua: a message with a uid is added once, however often it is sent, and its first
id is the answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.factories import World
from tests.integration.memory import full_memory
from tests.integration.test_send import usher_send
from tests.proxy import Proxy
from usher.common.base.errors import Behind, MessageUndecodable, NotNow, ReplyUnknown
from usher.common.protocol.keys import Keys, uid_key
from usher.common.redis.client import CommandRefused, Link
from usher.common.redis.replies import pairs
from usher.common.sending.producer import Outgoing, Producer

STREAM = "ticket_stream"


def entries(link: Link) -> list[tuple[str, dict[bytes, bytes]]]:
    return [(entry_id.decode(), pairs(fields)) for entry_id, fields in link.call("XRANGE", STREAM, "-", "+")]


def messages(*uids: str | None) -> list[Outgoing]:
    return [Outgoing("T", {"text": f"of {uid}"}, uid) for uid in uids]


class TestSend:
    def test_the_first_send_adds_and_a_repeat_answers_its_id(self, world: World) -> None:
        producer = Producer(world.link, dedup_s=60)
        first = producer.send("42", {"text": "hello", "n": 3, "raw": b"\xff"}, uid="order-7")
        assert producer.send("42", {"text": "hello again"}, uid="order-7") == first
        told = {b"ticket_id": b"42", b"text": b"hello", b"n": b"3", b"raw": b"\xff", b"uid": b"order-7"}
        assert entries(world.link) == [(first, told)]

    def test_it_is_off_by_default(self, world: World) -> None:
        producer = Producer(world.link)
        assert producer.send("T", {}, uid="a") != producer.send("T", {}, uid="a")
        assert world.link.call("KEYS", "*uid*") == []

    def test_a_batch_is_in_order_and_says_which_were_there(self, world: World) -> None:
        producer = Producer(world.link, dedup_s=60)
        [early] = producer.send_many(messages("b"))
        sent = producer.send_many(messages("a", "b", None, "c", "a", None))
        assert [one.repeated for one in sent] == [False, True, False, False, True, False]
        assert (sent[1].id, sent[4].id) == (early.id, sent[0].id)
        assert [fields[b"text"] for _, fields in entries(world.link)] == [
            b"of b",
            b"of a",
            b"of None",
            b"of c",
            b"of None",
        ]

    def test_more_than_a_batch(self, world: World) -> None:
        producer = Producer(world.link, dedup_s=60)
        sent = producer.send_many(messages(*map(str, range(1200))))
        assert [one.id for one in sent] == [entry_id for entry_id, _ in entries(world.link)]
        assert [one.id for one in producer.send_many(messages(*map(str, range(1200))))] == [one.id for one in sent]

    def test_a_uid_among_the_fields_counts(self, world: World) -> None:
        producer = Producer(world.link, dedup_s=60)
        assert producer.send("T", {"uid": "a"}) == producer.send("T", {}, uid="a")

    def test_the_window_ends_and_a_repeat_does_not_make_it_longer(self, world: World) -> None:
        producer = Producer(world.link, dedup_s=60)
        first = producer.send("T", {}, uid="a")
        assert 59_000 < world.link.call("PTTL", uid_key(STREAM, b"a")) <= 60_000
        world.link.call("PEXPIRE", uid_key(STREAM, b"a"), 30_000)
        producer.send("T", {}, uid="a")
        assert world.link.call("PTTL", uid_key(STREAM, b"a")) <= 30_000
        world.link.call("DEL", uid_key(STREAM, b"a"))  # as at the end of its time
        assert producer.send("T", {}, uid="a") != first

    @pytest.mark.parametrize(
        "wrong",
        [
            Outgoing("", {"a": "b"}),
            Outgoing("x" * 257, {}),
            Outgoing("T", {"ticket_id": "U"}),
            Outgoing("T", {}, ""),
            Outgoing("T", {}, "x" * 513),
            Outgoing(None, {}),
            Outgoing("T", {f"f{n}": "v" for n in range(3500)}),
        ],
    )
    def test_what_could_never_be_handled_is_refused_before_anything_is_sent(
        self, world: World, wrong: Outgoing
    ) -> None:
        with pytest.raises((ValueError, MessageUndecodable)):
            Producer(world.link, dedup_s=60).send_many([*messages("a"), wrong])
        assert world.link.call("XLEN", STREAM) == 0

    def test_a_uid_key_that_is_something_else_is_refused_before_anything_is_added(self, world: World) -> None:
        """The losing side of send.lua: checks come first, because a script is not rolled back."""
        world.link.call("HSET", uid_key(STREAM, b"b"), "f", "v")
        with world.unchanged(), pytest.raises(CommandRefused, match="WRONGTYPE"):
            Producer(world.link, dedup_s=60).send_many(messages("a", "b"))

    def test_two_that_send_the_same_at_once_add_one(self, any_redis_url: str) -> None:
        answers: list[str] = []

        def send(link: Link) -> None:
            producer = Producer(link, dedup_s=60)
            answers.extend(producer.send("T", {}, uid=str(n)) for n in range(50))

        links = [Link(any_redis_url, f"test:{n}") for n in range(4)]
        threads = [threading.Thread(target=send, args=(one,)) for one in links]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(answers) == 200
        assert len(set(answers)) == links[0].call("XLEN", STREAM) == 50
        for one in links:
            one.close()


def test_a_full_server_refuses_a_batch_as_a_whole(world: World) -> None:
    producer = Producer(world.link, dedup_s=60, patience_s=0)
    producer.send_many(messages("a"))
    with full_memory(world.link), pytest.raises(NotNow):
        producer.send_many(messages("b", "c"))
    assert [one.repeated for one in producer.send_many(messages("a", "b", "c"))] == [True, False, False]


class Lossy:
    """Breaks the connection instead of passing on the next ``count`` replies to sends that happened."""

    def __init__(self, count: int, link: Link) -> None:
        self.lost = 0
        self._count = count
        self._link = link

    def __call__(self, chunk: bytes) -> bytes | None:
        if self.lost < self._count and self._link.call("XLEN", STREAM):
            self.lost += 1
            return None
        return chunk


class TestLostReplies:
    @pytest.fixture
    def through(self, redis_url: str, link: Link, request: pytest.FixtureRequest) -> Any:
        def made(count: int, work: Callable[[Link], Any]) -> tuple[Any, Lossy]:
            with Proxy(redis_url) as proxy:
                lossy = Lossy(count, link)
                proxy.on_reply = lossy
                with Link(proxy.url, "test:lossy", timeout_s=20.0) as far:
                    return work(far), lossy

        return made

    def test_a_send_whose_reply_is_lost_is_repeated_and_added_once(self, through: Any, link: Link) -> None:
        sent, lossy = through(3, lambda far: Producer(far, dedup_s=600, patience_s=100).send_many(messages("a", "b")))
        assert lossy.lost == 3
        assert [one.id for one in sent] == [entry_id for entry_id, _ in entries(link)]
        assert len(sent) == 2
        assert {one.repeated for one in sent} == {True}, "by our own first send"

    @pytest.mark.parametrize("producer", [{"dedup_s": 0}, {"dedup_s": 600}])
    def test_what_cannot_be_recognised_is_not_repeated(
        self, through: Any, link: Link, producer: dict[str, float]
    ) -> None:
        uid = "a" if not producer["dedup_s"] else None
        with pytest.raises(ReplyUnknown):
            through(1, lambda far: Producer(far, patience_s=100, **producer).send_many(messages("b", uid)))
        assert link.call("XLEN", STREAM) == 2

    def test_the_caller_may_repeat_it_itself(self, through: Any, link: Link) -> None:
        with pytest.raises(ReplyUnknown):
            through(1, lambda far: Producer(far, dedup_s=600, patience_s=0).send("T", {}, uid="a"))
        [(first, _)] = entries(link)
        assert Producer(link, dedup_s=600).send("T", {}, uid="a") == first

    def test_what_did_not_happen_is_tried_again_for_a_while_and_then_told(self) -> None:
        with pytest.raises(NotNow):
            Producer(Link("redis://127.0.0.1:1/0", "test"), patience_s=0.2).send("T", {})


class TestCommand:
    def test_the_same_file_twice_is_sent_once(self, redis_url: str, link: Link) -> None:
        csv = b"number,uid\n" + b"".join(b"I%d,u%d\n" % (n % 7, n) for n in range(600))
        words = ("--csv", "-", "--key", "number", "--dedup", "60")
        assert b"600 sent" in usher_send(redis_url, *words, stdin=csv).stdout
        done = usher_send(redis_url, *words, "--json", stdin=csv + b"I9,new\n")
        assert (done.returncode, done.stderr) == (0, b"")
        document = json.loads(done.stdout)
        assert (document["sent"], document["repeated"], document["unknown"]) == (1, 600, 0)
        assert link.call("XLEN", STREAM) == 601

    def test_made_up_messages_get_uids_by_their_number(self, redis_url: str, link: Link) -> None:
        words = ("--simulate", "30", "--seed", "5", "--dedup", "60")
        assert b"30 sent" in usher_send(redis_url, *words).stdout
        assert b"0 sent" in (again := usher_send(redis_url, *words)).stdout
        assert b"30 were there already" in again.stdout
        assert link.call("XLEN", STREAM) == 30

    @pytest.mark.parametrize(
        ("words", "told"),
        [(("--ticket", "1", "a=b"), b"a field uid="), (("--csv", "-", "--key", "a"), b"a column uid")],
    )
    def test_messages_that_could_not_be_recognised_are_refused(
        self, redis_url: str, link: Link, words: tuple[str, ...], told: bytes
    ) -> None:
        done = usher_send(redis_url, *words, "--dedup", "60", stdin=b"a,b\n1,2\n")
        assert done.returncode == 2
        assert told in done.stderr
        assert link.call("XLEN", STREAM) == 0

    def test_a_row_that_no_message_can_have_leaves_nothing_unknown(self, redis_url: str, link: Link) -> None:
        csv = b"number,uid\nI1,u1\nI2,\n"
        done = usher_send(redis_url, "--csv", "-", "--key", "number", "--dedup", "60", "--json", stdin=csv)
        document = json.loads(done.stdout)
        assert (done.returncode, document["sent"], document["unknown"]) == (1, 0, 0)
        assert b"may or may not have arrived" not in done.stderr
        assert link.call("XLEN", STREAM) == 0


def test_no_more_of_a_ticket_waits_than_its_limit(link: Link, redis_url: str) -> None:
    stream, group = "ticket_stream", "concurrency_stream_group"
    producer = Producer(redis_url, ticket_limit=3, dedup_s=60)
    ids = [producer.send("A", {"n": n}, uid=f"u{n}") for n in range(3)]
    with pytest.raises(Behind, match="no master reads it as group concurrency_stream_group") as behind:
        producer.send("A", {"n": 3})
    assert (behind.value.ticket_id, behind.value.waiting) == ("A", 3)
    assert producer.send("A", {"n": 0}, uid="u0") == ids[0], "a repeat adds nothing"
    with pytest.raises(Behind):
        producer.send_many([Outgoing("B", {"n": 0}), Outgoing("A", {"n": 1})])
    assert link.call("XLEN", stream) == 3, "none of a batch is added"
    link.call("XGROUP", "CREATE", stream, group, "0")
    link.call("XREADGROUP", "GROUP", group, "x", "NOACK", "COUNT", 2, "STREAMS", stream, ">")
    with pytest.raises(Behind):
        producer.send("A", {"n": 3})  # the leader has read two, and handed them over to nobody yet
    link.call("XCLAIM", stream, group, "x", 0, ids[1], "FORCE")
    link.call("SET", Keys(stream, group).taken, f"{ids[1]} 2")  # the first is over
    producer.send("A", {"n": 3})
    with pytest.raises(Behind):
        producer.send("A", {"n": 4})
    producer.send_many([Outgoing("B", {"n": n}) for n in range(3)])
    with pytest.raises(Behind, match="ticket B is behind: 3 messages wait; nothing was sent$"):
        producer.send("B", {"n": 3})
    last = link.call("XINFO", "STREAM", stream)[7]
    link.call("SET", Keys(stream, group).taken, last + b" 9")
    link.call("XACK", stream, group, ids[1])
    producer.send_many([Outgoing("A", {"n": n}) for n in range(3)])  # all that was sent before is over
    sent = producer.send_many([Outgoing("C", {"n": 0}, uid="c")] * 4 + [Outgoing("C", {"n": n}) for n in (1, 2)])
    assert len({one.id for one in sent}) == 3, "a repeat in a batch counts once"
    with pytest.raises(Behind, match="only the first 500 of these were sent") as behind:
        producer.send_many([Outgoing(f"N{n}", {"n": n}) for n in range(500)] + [Outgoing("C", {"n": 3})])
    assert behind.value.sent == 500


@pytest.mark.parametrize("limit", [-1, 1.5, True, "3", 10_001])
def test_a_limit_that_is_none_is_refused(redis_url: str, limit: Any) -> None:
    with pytest.raises(ValueError, match="ticket_limit"):
        Producer(redis_url, ticket_limit=limit)
