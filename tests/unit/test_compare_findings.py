"""The verifier of `python -m benchmarks compare`, and the notes that it judges from."""

from __future__ import annotations

import multiprocessing
import random
import threading
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.cli.comparison import summary
from benchmarks.rig import recording
from benchmarks.rig.findings import BenchVerdict, Note, judge
from benchmarks.rig.recording import FOLDER_VARIABLE, PeerJob, count_notes, read_notes, record


def _notes(*runs: tuple[int, int, int, int]) -> list[Note]:
    return [Note(*run) for run in runs]


def _sound(messages: int) -> tuple[list[Note], list[int]]:
    """Notes of a run in which all went well, in two processes, and the tickets of its messages."""
    rng = random.Random(1)
    tickets = [rng.randrange(20) for _ in range(messages)]
    counts: Counter[int] = Counter()
    notes = []
    for at, ticket in enumerate(tickets):
        counts[ticket] += 1
        notes.append(Note(ticket, counts[ticket], 1000 * at, 1000 * at + 900))
    return notes, tickets


def _violations(verdict: BenchVerdict) -> tuple[int, int, int, int]:
    return verdict.lost, verdict.doubled, verdict.out_of_order, verdict.overlapping


def test_a_run_in_which_all_went_well_has_no_findings_however_the_notes_are_sorted() -> None:
    notes, tickets = _sound(500)
    random.Random(2).shuffle(notes)
    verdict = judge(notes, tickets)
    assert _violations(verdict) == (0, 0, 0, 0)
    assert verdict.handled == 500
    assert verdict.seconds == pytest.approx(499_900e-9)
    assert verdict.per_second == pytest.approx(500 / 499_900e-9)


def test_tickets_may_overlap_each_other() -> None:
    verdict = judge(_notes((1, 1, 0, 100), (2, 1, 50, 150), (1, 2, 100, 200)), [1, 2, 1])
    assert _violations(verdict) == (0, 0, 0, 0)


def test_a_lost_message_is_seen() -> None:
    assert _violations(judge(_notes((1, 1, 0, 1), (1, 3, 2, 3)), [1, 1, 1])) == (1, 0, 0, 0)


def test_a_message_that_came_twice_is_doubled_and_not_out_of_order() -> None:
    assert _violations(judge(_notes((1, 1, 0, 1), (1, 2, 2, 3), (1, 1, 4, 5)), [1, 1])) == (0, 1, 0, 0)


def test_one_lost_and_another_doubled_do_not_make_up_for_each_other() -> None:
    assert _violations(judge(_notes((1, 1, 0, 1), (1, 1, 2, 3)), [1, 1])) == (1, 1, 0, 0)


def test_a_message_that_nobody_sent_makes_up_for_none() -> None:
    assert judge(_notes((1, 1, 0, 1), (1, 9, 2, 3), (7, 1, 4, 5)), [1, 1]).lost == 1


def test_a_message_after_a_later_one_is_out_of_order() -> None:
    verdict = judge(_notes((1, 3, 0, 1), (1, 1, 2, 3), (1, 2, 4, 5), (2, 1, 0, 1)), [1, 1, 1, 2])
    assert _violations(verdict) == (0, 0, 2, 0)


def test_two_of_a_ticket_at_the_same_time_overlap() -> None:
    verdict = judge(_notes((1, 1, 0, 100), (1, 2, 99, 200), (1, 3, 200, 300)), [1, 1, 1])
    assert _violations(verdict) == (0, 0, 0, 1)


def test_a_long_one_overlaps_all_that_start_before_its_end() -> None:
    assert judge(_notes((1, 1, 0, 1000), (1, 2, 10, 20), (1, 3, 30, 40)), [1, 1, 1]).overlapping == 2


def test_nothing_noted_is_everything_lost() -> None:
    verdict = judge([], [1, 2, 2])
    assert (verdict.lost, verdict.handled, verdict.per_second) == (3, 0, 0.0)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PeerJob:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(recording, "_recorder", None)
    made = PeerJob(str(tmp_path), "", messages=400, payload=3, processes=2, concurrency=1)
    made.save([number % 3 for number in range(400)])
    return made


def test_every_process_and_thread_notes_what_it_ran(job: PeerJob, tmp_path: Path) -> None:
    messages = list(PeerJob.load(tmp_path).workload())

    def work(part: list[tuple[int, int]]) -> None:
        for message in part:
            record(*message)

    threads = [threading.Thread(target=work, args=(messages[at:200:4],)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    other = multiprocessing.get_context("spawn").Process(target=_record_all, args=(messages[200:],))
    other.start()
    other.join()
    assert count_notes(tmp_path) == 400
    noted = read_notes(tmp_path)
    assert sorted((note.ticket, note.number) for note in noted) == sorted(messages)
    assert all(0 < note.start_ns <= note.end_ns for note in noted)


def _record_all(messages: list[tuple[int, int]]) -> None:
    for message in messages:
        record(*message)


def test_the_notes_are_counted_exactly_whatever_their_number(job: PeerJob, tmp_path: Path) -> None:
    for number in range(1, 70):
        record(1, number)
        assert count_notes(tmp_path) == number


def test_the_workload_numbers_the_messages_of_each_ticket(job: PeerJob, tmp_path: Path) -> None:
    assert list(PeerJob.load(tmp_path, 1).workload())[:5] == [(0, 1), (1, 1), (2, 1), (0, 2), (1, 2)]
    assert (PeerJob.load(tmp_path, 1).place, job.body) == (1, "xxx")


def test_a_handler_that_runs_without_end_fills_no_disk(job: PeerJob, tmp_path: Path) -> None:
    for number in range(job.room + 5):
        record(1, number)
    assert count_notes(tmp_path) == job.room


def _run(rate: float, lost: int | None = 0, out_of_order: int = 0) -> dict[str, float | int | None]:
    counted = {"lost": lost, "doubled": 0, "out_of_order": out_of_order, "overlapping": 0}
    return {"messages": 10, "messages_per_second": rate, "cpu_us_per_message": 1000 / rate, **counted}


def test_figures_are_medians_and_violations_are_sums() -> None:
    ushers = [_run(50), _run(100), _run(80)]
    told = summary([_run(10, out_of_order=3), _run(40), _run(20, out_of_order=4)], ushers)
    assert (told["messages_per_second"], told["cpu_us_per_message"], told["ratio"]) == (20, 50, 0.25)
    assert (told["out_of_order"], told["lost"]) == (7, 0)


def test_what_one_run_cannot_tell_the_sum_cannot() -> None:
    told = summary([_run(10, lost=None), _run(40)], [])
    assert (told["lost"], told["ratio"]) == (None, None)
    assert summary([], [])["messages_per_second"] is None
