"""The judge of the demo must see what is wrong; a judge that says yes to everything would make the demo worthless."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from usher.deploy.demo.handlers import Execution, count_ended, executions, judge

SENT = [("1-0", "A"), ("2-0", "A"), ("3-0", "B"), ("4-0", "A")]


def run(
    stream_id: str, start: int, end: int | None, *, ticket: str = "A", fence: int = 1, attempt: int = 1, pid: int = 7
) -> Execution:
    return Execution(f"c{pid}", pid, stream_id, ticket, fence, attempt, start, end)


def good() -> list[Execution]:
    return [run("1-0", 10, 20), run("2-0", 20, 30), run("3-0", 12, 18, ticket="B", pid=8), run("4-0", 31, 40)]


def verdict(executions: list[Execution], **facts: object) -> SimpleNamespace:
    return SimpleNamespace(**judge(SENT, executions, seconds=2.0, **facts))  # type: ignore[arg-type]


def test_a_good_run_is_clean_and_counted() -> None:
    seen = verdict(good())
    assert seen.clean
    assert (seen.sent, seen.handled, seen.tickets, seen.messages_per_second) == (4, 4, 2, 2.0)
    assert [tuple(share.values()) for share in seen.consumers] == [("c7", 3, 1), ("c8", 1, 1)]
    assert seen.examples == []


def test_a_dead_letter_is_not_lost_but_not_clean_either() -> None:
    seen = verdict(good()[:3], dead={"4-0": "attempts_exhausted"})
    assert (seen.lost, seen.dead_letters, seen.clean) == (0, 1, False)


def test_after_a_kill_repeats_under_a_new_fence_are_fine_and_reported() -> None:
    runs = [
        run("1-0", 10, 20),
        run("2-0", 20, None),
        run("3-0", 12, 18, ticket="B", pid=8),
        run("1-0", 40, 45, fence=2, pid=8),
        run("2-0", 45, 50, fence=2, pid=8),
        run("4-0", 50, 55, fence=2, pid=8),
    ]
    seen = verdict(runs, killed_ns={7: 25})
    assert (seen.duplicates, seen.order_violations, seen.overlaps, seen.lost, seen.clean) == (2, 0, 0, 0, True)


def test_after_a_kill_a_start_before_the_killed_execution_can_have_ended_overlaps() -> None:
    runs = [
        run("1-0", 10, 20),
        run("2-0", 20, None),
        run("3-0", 12, 18, ticket="B"),
        run("2-0", 23, 30, fence=2, pid=8),
        run("4-0", 31, 40, fence=2, pid=8),
    ]
    assert verdict(runs, killed_ns={7: 25}).overlaps == 1


def test_an_owner_with_a_lower_fence_that_runs_later_is_a_violation() -> None:
    runs = [
        run("1-0", 10, 20, fence=5),
        run("2-0", 20, 30, fence=4),
        run("3-0", 12, 18, ticket="B"),
        run("4-0", 31, 40, fence=5),
    ]
    assert verdict(runs).order_violations == 1


def test_a_retry_in_place_keeps_the_order() -> None:
    seen = verdict([*good()[:3], run("4-0", 31, 40), run("4-0", 41, 50, attempt=2)])
    assert (seen.order_violations, seen.duplicates) == (0, 1)


def test_handled_but_never_acknowledged_is_not_clean() -> None:
    assert not verdict(good(), unacknowledged=1).clean


@pytest.mark.parametrize("fault", ["swap", "drop", "overlap", "repeat"])
def test_one_fault_in_a_long_random_history_is_found(fault: str) -> None:
    for seed in range(30):
        rng = random.Random(seed)
        sent, runs = history(rng, 200, 12)
        assert judge(sent, runs, seconds=1.0)["clean"], seed
        spoil(runs, fault, rng)
        assert not judge(sent, runs, seconds=1.0)["clean"], (fault, seed)


def history(rng: random.Random, count: int, tickets: int) -> tuple[list[tuple[str, str]], list[Execution]]:
    free = {f"T{ticket}": 0 for ticket in range(tickets)}
    sent, runs = [], []
    for index in range(count):
        ticket = rng.choice(list(free))
        start = free[ticket] + rng.randrange(5)
        free[ticket] = start + 2 + rng.randrange(9)
        sent.append((f"{index + 1}-0", ticket))
        runs.append(run(f"{index + 1}-0", start, free[ticket], ticket=ticket, pid=rng.randrange(3)))
    return sent, runs


def spoil(runs: list[Execution], fault: str, rng: random.Random) -> None:
    index = rng.randrange(len(runs) - 50)
    victim = runs[index]
    other = next(later for later in runs[index + 1 :] if later.ticket == victim.ticket)
    if fault == "swap":
        victim.stream_id, other.stream_id = other.stream_id, victim.stream_id
    elif fault == "drop":
        runs.remove(victim)
    elif fault == "overlap":
        victim.end_ns = other.start_ns + 1
    else:
        assert victim.end_ns is not None
        runs.append(run(victim.stream_id, victim.end_ns, victim.end_ns, ticket=victim.ticket))


class TestRecords:
    def test_a_line_that_is_not_whole_waits(self, tmp_path: Path) -> None:
        path = tmp_path / "c1.77.records"
        path.write_bytes(b"S 0 5-1 3 1 100 T\nE 0 2")
        assert [seen.end_ns for seen in executions(tmp_path)] == [None]
        with path.open("ab") as file:
            file.write(b"00\n")
        assert ([seen.end_ns for seen in executions(tmp_path)], count_ended(tmp_path)) == ([200], 1)
