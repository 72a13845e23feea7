"""Plots of the audit's page as inline SVG. Pure: numbers in, positions out; the template writes them. No script,
nothing loaded from elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from usher.master.audit.report import AuditReport
from usher.master.audit.standing import ProvenSpan

_WIDTH, _LEAST = 640.0, 5.0
_TREND_HEIGHT, _TREND_LEFT = 110.0, 5.0
_AGES = ("under 1 s", "1-10 s", "10-60 s", "1-10 min", "10-60 min", "1-24 h", "over a day")
_RECOVERIES = ("under 0.1 s", "0.1-0.5 s", "0.5-1 s", "1-5 s", "5-10 s", "10-30 s", "30-60 s", "over a minute")


class Bar(NamedTuple):
    """A horizontal bar: its label, its number as text, and its width, of 100."""

    label: str
    value: str
    width: float


class Bars(NamedTuple):
    """A bar chart. ``empty``: the reason when there is nothing to draw."""

    title: str
    note: str
    bars: list[Bar]
    empty: str


class Line(NamedTuple):
    """A line over the runs: points of an SVG polyline, and the values at its ends."""

    title: str
    points: str
    dots: list[tuple[float, float, str]]
    highest: str
    first: str
    last: str


def bars(title: str, note: str, rows: Sequence[tuple[str, int]], empty: str) -> Bars:
    """Return a chart of (label, number) rows."""
    most = max((number for _, number in rows), default=0)
    if not most:
        return Bars(title, note, [], empty)
    made = [Bar(_clean(label), f"{n:,}", round(max(0.3, 100 * n / most), 1) if n else 0.0) for label, n in rows]
    return Bars(title, note, made, "")


class Stretch(NamedTuple):
    """A part of the time line of a stream's history, proven or not, in pixels; ``told``: from when to when."""

    x: float
    width: float
    is_proven: bool
    told: str


def time_line(spans: Sequence[ProvenSpan]) -> list[Stretch]:
    """Return what is proven, and on top of it what is not. However short, it is seen."""
    if not spans:
        return []
    since_ms, until_ms = spans[0].since_ms, max(one.until_ms for one in spans)
    unit = _WIDTH / max(1, until_ms - since_ms)

    def stretch(first_ms: int, last_ms: int, *, is_proven: bool) -> Stretch:
        width = max(_LEAST, (last_ms - first_ms) * unit)
        x = min((first_ms - since_ms) * unit, _WIDTH - width)
        return Stretch(round(x, 1), round(width, 1), is_proven, f"{moment(first_ms)} to {moment(last_ms)}")

    proven = [stretch(one.since_ms, one.until_ms, is_proven=True) for one in spans]
    between = pairwise(spans)
    return [*proven, *(stretch(one.until_ms, other.since_ms, is_proven=False) for one, other in between)]


def moment(ms: int) -> str:
    """Return a moment, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(ms / 1000))


def line(title: str, rows: Sequence[Mapping[str, Any]], name: str, unit: float = 1.0) -> Line | None:
    """Return a line of one figure over the runs; None with fewer than two runs that have it."""
    known = [(row["run"], float(row[name]) / unit) for row in rows if row.get(name) is not None]
    if len(known) < 2:
        return None
    most = max(value for _, value in known) or 1.0
    room = _WIDTH - 2 * _TREND_LEFT
    at = [
        (_TREND_LEFT + room * n / (len(known) - 1), 5 + _TREND_HEIGHT * (1 - value / most))
        for n, (_, value) in enumerate(known)
    ]
    dots = [(round(x, 1), round(y, 1), f"{run}: {value:,.0f}") for (x, y), (run, value) in zip(at, known, strict=True)]
    return Line(
        title, " ".join(f"{x:.1f},{y:.1f}" for x, y in at), dots, f"{most:,.0f}", _day(known[0][0]), _day(known[-1][0])
    )


def _day(run: str) -> str:
    """Return when a run began, by its name (``report.run_name``), to the minute.

    >>> _day("20261127T170000.123Z")
    '2026-11-27 17:00'
    """
    return f"{run[:4]}-{run[4:6]}-{run[6:8]} {run[9:11]}:{run[11:13]}"


def charts(report: AuditReport) -> list[Bars]:
    """Return the charts of one run; a proof, which looks at nothing that waits now, has none."""
    if report.proven:
        return []
    plots, one_stream = report.plots, len(report.streams) == 1
    owners = [
        (owner if one_stream else f"{stream} {owner}", count) for stream, owner, count in plots.get("owners", ())[:20]
    ]
    tickets = [
        (ticket if one_stream else f"{stream} {ticket}", count) for stream, ticket, count in plots.get("tickets", ())
    ]
    return [
        bars(
            "Age of pending entries",
            "since they were added",
            list(zip(_AGES, plots.get("ages", ()), strict=False)),
            "nothing is pending",
        ),
        bars("Load by owner", "pending entries; master holds what waits", owners, "nothing is pending"),
        bars(
            "Tickets with most entries pending",
            "a few hot tickets limit the gain from more consumers",
            tickets,
            "nothing is pending",
        ),
        bars(
            "Recovery times",
            "from the last sign of life of an owner that was lost to the next start of its message, under a new owner",
            list(zip(_RECOVERIES, plots.get("recoveries", ()), strict=False)),
            "no message was started again under a new owner",
        ),
    ]


def lines(report: AuditReport) -> list[Line]:
    """Return the trend over the runs."""
    made = [
        line("Findings", report.trend, "findings"),
        line("Pending entries", report.trend, "pending"),
        line("Oldest pending entry, seconds", report.trend, "oldest_age_ms", 1000.0),
        line("Slowest recovery, milliseconds", report.trend, "slowest_recovery_ms"),
    ]
    return [one for one in made if one is not None]


def _clean(label: str) -> str:
    """Return the label without control characters."""
    return "".join(char if char.isprintable() else "\ufffd" for char in label)
