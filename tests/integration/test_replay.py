"""``usher replay`` with a real Redis, where a thread plays the leader and a consumer: what is added when, and what it
says of it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.commands import usher
from tests.integration.factories import World, fetch, hand_over, plan
from usher.common.protocol.keys import uid_key
from usher.common.protocol.run_log import encode
from usher.common.redis.client import Link
from usher.common.redis.replies import pairs
from usher.consumer.policy.outcome import Finished
from usher.deploy.rehearsal import cli as replay_module
from usher.master.audit import batches
from usher.master.audit.archive import Commit, data_sets
from usher.master.audit.batches import BulkReader

_SHADOW = """
def handle(message):
    if message.fields["body"].endswith("2-1"):
        raise ValueError("the new code does not take it")
"""


@pytest.fixture
def world(link: Link, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(link)
    (tmp_path / "shadow.py").write_text(_SHADOW)
    monkeypatch.chdir(tmp_path)
    for name, value in {"REDIS_URL": link.url, "GROUP": made.keys.group, "TICKET_STREAM": made.keys.stream}.items():
        monkeypatch.setenv(f"USHER_{name}", value)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(replay_module, "_LOOK_S", 0.005)
    monkeypatch.setattr(replay_module, "_LONGEST_LOOK_S", 0.02)
    return made


class Crew:
    """A leader and a consumer, in a thread: every new entry is handed over, run, and done; those of ``fails`` (the
    originals' ids) become dead letters."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._leader, self._owner = world.elect(), world.join("a")
        self.fails: set[bytes] = set()
        self.ran: list[tuple[bytes, bytes]] = []  # (original's id or own, ticket)
        self.together = 0  # most entries of one ticket in the stream that were not done
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Crew:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def turn(self) -> bool:
        found = fetch(self._leader, 100)
        for ticket in {one.ticket for one in found}:
            self.together = max(self.together, sum(one.ticket == ticket for one in found))
        for one in found:
            self._run(one.id, one.ticket)
        return bool(found)

    def _run(self, entry_id: bytes, ticket: bytes) -> None:
        world, owner = self._world, self._owner
        hand_over(self._leader, plan(owner, {ticket: [entry_id]}, {ticket: world.head(ticket)}))
        [[_, flat]] = world.link.call("XRANGE", world.keys.stream, entry_id, entry_id)
        original = pairs(flat).get(b"usher_replay_of", entry_id)
        self.ran.append((original, ticket))
        record = world.record(ticket)
        assert record is not None
        how = "gave_up" if original in self.fails else "done"
        run = encode("a:1", [Finished(ticket, entry_id, record.fence, 1, 1_000_000, 1_500_000)], (how,))
        world.link.call("XADD", world.keys.runs, "*", "batch", run)
        if how == "done":
            owner.steps.ack([entry_id])
        else:
            world.give_up(owner, ticket, "skip")

    def _work(self) -> None:
        while not self._stop.is_set():
            if not self.turn():
                time.sleep(0.002)


@pytest.fixture
def crew(world: World) -> Iterator[Crew]:
    """With six messages of two tickets that are done."""
    made = Crew(world)
    for n in range(1, 7):
        world.add(
            b"%d-1" % n, "ticket_id", "AB"[n % 2], "body", b"body of %d-1" % n, "kind", str(n % 3), "uid", f"u{n}"
        )
    assert made.turn()
    made.ran.clear()
    made.together = 0
    yield made


Replayed = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def replayed(capfd: pytest.CaptureFixture[str]) -> Replayed:
    def run(*words: str) -> tuple[int, dict[str, Any]]:
        code = usher("replay", *words, "--json")
        told = capfd.readouterr()
        assert told.out, told.err
        found: dict[str, Any] = json.loads(told.out)
        return code, found

    return run


def _originals(world: World) -> list[str]:
    """The originals of all entries that a replay added."""
    rows = world.link.call("XRANGE", world.keys.stream, "-", "+")
    return [pairs(flat)[b"usher_replay_of"].decode() for _, flat in rows if b"usher_replay_of" in flat]


def test_messages_run_again_in_order_one_of_a_ticket_at_a_time_and_are_compared(
    world: World, crew: Crew, replayed: Replayed
) -> None:
    world.add(b"7-1", "ticket_id", "A", "body", "waits")
    waiting = world.link.call("XINFO", "GROUPS", world.keys.stream)
    _, preview = replayed("--since", "0", "--preview")
    assert preview == {"messages": 6, "left_out": 1, "ids": [f"{n}-1" for n in range(1, 7)]}
    assert world.link.call("XINFO", "GROUPS", world.keys.stream) == waiting, "nothing was done"
    with crew:
        code, found = replayed("--since", "0", "--until", "6-1", "--why", "bug 7", "--name", "fix", "--yes")
    assert (code, found["messages"], found["same"]) == (0, 6, 6)
    ours = [one for one in crew.ran if one[0] != b"7-1"]
    for ticket in (b"A", b"B"):
        ids = [int(one[0].partition(b"-")[0]) for one in ours if one[1] == ticket]
        assert ids == sorted(ids) and len(ids) == 3
    fences: dict[str, list[int]] = {}
    for _, flat in world.link.call("XRANGE", world.keys.runs, "-", "+"):
        record = json.loads(pairs(flat)[b"batch"])
        fences.setdefault(record["tickets"][0], []).extend(record["fences"])
    for given in fences.values():
        assert given == sorted(set(given)), "each under a fence that its ticket never had"
    first = found["replayed"][0]
    assert first["before"] == first["now"] == {"state": "done", "told": "done", "seconds": 0.5}
    [[_, flat]] = world.link.call("XRANGE", world.keys.stream, first["new_id"], first["new_id"])
    assert pairs(flat)[b"uid"] == b"u%s@fix" % first["message_id"][:1].encode()
    begun, noted = (pairs(flat) for _, flat in world.link.call("XRANGE", world.keys.actions, "-", "+"))
    assert (begun[b"why"], begun[b"outcome"]) == (b"bug 7", b"begun"), "also if it is killed"
    assert (noted[b"what"], noted[b"why"], noted[b"outcome"]) == (b"replay", b"bug 7", b"done 6")
    assert noted[b"on"] == b"6 messages of from 0-0 to 6-1, as fix"


def test_no_more_messages_are_added_than_the_rate_allows(
    world: World, crew: Crew, replayed: Replayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock of its own, which goes on when it waits; all that was added is done by then."""
    for n in range(11, 21):
        world.add(b"%d-1" % n, "ticket_id", f"T{n}", "body", "b", "kind", "many")
    assert crew.turn()
    moment, added = 0.0, [(0.0, 0)]

    def wait(seconds: float) -> None:
        nonlocal moment
        added.append((moment, len(_originals(world))))
        moment += seconds
        crew.turn()

    monkeypatch.setattr(replay_module, "_LOOK_S", 0.05)
    monkeypatch.setattr(replay_module, "now_s", lambda: moment)
    monkeypatch.setattr(replay_module, "time", SimpleNamespace(sleep=wait))
    code, found = replayed("--since", "0", "--where", "kind=many", "--rate", "4", "--why", "w", "--yes")
    assert (code, found["same"], added[-1][1]) == (0, 10, 10)
    assert all(count <= 1 + 4 * seconds for seconds, count in added)
    assert added[-1][0] <= 2.5, "and not many fewer"


def test_behind_one_that_is_not_done_the_rest_of_its_ticket_is_left_alone(
    world: World, crew: Crew, replayed: Replayed
) -> None:
    crew.fails = {b"3-1"}
    with crew:
        code, found = replayed("--since", "0", "--why", "w", "--yes")
    assert (code, found["differs"], found["same"], found["unknown"]) == (1, 1, 4, 1)
    [differs] = [one for one in found["replayed"] if one["comparison"] == "differs"]
    assert (differs["message_id"], differs["now"]["told"]) == ("3-1", "over; gave up at its last start")
    [left] = [one for one in found["replayed"] if one["comparison"] == "unknown"]
    assert (left["message_id"], left["now"]) == (
        "5-1",
        {"state": "not_replayed", "told": "behind 3-1, which was not done", "seconds": None},
    )
    assert crew.together == 1
    assert sorted(_originals(world)) == ["1-1", "2-1", "3-1", "4-1", "6-1"]


def test_a_replay_that_was_cut_off_goes_on_under_its_name(world: World, crew: Crew, replayed: Replayed) -> None:
    words = ("--ticket", "A", "--why", "w", "--name", "fix", "--yes")
    with crew:
        assert replayed(*words)[0] == 0
    assert _originals(world) == ["2-1", "4-1", "6-1"]
    added = world.link.call("GET", uid_key(world.keys.stream, b"u4@fix"))
    assert added is not None
    with crew_again(world, crew):
        code, found = replayed(*words, "--until", "6-1")
    assert code == 0
    assert found["replayed"][1]["new_id"].encode() == added, "the same entry, not another one"
    assert _originals(world) == ["2-1", "4-1", "6-1"]


def test_where_redis_refuses_in_the_middle_it_says_what_it_did_and_how_to_go_on(
    world: World, crew: Crew, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1 would say that it came to its end, and that something was not done."""
    ran = crew._run

    def run_and_refuse(entry_id: bytes, ticket: bytes) -> None:
        ran(entry_id, ticket)
        world.link.call("CONFIG", "SET", "maxmemory", "1")
        crew._stop.set()

    monkeypatch.setattr(crew, "_run", run_and_refuse)
    try:
        with crew:
            code = usher("replay", "--ticket", "A", "--why", "w", "--name", "fix", "--yes", "--json")
    finally:
        world.link.call("CONFIG", "SET", "maxmemory", "0")
    told = capfd.readouterr()
    assert (code, "it could not go on (--name fix does): " in told.err) == (2, True)
    assert [one["now"]["state"] for one in json.loads(told.out)["replayed"]] == ["done", "not_replayed", "not_replayed"]


def crew_again(world: World, crew: Crew) -> Crew:
    crew._stop.clear()
    crew._thread = threading.Thread(target=crew._work, daemon=True)
    return crew


def test_messages_are_chosen_by_ticket_time_and_fields(world: World, crew: Crew, replayed: Replayed) -> None:
    def ids(*words: str) -> list[str]:
        found: list[str] = replayed(*words, "--preview")[1]["ids"]
        return found

    assert ids("--ticket", "A") == ["2-1", "4-1", "6-1"]
    assert ids("--ticket", "A", "--since", "3-0", "--until", "5-9") == ["4-1"]
    assert ids("--ticket", "A", "--where", "kind=1") == ["4-1"]
    assert ids("--since", "2-1", "--where", "kind=0") == ["3-1", "6-1"]
    assert ids("--since", "0", "--where", "kind=0", "--where", "uid=u6") == ["6-1"]
    assert ids("--ticket", "nobody") == []


def test_with_the_uids_of_the_originals_sinks_know_them(world: World, crew: Crew, replayed: Replayed) -> None:
    with crew:
        _, found = replayed("--ticket", "B", "--since", "5-0", "--why", "w", "--same-uid", "--yes")
    [[_, flat]] = world.link.call("XRANGE", world.keys.stream, *2 * [found["replayed"][0]["new_id"]])
    assert pairs(flat)[b"uid"] == b"u5"


def test_a_shadow_handler_is_called_and_nothing_is_added(world: World, crew: Crew, replayed: Replayed) -> None:
    with world.unchanged():
        code, found = replayed("--ticket", "A", "--into", "shadow:handle", "--yes")
    assert (code, found["same"], found["differs"]) == (1, 2, 1)
    [differs] = [one for one in found["replayed"] if one["comparison"] == "differs"]
    assert differs["message_id"] == "2-1"
    assert differs["before"]["state"] == "done"
    assert differs["now"]["told"] == "raises ValueError: the new code does not take it"


def test_messages_come_from_an_archive_when_the_stream_has_them_no_more(
    world: World, crew: Crew, replayed: Replayed, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With how they ended: neither Redis' stream nor its run log knows them."""
    keys, folder = world.keys, tmp_path / "archive"
    entries, runs, _ = data_sets(folder, keys)
    with BulkReader(world.link.url) as reader:
        bodies = pa.Table.from_batches(
            batches.stream(reader, keys.stream, keys.stream, b"ticket_id", (b"-", b"+"), raw=True)
        )
    run = {"stream": keys.stream, "record": "9-1", "record_ms": 9, "consumer": "a:1", "ticket": "A", "id": "4-1"}
    run |= {"ms": 4, "seq": 1, "fence": 7, "attempt": 1, "start_us": 0, "end_us": 250_000, "outcome": "failed"}
    for data, table in ((entries, bodies), (runs, pa.Table.from_pylist([run], batches.RUNS))):
        made = Commit(1, "0-0", "6-1", table.num_rows, facts={"bodies": True})
        pq.write_table(table, data.place(made, "date=1970-01-01"))
        data.commit(made)
    world.link.call("XTRIM", keys.stream, "MAXLEN", 0)
    world.link.call("DEL", keys.runs)
    assert usher("replay", "--ticket", "A", "--preview") == 0
    assert "nothing to replay" in capfd.readouterr().out
    with crew:
        code, found = replayed("--ticket", "A", "--since", "3-0", "--archive", str(folder), "--why", "w", "--yes")
    assert code == 0
    before = [(one["message_id"], one["before"]["state"], one["before"]["seconds"]) for one in found["replayed"]]
    assert before == [("4-1", "ended", 0.25), ("6-1", "unknown", None)]
    assert [one["comparison"] for one in found["replayed"]] == ["differs", "unknown"]
    assert _originals(world) == ["4-1", "6-1"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--why", "w", "--yes"), "say which messages"),
        (("--ticket", "A", "--yes"), "say why"),
        (("--ticket", "A", "--why", "w"), "there is nobody to ask"),
        (("--ticket", "A", "--where", "x", "--preview"), "must look like FIELD=VALUE"),
        (("--since", "0", "--most", "2", "--preview"), "more than 2 messages are meant"),
        (("--ticket", "A", "--most", "2", "--preview"), "more than 2 messages are meant"),
    ],
)
def test_where_it_is_not_clear_what_to_do_nothing_is_done(
    world: World, crew: Crew, capfd: pytest.CaptureFixture[str], words: tuple[str, ...], told: str
) -> None:
    with world.unchanged():
        assert usher("replay", *words) == 2
    assert told in capfd.readouterr().err
