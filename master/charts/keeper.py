"""The charts in Redis: the leading master writes a point each minute, and any master reads them.

All that a point goes by is in Redis, so a successor goes on where the former leader ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from usher.common.protocol.keys import Keys
from usher.common.protocol.run_log import RunRecord, decode
from usher.common.protocol.stream_id import milliseconds
from usher.common.redis.client import Link
from usher.common.redis.replies import pairs, redis_ms
from usher.master.insight.stats import stream_sums
from usher.master.leader.elector import Lead
from usher.master.leader.leader_scripts import LeaderScripts, LeaderService
from usher.master.policy import charts
from usher.master.policy.charts import MINUTE_MS, ChartSpan
from usher.master.policy.rates import sample_of

#: Bytes of the run log that are read for a minute, in so many slices of it, so that a part stands for all of it; and
#: records per call.
_RUN_BYTES, _SLICES, _RECORDS = 2 << 20, 6, 20
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
        steps.note_chart(charts.place_of(now_ms), charts.encode(self._point(now_ms, level)))
        return (MINUTE_MS - now_ms % MINUTE_MS + 200) / 1000

    def _point(self, now_ms: int, level: dict[str, Any]) -> dict[str, Any]:
        values = self._link.call("HMGET", self._keys.charts, *charts.places(now_ms - _FORMER_MS, now_ms))
        this_minute = now_ms - now_ms % MINUTE_MS
        earlier = [one for value in values if (one := charts.decode(value)) is not None and one["t"] < this_minute]
        former = max(earlier, key=lambda one: int(one["t"]), default=None)
        after = former["runs"] if former is not None else f"{now_ms - _FIRST_MS}-0"
        runs, in_part = self._read_runs(after, level["runs"])
        counted = charts.gather(runs, by_stream=self._by_stream)
        made = charts.point(now_ms, level, former, counted, self._take_tenants(), in_part=in_part)
        return made | charts.marks(now_ms, former, self._lead.epoch or 0, self._lead.leader_url or "", self._fleet())

    def _level(self) -> tuple[int, dict[str, Any]]:
        keys, seen = self._keys, stream_sums(self._link, self._scripts, self._keys, 0)
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
        begin, end = milliseconds(after.encode()), milliseconds(until.encode())
        found: list[RunRecord] = []
        in_part = False
        for number in range(_SLICES if end >= begin else 0):
            start = f"({after}" if not number else f"{begin + (end - begin) * number // _SLICES + 1}-0"
            stop = until if number == _SLICES - 1 else str(begin + (end - begin) * (number + 1) // _SLICES)
            left = _RUN_BYTES // _SLICES
            while left > 0:
                page = self._link.call("XRANGE", self._keys.runs, start, stop, "COUNT", _RECORDS)
                for _, (_, record) in page:
                    left -= len(record)
                    found += decode(record)
                if len(page) < _RECORDS:
                    break
                start = f"({page[-1][0].decode()}"
            else:
                in_part = True
        return found, in_part

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
    values = link.call("HMGET", keys.charts, *charts.places(since_ms, now_ms))
    steps: dict[int, list[dict[str, Any]]] = {}
    for one in filter(None, map(charts.decode, values)):
        if since_ms - MINUTE_MS < one["t"] <= now_ms:
            steps.setdefault(one["t"] - one["t"] % span.step_ms, []).append(one)
    return now_ms, [charts.merge(begin_ms, of_step) for begin_ms, of_step in sorted(steps.items())]
