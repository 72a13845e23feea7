from __future__ import annotations

from pathlib import Path

import pytest

from usher.common.protocol.keys import Keys
from usher.master.audit.findings import CHECKS, AuditFinding, Example, filled
from usher.master.audit.job import AuditReport
from usher.master.audit.settings import AuditChoices

KEYS = Keys("s", "g")
RUNBOOK = (Path(__file__).resolve().parents[2] / "deploy" / "runbook.md").read_text()
FULL = Example("s", "5-1", "it's", "c1:1", "what was seen")


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_every_check_says_what_and_what_to_do(check: object) -> None:
    one = CHECKS[check.name]  # type: ignore[attr-defined]
    assert one.rule.endswith(".")
    assert one.means.endswith(".")
    assert f"\n## {one.section}\n" in RUNBOOK
    assert "{" not in filled(one.repair, FULL, KEYS).replace("{s}", ""), "everything is filled in"


def test_what_is_to_be_done_is_quoted_for_a_shell() -> None:
    odd = Example("s", "5-1", "a b$(rm)", "c 1:1")
    assert "(HDEL '{s}:g:tickets' 'a b$(rm)'):" in filled(CHECKS["index_unreadable"].repair, odd, KEYS)
    assert filled(CHECKS["attempts_leaked"].repair, odd, KEYS) == "Delete the field: HDEL '{s}:g:attempts' 5-1."


def test_where_there_was_nothing_nothing_is_said_to_have_held() -> None:
    """Who audits the wrong stream must not take it for a proof."""
    figures = {"entries": 0, "pending": 0, "executions": 0}
    empty = AuditReport(AuditChoices(), 0, (), (), figures)
    assert empty.sentence() == "nothing found, for there is nothing: no message and no execution in any of the streams"
    some = AuditReport(AuditChoices(), 0, (), (), figures | {"executions": 7})
    assert some.sentence() == "clean: the promise held"


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"unregistered": 1}, "1 finding"),
        ({"unregistered": 1200}, "1,200 findings"),
        ({"unregistered": 1, "lost": 2}, "3 findings of 2 kinds; the promise was broken"),
    ],
)
def test_the_verdict_says_how_many_were_found_of_how_many_kinds(found: dict[str, int], said: str) -> None:
    every = tuple(AuditFinding(CHECKS[name], "s", count) for name, count in found.items())
    assert AuditReport(AuditChoices(), 0, every, (), {}).sentence() == said


def test_the_worst_comes_first() -> None:
    found = [
        AuditFinding(CHECKS[name], "s", 1) for name in ("unregistered", "overlap", "parked_too_long", "owners_differ")
    ]
    told = AuditReport(AuditChoices(), 0, found, (), {}).found
    assert [one.check.name for one in told] == ["overlap", "owners_differ", "parked_too_long", "unregistered"]
