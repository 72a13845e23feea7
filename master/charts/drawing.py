"""Draw charts: from points to the numbers of an SVG with axes. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from math import ceil, floor, log10
from typing import Any, NamedTuple

from usher.master.policy.charts import ALL, BY_CONSUMER, BY_SOURCE, ChartSpan, percentile_ms

#: Size of a chart in its own units, and the room for its axes.
WIDTH, HEIGHT, _LEFT, _BOTTOM, _TOP = 560, 180, 80, 22, 8
_LINES = 4
#: Milliseconds between two marks of the time axis, by span.
_TIMES = {"1 hour": 600_000, "24 hours": 4 * 3_600_000}

Value = Callable[[Mapping[str, Any]], float | None]


class Series(NamedTuple):
    """A line of a chart; ``kind`` is its look."""

    label: str
    kind: str
    value: Value


class ChartKind(NamedTuple):
    """A chart: ``unit`` is a format of ``usher.master.insight.formatting``."""

    title: str
    unit: str
    series: tuple[Series, ...]


def _rate(name: str) -> Value:
    def value(point: Mapping[str, Any]) -> float | None:
        count = point.get(name)
        return None if count is None or not point["ms"] else 1000 * float(count) / float(point["ms"])

    return value


def _of_part(key: str, group: str, name: str) -> Value:
    def value(point: Mapping[str, Any]) -> float | None:
        part = point[group].get(name)
        return 1000 * float(part[key] if part else 0) / float(point["ms"]) if point["ms"] else None

    return value


def _percentile(key: str, share: float, group: str, name: str) -> Value:
    def value(point: Mapping[str, Any]) -> float | None:
        part = point[group].get(name)
        return percentile_ms(part[key], share) if part else None

    return value


def _of_tenant(at: int, name: str, is_rate: bool) -> Value:
    def value(point: Mapping[str, Any]) -> float | None:
        told = point["tenants"].get(name)
        count = float(told[at]) if told else 0.0
        return count if not is_rate else 1000 * count / float(point["ms"]) if point["ms"] else None

    return value


def kinds(consumer: str, tenant: str, source: str) -> tuple[ChartKind, ...]:
    if tenant:
        given = Series("handed over", "one", _of_tenant(0, tenant, True))
        waiting = Series("tickets", "two", _of_tenant(1, tenant, False))
        return ChartKind("Handed over per second", "number", (given,)), ChartKind("Waiting", "number", (waiting,))
    part = (BY_SOURCE, source) if source else (BY_CONSUMER, consumer or ALL)
    failed = Series("failed", "bad", _of_part("failed", *part))
    if consumer or source:
        moved = [ChartKind("Per second", "number", (Series("done", "two", _of_part("done", *part)), failed))]
    else:
        sent, done = Series("sent", "one", _rate("sent")), Series("done", "two", _rate("done"))
        failed = failed._replace(value=_rate("failed"))
        lag = Series("unread (lag)", "one", lambda point: None if point["lag"] is None else float(point["lag"]))
        pending = Series("pending", "two", lambda point: float(point["pending"]))
        moved = [
            ChartKind("Per second", "number", (sent, done, failed)),
            ChartKind("Unfinished", "number", (lag, pending)),
        ]
    timed = [
        ChartKind(
            title,
            "duration",
            (Series("p50", "two", _percentile(key, 0.5, *part)), Series("p99", "one", _percentile(key, 0.99, *part))),
        )
        for key, title in (("wait", "Wait from sent to start"), ("took", "Handler time"))
    ]
    return (*moved, *timed)


def draw(kind: ChartKind, points: Sequence[Mapping[str, Any]], span: ChartSpan, now_ms: int) -> dict[str, Any]:
    """Return the chart as a template needs it: lines, in pieces where points are missing, marks of both axes, and a
    table."""
    since_ms, right = now_ms - span.length_ms, WIDTH - 4
    columns = [[series.value(point) for point in points] for series in kind.series]
    top, step = _scale(max((value for column in columns for value in column if value is not None), default=0.0))

    def x(ms: float) -> float:
        return round(_LEFT + (right - _LEFT) * (ms - since_ms) / span.length_ms, 1)

    def y(value: float) -> float:
        return round(HEIGHT - _BOTTOM - (HEIGHT - _BOTTOM - _TOP) * value / top, 1)

    mark_ms = _TIMES[span.label]
    marks = range(since_ms - since_ms % mark_ms + mark_ms, now_ms + 1, mark_ms)
    times = [max(since_ms, int(point["t"])) for point in points]
    lines = []
    for series, column in zip(kind.series, columns, strict=True):
        pieces: list[list[str]] = [[]]
        before_ms = 0
        for ms, value in zip(times, column, strict=True):
            if pieces[-1] and (value is None or ms - before_ms > 2.5 * span.step_ms):
                pieces.append([])
            if value is not None:
                pieces[-1].append(f"{x(ms)},{y(value)}")
                before_ms = ms
        # A point alone would be no line at all.
        shown = [" ".join(piece if len(piece) > 1 else [piece[0], piece[0]]) for piece in pieces if piece]
        lines.append({"label": series.label, "kind": series.kind, "pieces": shown})
    return {
        "title": kind.title,
        "unit": kind.unit,
        "lines": lines,
        "levels": [(y(step * n), step * n) for n in range(round(top / step) + 1)],
        "times": [(x(ms), ms, f"{datetime.datetime.fromtimestamp(ms / 1000, datetime.UTC):%H:%M}") for ms in marks],
        "rows": [(int(point["t"]), list(row)) for point, row in zip(points, zip(*columns, strict=True), strict=True)],
        "left": _LEFT,
        "right": right,
        "bottom": HEIGHT - _BOTTOM,
    }


def _scale(most: float) -> tuple[float, float]:
    """Return the highest mark of an axis for values up to this, and the step between its marks.

    >>> _scale(0), _scale(7), _scale(430)
    ((1.0, 1.0), (8.0, 2.0), (600.0, 200.0))
    """
    if most <= 0:
        return 1.0, 1.0
    rough = most / _LINES
    power = 10.0 ** floor(log10(rough))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= rough)
    return step * ceil(most / step), step


def totals(points: Sequence[Mapping[str, Any]], group: str) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    parts = (item for point in points for item in point[group].items())
    for name, part in ((name, part) for name, part in parts if name != ALL):
        row = found.setdefault(name, {"name": name, "done": 0, "failed": 0, "wait": {}, "took": {}})
        row["done"] += part["done"]
        row["failed"] += part["failed"]
        for key in ("wait", "took"):
            for step, count in part[key].items():
                row[key][step] = row[key].get(step, 0) + count
    rows = sorted(found.values(), key=lambda row: (-row["done"] - row["failed"], row["name"]))
    shares = {f"{key}_{int(100 * share)}": (key, share) for key in ("wait", "took") for share in (0.5, 0.99)}
    return [row | {name: percentile_ms(row[key], share) for name, (key, share) in shares.items()} for row in rows]


def turns(points: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each tenant, who was handed most first: what it was handed over in all, and how it stands in the
    newest point."""
    given: dict[str, int] = {}
    for name, told in ((name, told) for point in points for name, told in point["tenants"].items()):
        given[name] = given.get(name, 0) + told[0]
    newest = points[-1]["tenants"] if points else {}
    rows = []
    for name, count in sorted(given.items(), key=lambda item: (-item[1], item[0])):
        waiting, weight, held = newest[name][1:] if name in newest else (0, None, False)
        rows.append({"name": name, "given": count, "waiting": waiting, "weight": weight, "held": held})
    return rows
