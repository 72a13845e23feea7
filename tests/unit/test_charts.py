"""Points of the charts: what they count, what several are together, their bound in bytes, and what a chart of them
is."""

from __future__ import annotations

import random

import orjson

from usher.common.protocol.run_log import RunRecord
from usher.master.insight import charts
from usher.master.insight.charts import ALL, BY_CONSUMER, BY_SOURCE, LONGEST, NAMES, OTHERS, SPANS, draw, totals

_NOW = 1_700_000_000_000
_NOTHING = charts.gather(())


def _level(
    sent: int | None = 0, done: int | None = 0, failed: int | None = None, lag: int | None = 3
) -> dict[str, object]:
    totals = {"sent_total": sent, "done_total": done, "failed_total": failed}
    return totals | {"lag": lag, "pending": 2, "oldest_ms": 500, "runs": "1-0"}


def _run(
    consumer: str = "a:1", took_ms: float = 10, wait_ms: float = 5, outcome: str = "done", n: int = 0
) -> RunRecord:
    start = 1000 * _NOW + int(1000 * wait_ms)
    return RunRecord(consumer, "t", f"{_NOW}-{n}", 1, 1, start, start + int(1000 * took_ms), outcome)


def test_percentiles_are_right_within_a_fifth() -> None:
    for took_ms in (0.3, 1.7, 40, 9_999, 3_600_000):
        part = charts.gather([_run(took_ms=took_ms)] * 99 + [_run(took_ms=50 * took_ms)])[BY_CONSUMER][ALL]
        for share, true in ((0.5, took_ms), (0.99, took_ms), (1.0, 50 * took_ms)):
            found = charts.percentile_ms(part, "t", share)
            assert found is not None
            assert abs(found / true - 1) < 0.2


def test_executions_are_counted_by_consumer_and_a_second_attempt_has_not_waited() -> None:
    runs = [_run("a:1"), _run("b:2", outcome="failed"), _run("b:2", outcome="retry_later")]
    runs.append(_run("b:3")._replace(attempt=2))
    runs.append(_run("b:3", outcome="crashed")._replace(end_us=0))
    found = charts.gather(runs)[BY_CONSUMER]
    assert {name: (part["done"], part["failed"]) for name, part in found.items()} == {
        ALL: (2, 2),
        "a": (1, 0),
        "b": (1, 2),
    }
    assert [sum(n for name, n in found[ALL].items() if name[0] == of) for of in "wt"] == [4, 4]


def test_executions_of_a_work_stream_are_counted_by_source_and_the_busiest_have_a_place() -> None:
    tickets = ["a/1", "a/2/3", "b/1", "none"] + [f"s{n}/1" for n in range(30) for _ in range(3)]
    runs = [_run()._replace(ticket=ticket) for ticket in tickets]
    assert charts.gather(runs)[BY_SOURCE] == {}, "tickets may have any name"
    one = charts.point(_NOW, _level(), None, charts.gather(runs, by_stream=True), {}, in_part=False)
    assert {name: one[BY_SOURCE][name]["done"] for name in ("a", "b", "s7")} == {"a": 2, "b": 1, "s7": 3}
    kept = charts.decode(charts.encode(charts.merge(_NOW, [one, one])))
    assert kept is not None
    assert (len(kept[BY_SOURCE]), "a" in kept[BY_SOURCE], kept[BY_SOURCE]["s7"]["done"]) == (NAMES + 1, False, 6)
    assert sum(part["done"] for part in kept[BY_SOURCE].values()) == 2 * 93
    many = [
        _run(f"{n % 20}:1", took_ms=2.0 ** (n // 20 % 12), wait_ms=2.0 ** (n // 20 % 10))._replace(ticket=f"{n % 20}/1")
        for n in range(2000)
    ]
    both = charts.gather(many, by_stream=True)
    full = charts.decode(charts.encode(charts.point(_NOW, _level(), None, both, {}, in_part=False)))
    assert full is not None
    assert (len(full[BY_CONSUMER]), len(full[BY_SOURCE])) == (NAMES // 2 + 2, NAMES // 4 + 1), (
        "consumers keep theirs longer"
    )
    assert [row["done"] for row in totals([kept], BY_SOURCE) if row["name"] == "s7"] == [6]
    done, failed = draw([one | {"ms": 60_000}], SPANS["1h"], _NOW, source="s7")[0]["rows"][0][1]
    assert (done, failed) == (3 / 60, 0)


def test_a_point_counts_since_the_former_one_and_nothing_where_a_count_went_back() -> None:
    former = charts.point(_NOW, _level(100, 50), None, _NOTHING, {}, in_part=False)
    assert (former["sent"], former["ms"]) == (None, 0)
    late = charts.point(_NOW + 300_000, _level(160, 20), former, _NOTHING, {}, in_part=False)
    assert (late["sent"], late["done"], late["ms"]) == (60, None, 300_000)
    assert charts.point(_NOW, _level(None, None), former, _NOTHING, {}, in_part=False)["sent"] is None
    runs = charts.gather([_run(outcome="failed")])  # all that was read of the run log
    before = charts.point(_NOW, _level(failed=1_000), None, runs, {}, in_part=True)
    after = charts.point(_NOW, _level(failed=11_010), before, runs, {}, in_part=True)
    assert (before["failed"], after["failed"], charts.merge(_NOW, [before, after])["failed"]) == (1, 10_010, 10_011)


def test_a_point_has_its_bound_whatever_the_names() -> None:
    chance = random.Random(1)
    runs = [
        _run(f"{n % 300:03}{'ä' * 90}:1", took_ms=10 ** chance.uniform(-2, 9), wait_ms=10 ** chance.uniform(-2, 9))
        for n in range(9_000)
    ]
    tenants = {f"{n}" + "\u2028" * 200: (n, n, 1.0, False) for n in range(500)}
    made = charts.encode(charts.point(_NOW, _level(), None, charts.gather(runs), tenants, in_part=False))
    assert len(made) <= LONGEST
    found = charts.decode(made)
    assert found is not None
    assert found["consumers"][ALL]["done"] == 9_000
    assert sum(part["done"] for name, part in found["consumers"].items() if name != ALL) == 9_000
    few = charts.decode(
        charts.encode(
            charts.point(_NOW, _level(), None, charts.gather(_run(f"{n}:1") for n in range(30)), {}, in_part=False)
        )
    )
    assert few is not None
    assert len(few["consumers"]) == NAMES + 2
    assert OTHERS in few["consumers"]


def test_what_is_no_point_is_passed_over() -> None:
    made = charts.point(_NOW, _level(), None, charts.gather([_run()]), {}, in_part=False)
    former = {name: value for name, value in made.items() if name != BY_CONSUMER} | {"parts": {ALL: {"wait": {"7": 1}}}}
    assert charts.decode(charts.encode(made)) is not None
    assert charts.decode(orjson.dumps(former)) is None, "of a master of another version"
    assert [charts.decode(value) for value in (None, b"", b"{}", b"[1]", b"\xff", b'{"t":1}')] == [None] * 6


def test_a_chart_has_pieces_where_points_are_missing_and_keeps_within_its_axes() -> None:
    points = []
    for minute in (0, 1, 2, 20, 21, 40):
        former = points[-1] if points else None
        points.append(
            charts.point(_NOW + 60_000 * minute, _level(100 * minute, 0), former, _NOTHING, {}, in_part=False)
        )
    drawn = draw(points, SPANS["1h"], _NOW + 45 * 60_000)[0]
    assert [len(line["pieces"]) for line in drawn["lines"]] == [3, 3]
    places = [
        tuple(map(float, one.split(",")))
        for line in drawn["lines"]
        for piece in line["pieces"]
        for one in piece.split()
    ]
    assert all(drawn["left"] <= x <= drawn["right"] and 0 <= y <= drawn["bottom"] for x, y in places)
    assert drawn["rows"][1][1][0] == 100 / 60
    assert not draw(points, SPANS["1h"], _NOW + 45 * 60_000, consumer="nobody")[-1]["lines"][0]["pieces"]


def test_a_lag_that_redis_does_not_know_is_no_zero() -> None:
    unknown = _level(lag=None)
    one, two = (charts.point(_NOW, level, None, _NOTHING, {}, in_part=False) for level in (unknown, _level()))
    assert (charts.merge(_NOW, [one, one])["lag"], charts.merge(_NOW, [one, two])["lag"]) == (None, 3)
    chart = draw([one], SPANS["1h"], _NOW)[1]
    assert chart["rows"][0][1][0] is None
    assert [bool(line["pieces"]) for line in chart["lines"]] == [False, True]
