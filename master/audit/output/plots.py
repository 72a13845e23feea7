"""Plots of the audit's page as inline SVG. Pure: numbers in, positions out; the template writes them. No script,
nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from usher.master.audit.output.report import AuditReport

_WIDTH, _BAR, _LABEL = 640.0, 20.0, 190.0
_TREND_HEIGHT, _TREND_LEFT = 110.0, 70.0
_AGES = ("under 1 s", "1-10 s", "10-60 s", "1-10 min", "10-60 min", "1-24 h", "over a day")
_RECOVERIES = ("under 0.1 s", "0.1-0.5 s", "0.5-1 s", "1-5 s", "5-10 s", "10-30 s", "30-60 s", "over a minute")


class Bar(NamedTuple):
    """A horizontal bar: its label, its number as text, and its place, in pixels."""

    label: str
    value: str
    y: float
    width: float


class Bars(NamedTuple):
    """A bar chart. ``empty``: the reason when there is nothing to draw."""

    title: str
    note: str
    height: float
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
        return Bars(title, note, 0.0, [], empty)
    room = _WIDTH - _LABEL - 90
    widths = [max(1.0, room * number / most) if number else 0.0 for _, number in rows]
    made = [Bar(_short(label), f"{number:,}", at * (_BAR + 6), widths[at]) for at, (label, number) in enumerate(rows)]
    return Bars(title, note, len(rows) * (_BAR + 6), made, "")


def line(title: str, rows: Sequence[Mapping[str, Any]], name: str, unit: float = 1.0) -> Line | None:
    """Return a line of one figure over the runs; None with fewer than two runs that have it."""
    known = [(row["run"], float(row[name]) / unit) for row in rows if row.get(name) is not None]
    if len(known) < 2:
        return None
    most = max(value for _, value in known) or 1.0
    room = _WIDTH - _TREND_LEFT - 10
    at = [
        (_TREND_LEFT + room * n / (len(known) - 1), 5 + _TREND_HEIGHT * (1 - value / most))
        for n, (_, value) in enumerate(known)
    ]
    dots = [(round(x, 1), round(y, 1), f"{run}: {value:,.0f}") for (x, y), (run, value) in zip(at, known, strict=True)]
    return Line(
        title, " ".join(f"{x:.1f},{y:.1f}" for x, y in at), dots, f"{most:,.0f}", known[0][0][:15], known[-1][0][:15]
    )


def charts(report: AuditReport) -> list[Bars]:
    """Return the charts of one run."""
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


def _short(label: str) -> str:
    """Return the label without control characters, cut to the room there is."""
    clean = "".join(char if char.isprintable() else "\ufffd" for char in label)
    return clean if len(clean) <= 28 else clean[:25] + "..."
