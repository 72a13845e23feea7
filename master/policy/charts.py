"""Points of the charts, one a minute for a day: what one is made of, which place it has, and how several become one.
Pure.

A point is kept as JSON, of at most ``LONGEST`` bytes. Executions are counted: ``done``, ``failed``, and
durations by step of a scale (``step_of``): ``w7`` of waits, ``t12`` of handlers. So they can be added up; a percentile
is right within a fifth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import log2
from typing import Any, NamedTuple

import orjson

from usher.common.protocol.run_log import DONE, FAILURES, MERGED, RunRecord


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
