"""The charts: the leading master writes a point each minute into Redis, for a day, and any master reads and draws them.
All that a point goes by is in Redis, so a successor goes on where the former leader ended.

A point is kept as JSON, of at most ``LONGEST`` bytes. Executions are counted: ``done``, ``failed``, and durations by
step of a scale (``step_of``): ``w7`` of waits, ``t12`` of handlers. So they can be added up; a percentile is right
within a fifth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil, floor, log2, log10
from typing import Any, NamedTuple

import orjson

from usher.common.protocol.keys import Keys
from usher.common.protocol.run_log import DONE, FAILURES, MERGED, RunRecord
from usher.common.protocol.run_log import decode as decode_runs
from usher.common.protocol.stream_id import milliseconds
from usher.common.redis.client import Link
from usher.common.redis.replies import pairs, redis_ms
from usher.master.insight.stats import sample_of, stream_sums
from usher.master.leader.elector import Lead
from usher.master.leader.leader_scripts import LeaderScripts, LeaderService


class ChartSpan(NamedTuple):
    """A length of time that is shown, and the step in which it is drawn."""

    label: str
    step_ms: int
    length_ms: int


MINUTE_MS = 60_000
SPANS = {"1h": ChartSpan("1 hour", MINUTE_MS, 3_600_000), "24h": ChartSpan("24 hours", 600_000, 86_400_000)}
#: Places of points: a day, and some minutes more. All have at most 6 MiB, and some 500 KiB as a rule.
PLACES = 1_450
#: The longest point, in bytes.
LONGEST = 4_096
#: The most consumers, sources and tenants of a point, and the most characters of their names.
NAMES, _LONGEST_NAME = 20, 100
#: Executions of all consumers; those of the consumers, or sources, that have no place in a point.
ALL, OTHERS = "", "(others)"
#: By what executions are counted apart: the consumer, and the source of which a work stream has the message.
BY_CONSUMER, BY_SOURCE = "consumers", "sources"
_FIRST_US, _LAST_STEP = 100, 80
_KNOWN = {"t", "at", "ms", "lag", "failed", BY_CONSUMER, BY_SOURCE, "tenants", "marks", "codes"}
#: Most marks of a point, and most codes that it remembers.
_MARKS, _CODES = 12, 8


def place_of(ms: int) -> str:
    return f"m{ms // MINUTE_MS % PLACES}"


def places(since_ms: int, until_ms: int) -> list[str]:
    first = max(since_ms - since_ms % MINUTE_MS, until_ms - until_ms % MINUTE_MS - (PLACES - 1) * MINUTE_MS)
    return [place_of(ms) for ms in range(first, until_ms + 1, MINUTE_MS)]


#: Counts of executions, by name.
Parts = dict[str, Counter[str]]


def step_of(us: float) -> int:
    """Return the step of a duration: two for each doubling from 0.1 ms on.

    >>> step_of(0), step_of(100), step_of(200), step_of(-5), step_of(1e99)
    (0, 1, 3, 0, 80)
    """
    return 0 if us < _FIRST_US else min(_LAST_STEP, 1 + int(2 * log2(us / _FIRST_US)))


def percentile_ms(part: Mapping[str, int], what: str, share: float) -> float | None:
    """Return about how long the given share of the waits ("w"), or handlers ("t"), took at most; None without any.

    >>> percentile_ms({"done": 9}, "t", 0.5), percentile_ms({"t0": 3}, "t", 0.5)
    (None, 0.1)
    >>> round(percentile_ms({"t7": 1, "t21": 1}, "t", 0.99))
    122
    """
    steps = sorted((int(name[1:]), count) for name, count in part.items() if name[0] == what)
    left = share * sum(count for _, count in steps)
    for step, count in steps:
        left -= count
        if left <= 0:
            return float(_FIRST_US * 2 ** ((step - 0.5) / 2) / 1000) if step else _FIRST_US / 1000
    return None


_PERCENTILES = {f"{name}_{int(100 * share)}": (name[0], share) for name in ("wait", "took") for share in (0.5, 0.99)}


def measured(part: Counter[str]) -> dict[str, float | None]:
    """Return what these counts of executions say, by name: how many were done and failed, and percentiles in ms."""
    shares = {name: percentile_ms(part, *share) for name, share in _PERCENTILES.items()}
    return {"done": part["done"], "failed": part["failed"], **shares}


def gather(runs: Iterable[RunRecord], *, by_stream: bool = False) -> dict[str, Parts]:
    """Count executions: those of each consumer and ``ALL``, and those of each source where tickets are called
    SOURCE/ID (``by_stream``). A message's wait is the time from its id to the start of its first attempt."""
    found: dict[str, Parts] = {BY_CONSUMER: {}, BY_SOURCE: {}}
    for run in runs:
        told = {"done": 1} if run.outcome in (DONE, MERGED) else {"failed": 1} if run.outcome in FAILURES else {}
        if run.attempt == 1:
            told[f"w{step_of(run.start_us - 1000 * int(run.id.partition('-')[0]))}"] = 1
        if run.end_us and run.outcome != MERGED:
            told[f"t{step_of(run.end_us - run.start_us)}"] = 1
        places = [(BY_CONSUMER, ALL), (BY_CONSUMER, run.consumer.rpartition(":")[0][:_LONGEST_NAME])]
        if by_stream and run.ticket.find("/") > 0:
            places.append((BY_SOURCE, run.ticket.partition("/")[0][:_LONGEST_NAME]))
        for group, name in places:
            found[group].setdefault(name, Counter()).update(told)
    return found


def point(
    now_ms: int,
    level: Mapping[str, Any],
    former: Mapping[str, Any] | None,
    runs: Mapping[str, Parts],
    tenants: Mapping[str, Sequence[Any]],
    *,
    in_part: bool,
) -> dict[str, Any]:
    """Return the point of this minute. ``level``: figures that Redis tells at one moment, None where they are unknown;
    ``..._total`` are counted since some moment of the past; ``runs``: up to where the run log was read. ``former``: the
    newest point of an earlier minute; what was counted since then is this point's. ``in_part``: not all executions were
    read."""
    since_ms = now_ms if former is None else former["at"]
    told: dict[str, Any] = {"t": now_ms - now_ms % MINUTE_MS, "at": now_ms, "ms": max(0, now_ms - since_ms)}
    told |= {name: _more(former, level, f"{name}_total") for name in ("sent", "done", "failed")} | {**level, **runs}
    if told["failed"] is None:
        told["failed"] = runs[BY_CONSUMER].get(ALL, Counter())["failed"]
    told |= {"tenants": {name[:_LONGEST_NAME]: list(told) for name, told in list(tenants.items())[:NAMES]}}
    return told | {"in_part": in_part, "marks": [], "codes": []}


def marks(
    now_ms: int, former: Mapping[str, Any] | None, epoch: int, leader_url: str, fleet: Mapping[str, str]
) -> dict[str, Any]:
    """Return what happened since the former point, for charts: a change of leader, starts of consumers, and deploys,
    which are code that no consumer ran before. Epochs and generations are times (lua/includes/numbers.lua).

    >>> marks(9000, {"at": 5000, "codes": ["a"]}, 6000 * 1024, "http://m", {"c:7168000": "b", "d:1": "a"})["marks"]
    [[6000, 'leader', 'm'], [7000, 'start', 'c'], [9000, 'deploy', 'b']]
    """
    since_ms, known = (former["at"], former["codes"]) if former is not None else (now_ms - MINUTE_MS, None)
    codes = sorted({code for code in fleet.values() if code})
    found: list[list[Any]] = [[epoch // 1024, "leader", leader_url.partition("://")[2]]]
    for incarnation in fleet:
        name, _, generation = incarnation.rpartition(":")
        found.append([int(generation or 0) // 1024, "start", name])
    found = [one for one in found if since_ms < one[0] <= now_ms]
    found += [[now_ms, "deploy", code] for code in codes if known and code not in known]
    told = [[ms, kind, text[:_LONGEST_NAME]] for ms, kind, text in found]
    return {"marks": told[:_MARKS], "codes": (codes or known or [])[:_CODES]}


def merge(begin_ms: int, points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return these points, of one step that begins then, as one: counts added up, and the highest of each level."""
    merged: dict[str, Any] = {"t": begin_ms, "at": points[-1]["at"], "in_part": any(one["in_part"] for one in points)}
    merged["ms"] = sum(one["ms"] for one in points)
    for name in ("sent", "done", "failed", "lag"):
        known = [one[name] for one in points if one[name] is not None]
        merged[name] = (max(known) if name == "lag" else sum(known)) if known else None
    merged |= {name: max(one[name] for one in points) for name in ("pending", "oldest_ms")}
    parts: dict[str, Parts] = {BY_CONSUMER: {}, BY_SOURCE: {}}
    tenants: dict[str, list[Any]] = {}
    for one in points:
        for group, of in parts.items():
            for name, part in one[group].items():
                of.setdefault(name, Counter()).update(part)
        for name, (given, waiting, weight, held) in one["tenants"].items():
            before = tenants.get(name, [0, 0, weight, False])
            tenants[name] = [before[0] + given, max(before[1], waiting), weight, held]
    most = sorted(tenants.items(), key=lambda item: -item[1][0])[:NAMES]
    told = {"marks": [mark for one in points for mark in one["marks"]], "codes": points[-1]["codes"]}
    return merged | parts | {"tenants": dict(most)} | told


def encode(one: Mapping[str, Any]) -> bytes:
    """Encode a point in at most ``LONGEST`` bytes: the consumers and the sources with the fewest executions are
    ``OTHERS``, the tenants with the fewest messages are left out; sources before consumers and tenants."""
    most = of_sources = NAMES
    while True:
        kept = {BY_CONSUMER: _busiest(one[BY_CONSUMER], most), BY_SOURCE: _busiest(one[BY_SOURCE], of_sources)}
        tenants = dict(list(one["tenants"].items())[:most])
        made = orjson.dumps({**one, **kept, "tenants": tenants})
        if len(made) <= LONGEST or not most:
            return made
        if of_sources >= most:
            of_sources //= 2
        else:
            most //= 2


def _busiest(parts: Parts, most: int) -> Parts:
    ranked = sorted(parts, key=lambda name: (name != ALL, name == OTHERS, -parts[name]["done"] - parts[name]["failed"]))
    most += ALL in parts
    kept = {name: parts[name] for name in ranked[:most]}
    if rest := [parts[name] for name in ranked[most:]]:
        kept[OTHERS] = sum([kept.get(OTHERS, Counter()), *rest], Counter())
    return kept


def decode(value: Any) -> dict[str, Any] | None:
    try:
        found = orjson.loads(value) if isinstance(value, bytes) else None
    except ValueError:
        return None
    if not isinstance(found, dict) or not found.keys() >= _KNOWN:
        return None
    return found | {of: {name: Counter(part) for name, part in found[of].items()} for of in (BY_CONSUMER, BY_SOURCE)}


def _more(former: Mapping[str, Any] | None, level: Mapping[str, Any], name: str) -> int | None:
    before, total = None if former is None else former.get(name), level[name]
    return None if before is None or total is None or total < before else total - before


# -- in Redis

#: Bytes of the run log that are read for a minute, from its begin on, and records per call.
_RUN_BYTES, _RECORDS = 2 << 20, 20
#: Milliseconds of the run log that a first point is made of; and how far back a former point is looked for.
_FIRST_MS, _FORMER_MS = 60_000, 3_600_000


class ChartKeeper(LeaderService):
    """The service. ``tenants``: for each tenant, by name, (messages handed over so far, tickets that wait, weight, held
    by a rule); ``by_stream``: tickets are called SOURCE/ID; ``fleet``: consumers, and what code they run."""

    name = "charts"
    stalls_after_s = 180.0

    def __init__(
        self,
        link: Link,
        keys: Keys,
        lead: Lead,
        tenants: Callable[[], Mapping[str, Sequence[Any]]] = dict,
        by_stream: bool = False,
        fleet: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        super().__init__(link, keys, lead)
        self._fleet, self._by_stream, self._tenants = fleet, by_stream, tenants
        self._given: dict[str, int] = {}

    def work(self, steps: LeaderScripts) -> float:
        now_ms, level = self._level()
        steps.note_chart(place_of(now_ms), encode(self._point(now_ms, level)))
        return (MINUTE_MS - now_ms % MINUTE_MS + 200) / 1000

    def _point(self, now_ms: int, level: dict[str, Any]) -> dict[str, Any]:
        values = self._link.call("HMGET", self._keys.charts, *places(now_ms - _FORMER_MS, now_ms))
        this_minute = now_ms - now_ms % MINUTE_MS
        earlier = [one for value in values if (one := decode(value)) is not None and one["t"] < this_minute]
        former = max(earlier, key=lambda one: int(one["t"]), default=None)
        after = former["runs"] if former is not None else f"{now_ms - _FIRST_MS}-0"
        runs, in_part = self._read_runs(after, level["runs"])
        counted = gather(runs, by_stream=self._by_stream)
        made = point(now_ms, level, former, counted, self._take_tenants(), in_part=in_part)
        return made | marks(now_ms, former, self._lead.epoch or 0, self._lead.leader_url or "", self._fleet())

    def _level(self) -> tuple[int, dict[str, Any]]:
        keys, seen = self._keys, stream_sums(self._link, self._keys, 0)
        asked = [("XINFO", "STREAM", keys.stream), ("XREVRANGE", keys.runs, "+", "-", "COUNT", 1)]
        now_ms = redis_ms(self._link)
        stream, last, failed = self._link.pipeline([*asked, ("HGET", keys.failures, "failed")])
        facts, sample = {} if isinstance(stream, Exception) else pairs(stream), sample_of(seen)
        oldest_ms = max(0, now_ms - milliseconds(seen["oldest"])) if seen["oldest"] else 0
        runs = last[0][0].decode() if isinstance(last, list) and last else f"{now_ms}-0"
        sent, done = facts.get(b"entries-added", sample.sent), sample.done if seen["has_group"] else None
        number = int(failed) if isinstance(failed, bytes) and failed.isdigit() else 0
        level = {"sent_total": sent, "done_total": done, "failed_total": number, "runs": runs}
        return now_ms, level | {"lag": sample.lag, "pending": sample.pending, "oldest_ms": oldest_ms}

    def _read_runs(self, after: str, until: str) -> tuple[list[RunRecord], bool]:
        """Return the executions that the run log has after the one record, up to the other; and whether some were
        passed over."""
        found, start, left = list[RunRecord](), f"({after}", _RUN_BYTES
        while left > 0:
            page = self._link.call("XRANGE", self._keys.runs, start, until, "COUNT", _RECORDS)
            for _, (_, record) in page:
                left -= len(record)
                found += decode_runs(record)
            if len(page) < _RECORDS:
                return found, False
            start = f"({page[-1][0].decode()}"
        return found, True

    def _take_tenants(self) -> dict[str, list[Any]]:
        told = self._tenants()
        taken = {}
        for name, (given, *rest) in told.items():
            before = self._given.get(name, 0)
            taken[name] = [given - before if given >= before else given, *rest]
        self._given = {name: int(one[0]) for name, one in told.items()}
        return dict(sorted(taken.items(), key=lambda item: (-item[1][0], -item[1][1])))


def read_points(link: Link, keys: Keys, span: ChartSpan) -> tuple[int, list[dict[str, Any]]]:
    """Return Redis' time in ms, and the points of this span up to then, oldest first. Raises RedisTrouble."""
    now_ms = redis_ms(link)
    since_ms = now_ms - span.length_ms
    values = link.call("HMGET", keys.charts, *places(since_ms, now_ms))
    steps: dict[int, list[dict[str, Any]]] = {}
    for one in filter(None, map(decode, values)):
        if since_ms - MINUTE_MS < one["t"] <= now_ms:
            steps.setdefault(one["t"] - one["t"] % span.step_ms, []).append(one)
    return now_ms, [merge(begin_ms, of_step) for begin_ms, of_step in sorted(steps.items())]


#: Size of a chart in its own units, the room for its axes, and the height of its bars.
WIDTH, HEIGHT, _LEFT, _RIGHT, _BOTTOM, _TOP, _BARS = 560, 180, 66, 556, 22, 22, 34
_LINES = 4
#: Words of marks, for one and for more.
_TOLD_OF = {"leader": ("{} leads", "{} changes of leader"), "start": ("{} started", "{} consumers started")}
_TOLD_OF["deploy"] = ("code {}", "{} deploys")
#: Milliseconds between two marks of the time axis, by span.
_TIMES = {"1 hour": 600_000, "24 hours": 4 * 3_600_000}


class _ChartKind(NamedTuple):
    """A chart: ``unit`` is a format of ``usher.master.insight.formatting``; of each series its label, its look, and its
    name in a row. What went ``bad`` is bars below, with a scale of their own."""

    title: str
    unit: str
    series: tuple[tuple[str, str, str], ...]


_DONE, _FAILED = ("done", "two", "done"), ("failed", "bad", "failed")
_LEFT_OVER = ("unread (lag)", "one", "lag"), ("pending", "two", "pending"), ("given up", "bad", "letters")
_TIMED = (
    _ChartKind("Wait from sent to start", "duration", (("p50", "two", "wait_50"), ("p99", "one", "wait_99"))),
    _ChartKind("Handler time", "duration", (("p50", "two", "took_50"), ("p99", "one", "took_99"))),
)
_OF_ALL = (
    _ChartKind("Per second", "number", (("sent", "one", "sent"), _DONE, _FAILED)),
    _ChartKind("Unfinished", "number", _LEFT_OVER),
    *_TIMED,
)
_OF_PART = (_ChartKind("Per second", "number", (_DONE, _FAILED)), *_TIMED)
_OF_TENANT = (
    _ChartKind("Handed over per second", "number", (("handed over", "one", "given"),)),
    _ChartKind("Waiting", "number", (("tickets", "two", "waiting"),)),
)
#: Counts that are drawn per second.
_RATES = ("sent", "done", "given")


def _row(point: Mapping[str, Any], consumer: str = "", tenant: str = "", source: str = "") -> dict[str, float | None]:
    if tenant:
        given, waiting = point["tenants"].get(tenant, (0, 0))[:2]
        row: dict[str, float | None] = {"given": given, "waiting": waiting}
    else:
        group, name = (BY_SOURCE, source) if source else (BY_CONSUMER, consumer or ALL)
        row = measured(point[group].get(name, Counter()))
        if name == ALL:
            row |= {name: point.get(name) for name in ("sent", "done", "failed", "lag", "pending", "letters")}
    for name in _RATES:
        count = row.get(name)
        row[name] = None if count is None or not point["ms"] else 1000 * count / point["ms"]
    return row


class _Frame(NamedTuple):
    """Place of a chart's values: ``top`` is the highest one."""

    since_ms: int
    span: ChartSpan
    top: float

    def x(self, ms: float) -> float:
        return round(_LEFT + (_RIGHT - _LEFT) * (ms - self.since_ms) / self.span.length_ms, 1)

    def y(self, value: float) -> float:
        return round(HEIGHT - _BOTTOM - (HEIGHT - _BOTTOM - _TOP) * value / self.top, 1)

    def pieces(self, times: Sequence[int], column: Sequence[float | None]) -> list[str]:
        pieces: list[list[str]] = [[]]
        before_ms = 0
        for ms, value in zip(times, column, strict=True):
            if pieces[-1] and (value is None or ms - before_ms > 2.5 * self.span.step_ms):
                pieces.append([])
            if value is not None:
                pieces[-1].append(f"{self.x(ms)},{self.y(value)}")
                before_ms = ms
        # A point alone would be no line at all.
        return [" ".join(piece if len(piece) > 1 else [piece[0], piece[0]]) for piece in pieces if piece]

    def bars(self, times: Sequence[int], column: Sequence[float | None], most: float) -> list[tuple[float, ...]]:
        highs = [round((_BARS - 8) * (value or 0) / (most or 1), 1) for value in column]
        return [(self.x(ms), HEIGHT + _BARS - high, high) for ms, high in zip(times, highs, strict=True) if high]

    def marks(self, points: Sequence[Mapping[str, Any]]) -> list[tuple[float, int, str]]:
        """Return what happened, each kind of it told once for a step."""
        found: dict[tuple[int, str], list[tuple[int, str]]] = {}
        for ms, what, name in (mark for point in points for mark in point["marks"] if mark[0] >= self.since_ms):
            found.setdefault((ms // self.span.step_ms, what), []).append((ms, name))
        told = [(some[0], _TOLD_OF[what][len(some) > 1], len(some)) for (_, what), some in found.items()]
        return [(self.x(ms), ms, text.format(name if count == 1 else count)) for (ms, name), text, count in told]


def draw(points: Sequence[Mapping[str, Any]], span: ChartSpan, now_ms: int, **of: str) -> list[dict[str, Any]]:
    """Return the charts of the ``consumer``, ``tenant`` or ``source`` that is named; of everything where none is."""
    rows = [_row(point, **of) for point in points]
    kinds = _OF_TENANT if of.get("tenant") else _OF_PART if any(of.values()) else _OF_ALL
    return [_draw(kind, points, rows, span, now_ms) for kind in kinds]


def _draw(
    kind: _ChartKind,
    points: Sequence[Mapping[str, Any]],
    of_points: Sequence[Mapping[str, float | None]],
    span: ChartSpan,
    now_ms: int,
) -> dict[str, Any]:
    """Return the chart as a template needs it: lines, in pieces where points are missing, bars, what happened, marks of
    both axes, and a table, whose rows are also shown where somebody points."""
    columns = [(label, look, [row[name] for row in of_points]) for label, look, name in kind.series]
    top, step = _scale(max((one or 0 for _, look, column in columns if look != "bad" for one in column), default=0.0))
    frame = _Frame(now_ms - span.length_ms, span, top)
    times = [max(frame.since_ms, int(point["t"])) for point in points]
    rows = [(int(point["t"]), [column[at] for _, _, column in columns]) for at, point in enumerate(points)]
    drawn: dict[str, Any] = {"title": kind.title, "unit": kind.unit, "lines": [], "bars": [], "rows": rows}
    for label, look, column in columns:
        line: dict[str, Any] = {"label": label, "kind": look}
        if look == "bad":
            line["most"] = max((one or 0 for one in column), default=0)
            drawn["bars"].append(line | {"rects": frame.bars(times, column, line["most"])})
        else:
            drawn["lines"].append(line | {"pieces": frame.pieces(times, column)})
    mark_ms, wide = _TIMES[span.label], (_RIGHT - _LEFT) * span.step_ms / span.length_ms
    first_ms = frame.since_ms + span.length_ms // 20  # there, and at the end, is no room for its words
    moments = range(first_ms - first_ms % mark_ms + mark_ms, now_ms - span.length_ms // 40, mark_ms)
    drawn |= {"marks": frame.marks(points), "labels": [label for label, _, _ in kind.series]}
    drawn |= {"wide": round(wide, 1), "bar": round(max(1.5, wide * 0.7), 1)}
    drawn |= {"points": [(frame.x(ms), *row) for ms, row in zip(times, rows, strict=True)]}
    drawn |= {"levels": [(frame.y(step * n), step * n) for n in range(round(top / step) + 1)]}
    drawn |= {"times": [(frame.x(ms), ms) for ms in moments]}
    height = HEIGHT + _BARS + 2 if drawn["bars"] else HEIGHT
    return drawn | {"left": _LEFT, "right": _RIGHT, "bottom": HEIGHT - _BOTTOM, "height": height}


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


def totals(points: Sequence[Mapping[str, Any]], group: str, only: str | None = None) -> list[dict[str, Any]]:
    """Return a row for each consumer, or source, of these points; ``only``: for this one."""
    found: dict[str, Counter[str]] = {}
    parts = (item for point in points for item in point[group].items())
    for name, part in ((name, part) for name, part in parts if (name != ALL if only is None else name == only)):
        found.setdefault(name, Counter()).update(part)
    rows: list[dict[str, Any]] = [{"name": name} | measured(part) for name, part in found.items()]
    return sorted(rows, key=lambda row: (-row["done"] - row["failed"], row["name"]))


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
