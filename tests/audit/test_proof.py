"""The proof from the archive: run by run it says what one look at everything says, and without a gap, whatever was
killed when."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow.dataset as ds
import pytest

from tests.audit.random_histories import BEGAN_MS, histories
from tests.audit.seeding import GROUP, Killed, Seeder, die
from tests.audit.test_archive import archived, ids_of
from tests.audit.test_job import plan
from tests.commands import usher
from usher.common.base.errors import StartRefused
from usher.common.protocol.keys import Keys
from usher.common.protocol.stream_id import rank
from usher.common.redis.client import Link
from usher.master.audit.archive import Commit, DataSet

if TYPE_CHECKING:
    from usher.master.audit.job import Proof

#: Checks of executions and of entries that are over: what a proof from the archive is about.
PROVEN = (
    *("overlap", "owners_overlap", "out_of_order", "fence_shared", "fence_fell", "run_unreadable"),
    *("effect_twice", "repeat_declared", "stale_counted", "dead_and_done", "lost", "overtaken", "clock_wrong"),
)

_BY_CLOCKS, _EXCUSED = {"owners_overlap", "fence_fell"}, {"overtaken", "out_of_order", "fence_shared"}
RANDOM = "random"


def prove(
    session: Any,
    url: str,
    folder: Path,
    stream: str = "s",
    *,
    again: bool = False,
    keep_days: int | None = None,
    tell: Callable[[Proof], object] = id,
) -> Proof:
    """As the command does: what is found is told, and then committed."""
    from usher.master.audit.job import Proof

    with tempfile.TemporaryDirectory() as reading:
        proof = Proof(session, plan(url, stream, keep_days=keep_days), stream, folder, Path(reading))
        proof.run(again=again)
        tell(proof)
        if not again:
            proof.commit()
        return proof


def standing(session: Any, folder: Path, stream: str = "s") -> set[tuple[str, str]]:
    """(check, id) of all findings so far, as any reader of Parquet sees them."""
    place = folder / f"stream-{stream}" / "proof" / f"group={GROUP}" / "found"
    rows = ds.dataset(place, format="parquet").to_table().to_pylist()
    return {(row["check"], row["id"] or row["owner"]) for row in rows}


def fresh(proven: Proof) -> dict[str, set[str]]:
    return {one.check.name: {example.id or example.owner for example in one.examples} for one in proven.fresh}


def played(link: Link, seeds: range, cuts: int, *, set_clocks: bool) -> Iterator[None]:
    """Play random histories in steps, cut anywhere."""
    history, dice = histories(seeds, set_clocks=set_clocks), random.Random(seeds.start)
    seeder, keys = Seeder(link, RANDOM), Keys(RANDOM, GROUP)
    lowest = f"{BEGAN_MS - 2_000_000}-1"
    seeder.add((lowest, "first"), *sorted(history.entries.items(), key=lambda one: rank(one[0].encode())))
    seeder.read()
    seeder.ran("first:1", (lowest, "first", BEGAN_MS * 1024, BEGAN_MS * 1000, BEGAN_MS * 1000), record=f"{BEGAN_MS}-0")
    for n, (ms, one) in enumerate(sorted(history.repeats), 1):
        link.call("XADD", keys.losses, f"{ms}-{n}", "kind", "group_lost", "repeats", f"{one} {one}")
    left = {one: sum(row.run[0] == one for row in history.executions) for one in history.entries}
    ends = sorted(dice.sample(range(len(history.executions)), cuts))
    seeder.over(lowest)
    for begin, end in pairwise((0, *ends, len(history.executions))):
        for n, row in enumerate(history.executions[begin:end], begin + 1):
            seeder.ran(row.consumer, row.run, record=f"{row.noted_ms}-{n}")
            left[row.run[0]] -= 1
        over = [one for one, count in left.items() if not count and one not in history.kept]
        seeder.over(*over, lowest)
        for one in [one for one in sorted(history.letters) if not left[one]]:
            seeder.letter(one, history.entries[one])
            history.letters.remove(one)
        yield


def test_run_by_run_each_finding_is_told_whatever_is_killed_in_between(
    local: Any, link: Link, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two runs, and two more that are killed: when what is new is archived and told and nothing of it committed, and
    behind the commit of the proof."""
    told: list[list[tuple[str, str]]] = []

    def tell(proven: Proof) -> None:
        told.append([(check, one) for check, ids in fresh(proven).items() for one in ids])

    write, commit = DataSet._write, DataSet.commit

    def not_the_rest(data: DataSet, commits: Sequence[Commit]) -> None:
        write(data, commits)
        if data.folder.parent.name == "proof" and len(commits) > 1:
            raise Killed

    def not_the_proof_itself(data: DataSet, wanted: Commit, stays: str = "") -> Commit:
        if data.folder.parent.name == "proof":
            raise Killed
        return commit(data, wanted, stays)

    monkeypatch.setattr("usher.master.audit.findings.SHOWN", 10_000)
    for n, _ in enumerate(played(link, range(20), 1, set_clocks=False)):
        for place, deadly in (("commit", not_the_proof_itself), ("_write", not_the_rest))[: 2 * n]:
            with monkeypatch.context() as patched, pytest.raises(Killed):
                patched.setattr(DataSet, place, deadly)
                prove(local, redis_url, tmp_path, RANDOM, tell=tell)
        proven = prove(local, redis_url, tmp_path, RANDOM, tell=tell)
        assert proven.number == (1, 3)[n], "the second one was committed when it was killed"
    expected = standing(local, tmp_path, RANDOM)
    whole = prove(local, redis_url, tmp_path, RANDOM, again=True)
    compared = {*PROVEN} - _BY_CLOCKS - _EXCUSED
    in_whole = {(check, one) for check, ids in fresh(whole).items() for one in ids if check in compared}
    assert in_whole == {(check, one) for check, one in expected if check in compared}
    first, not_committed, second, nothing = told
    assert sorted(not_committed) == sorted(second) and not nothing
    assert len(first + second) == len({*first, *second}) and {*first, *second} >= expected
    assert proven.span["executions"] == whole.span["executions"]


@pytest.mark.parametrize("set_clocks", [False, True], ids=["steady clocks", "clocks that are set"])
@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1000, 1500, 100))])
def test_random_histories_in_steps_cut_anywhere_show_what_one_look_shows(
    local: Any, link: Link, redis_url: str, tmp_path: Path, monkeypatch: Any, first: int, set_clocks: bool
) -> None:
    """Every check that the proof makes; a day is so short that the archive folds some. What was told stands, though what
    is recorded later may excuse it; and two owners are compared by what is known of their clocks at each step."""
    monkeypatch.setattr("usher.master.audit.archive._DAY_MS", 10_000)
    seeds, cuts = (100, 5) if first else (30, 4)
    for _ in played(link, range(first, first + seeds), cuts, set_clocks=set_clocks):
        prove(local, redis_url, tmp_path, RANDOM)
    assert first or [*tmp_path.glob("stream-*/runs/*/date=*/*-*-part-*")]
    prove(local, redis_url, tmp_path / "whole", RANDOM)
    in_whole, in_steps = standing(local, tmp_path / "whole", RANDOM), standing(local, tmp_path, RANDOM)
    for check in {*PROVEN} - _BY_CLOCKS:
        told = {about for name, about in in_whole if name == check}
        steps = {about for name, about in in_steps if name == check}
        if check == "lost":  # of what ran for another ticket one look at all says that alone
            steps -= {about for name, about in in_whole if name == "ticket_differs"}
        if check in _EXCUSED:
            assert told <= steps, check
        else:
            assert told == steps, check


def test_the_command_says_the_span_and_costs_nothing_when_nothing_is_new(
    local: Any,
    settings: dict[str, str],
    link: Link,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("USHER_TICKET_STREAM", "s")
    monkeypatch.setenv("USHER_GROUP", GROUP)
    seeder = Seeder(link, "s")
    seeder.add(("1-1", "a"), ("2-1", "a"), ("3-1", ""))
    seeder.read()
    seeder.over("1-1", "2-1")
    seeder.ran("c1:1", ("1-1", "a", 5, 100, 200), ("2-1", "a", 5, 200, 300), record="1700000000000-0")
    assert usher("audit", "prove") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "s: proven from 2023-11-14 22:13:20 to" in shown
    assert "without a gap; executions: 2, of them new: 2; findings in all: 0" in shown
    noted = int(link.call("HGET", Keys("s", GROUP).archived, "proven_until_ms"))
    with monkeypatch.context() as patched:
        patched.setattr("usher.master.audit.engine.local_engine", die)
        assert usher("audit", "prove") == 0
    assert "Nothing is new" in capsys.readouterr().out
    assert int(link.call("HGET", Keys("s", GROUP).archived, "proven_until_ms")) > noted
    seeder.over("3-1")
    assert usher("audit", "prove", "--json") == 1
    told = orjson.loads(capsys.readouterr().out)
    assert [(one["check"], [e["id"] for e in one["examples"]]) for one in told["findings"]] == [("lost", ["3-1"])]
    # A hole, which the run that finds it is killed before it has told it all.
    link.call("DEL", seeder.keys.runs)
    seeder.ran("c1:1", ("2-1", "a", 5, 200, 300), record="1700000000009-0")
    with monkeypatch.context() as patched:
        patched.setattr("usher.master.audit.job.Proof.commit", die)
        assert usher("audit", "prove") == 2
    capsys.readouterr()
    assert usher("audit", "prove") == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "runs from 1700000000000-1 to before 1700000000009-0 may be missing" in shown
    assert "so entries added before it are not judged" in shown
    assert "executions: 1, of them new: 1; findings in all: 2" in shown, "of the span behind the hole"
    assert usher("audit", "prove") == 0, "it was told"
    capsys.readouterr()
    [log] = Path(settings["USHER_AUDIT_DIR"]).glob("archive/stream-s/proof/*/_commits.json")
    commits = log.read_bytes()
    assert usher("audit", "prove", "--all", "--json") == 1, "all that is archived, once more"
    told = orjson.loads(capsys.readouterr().out)
    assert [one["check"] for one in told["findings"]] == ["effect_twice"] or told["findings"] == []
    assert any("may be missing" in sentence for sentence in told["unproven"])
    assert log.read_bytes() == commits


def test_behind_a_hole_in_the_archive_a_new_span_begins_and_that_is_said(
    session: Any, link: Link, redis_url: str, tmp_path: Path
) -> None:
    seeder = Seeder(link, "s")
    seeder.add(*((f"{n}-1", "a") for n in range(1, 7)))
    seeder.read()
    seeder.ran("c1:1", ("1-1", "a", 5, 100, 150), record="10-1")
    seeder.over("1-1")
    prove(session, redis_url, tmp_path)
    seeder.over("2-1", "3-1", "4-1")
    link.call("DEL", seeder.keys.runs)
    seeder.ran("c1:1", ("4-1", "a", 5, 400, 450), record="30-1")
    proven = prove(session, redis_url, tmp_path)
    assert proven.span["since_ms"] == 30
    assert fresh(proven) == {}, "what happened to 2-1 and 3-1 was cut before it was archived"
    assert any("may be missing" in sentence for sentence in proven.unproven)
    assert any("entries added before it are not judged" in sentence for sentence in proven.unproven)
    noted = orjson.loads(link.call("HGET", seeder.keys.archived, "history"))
    assert (noted["since_ms"], noted["executions"]) == (30, 1)
    assert noted["before"].startswith("runs from 10-2 to before 30-1 may be missing")


@pytest.mark.parametrize(("moved_ms", "found"), [(4, {"owners_overlap": {"2-1"}}), (400, {})])
def test_a_clock_that_drifts_by_milliseconds_is_known_to_milliseconds(
    local: Any, link: Link, redis_url: str, tmp_path: Path, moved_ms: int, found: dict[str, set[str]]
) -> None:
    seeder, began_ms = Seeder(link, "s"), BEGAN_MS
    seeder.add(("1-1", "a"), ("2-1", "a"), ("3-1", "b"), ("4-1", "c"))
    seeder.read()

    def ran(consumer: str, entry: str, ticket: str, start_ms: int, end_ms: int, ahead_ms: int, number: int) -> None:
        times = ((began_ms + start_ms) * 1024, *((began_ms + one + ahead_ms) * 1000 for one in (start_ms, end_ms)))
        seeder.ran(consumer, (entry, ticket, *times), record=f"{began_ms + end_ms}-{number}")

    ran("c1:1", "1-1", "a", 0, 1000, 0, 1)
    ran("c2:1", "2-1", "a", 800, 1100, 0, 2)
    for number, (consumer, entry, ticket) in enumerate([("c1:1", "3-1", "b"), ("c2:1", "4-1", "c")], 3):
        ran(consumer, entry, ticket, 50_000, 50_001, moved_ms, number)
    seeder.over("1-1", "2-1", "3-1", "4-1")
    assert fresh(prove(local, redis_url, tmp_path)) == found


def test_of_a_clock_that_was_set_former_runs_took_more_for_known_than_there_was(
    local: Any, link: Link, redis_url: str, tmp_path: Path
) -> None:
    """By its own clock c1 ran two messages at once; when the first one was proven, nobody knew that it would be set."""
    seeder, began_ms = Seeder(link, "s"), BEGAN_MS
    seeder.add(("1-1", "a"), ("2-1", "a"))
    seeder.read()
    first = ("1-1", "a", began_ms * 1024, (began_ms + 1) * 1000, (began_ms + 1000) * 1000)
    seeder.ran("c1:1", first, record=f"{began_ms + 1000}-1")
    seeder.over("1-1")
    assert fresh(prove(local, redis_url, tmp_path)) == {}
    second = ("2-1", "a", (began_ms + 2900) * 1024, (began_ms + 901) * 1000, (began_ms + 950) * 1000)
    seeder.ran("c1:1", second, record=f"{began_ms + 2950}-1")
    seeder.over("2-1")
    expected = {"overlap": {"2-1"}, "clock_wrong": {"c1:1"}}
    assert fresh(prove(local, redis_url, tmp_path)) == expected
    assert fresh(prove(local, redis_url, tmp_path, again=True)) == expected


def test_what_was_found_before_a_hole_stands_when_its_ticket_is_judged_again_behind_it(
    local: Any, link: Link, redis_url: str, tmp_path: Path
) -> None:
    seeder = Seeder(link, "s")
    seeder.add(*((f"{n}-1", "a") for n in range(1, 4)))
    seeder.read()
    for n in (1, 2):
        seeder.ran("c1:1", ("1-1", "a", 5, 100 * n, 100 * n + 50), record=f"{n}0-1")
    seeder.over("1-1")
    assert fresh(prove(local, redis_url, tmp_path)) == {"effect_twice": {"1-1"}}
    link.call("DEL", seeder.keys.runs)
    for n, (entry, start_us) in enumerate([("3-1", 1000), ("2-1", 2000)], 3):
        seeder.ran("c1:1", (entry, "a", 5, start_us, start_us + 50), record=f"{n}0-1")
        prove(local, redis_url, tmp_path)
    assert ("effect_twice", "1-1") in standing(local, tmp_path)


def test_what_waits_before_anything_has_run_is_judged_once_something_has(
    local: Any, link: Link, redis_url: str, tmp_path: Path
) -> None:
    seeder = Seeder(link, "s")
    seeder.add(("1-1", "a"), ("2-1", "b"), ("3-1", "c"))
    seeder.read()
    seeder.add(("4-1", "d"))
    in_the_way = tmp_path / "stream-s" / "proof" / f"group={GROUP}" / "_commits.json.new"
    in_the_way.mkdir(parents=True)
    with pytest.raises(StartRefused, match="the proof was not finished; run it again: .*_commits.json.new"):
        prove(local, redis_url, tmp_path)
    in_the_way.rmdir()
    assert prove(local, redis_url, tmp_path).span["since_ms"] is None
    seeder.ran("c1:1", ("1-1", "a", 5, 100, 150), record="10-1")
    seeder.read()
    seeder.over("1-1", "2-1", "4-1")
    assert fresh(prove(local, redis_url, tmp_path)) == {"lost": {"2-1", "4-1"}}
    prove(local, redis_url, tmp_path)
    seeder.over("3-1")  # by now 1-1, which was handled, is two steps back
    assert fresh(prove(local, redis_url, tmp_path)) == {"lost": {"3-1"}}


def test_what_is_not_kept_stays_proven_and_what_comes_is_compared_with_it(
    local: Any, link: Link, redis_url: str, tmp_path: Path
) -> None:
    """As where all is kept: one that runs again after days by another consumer, under a lower fence or the same one."""
    seeder, day_ms, entries = Seeder(link, "s"), 86_400_000, []
    for n, (day, consumer, ran) in enumerate(
        [
            (1, "c1:1", [("a", 9, 100), ("b", 9, 100), ("c", 9, 100)]),
            (1, "c2:1", [("a", 9, 300)]),
            (5, "c1:1", [("d", 9, 1)]),
            (9, "c2:1", [("b", 5, 1), ("c", 9, 3), ("a", 12, 5)]),
        ]
    ):
        ids = [f"{day * day_ms + n}-{at}" for at in range(len(ran))]
        seeder.add(*((one, ticket) for one, (ticket, *_) in zip(ids, ran, strict=True)))
        seeder.read()
        told = [
            (one, ticket, fence, (day * 86_400 + start) * 1_000_000, (day * 86_400 + start + 1) * 1_000_000)
            for one, (ticket, fence, start) in zip(ids, ran, strict=True)
        ]
        seeder.ran(consumer, *told, record=f"{day * day_ms + 50_000_000 + n}-1")
        seeder.over(*ids)
        entries += ids
        proven = prove(local, redis_url, tmp_path / "cut", keep_days=2)
    prove(local, redis_url, tmp_path / "all")
    assert ids_of(tmp_path / "cut") == entries[4:]
    found = {one for one in standing(local, tmp_path / "all") if one[0] != "out_of_order"}  # which is of an old message
    assert {check for check, _ in found} == {"fence_fell", "fence_shared", "stale_counted"}
    assert standing(local, tmp_path / "cut") == found
    assert proven.span["since_ms"] == day_ms + 50_000_000, "it stays proven"
    again = prove(local, redis_url, tmp_path / "cut", again=True)
    assert again.holes == 0 and again.span["since_ms"] == 5 * day_ms + 50_000_002
    assert any("are not kept (--keep-days)" in sentence for sentence in again.unproven)


def test_an_archive_that_is_older_than_its_proof_is_refused_with_a_way_out_that_works(
    local: Any, link: Link, redis_url: str, tmp_path: Path
) -> None:
    seeder = Seeder(link, "s")
    place = tmp_path / "stream-s"
    for n in (1, 2):
        seeder.add((f"{n}-1", "a"))
        seeder.read()
        seeder.ran("c1:1", (f"{n}-1", "a", 5, 100 * n, 100 * n + 50), record=f"{n}0-1")
        seeder.over(f"{n}-1")
        prove(local, redis_url, tmp_path)
        for table in ("entries", "runs"):
            shutil.copytree(place / table, tmp_path / f"{table}{n}")
    for table in ("entries", "runs"):
        for n in (1, 2) if table == "entries" else (1,):
            shutil.rmtree(place / table)
            shutil.copytree(tmp_path / f"{table}{n}", place / table)
            if n == 1:
                with pytest.raises(StartRefused, match=f"the archive's {table} are older than what was proven") as told:
                    prove(local, redis_url, tmp_path)
    seeder.ran("c1:1", ("1-1", "a", 5, 300, 350), record="30-1")
    archived(redis_url, tmp_path)
    with pytest.raises(StartRefused, match="the archive's runs are older than what was proven"):
        prove(local, redis_url, tmp_path)  # there is a second commit again, with another end
    moved = Path(str(told.value).partition("or move ")[2].partition(" away")[0])
    moved.rename(tmp_path / "proof")
    proven = prove(local, redis_url, tmp_path)
    assert (proven.span["executions"], fresh(proven)) == (3, {"effect_twice": {"1-1"}})


@pytest.mark.slow
def test_after_many_runs_what_they_carry_is_made_one_and_says_the_same(
    local: Any, link: Link, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("usher.master.audit.job._DELTAS", 1)
    seeder = Seeder(link, "s")
    seeder.add(("9-1", "z"))
    seeder.read()
    for n, runs in enumerate(
        (
            (("5-1", "a", 5, 100, 200), ("1-1", "b", 5, 100, 200)),
            (("6-1", "c", 5, 300, 400),),
            (("7-1", "d", 5, 400, 500),),
            (("4-1", "a", 5, 600, 700),),
        )
    ):
        seeder.ran("c1:1", *runs, record=f"{n + 1}0-1")
        if n == 3:
            seeder.ran("c2:2", ("2-1", "b", 5, 600, 700), record="41-1")
        prove(local, redis_url, tmp_path)
    carried = tmp_path / "stream-s" / "proof" / f"group={GROUP}" / "carry"
    assert {file.name.partition("-part")[0] for file in carried.iterdir()} == {"00000001-00000003", "00000004"}
    assert [one.name for one in DataSet(carried.parent).chain()] == ["00000001-00000003", "00000004"]
    whole = prove(local, redis_url, tmp_path, again=True)
    expected = {("out_of_order", "4-1"), ("fence_shared", "2-1")}
    assert {(check, one) for check, ids in fresh(whole).items() for one in ids} == expected
    assert standing(local, tmp_path) == expected
