"""Executions in doubt: short histories, each of which breaks one of the conditions alone, and such as look like it; and of
many random ones all that is to be found."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from tests.audit.random_histories import random_runs
from usher.master.audit.checks.facts import AuditedStream

#: Milliseconds of ids that somebody made of microseconds.
_LATE = 1_790_000_000_000_000
#: What the clock of a consumer is ahead of Redis', at least and at most; of others nothing.
CLOCKS = {"back": (-12, -8), "ahead": (5, 8), "unsure": (-10, 20)}


class Run(NamedTuple):
    fence: int
    start: int
    end: int
    id: str
    consumer: str = "a"
    outcome: str = "done"
    noted: int = 0


#: name -> (executions of former runs, of this run), with something to be found in these.
WRONG: dict[str, tuple[list[Run], list[Run]]] = {
    "a fence of two owners": ([], [Run(5, 10, 20, "1-0"), Run(5, 30, 40, "2-0", "b")]),
    "behind a later one": ([], [Run(5, 10, 20, "2-0"), Run(5, 30, 40, "1-1")]),
    "behind one that failed": ([], [Run(5, 10, 20, "2-0", outcome="failed"), Run(5, 30, 40, "1-0")]),
    "behind one of the same moment": ([], [Run(5, 10, 20, "1-1", outcome="failed"), Run(5, 30, 40, "1-0")]),
    "done twice": ([], [Run(5, 10, 20, "1-0"), Run(5, 30, 40, "1-0")]),
    "started again elsewhere": ([], [Run(5, 10, 0, "1-0", outcome="crashed"), Run(6, 30, 40, "1-0", "b")]),
    "two at once by one clock": ([], [Run(5, 10, 20, "1-0", "unsure"), Run(5, 15, 30, "2-0", "unsure")]),
    "two owners at once": ([], [Run(5, 10, 20, "1-0", "back"), Run(6, 22, 30, "2-0")]),
    "one call under two fences": ([], [Run(5, 10, 20, "1-0"), Run(6, 10, 20, "2-0")]),
    "ended together": ([], [Run(5, 10, 30, "1-0"), Run(5, 20, 30, "2-0")]),
    "started together": ([], [Run(5, 10, 20, "1-0"), Run(5, 10, 30, "2-0")]),
    "noted behind its successor": ([], [Run(5, 10, 20, "1-0", noted=9), Run(6, 30, 40, "2-0", "b", noted=8)]),
    "behind one of a time to come": ([], [Run(5, 10, 20, f"{_LATE + 5}-0"), Run(5, 30, 40, f"{_LATE + 3}-1")]),
    "behind a former one of a time to come": ([Run(5, 10, 20, f"{_LATE + 5}-0")], [Run(5, 30, 40, f"{_LATE + 3}-1")]),
    "over before it began": ([], [Run(5, 20, 10, "1-0")]),
    "crashed when it was done": (
        [],
        [Run(5, 10, 0, "1-0", outcome="crashed", noted=9), Run(5, 10, 10, "1-0", noted=8)],
    ),
    "a fence below a former one": ([Run(6, 10, 20, "1-0")], [Run(5, 30, 40, "2-0")]),
    "a fence of a former owner": ([Run(5, 10, 20, "1-0")], [Run(5, 30, 40, "2-0", "b")]),
    "at once with a former one": ([Run(5, 10, 20, "1-0", "unsure")], [Run(5, 15, 30, "2-0", "unsure")]),
    "at once with a former owner": ([Run(5, 10, 20, "1-0", "back")], [Run(6, 22, 30, "2-0")]),
    "behind a former one": ([Run(5, 10, 20, "2-0", outcome="failed")], [Run(5, 30, 40, "1-0")]),
    "behind a former one of the same moment": ([Run(5, 10, 20, "1-1", outcome="failed")], [Run(5, 30, 40, "1-0")]),
    "behind what a former owner had done": ([Run(5, 10, 20, "2-0")], [Run(6, 30, 40, "1-0", "b")]),
    "a later one at once with a former owner": (
        [Run(5, 5, 16, "1-0")],
        [Run(6, 20, 20, "2-0", "unsure"), Run(7, 20, 28, "3-0", "ahead")],
    ),
}
#: Nothing is to be found in these.
RIGHT: dict[str, tuple[list[Run], list[Run]]] = {
    "one owner after the other": ([], [Run(5, 10, 20, "1-0"), Run(6, 30, 40, "2-0", "b")]),
    "one call": ([], [Run(5, 10, 20, "1-0"), Run(5, 10, 20, "2-0")]),
    "crashed": ([], [Run(5, 10, 0, "1-0", outcome="crashed")]),
    "a later moment, a lower number": ([], [Run(5, 10, 20, "1-1"), Run(5, 30, 40, "2-0")]),
    "an owner after a former one": ([Run(5, 10, 20, "1-0")], [Run(6, 30, 40, "2-0", "b")]),
    "behind what a former owner had not done": (
        [Run(5, 10, 20, "2-0", outcome="failed")],
        [Run(6, 30, 40, "1-0", "b")],
    ),
    "a lower number than a former one": ([Run(5, 10, 20, "1-1")], [Run(5, 30, 40, "2-0")]),
}


def _table(parts: dict[str, list[Run]]) -> pa.Table:
    from usher.master.audit.read import columns

    rows = []
    for ticket, runs in parts.items():
        for n, run in enumerate(runs):
            ms, seq = map(int, run.id.split("-"))
            noted = run.noted or n + 1
            rows.append(
                {"stream": "s", "ticket": ticket, "record": f"{noted}-0", "record_ms": noted, "attempt": 1}
                | {"consumer": run.consumer, "id": run.id, "ms": ms, "seq": seq, "fence": run.fence}
                | {"start_us": run.start, "end_us": run.end, "outcome": run.outcome}
            )
    return pa.Table.from_pylist(rows, columns.RUNS)


class Seen(NamedTuple):
    shown: set[str]
    doubted: set[str]


@pytest.fixture(scope="module")
def seen(local: Any) -> Seen:
    """Tickets in which something is to be found, and those that are in doubt; each history is a ticket."""
    from usher.master.audit.checks import carry, clocks, run_proof
    from usher.master.audit.engine import F, use
    from usher.master.audit.read import columns

    histories = WRONG | RIGHT
    tables = [_table({name: parts[n] for name, parts in histories.items()}) for n in (0, 1)]
    with use(local):
        former, runs = (local.lazily(columns.RUNS, table.to_batches) for table in tables)
        rows = [("s", name, *CLOCKS.get(name, (0, 0)), False) for name in ("a", "b", *CLOCKS)]
        known = "stream string, consumer string, least_us bigint, most_us bigint, was_set boolean"
        right = local.createDataFrame(rows, known)
        carried = carry.carry_of(clocks.on_redis_clock(former, right))
        told = run_proof.follow(carry.with_order(clocks.on_redis_clock(runs, right)), carried)
        shows = F.greatest(*run_proof.FLAGS) | F.col("recovered_ms").isNotNull()
        shown = {row.ticket for row in told.filter(shows).collect()}
        doubted = {row.ticket for row in run_proof.doubts(runs, right, carried).collect()}
    return Seen(shown, doubted)


@pytest.mark.parametrize("history", WRONG)
def test_a_ticket_with_something_to_be_found_is_in_doubt(seen: Seen, history: str) -> None:
    assert history in seen.shown
    assert history in seen.doubted


@pytest.mark.parametrize("history", RIGHT)
def test_a_ticket_that_only_looks_wrong_costs_no_closer_look(seen: Seen, history: str) -> None:
    assert history not in seen.shown
    assert history not in seen.doubted


@pytest.fixture(autouse=True)
def _nothing_is_kept(request: pytest.FixtureRequest) -> Iterator[None]:
    """Empty the cache of Spark: what these tests keep, with its plans, is more than the heap of a small session."""
    params = getattr(request.node, "callspec", SimpleNamespace(params={})).params
    spark = request.getfixturevalue("spark") if "spark" in params.values() else None
    yield
    if spark is not None:
        spark.catalog.clearCache()


@pytest.fixture(scope="module")
def drawn() -> list[pa.Table]:
    """Executions of many short tickets and some longer ones: all of them, and cut into three parts."""
    from usher.master.audit.read import columns

    rows, dice = random_runs(300, most=4), random.Random(7)
    for n in range(300):
        rows += _mostly_well(f"well {n}", dice)
    parts: list[list[dict[str, Any]]] = [[], [], []]
    cuts = {row["ticket"]: sorted(dice.choices(range(30), k=2)) for row in rows}
    seen = dict.fromkeys(cuts, 0)
    for row in rows:
        part = sum(seen[row["ticket"]] >= one for one in cuts[row["ticket"]])
        row["record_ms"] += 1_000_000 * part
        parts[part].append(row)
        seen[row["ticket"]] += 1
    return [pa.Table.from_pylist(part, columns.RUNS) for part in (rows, *parts)]


def _mostly_well(ticket: str, dice: random.Random) -> Iterator[dict[str, Any]]:
    """Yield executions of a ticket; one in twenty is out of turn in one way or another."""
    fence, start, ms, noted, owner = 1, 1_000_000, 1, 1, "c1:1"

    def is_wrong() -> bool:
        return dice.random() < 0.01

    for n in range(dice.randint(1, 60)):
        if dice.random() < 0.1:
            fence, owner = fence + 1, dice.choice(("c1:1", "c2:1", "c3:1"))
        ms += 1
        one_call = dice.random() < 0.1
        start += 0 if one_call and n else 10_000
        noted += dice.choice((0, 0, 0, 5))
        yield {
            "stream": "s",
            "record": f"{noted}-{n}",
            "record_ms": max(1, noted - 20) if is_wrong() else noted,
            "consumer": "c2:1" if is_wrong() else owner,
            "ticket": ticket,
            "id": f"{(at := max(1, ms - dice.randint(1, 9)) if is_wrong() else ms)}-0",
            "ms": at,
            "seq": 0,
            "fence": max(1, fence - 1) if is_wrong() else fence,
            "attempt": 1,
            "start_us": (began := start - dice.randint(1, 9) * 1000 if is_wrong() else start),
            "end_us": began + (dice.choice((-1, 30_000)) if is_wrong() else 10_000),
            "outcome": dice.choice(("done", "done", "done", "failed", "crashed")),
        }


def _frame(session: Any, table: pa.Table) -> Any:
    from usher.master.audit.engine import name_of
    from usher.master.audit.read import columns

    if name_of(session) == "spark":
        return session.createDataFrame(table).cache()
    return session.lazily(columns.RUNS, table.to_batches).persist()


def _known(session: Any, table: pa.Table, clocks_are_right: bool) -> Any:
    """Return the offsets of all clocks: none, or drawn."""
    dice = random.Random(11)
    names = sorted(set(table["consumer"].to_pylist()))
    least = {name: 0 if clocks_are_right else dice.randint(-2_000_000, 2_000_000) for name in names}
    width = 0 if clocks_are_right else 100_000
    rows = [("s", name, at, at + width, not clocks_are_right and dice.random() < 0.2) for name, at in least.items()]
    form = "stream string, consumer string, least_us bigint, most_us bigint, was_set boolean"
    return session.createDataFrame(rows, form).persist()


@pytest.mark.parametrize(
    ("engine", "most", "clocks_are_right"),
    [
        *(pytest.param("local", most, right) for most in (1_000_000, 5) for right in (True, False)),
        pytest.param("spark", 5, False, marks=pytest.mark.slow),  # it takes minutes for so many findings
    ],
)
def test_all_that_is_to_be_found_is_found_among_the_executions_in_doubt(
    engine: str,
    drawn: list[pa.Table],
    most: int,
    clocks_are_right: bool,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """The same findings, for the same reasons, as when all executions are followed."""
    from usher.master.audit.checks import carry, clocks, run_proof
    from usher.master.audit.checks.doubt import doubtful
    from usher.master.audit.checks.suspects import Suspects
    from usher.master.audit.engine import use

    floor = AuditedStream("s", "g", 1 << 40, 0, b"9-0", 0, 0, b"0-1", False, 0)
    looks: list[tuple[Any, Any, Any]] = []
    kept = 0

    def some(runs: Any, known: Any) -> Any:
        nonlocal kept
        found = doubtful(clocks.on_redis_clock(runs, known), None, most)
        kept = found.count()
        return found

    session = request.getfixturevalue(engine)
    with use(session):
        runs, known = _frame(session, drawn[0]), _known(session, drawn[0], clocks_are_right)
        for chosen in (lambda runs, known: carry.with_order(clocks.on_redis_clock(runs, known)).persist(), some):
            monkeypatch.setattr(run_proof, "doubts", chosen)
            figures, suspects = run_proof.RunFigures(executions=len(drawn[0])), Suspects()
            run_proof.check_runs(runs, None, [floor], known, figures, suspects)
            named = {place: sorted(found, key=repr) for place, found in suspects.named.items()}
            looks.append((figures, suspects.counts, named))
    assert looks[1] == looks[0]
    checks = (
        "overlap",
        "owners_overlap",
        "fence_fell",
        "fence_shared",
        "times_impossible",
        "out_of_order",
        "effect_twice",
    )
    assert min(looks[0][1][check, "s"] for check in checks) > 10, "all of them are there"
    assert kept < len(drawn[0]) - 500


@pytest.mark.parametrize("clocks_are_right", [True, False], ids=["right clocks", "wrong clocks"])
@pytest.mark.parametrize("most", [1_000_000, 5], ids=["as wholes", "in ranges"])
def test_what_former_runs_make_wrong_is_in_doubt(
    session: Any, drawn: list[pa.Table], clocks_are_right: bool, most: int
) -> None:
    """Each execution in doubt has the flags that it has among all, and no other one has any."""
    from usher.master.audit.checks import carry, clocks, run_proof
    from usher.master.audit.checks.doubt import doubtful
    from usher.master.audit.engine import use

    def flags(told: Any) -> dict[tuple[str, str], tuple[bool, ...]]:
        return {(row.ticket, row.record): tuple(row[name] for name in run_proof.FLAGS) for row in told.collect()}

    with use(session):
        known = _known(session, drawn[0], clocks_are_right)
        parts = [_frame(session, table) for table in drawn[1:]]
        timed = [carry.with_order(clocks.on_redis_clock(part, known)) for part in parts]
        one, other = map(carry.carry_of, timed[:2])
        for part, whole, carried in ((parts[1], timed[1], one), (parts[2], timed[2], one.unionByName(other))):
            merged = carry.merged(carried, part)
            at_all = flags(run_proof.follow(whole, merged))
            found = flags(run_proof.follow(doubtful(clocks.on_redis_clock(part, known), carried, most), merged))
            # Where the first of several messages of a call is flagged, the next ones may not be in doubt.
            assert found == {place: at_all[place] for place in found}
            assert not [place for place, flagged in at_all.items() if any(flagged) and place not in found]
            assert 50 < len(found) < len(at_all) - 50
