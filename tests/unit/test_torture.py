"""What torture makes of what it saw, and where it stops a handler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from usher.consumer.handlers.error_trace import is_users
from usher.consumer.torture.stage import counted
from usher.consumer.torture.stories import AFTER, BEFORE, DISTURBED, MESSAGES, SCENARIOS, WAKE, explain, places


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_every_story_runs_every_message_to_its_end_and_no_fence_comes_back_but_a_zombies(scenario: Any) -> None:
    for place in places(scenario, 7, 3):
        steps = scenario.steps(place)
        runs = [step for step in steps if step.does != WAKE]
        highest = max(run.fence for run in runs)
        for number in range(1, MESSAGES + 1):
            last = [run for run in runs if run.number == number][-1]
            assert not last.does, "somebody finishes it"
        finished = {run.number for run in runs if run.fence == highest and not run.does}
        assert DISTURBED in finished or scenario.name == "sent_again_later"
        frozen = {run.actor for run in runs if run.does == "freeze"}
        assert {step.actor for step in steps if step.does == WAKE} == frozen
        assert all(runs[at].fence >= runs[at - 1].fence or scenario.name == "late_ack" for at in range(1, len(runs)))


def test_places_are_spread_and_the_end_is_always_one() -> None:
    within = next(scenario for scenario in SCENARIOS if scenario.at_every_line)
    assert places(within, 4, 30) == [0, 1, 2, 3, AFTER]
    assert places(within, 100, 4) == [0, 25, 50, 75, AFTER]
    assert places(within, 0, 4) == [AFTER]
    assert {tuple(places(each, 9, 9)) for each in SCENARIOS if not each.at_every_line} == {(BEFORE,)}


def test_a_handler_is_stopped_before_the_line_that_was_asked_for() -> None:
    reached = []

    def handler() -> None:
        reached.append("one")
        reached.append("two")
        reached.append("three")

    places_told: list[str] = []
    for at in (0, 1, 2, 3):
        reached.clear()
        _, count = counted(handler, __file__, at, lambda where: places_told.append(f"{where} after {len(reached)}"))
        assert count == 3
    wanted = [f'reached.append("{word}") after {count}' for count, word in enumerate(("one", "two", "three"))]
    assert [told.partition(": ")[2] for told in places_told] == wanted


def test_a_sum_tells_how_often_each_message_was_added() -> None:
    two, all_three = "message 1 twice, message 2 twice", "message 1 twice, message 2 twice, message 3 twice"
    for seen, told in (
        (121, "10 too much: your handler added message 2 twice"),
        (101, "10 too little: your handler added message 2 not at all"),
        (122, f"11 too much: your handler added {two}"),
        (222, f"111 too much: your handler added {all_three}"),
        (50, "61 too little"),
    ):
        assert explain((None, 1, 11, 111), seen) == told


def test_lines_of_libraries_of_python_and_of_usher_do_not_count(tmp_path: Path) -> None:
    import json

    import sqlalchemy

    import usher.consumer.sinks.sql

    for module in (json, sqlalchemy, usher.consumer.sinks.sql):
        assert not is_users(str(module.__file__))
    assert not is_users("<string>")
    assert is_users(str(tmp_path / "shop.py"))
