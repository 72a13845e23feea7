from __future__ import annotations

import dataclasses
import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from usher.common.protocol.keys import Keys
from usher.master.audit import page
from usher.master.audit.commits import ProvenSpan
from usher.master.audit.findings import (
    CHECKS,
    AuditFinding,
    Example,
    commands,
    fold,
    repair,
)
from usher.master.audit.page import bars, line, time_line
from usher.master.audit.report import AuditReport
from usher.master.audit.settings import AuditThresholds
from usher.master.audit.snapshot import (
    AuditedStream,
    GroupMember,
    SuspectSnapshot,
    _holds,
    judge_members,
    unproven,
)
from usher.master.audit.source import Probe, cut, points

KEYS = Keys("s", "g")
RUNBOOK = (Path(__file__).resolve().parents[2] / "deploy" / "runbook.md").read_text()
LIMITS = AuditThresholds(owner_idle_ms=1000, reaped_ms=1000)
FULL = Example("s", "5-1", "it's", "c1:1", "what was seen")


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_every_check_says_what_how_to_look_and_what_to_do(check: object) -> None:
    one = CHECKS[check.name]  # type: ignore[attr-defined]
    assert one.rule.endswith(".")
    assert one.means.endswith(".")
    lines = commands(one, FULL, KEYS)
    assert len(lines) == len(one.look) > 0
    assert f"\n## {one.section}\n" in RUNBOOK
    assert not any("{" in line.replace("{s}", "") for line in [*lines, repair(one, FULL, KEYS)]), (
        "everything is filled in"
    )


def test_lines_are_quoted_for_a_shell_and_need_what_they_name() -> None:
    assert commands(CHECKS["index_unreadable"], FULL, KEYS) == ["redis-cli HGET '{s}:g:tickets' 'it'\"'\"'s'"]
    assert commands(CHECKS["index_unreadable"], Example("s"), KEYS) == []


def test_what_is_to_be_done_is_quoted_for_a_shell_too() -> None:
    odd = Example("s", "5-1", "a b$(rm)", "c 1:1")
    assert "(HDEL '{s}:g:tickets' 'a b$(rm)'):" in repair(CHECKS["index_unreadable"], odd, KEYS)
    assert repair(CHECKS["key_leaked"], odd, KEYS) == "Delete it: DEL '{s}:g:inbox:c 1:1'."
    assert repair(CHECKS["attempts_leaked"], odd, KEYS) == "Delete the field: HDEL '{s}:g:attempts' 5-1."


def test_where_there_was_nothing_nothing_is_said_to_have_held() -> None:
    """Who audits the wrong stream must not take it for a proof."""
    empty = AuditReport("run", 1, 1.0, "redis://", ("s",), "g", (), (), {"entries": 0, "pending": 0, "executions": 0})
    assert empty.sentence() == "nothing found, for there is nothing: no message and no execution in any of the streams"
    assert (
        dataclasses.replace(empty, figures={"entries": 0, "pending": 0, "executions": 7}).sentence()
        == "clean: the promise held"
    )


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"key_leaked": 1}, "1 finding"),
        ({"key_leaked": 1200}, "1,200 findings"),
        ({"key_leaked": 1, "lost": 2}, "3 findings of 2 kinds; the promise was broken"),
    ],
)
def test_the_verdict_says_how_many_were_found_of_how_many_kinds(found: dict[str, int], said: str) -> None:
    every = tuple(AuditFinding(CHECKS[name], "s", count, count) for name, count in found.items())
    assert AuditReport("run", 1, 1.0, "redis://", ("s",), "g", every, (), {}).sentence() == said


def test_the_worst_comes_first() -> None:
    found = [
        AuditFinding(CHECKS[name], "s", 1, 1) for name in ("key_leaked", "overlap", "parked_too_long", "owners_differ")
    ]
    assert [one.check.name for one in fold(found)] == ["owners_differ", "overlap", "parked_too_long", "key_leaked"]


@pytest.mark.parametrize(
    ("member", "check"),
    [
        (GroupMember("s", "c:1", 5, 9000, 9000, lives=True), None),
        (GroupMember("s", "c:1", 5, 9000, 0, lives=False), "owner_dead"),
        (GroupMember("s", "c:1", 5, 500, 0, lives=False), None),  # it has just died: recovery is under way
        (GroupMember("s", "c:1", 0, 0, 9000, lives=False), "consumer_leaked"),
        (GroupMember("s", "c:1", 0, 0, 500, lives=False), None),
        (GroupMember("s", "stranger", 5, 0, 0, lives=False), "stranger_owns"),
        (GroupMember("s", "stranger", 0, 0, 9000, lives=False), None),
        (GroupMember("s", "master", 5, 9000, 9000, lives=False), None),
        (GroupMember("s", "halted", 5, 9000, 9000, lives=False), None),
        (GroupMember("s", "c:1", 0, 0, 0, lives=False, in_group=False), "key_leaked"),
        (GroupMember("s", "c:1", 0, 0, 0, lives=True, in_group=False), None),
    ],
)
def test_members_of_the_group_are_judged(member: GroupMember, check: str | None) -> None:
    assert [name for name, _, _ in judge_members([member], LIMITS)] == ([check] if check else [])


_WELL = SuspectSnapshot("c:1", 0, 1, ("c:1", ("5-1",), 1), True, True, True, None)
_WRONG: dict[str, SuspectSnapshot] = {
    "pending_without_index": _WELL._replace(record=None),
    "index_without_pending": _WELL._replace(owner=None),
    "owners_differ": _WELL._replace(record=("c:2", ("5-1",), 1)),
    "index_unreadable": _WELL._replace(record=None, readable=False),
    "idle_too_long": _WELL._replace(idle_ms=5000),
    "parked_too_long": _WELL._replace(owner="master", record=None, idle_ms=10**9),
    "body_gone": _WELL._replace(in_stream=False),
    "delivered_often": _WELL._replace(deliveries=100),
    "attempts_many": _WELL._replace(attempts=9),
    "ticket_owned_twice": _WELL._replace(other_owner="c:2"),
    "attempts_leaked": _WELL._replace(owner=None, attempts=1),
    "lost": _WELL._replace(owner=None, record=None),
}


@pytest.mark.parametrize("check", _WRONG)
def test_the_second_look_keeps_what_is_wrong_and_drops_what_is_well(check: str) -> None:
    suspect = Example("s", "5-1", "t", "c:1", "5-1")
    assert _holds(check, suspect, _WRONG[check], LIMITS)
    assert not _holds(check, suspect, _WELL, LIMITS)


def facts(run_first: bytes | None, capped: bool, deleted: bytes | None = None) -> AuditedStream:
    return AuditedStream("s", "g", 9000, 5, b"7-1", 0, 3, run_first, capped, deleted, 0, b"1-1", 0, (), None)


def test_only_entries_added_after_what_is_missing_in_the_log_are_judged() -> None:
    known = {"handled_ms": 1, "ahead_ms": 0}
    assert facts(b"500-1", capped=True).base_ms == 500
    assert facts(b"500-1", capped=False).base_ms == -1
    assert facts(b"500-1", capped=False, deleted=b"700-1").base_ms == 700
    assert facts(None, capped=False).base_ms == 9000
    assert list(unproven(facts(b"500-1", capped=False), known, {})) == []
    counts = {"skipped_order": 3, "before_known": 4}
    assert len(list(unproven(facts(b"500-1", capped=True), known, counts))) == 3
    assert len(list(unproven(facts(b"500-1", False, b"700-1"), known, {}))) == 1


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=300), st.integers(1, 12), st.integers(1, 20))
def test_parts_cover_everything_once_whatever_the_probes_say(at: list[int], parts: int, probes: int) -> None:
    ids = sorted(set(at))
    lowest, highest = ids[0], ids[-1]
    seen = []
    for point in points(lowest, highest, probes):
        behind = [one for one in ids if one >= point][:5]
        seen.append(Probe(point, len(behind), behind[-1] if behind else 0, len(behind) == 5))
    ranges = cut(lowest, highest, seen, parts)
    assert len(ranges) <= parts
    assert (ranges[0][0], ranges[-1][1]) == (lowest, highest)
    assert all(first <= last for first, last in ranges)
    assert all(earlier[1] + 1 == later[0] for earlier, later in itertools.pairwise(ranges))


def test_a_burst_is_cut_into_parts_too() -> None:
    """A thousand entries in the first hundredth of the time."""
    ids = [*range(1000), 100_000]
    seen = []
    for point in points(0, 100_000, 400):
        behind = [one for one in ids if one >= point][:50]
        seen.append(Probe(point, len(behind), behind[-1], len(behind) == 50))
    sizes = [sum(first <= one <= last for one in ids) for first, last in cut(0, 100_000, seen, 4)]
    assert max(sizes) < 500


def test_a_chart_of_nothing_says_so_and_a_line_needs_two_runs() -> None:
    assert bars("t", "n", [("a", 0)], "nothing")["empty"] == "nothing"
    assert [width > 0 for *_, width in bars("t", "n", [("a", 5), ("b\x1b", 0)], "")["bars"]] == [True, False]
    assert bars("t", "n", [("shop/" * 40, 5)], "")["bars"][0][0] == "shop/" * 40
    assert line("t", [{"run": "1", "pending": 3}], "pending") is None
    drawn = line(
        "t", [{"run": "1", "pending": 3}, {"run": "2", "pending": None}, {"run": "3", "pending": 0}], "pending"
    )
    assert drawn is not None
    assert [y for _, y, _ in drawn["dots"]] == [5.0, 115.0]


def test_a_hole_of_a_second_in_a_year_of_history_is_seen() -> None:
    year_ms = 365 * 86_400_000
    spans = (ProvenSpan(0, year_ms - 1000, 10, ""), ProvenSpan(year_ms, year_ms + 5, 1, "runs from 1-0 may be missing"))
    *proven, hole = time_line(spans)
    assert [is_proven for _, _, is_proven, _ in (*proven, hole)] == [True, True, False]
    assert hole[1] >= 2
    assert hole[3] == "1970-12-31 23:59:59 to 1971-01-01 00:00:00"
    assert all(x >= 0 and x + width <= 640 for x, width, *_ in (*proven, hole))
    assert time_line(()) == []


def test_the_page_tells_the_proven_spans_and_the_findings_of_a_ticket() -> None:
    finding = AuditFinding(CHECKS["lost"], "s", 1, 1, (FULL,))
    other = AuditFinding(CHECKS["overlap"], "s", 1, 1, (FULL,))
    span = ProvenSpan(1_700_000_000_000, 1_700_000_100_000, 1234, "runs before 5-1 <b> are missing")
    report = AuditReport("run", 0, 1.0, "redis", ("s",), "g", (finding, other), (), {}, spans={"s": (span,)})
    told = page.render(report)
    assert "<span>2023-11-14 22:13:20</span><span>2023-11-14 22:15:00</span>" in told
    assert 'data-label="proven from (UTC)">2023-11-14 22:13:20</td>' in told
    assert told.count(f"<li><b>lost</b> {FULL.id} ") == 1, "what was seen of the ticket"
    assert "all of it is proven" in told and 'class="hole"' not in told
    behind = replace(
        report, spans={"s": (span, span._replace(since_ms=span.until_ms + 9, until_ms=span.until_ms + 99))}
    )
    [higher] = re.findall(r'class="hole" x=".*" y="(.*)" width=".*" height="(.*)">', page.render(behind))
    assert higher == ("0", "24"), "who sees no colours sees a hole"
    assert "runs before 5-1 &lt;b&gt; are missing" in told
    for check in ("lost", "overlap"):
        assert f'id="{check}-s"' in told
        assert f'href="#{check}-s"' in told
    assert "usher audit --streams s --group g runs --ticket &#39;it&#39;&#34;&#39;&#34;&#39;s&#39;" in told


def test_the_page_of_a_proof_says_nothing_of_what_it_did_not_look_at() -> None:
    report = AuditReport("run", 0, 1.0, "redis", ("s",), "g", (), (), {"executions": 3})
    proof = replace(report, proven=("s: proven",), checks=("lost", "overlap"))
    told = page.render(proof)
    assert "2 checks were made" in told
    assert "executions in the run log</dt><dd>3</dd>" in told
    for words in ("nothing is pending", "pending entries", "<dd>-</dd>", "It begins with the second run"):
        assert words not in told
        assert words in page.render(replace(report, figures={"executions": 3, "pending": None}))
