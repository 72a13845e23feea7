"""Read the system as a whole from Redis: the doctor's findings, the stream's readers, and what may be cut of the
stream."""

from __future__ import annotations

from typing import Any

from usher.common.base.clock import wall_ms
from usher.common.base.log import redacted
from usher.common.doctor.collector import collect, look_at_memory, read_growth
from usher.common.doctor.judgements import DoctorFinding, describe, examine, report
from usher.common.protocol.keys import Keys, LogKeys
from usher.common.protocol.mishaps import losses_command, parse_losses, told
from usher.common.protocol.sources import SourceSelection
from usher.common.redis.client import Link
from usher.common.redis.replies import pairs
from usher.master.insight.stats import Kept
from usher.master.operations.trimming import Trimming
from usher.master.policy.trim import Cut, Nothing, Refused, Retention, RetentionFacts, decide, readers

#: Seconds for which findings are shown again: an examination watches clocks for 0.1 s.
_FOUND_FOR_S = 15.0
#: Newest declared losses that are shown.
_LOSSES = 50


class SystemDiagnostics:
    """The doctor and the stream's readers, for the page. ``retention`` and the findings ``of_master``: the master's."""

    def __init__(
        self,
        link: Link,
        keys: Keys,
        lease_ms: int,
        sources: SourceSelection | None = None,
        retention: Retention | None = None,
        of_master: tuple[DoctorFinding, ...] = (),
    ) -> None:
        self._link, self._keys, self._lease_ms, self._sources = link, keys, lease_ms, sources
        self._retention, self._of_master = retention or Retention(), of_master
        #: Returns the document of `usher doctor --json`.
        self.doctor = Kept(_FOUND_FOR_S, self._examine)

    def _examine(self) -> dict[str, Any]:
        facts = collect(self._link, self._keys, self._lease_ms, self._sources)
        findings = [*examine(facts), *self._of_master]
        return {"asked_ms": wall_ms(), **report(redacted(self._link.url), facts, findings)}

    def streams(self) -> list[dict[str, Any]]:
        """Return one row for the ticket stream: its readers, what may be cut and why, and whose checkpoints there
        are."""
        facts = Trimming(self._link, self._keys).facts()
        beside = {self._keys.runs: "run log", self._keys.dead: "dead letters"}
        lengths = [("XLEN", name) for name in (self._keys.stream, *beside)]
        streamer, length, *entries = self._link.all_of([("GET", LogKeys(self._keys.stream).leader), *lengths])
        now_ms, memory = look_at_memory(self._link)
        grows = read_growth(self._link, self._keys.stream, length, facts.span, now_ms, memory)
        losses = parse_losses(*self._link.pipeline([losses_command(self._keys, _LOSSES)]))
        seen = self._link.pipeline([("XINFO", "STREAM", name) for name in beside])
        last = [None if isinstance(one, Exception) else pairs(one)[b"last-generated-id"].decode() for one in seen]
        others = [
            {"name": name, "what": what, "entries": count, "last": newest}
            for (name, what), count, newest in zip(beside.items(), entries, last, strict=True)
        ]
        archived_only, wished = self._retention.archived_only, self._retention.wishes(facts, now_ms)
        decision = decide(facts, archived_only=archived_only, wished=wished)
        return [
            retained(self._keys.stream, facts, decision, archived_only)
            | {
                "entries": length,
                "growth": None if grows is None else describe(grows),
                "days_left": None if grows is None else grows.days_left,
                "memory": None if memory is None else memory._asdict() | {"share": memory.share},
                "losses": [told(loss) for loss in losses],
                "streamer": (streamer or b"").decode(errors="replace").partition(" ")[2] or None,
                "others": others,
            }
        ]


def retained(
    stream: str, facts: RetentionFacts, decision: Cut | Nothing | Refused, archived_only: bool
) -> dict[str, Any]:
    """Return, for programs, who reads a stream, and what may be cut of it."""
    now_ms, span, cut = wall_ms(), facts.span, decision if isinstance(decision, Cut) else None
    ages_s = {name: round((now_ms - noted_ms) / 1000, 1) for name, _, noted_ms in facts.checkpoints}
    rows = [
        one._asdict()
        | {"keeps_from": one.keeps_from.decode()}
        | {"noted_s_ago": ages_s[one.name] if one.kind == "checkpoint" else None}
        for one in readers(facts, archived_only=archived_only)
    ]
    return {
        "stream": stream,
        "first_id": span.first.decode() if span is not None and span.first else None,
        "last_id": span.last_generated.decode() if span is not None else None,
        "readers": rows,
        "decision": type(decision).__name__.lower(),
        "floor": cut and cut.floor.decode(),
        "kept_for": cut and f"{cut.because.kind} {cut.because.name}",
        "why": decision.why,
        "problems": list(decision.problems) if isinstance(decision, Refused) else [],
    }
