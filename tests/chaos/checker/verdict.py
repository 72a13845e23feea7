"""What the checker says of a history."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from .history import NEVER, History
from .liveness import Recoveries, leaks, liveness, vacuity
from .safety import safety
from .talk import OVER_LIMIT, talked

#: Violations that are told one by one; the counts are complete.
_MOST_TOLD = 40


@dataclass(frozen=True)
class Violation:
    """A broken rule, with the counter-example."""

    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}"


@dataclass
class Verdict:
    """All violations, and the figures of the run."""

    violations: list[Violation]
    figures: dict[str, int] = field(default_factory=dict)
    recoveries: Recoveries = field(default_factory=Recoveries)

    @property
    def ok(self) -> bool:
        return not self.violations

    @property
    def rules(self) -> Counter[str]:
        """How often each rule was broken."""
        return Counter(violation.rule for violation in self.violations)

    def told(self) -> str:
        """The first violations, as text."""
        lines = [str(violation) for violation in self.violations[:_MOST_TOLD]]
        if len(self.violations) > _MOST_TOLD:
            lines.append(f"... and {len(self.violations) - _MOST_TOLD} more: {dict(self.rules)}")
        return "\n".join(lines)


def judge(history: History) -> Verdict:
    """Apply every rule."""
    violations = [Violation(rule, text) for rule, text in (*safety(history), *talked(history))]
    recoveries = Recoveries.of(history)
    violations += [Violation("L1", text) for text in recoveries.late]
    violations += [Violation(rule, text) for rule, text in liveness(history)]
    violations += [Violation("Q1", text) for text in leaks(history)]
    figures = count(history, recoveries)
    violations += [Violation("V", text) for text in vacuity(history, figures)]
    return Verdict(violations, figures, recoveries)


def count(history: History, recoveries: Recoveries) -> dict[str, int]:
    """What happened in the run: the rig's counters, and what the records themselves show."""
    figures = {name: value for record in history.of("counters") for name, value in record.items() if name != "k"}
    executions = history.executions
    kinds = Counter(record["kind"] for record in history.of("start") if record.get("kind"))
    entries = len({(e.uid, e.mid) for e in executions})
    zombies = len(
        {
            early.x
            for early, late in history.overlaps
            if early.tok is not None and late.tok is not None and late.tok > early.tok
        }
    )
    return (
        figures
        | {f"starts_{kind}": count for kind, count in kinds.items()}
        | {
            "messages": len(history.positions),
            "executions": len(executions),
            "redelivered": len(executions) - entries,
            "repeated": sum(len(runs) > 1 for runs in history.starts_of.values()),
            "zombies": zombies,
            "fenced": len(history.of("fenced")),
            "deaths": len({e.who for e in executions} & set(history.deaths)),
            "commits": len(history.commits),
            "dlq": len(history.dead),
            "over_limit": sum(letter.get("reason") == OVER_LIMIT for letter in history.dead.values()),
            "unknown_sends": sum(record["r"] == "info" for record in history.of("send")),
            "refused_sends": sum(record["r"] == "fail" for record in history.of("send")),
            "lost": sum(len(record["uids"]) for record in history.of("lost")),
            "deleted": sum(len(record["uids"]) for record in history.of("deleted")),
            "double_sends": len(history.of("stream")) - len(history.positions),
            "stalls": len(history.of("stall")),
            "cut_short": sum(e.finish is None and e.end < NEVER for e in executions),
            "recoveries": len(recoveries.seconds),
            "merged": sum(record["r"] == "merged" for record in history.of("ran")),
            "answers": sum(record["r"] != "part" for record in history.of("answer")),
            "tokens": len({(e.ticket, e.tok) for e in executions}),
        }
    )
