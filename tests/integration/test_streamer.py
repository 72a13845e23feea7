"""Rows become messages: all of them, in order, by one streamer, and what goes wrong between two steps loses nothing.

emit.lua's losing side: a streamer without the lease adds nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.outboxes import STREAM, Hand, Outbox, entries, made_outbox, uids, until
from tests.proxy import Proxy
from tests.valkey import durable_server
from usher.common.base.errors import NotNow, ReplyUnknown, SqlTrouble, StartRefused
from usher.common.outbox.rows import FIELDS, queries
from usher.common.outbox.store import LogRecord, write_to_outbox
from usher.common.redis.client import Link
from usher.common.redis.embedded import EmbeddedRedis, find_redis_server
from usher.master.settings import StreamerSettings
from usher.master.streamer import program as streamer
from usher.master.streamer.program import StreamerProgram


def test_rows_become_messages_in_order_and_go(outbox: Outbox, hands: Callable[..., Hand], link: Link) -> None:
    outbox.stage(LogRecord("42", "create", "ride", {"id": 7}, "u-1"))
    written = outbox.stage_many(2500)
    hand = hands(outbox)
    hand.turn(3)
    assert entries(link)[0] == {
        b"ticket_id": b"42",
        b"uid": b"u-1",
        b"action": b"create",
        b"object": b"ride",
        b"data": b'{"id":7}',
    }
    assert uids(link) == ["u-1", *written]
    assert outbox.store.waiting() == (0, 0)
    assert hand.streamer.run_once() > 0, "an empty outbox is looked at again later"


def test_slow_transactions_that_commit_out_of_id_order_lose_nothing(
    postgres_outbox: Outbox, hands: Callable[..., Hand], link: Link
) -> None:
    hand = hands(postgres_outbox)
    with postgres_outbox.engine.connect() as slow, postgres_outbox.engine.connect() as quick:
        write_to_outbox(slow, ticket_id="A", action="a", object="o", uid="low id")
        write_to_outbox(quick, ticket_id="B", action="b", object="o", uid="high id")
        lower = slow.scalar(sa.text("SELECT id FROM staged_log_records"))
        higher = quick.scalar(sa.text("SELECT id FROM staged_log_records"))
        assert lower < higher
        quick.commit()
        hand.turn(2)
        assert uids(link) == ["high id"]
        slow.commit()
        hand.turn(2)
    assert uids(link) == ["high id", "low id"]
    assert postgres_outbox.store.waiting() == (0, 0)


def test_a_row_that_becomes_visible_between_read_and_remove_stays(
    postgres_outbox: Outbox, hands: Callable[..., Hand], link: Link
) -> None:
    """What `DELETE ... WHERE id <= x` would take with it."""
    hand = hands(postgres_outbox)
    with postgres_outbox.engine.connect() as slow:
        write_to_outbox(slow, ticket_id="A", action="a", object="o", uid="low id")
        postgres_outbox.stage(LogRecord("B", "b", "o", uid="high id"))
        emit = hand.streamer.emit
        hand.streamer.emit = lambda *given: (emit(*given), slow.commit())[0]  # type: ignore[method-assign,func-returns-value]
        hand.turn()
        hand.streamer.emit = emit  # type: ignore[method-assign]
    assert uids(link) == ["high id"]
    assert postgres_outbox.store.waiting() == (1, 0)
    hand.turn()
    assert uids(link) == ["high id", "low id"]


def test_many_writers_of_few_tickets_keep_each_tickets_order(
    postgres_outbox: Outbox, hands: Callable[..., Hand], link: Link
) -> None:
    """Each transaction of a ticket counts those that have committed before it; the streamer runs all the while."""
    tickets, writers, turns = 3, 4, 15
    with postgres_outbox.engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE committed (ticket TEXT, n INTEGER)"))

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(turns):
            ticket = {"ticket": f"T{rng.randrange(tickets)}"}
            with postgres_outbox.engine.begin() as connection:
                write_to_outbox(connection, ticket_id=ticket["ticket"], action="first", object="o")
                n = 1 + int(
                    connection.scalar(sa.text("SELECT count(*) FROM committed WHERE ticket = :ticket"), ticket) or 0
                )
                connection.execute(sa.text("INSERT INTO committed VALUES (:ticket, :n)"), ticket | {"n": n})
                time.sleep(rng.random() / 100)
                write_to_outbox(connection, ticket_id=ticket["ticket"], action="then", object="o", data=n)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(writers)]
    for thread in threads:
        thread.start()
    hand = hands(postgres_outbox, batch_rows=5)
    until(lambda: (hand.turn(), not any(thread.is_alive() for thread in threads))[1])  # type: ignore[func-returns-value]
    until(lambda: (hand.turn(), postgres_outbox.store.waiting()[0] == 0)[1])  # type: ignore[func-returns-value]
    sent: dict[bytes, list[tuple[bytes, int]]] = {}
    for fields in entries(link):
        sent.setdefault(fields[b"ticket_id"], []).append((fields[b"action"], json.loads(fields[b"data"]) or 0))
    assert sum(map(len, sent.values())) == 2 * writers * turns
    for records in sent.values():
        assert records == [record for n in range(1, len(records) // 2 + 1) for record in ((b"first", 0), (b"then", n))]


def test_rows_that_can_become_no_message_are_set_aside_and_the_others_go_on(
    sqlite_outbox: Outbox, hands: Callable[..., Hand], link: Link, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        ("good 1", "'T'"),
        ("bad 1", "''"),
        ("good 2", "'T'"),
        ("bad 2", "CAST(x'ff41' AS TEXT)"),
        ("good 3", "'T'"),
    ]
    with sqlite_outbox.engine.begin() as connection:
        for uid, ticket in rows:
            connection.execute(
                sa.text(
                    f"INSERT INTO staged_log_records (uid, ticket_id, action, object) VALUES ('{uid}', {ticket}, 'a',"
                    " 'o')"
                )
            )
        connection.execute(
            sa.text(
                "INSERT INTO staged_log_records (uid, ticket_id, action, object, data) VALUES ('bad 3', 'T', 'a', 'o',"
                " x'ff')"
            )
        )
    hands(sqlite_outbox).turn(2)  # the good ones first
    assert uids(link) == ["good 1", "good 2", "good 3"]
    assert sqlite_outbox.store.waiting() == (0, 3)
    refused = sqlite_outbox.rows("SELECT uid, reason FROM refused_log_records ORDER BY id")
    assert refused == [("bad 1", "empty_ticket_id"), ("bad 2", "ticket_id_not_utf8"), ("bad 3", "data_not_utf8")]
    assert caplog.text.count("outbox_row_refused") == 3


def test_postgres_sets_aside_too_and_a_row_can_be_put_back(
    postgres_outbox: Outbox, hands: Callable[..., Hand], link: Link
) -> None:
    with postgres_outbox.engine.begin() as connection:
        connection.execute(
            sa.text("INSERT INTO staged_log_records (uid, ticket_id, action, object) VALUES ('x', '', 'a', 'o')")
        )
    hand = hands(postgres_outbox)
    hand.turn()
    assert postgres_outbox.rows("SELECT uid, reason FROM refused_log_records") == [("x", "empty_ticket_id")]
    with postgres_outbox.engine.begin() as connection:
        connection.execute(sa.text("UPDATE refused_log_records SET ticket_id = 'T', id = 1"))
        connection.execute(sa.text(queries("postgresql")["put_back"]), {"id": 1})
    hand.turn()
    assert uids(link) == ["x"]


def test_ten_megabytes_go_through_alone(outbox: Outbox, hands: Callable[..., Hand], link: Link) -> None:
    large = "x" * 10_000_000
    outbox.stage(
        LogRecord("T", "a", "o", 1, "1"), LogRecord("T", "a", "o", large, "2"), LogRecord("T", "a", "o", 3, "3")
    )
    batches = [[row.uid for row in outbox.store.batch(100)]]
    assert batches == [["1", "2"]], "the large one ends its batch"
    hands(outbox).turn(2)
    assert uids(link) == ["1", "2", "3"]
    assert len(entries(link)[1][b"data"]) == 10_000_002


# ---- Redis ----


def test_a_streamer_without_the_lease_adds_nothing(
    sqlite_outbox: Outbox, hands: Callable[..., Hand], link: Link
) -> None:
    """emit.lua, the losing side: another holder, another epoch, no lease at all."""
    one, two = hands(sqlite_outbox), hands(sqlite_outbox, lead=False, holder="two")
    assert two.elect() is None
    sqlite_outbox.stage_many(3)
    assert two.streamer.run_once() > 0.5, "a standby waits"
    epoch = str(one.lead.epoch)
    keys = (one.keys.stream, one.keys.leader)
    values = (len(FIELDS) + 1, "ticket_id", *FIELDS, "T", "u", "a", "o", "{}")
    for wrong in (epoch[:-1], epoch + "0", "0", ""):
        assert link.run("emit", keys, (wrong, *values)) == b"FENCED"
    link.call("DEL", one.keys.leader)
    assert link.run("emit", keys, (epoch, *values)) == b"FENCED"
    assert link.call("EXISTS", STREAM) == 0
    assert two.elect() is not None
    one.turn()
    assert (one.lead.epoch, link.call("EXISTS", STREAM), sqlite_outbox.store.waiting()[0]) == (None, 0, 3)
    two.turn()
    assert link.call("XLEN", STREAM) == 3


def test_a_lost_answer_means_a_new_epoch_and_the_same_batch_again(
    sqlite_outbox: Outbox, hands: Callable[..., Hand], redis_url: str, link: Link
) -> None:
    first = sqlite_outbox.stage_many(1)
    with Proxy(redis_url) as proxy:
        hand = hands(sqlite_outbox, proxy.url)
        hand.turn()  # the script is known to the server, and to the streamer
        written = first + sqlite_outbox.stage_many(3)
        before = hand.lead.epoch
        link.run(
            "emit", (hand.keys.stream, hand.keys.leader), ("0", 1, "f")
        )  # known to the server: no NOSCRIPT in the way
        proxy.on_reply = lambda chunk: None
        with pytest.raises(ReplyUnknown):
            hand.turn()
        proxy.on_reply = lambda chunk: chunk
        assert uids(link) == written, "it had happened"
        assert sqlite_outbox.store.waiting()[0] == 3
        hand.turn()
        assert uids(link) == written, "nothing is sent while in doubt"
        assert hand.elect() != before
        late = (str(before), 2, "ticket_id", "uid", "T", "late")
        assert link.run("emit", (hand.keys.stream, hand.keys.leader), late) == b"FENCED"
        hand.turn(2)
    assert uids(link) == written + written[1:]
    assert sqlite_outbox.store.waiting()[0] == 0


def test_a_redis_that_answers_too_late_for_a_large_batch_gets_smaller_ones_and_then_larger_ones_again(
    sqlite_outbox: Outbox, hands: Callable[..., Hand], redis_url: str, link: Link
) -> None:
    written = sqlite_outbox.stage_many(200)
    lengths = [0]

    def answer(chunk: bytes) -> bytes | None:
        lengths.append(link.call("XLEN", STREAM))
        return None if lengths[-1] - lengths[-2] > 40 else chunk

    with Proxy(redis_url) as proxy:
        hand = hands(sqlite_outbox, proxy.url, batch_rows=100)
        proxy.on_reply = answer
        for _ in range(50):
            with contextlib.suppress(ReplyUnknown):
                hand.turn()
            hand.elector._next_election_s = 0.0  # elections have a pace
            hand.elect()
            if not sqlite_outbox.store.waiting()[0]:
                break
    assert sqlite_outbox.store.waiting()[0] == 0, "the same batch again and again"
    assert list(dict.fromkeys(uids(link))) == written, "in order"
    sizes = [after - before for before, after in itertools.pairwise(lengths) if after > before]
    assert sizes[:6] == [100, 50, 25, 29, 33, 38]


def test_a_full_redis_takes_nothing_and_the_rows_wait(
    sqlite_outbox: Outbox, hands: Callable[..., Hand], link: Link
) -> None:
    sqlite_outbox.stage_many(3)
    hand = hands(sqlite_outbox)
    link.call("CONFIG", "SET", "maxmemory", 1)
    try:
        with pytest.raises(NotNow) as refused:
            hand.turn()
        assert refused.value.kind == "OOM"
    finally:
        link.call("CONFIG", "SET", "maxmemory", 0)
    assert (link.call("EXISTS", STREAM), sqlite_outbox.store.waiting()[0]) == (0, 3)
    hand.turn()
    assert (link.call("XLEN", STREAM), sqlite_outbox.store.waiting()[0]) == (3, 0)


def test_a_database_lost_between_add_and_remove_sends_nothing_twice(
    postgres_outbox: Outbox, hands: Callable[..., Hand], link: Link
) -> None:
    staged = "SELECT count(*) FROM staged_log_records"
    written = postgres_outbox.stage_many(5)
    hand = hands(postgres_outbox)
    remove = hand.streamer._outbox.remove

    def lost(ids: list[int]) -> None:
        with postgres_outbox.engine.begin() as connection:
            others = (
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND"
                " datname = current_database()"
            )
            assert connection.scalar(sa.text(others)) >= 1
        remove(ids)

    hand.streamer._outbox.remove = lost  # type: ignore[method-assign]
    with pytest.raises(SqlTrouble, match="removing sent rows"):
        hand.turn()
    assert (uids(link), postgres_outbox.scalar(staged)) == (written, 5)
    hand.streamer._outbox.remove = remove  # type: ignore[method-assign]
    hand.turn()
    assert (uids(link), postgres_outbox.scalar(staged)) == (written, 0)


def test_rows_are_kept_until_a_replica_has_them(
    sqlite_outbox: Outbox, hands: Callable[..., Hand], tmp_path_short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamer, "_DURABLE_MS", 20)
    written = sqlite_outbox.stage_many(3)
    with (
        EmbeddedRedis(tmp_path_short / "a", durable=False) as first,
        EmbeddedRedis(tmp_path_short / "b", durable=False) as second,
    ):
        hand = hands(sqlite_outbox, first.url, outbox_wait_replicas=1)
        with Link(second.url, "test") as far, Link(first.url, "test") as near:
            hand.turn(2)
            assert (uids(near), sqlite_outbox.store.waiting()[0]) == (written, 3)
            far.call("CONFIG", "SET", "masterauth", first.url.partition("://:")[2].partition("@")[0])
            far.call("REPLICAOF", "127.0.0.1", first.url.rpartition(":")[2].partition("/")[0])
            until(lambda: (hand.turn(), sqlite_outbox.store.waiting()[0] == 0)[1], "the replica never had them")  # type: ignore[func-returns-value]
            assert (uids(near), uids(far)) == (written, written)


def test_what_was_sent_over_a_connection_that_is_gone_is_sent_again_before_its_rows_go(
    sqlite_outbox: Outbox, hands: Callable[..., Hand], link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WAIT speaks of its own connection's writes only."""
    monkeypatch.setattr(streamer, "_DURABLE_MS", 20)
    written = sqlite_outbox.stage_many(3)
    hand = hands(sqlite_outbox, outbox_wait_replicas=1)
    hand.turn()
    hand.streamer._link.close()
    hand.streamer._link.call("PING")
    hand.turn()
    assert sqlite_outbox.store.waiting()[0] == 3
    hand.turn()
    assert uids(link) == written * 2


def test_waiting_for_the_disk_is_refused_where_redis_cannot_say(sqlite_outbox: Outbox, redis_url: str) -> None:
    settings = StreamerSettings(outbox_url=sqlite_outbox.url, outbox_wait_aof=True)
    with pytest.raises(StartRefused, match="USHER_OUTBOX_WAIT_AOF"):
        StreamerProgram(settings, redis_url)


def test_a_program_that_is_refused_leaves_no_connection_to_its_database(
    sqlite_outbox: Outbox, redis_url: str, tmp_path: Path
) -> None:
    """Python says so from 3.13 on (ResourceWarning: unclosed database)."""
    (tmp_path / "without.db").touch()
    for name, wait_aof in (("outbox.db", True), ("without.db", False)):
        before = _descriptors_of(tmp_path / name)
        with pytest.raises(StartRefused) as refused:
            StreamerProgram(
                StreamerSettings(outbox_url=f"sqlite:///{tmp_path / name}", outbox_wait_aof=wait_aof), redis_url
            )
        assert (_descriptors_of(tmp_path / name), wait_aof) == (before, "WAIT_AOF" in str(refused.value))


def _descriptors_of(file: Path) -> int:
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # of the listing itself
            found += descriptor.readlink() == file
    return found


def test_with_the_durable_profile_a_killed_redis_has_all_whose_rows_are_gone(
    sqlite_outbox: Outbox, tmp_path_short: Path
) -> None:
    """deploy/redis.conf: appendfsync always."""
    written = sqlite_outbox.stage_many(5000)
    settings = StreamerSettings(outbox_url=sqlite_outbox.url, ticket_stream=STREAM)
    with contextlib.ExitStack() as stack:
        server, url = stack.enter_context(durable_server(find_redis_server(), tmp_path_short))
        link = stack.enter_context(Link(url, "test"))
        assert link.call("CONFIG", "GET", "append*")[1::2].count(b"always") == 1
        program = StreamerProgram(settings, url, batch_rows=100, lease_s=1)
        program.start()
        try:
            until(lambda: sqlite_outbox.store.waiting()[0] < 4000)
            server.kill()
            server.wait()
            gone = 5000 - sqlite_outbox.store.waiting()[0]
            stack.enter_context(durable_server(find_redis_server(), tmp_path_short))
            link.close()  # it was of the one that is gone
            assert len(set(uids(link)) & set(written[:gone])) == gone
            until(lambda: sqlite_outbox.store.waiting()[0] == 0)
        finally:
            program.stop()
        assert list(dict.fromkeys(uids(link))) == written


def test_rows_are_kept_until_they_are_on_disk(
    sqlite_outbox: Outbox, hands: Callable[..., Hand], valkey_url: str
) -> None:
    """WAITAOF, which Redis has from 7.2 on: here of a Valkey that is told to leave it to the kernel when it writes to
    the disk."""
    written = sqlite_outbox.stage_many(3)
    link = Link(valkey_url, "test")
    link.call("CONFIG", "SET", "appendfsync", "no")
    hand = hands(sqlite_outbox, valkey_url, outbox_wait_aof=True)
    hand.turn(2)
    assert (uids(link), sqlite_outbox.store.waiting()[0]) == (written, 3)
    link.call("CONFIG", "SET", "appendfsync", "everysec")
    until(lambda: (hand.turn(), sqlite_outbox.store.waiting()[0] == 0)[1])  # type: ignore[func-returns-value]
    assert uids(link) == written
    link.close()


def test_waiting_for_the_disk_is_refused_where_nothing_goes_there(sqlite_outbox: Outbox, valkey_url: str) -> None:
    with Link(valkey_url, "test") as link:
        link.call("CONFIG", "SET", "appendonly", "no")
    with pytest.raises(StartRefused, match="USHER_OUTBOX_WAIT_AOF"):
        StreamerProgram(StreamerSettings(outbox_url=sqlite_outbox.url, outbox_wait_aof=True), valkey_url)


def test_the_program_waits_for_the_disk_where_redis_can_say(sqlite_outbox: Outbox, valkey_url: str) -> None:
    written = sqlite_outbox.stage_many(2500)
    program = StreamerProgram(
        StreamerSettings(outbox_url=sqlite_outbox.url, ticket_stream=STREAM, outbox_wait_aof=True), valkey_url
    )
    link = Link(valkey_url, "test")
    try:
        program.start()
        until(lambda: sqlite_outbox.store.waiting()[0] == 0)
        assert uids(link) == written
    finally:
        program.stop()
        link.close()


def test_two_outboxes_of_one_stream_need_a_name_each(
    sqlite_outbox: Outbox, redis_url: str, tmp_path: Path, link: Link, caplog: pytest.LogCaptureFixture
) -> None:
    other = made_outbox(f"sqlite:///{tmp_path / 'other.db'}")
    settings = StreamerSettings(outbox_url=sqlite_outbox.url, ticket_stream=STREAM)
    programs = [StreamerProgram(settings, redis_url)]
    try:
        programs[0].start()
        until(lambda: link.call("EXISTS", "{log}:streamer-outbox"))
        for name in ("outbox", "second"):
            programs.append(
                StreamerProgram(settings.model_copy(update={"outbox_url": other.url, "outbox_name": name}), redis_url)
            )
            programs[-1].start()
            if name == "outbox":
                until(lambda: "outbox_name_in_use" in caplog.text)
        written = sqlite_outbox.stage_many(3), other.stage_many(3)
        until(lambda: link.call("XLEN", STREAM) == 6)
        assert set(uids(link)) == {*written[0], *written[1]}
    finally:
        for program in programs:
            program.stop()
        other.close()


def test_the_program_streams_and_hands_its_lease_on(outbox: Outbox, redis_url: str, link: Link) -> None:
    settings = StreamerSettings(outbox_url=outbox.url, ticket_stream=STREAM)
    first, second = (StreamerProgram(settings, redis_url) for _ in range(2))
    try:
        for program in (first, second):
            program.start()
        written = outbox.stage_many(10)
        until(lambda: outbox.store.waiting()[0] == 0, patience_s=20)
        first.stop()
        for _ in range(3):
            written += outbox.stage_many(1)
            until(lambda: outbox.store.waiting()[0] == 0, patience_s=20)
        assert second.alive
        assert not first.alive
        assert uids(link) == written
    finally:
        first.stop()
        second.stop()
