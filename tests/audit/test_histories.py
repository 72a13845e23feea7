"""Histories that are wrong in one way, and such as look wrong and are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.audit.seeding import CAP, LIMITS, Seeder
from tests.audit.test_job import audit, plan
from tests.commands import usher
from usher.common.protocol.keys import Keys
from usher.common.redis.client import Link
from usher.common.sending.producer import Producer
from usher.master.audit.findings import AuditFinding
from usher.master.audit.job import last_drop_ms
from usher.master.operations.action_log import KEPT
from usher.master.policy.explain.explain import FENCES_PER_MS
from usher.master.policy.rules import Rule, RuleAction, Target


def told(local: Any, url: str) -> dict[str, set[str]]:
    """Check -> ids of its examples."""
    return {one.check.name: {example.id for example in one.examples} for one in audit(local, plan(url, "s")).found}


@pytest.fixture
def seeder(link: Link, request: pytest.FixtureRequest) -> Seeder:
    """Entries 2-1 to 5-1 are of ticket a, or of those that a test names."""
    made = Seeder(link, "s")
    made.add(("1-1", "first"), *((f"{n}-1", name) for n, name in enumerate(getattr(request, "param", "aaaa"), 2)))
    made.read()
    made.live("c1:1", "c2:2")
    made.ran("c1:1", ("1-1", "first", 5, 1, 2))
    return made


def test_what_succeeded_and_was_never_noted_because_the_next_one_crashed_is_in_order(
    local: Any, seeder: Seeder, redis_url: str
) -> None:
    """A success is noted when it is acknowledged, a crash by the successor: between the two the owner died."""
    seeder.over(*(f"{n}-1" for n in range(1, 6)))
    seeder.ran("c1:1", ("3-1", "a", 5, 200, 0, "crashed"))
    seeder.ran("c2:2", *((f"{n}-1", "a", 6, 1000 * n, 1000 * n + 500) for n in range(2, 6)))
    assert told(local, redis_url) == {}


@pytest.mark.slow
def test_a_dead_letter_that_runs_again_after_the_group_was_set_back_is_not_out_of_order(
    local: Any, link: Link, seeder: Seeder, redis_url: str
) -> None:
    """2-1 became a letter at 4000 ms; it runs again under a fence of 9000 ms. 3-1 was overtaken before it was one."""
    seeder.over(*(f"{n}-1" for n in range(1, 6)))
    late = 9000 * FENCES_PER_MS
    seeder.ran(
        "c1:1",
        ("2-1", "a", 5, 100, 200, "failed"),
        ("4-1", "a", 5, 300, 400),
        ("3-1", "a", 5, 500, 600, "failed"),
        ("5-1", "a", 5, 700, 800),
    )
    for n in (2, 3):
        link.call(
            "XADD", seeder.keys.dead, f"400{n}-1", "usher-id", f"{n}-1", "usher-ticket", "a", "usher-reason", "attempts"
        )
    seeder.ran("c2:2", ("2-1", "a", late, 9_100_000, 9_200_000, "failed"))
    assert told(local, redis_url) == {"out_of_order": {"3-1"}}


def test_where_rules_hold_tenants_back_nothing_is_said_to_wait_too_long(
    local: Any, link: Link, seeder: Seeder, redis_url: str
) -> None:
    seeder.over("1-1", "2-1", "3-1", "4-1", "5-1")
    seeder.ran("c1:1", *((f"{n}-1", "a", 6, 1000 * n, 1000 * n + 500) for n in range(2, 6)))
    seeder.add(("6-1", "T"), ("7-1", "U"))
    seeder.read()
    seeder.own("master", "6-1", "7-1", idle_ms=2 * LIMITS.parked_ms)
    seeder.rule(Rule(Target.TENANT, "w", RuleAction.SLOW, weight=2))
    assert told(local, redis_url) == {"parked_too_long": {"6-1", "7-1"}}
    for rule in (Rule(Target.TENANT, "p", RuleAction.PAUSE), Rule(Target.TENANT, "p", RuleAction.SLOW, concurrency=1)):
        seeder.rule(rule)
        report = audit(local, plan(redis_url, "s"))
        assert report.found == ()
        assert any("2 entries wait for long; live rules hold tenants back" in one for one in report.unproven)
        link.call("DEL", seeder.keys.rules)


@pytest.mark.parametrize("new", ["c0:9", "c9:9"])
@pytest.mark.parametrize("seeder", ["aabb"], indirect=True)
def test_a_ticket_that_moved_while_its_entries_were_read_has_one_owner(
    local: Any, seeder: Seeder, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new: str
) -> None:
    """Pages of a long pending list are read at different moments: of some entries the former owner is seen, of others
    the new one."""
    from usher.master.audit.job import AuditRun

    seeder.over("1-1", "4-1", "5-1")
    seeder.ran("c1:1", *((f"{n}-1", "b", 6, 1000 * n, 1000 * n + 500) for n in range(4, 6)))
    seeder.live(new)
    seeder.own("c1:1", "2-1")
    seeder.own(new, "3-1")
    seeder.index("a", f"{new} 7 2-1 3-1")
    running = AuditRun(local, plan(redis_url, "s"), tmp_path)
    second_look = running._second_look

    def moved() -> list[AuditFinding]:
        assert ("ticket_owned_twice", "s") in [(one.check.name, one.stream) for one in running.suspects]
        seeder.own(new, "2-1")
        return second_look()

    monkeypatch.setattr(running, "_second_look", moved)
    assert running.run().found == ()


def test_a_work_stream_may_be_named_by_hand_beside_others(
    local: Any, link: Link, seeder: Seeder, redis_url: str
) -> None:
    """Its entries name the ticket in a field of their own."""
    gathered = Seeder(link, "usher:{g}")
    link.call("XADD", "usher:{g}", "1-1", "usher_from", "7-1 5 shop", "usher_ticket", "shop/42", "ticket_id", "42")
    gathered.read()
    seeder.over("1-1")  # it is done
    gathered.own("c1:1", "1-1")
    seeder.own("c1:1", "2-1")
    gathered.index("shop/42", "c1:1 7 1-1")
    seeder.index("a", "c1:1 7 2-1")
    report = audit(local, plan(redis_url, "s", "usher:{g}"))
    assert report.found == ()


def test_what_became_of_a_letter_that_is_no_more_is_no_loss(
    local: Any, link: Link, seeder: Seeder, redis_url: str
) -> None:
    """2-1 and 3-1 were added again under their former ids, 6-1 under its own uid; 4-1 was dropped; 8-1 was added after
    that, and is lost."""
    link.call("XADD", "s", "6-1", "ticket_id", "a", "uid", "own")
    seeder.read()
    seeder.ran(
        "c1:1",
        ("2-1", "a", 5, 100, 200, "failed"),
        ("3-1", "a", 5, 200, 300, "crashed"),
        ("4-1", "a", 5, 300, 400, "failed"),
    )
    seeder.ran("c1:1", ("5-1", "a", 5, 400, 500), ("6-1", "a", 5, 500, 600, "failed"))
    seeder.over(*(f"{n}-1" for n in range(1, 7)))
    for entry_id, uid in (("7-1", "2-1"), ("7-2", "3-1"), ("7-3", "own")):
        link.call("XADD", "s", entry_id, "ticket_id", "a", "uid", uid)
    link.call("XADD", seeder.keys.actions, "7-9", "outcome", "dropped 1", "what", "drop")
    link.call("XADD", seeder.keys.actions, "9-9", "outcome", "added 3", "what", "redrive")
    seeder.add(("8-1", "a"))
    seeder.read()
    seeder.over("7-1", "7-2", "7-3", "8-1")
    seeder.ran("c1:1", ("7-1", "a", 5, 700, 800), ("7-2", "a", 5, 800, 900), ("7-3", "a", 5, 900, 1000))
    report = audit(local, plan(redis_url, "s"))
    assert [(one.check.name, [example.id for example in one.examples]) for one in report.found] == [("lost", ["8-1"])]
    assert [sentence for sentence in report.unproven if "dropped" in sentence] == [
        "s: nothing says that 1 entries were handled; dead letters were dropped since they were added, or may have been"
        " before the action log begins (usher actions), and theirs may be among them"
    ]


def test_of_a_stream_whose_ids_are_ahead_of_the_clock_a_log_that_was_cut_proves_less(
    local: Any, link: Link, seeder: Seeder, redis_url: str
) -> None:
    """Records are dated by Redis' clock. 900-1 and 901-1 were handled before 5 ms, 902-1 at 6 ms; the records of the
    first two are cut."""
    seeder.over(*(f"{n}-1" for n in range(1, 6)))
    seeder.add(("900-1", "a"), ("901-1", "a"), ("902-1", "b"))
    seeder.read()
    seeder.over("900-1", "901-1", "902-1")
    link.call("DEL", seeder.keys.runs)
    seeder.ran("c1:1", ("2-1", "a", 5, 1, 2), record="5-1")
    seeder.ran("c1:1", ("902-1", "b", 5, 1, 2), record="6-1")
    for n in range(CAP - 2):
        seeder.ran("c1:1", (f"1-{n + 5}", f"other{n}", 5, 1, 2), record=f"7-{n + 1}")
    report = audit(local, plan(redis_url, "s"))
    assert report.found == ()
    assert any("ids are up to 896 ms ahead of Redis' clock" in sentence for sentence in report.unproven)


def test_of_entries_that_are_cut_from_the_stream_losses_are_not_proven_and_that_is_said(
    local: Any, link: Link, seeder: Seeder, redis_url: str
) -> None:
    """2-1 was acknowledged by hand, and then cut: of a work stream everything is, as soon as it is over."""
    seeder.over(*(f"{n}-1" for n in range(1, 6)))
    seeder.ran("c1:1", *((f"{n}-1", "a", 6, 1000 * n, 1000 * n + 500) for n in range(3, 6)))
    link.call("XTRIM", "s", "MINID", "4-1")
    report = audit(local, plan(redis_url, "s"))
    assert (report.found, report.sentence()) == ((), "nothing found: what could be checked is as promised")
    assert report.unproven == (
        (
            "s: the entries before 4-1 are not in it any more (trimmed or deleted); whether all of them were handled"
            " was not looked at"
        ),
    )


def test_what_was_dropped_before_the_action_log_begins_is_not_known(link: Link, redis_url: str) -> None:
    keys = Keys("s", "g")
    link.pipeline([("XADD", keys.actions, f"{n}-1", "outcome", "paused", "what", "rules") for n in range(1, KEPT)])
    assert last_drop_ms(link, keys) == -1
    link.call("XADD", keys.actions, f"{KEPT}-1", "outcome", "paused", "what", "rules")  # as long as a log that was cut
    assert last_drop_ms(link, keys) == 1


def test_to_drop_delayed_messages_is_no_drop_of_letters(
    link: Link, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nothing could be said any more of entries that were added before it: theirs may be the letters that were
    dropped."""
    for name, value in {"USHER_REDIS_URL": redis_url, "USHER_TICKET_STREAM": "s", "USHER_GROUP": "g"}.items():
        monkeypatch.setenv(name, value)
    Producer(link, "s").send("T", {"text": "x"}, due_ms=Producer.ms_from_now(3600))
    assert usher("delayed", "drop", "--all", "--yes") == 0
    assert link.call("XLEN", Keys("s", "g").actions) == 1
    assert last_drop_ms(link, Keys("s", "g")) == -1
    assert usher("dead", "drop", "--all", "--yes") == 0, "there is none"
    link.call(
        "XADD",
        Keys("s", "g").dead,
        "5-1",
        "usher-id",
        "1-1",
        "usher-ticket",
        "T",
        "usher-reason",
        "x",
        "usher-fields",
        "0",
    )
    assert usher("dead", "drop", "5-1", "--yes") == 0
    assert last_drop_ms(link, Keys("s", "g")) > 0


def test_a_declared_loss_excuses_a_repeat_of_what_succeeded_before_it_and_nothing_later(
    local: Any, link: Link, seeder: Seeder, redis_url: str
) -> None:
    """2-1 ran for the first time after the loss, and twice; 3-1 before it, and twice after. 5-1
    was handed over before the loss, and ended when the group was there again, which did not know of it."""
    seeder.over("1-1", "2-1", "3-1", "4-1", "5-1")
    link.call("DEL", seeder.keys.runs)
    for record, fence, ids in (
        (1000, 5, ("1-1", "3-1", "4-1")),
        (2100, 6, ("5-1",)),
        (3000, 2500 * 1024, ("1-1", "2-1", "3-1", "4-1", "5-1")),
        (4000, 3500 * 1024, ("2-1", "3-1")),
    ):
        runs = [(one, one, fence, 10 * record, 10 * record + 5) for one in ids]
        seeder.ran(f"c{fence}:1", *runs, record=f"{record}-1")
    link.call("XADD", seeder.keys.losses, "2000-1", "kind", "group_lost", "repeats", "1-1 5-1")
    found = told(local, redis_url)
    assert found["repeat_declared"] == {"1-1", "3-1", "4-1", "5-1"}
    assert found["effect_twice"] == {"2-1", "3-1"}
    link.call("DEL", seeder.keys.losses)
    link.call("XADD", seeder.keys.losses, "2000-1", "kind", "taken_out", "repeats", "1-1 5-1")
    assert told(local, redis_url)["effect_twice"] == {"1-1", "2-1", "3-1", "4-1", "5-1"}
