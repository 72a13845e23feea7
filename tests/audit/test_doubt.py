"""Tickets in doubt: short histories, each of which breaks one of the conditions alone, and such as look like it."""

from __future__ import annotations

from typing import Any, NamedTuple

import pyarrow as pa
import pytest

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
    "failed, and again": ([], [Run(5, 10, 20, "1-0", outcome="failed"), Run(5, 30, 40, "1-0")]),
    "crashed": ([], [Run(5, 10, 0, "1-0", outcome="crashed")]),
    "an owner's own, noted by turns": ([], [Run(5, 10, 20, "1-0", noted=9), Run(5, 30, 40, "2-0", noted=8)]),
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
        told = run_proof.follow(runs, right, carried)
        shows = F.greatest(*run_proof.FLAGS) | F.col("recovered_ms").isNotNull()
        shown = {row.ticket for row in told.filter(shows).collect()}
        doubted = [row.ticket for row in run_proof.doubts(runs, right, len(histories), carried).collect()]
        assert len(doubted) == len(set(doubted))
    return Seen(shown, set(doubted))


@pytest.mark.parametrize("history", WRONG)
def test_a_ticket_with_something_to_be_found_is_in_doubt(seen: Seen, history: str) -> None:
    assert history in seen.shown
    assert history in seen.doubted


@pytest.mark.parametrize("history", RIGHT)
def test_a_ticket_that_only_looks_wrong_costs_no_closer_look(seen: Seen, history: str) -> None:
    assert history not in seen.shown
    assert history not in seen.doubted


def test_a_ticket_that_is_too_large_to_look_at_is_in_doubt(local: Any) -> None:
    from usher.master.audit.checks import clocks
    from usher.master.audit.checks.doubt import doubtful
    from usher.master.audit.engine import use
    from usher.master.audit.read import columns

    well = [Run(5, 10 * n, 10 * n + 5, f"{n}-0") for n in range(1, 4)]
    wrong = WRONG["done twice"][1]
    table = _table({"large": wrong, "large and well": well, "small": well})
    with use(local):
        runs = local.lazily(columns.RUNS, table.to_batches)
        hot = local.createDataFrame(
            [("s", "large", 3), ("s", "large and well", 3)], "stream string, ticket string, count bigint"
        )
        timed = clocks.on_redis_clock(runs, clocks.offsets(clocks.bounds(runs.limit(0)), 0))
        found = [(row.stream, row.ticket) for row in doubtful(timed, None, hot).collect()]
    assert sorted(found) == [("s", "large"), ("s", "large and well")]
