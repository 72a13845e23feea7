"""What torture makes of what it saw, and where it stops a handler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.rules import ROOT
from usher.consumer.torture.child import LineStops, is_users
from usher.consumer.torture.findings import CaseFailure, ScenarioResult, explain, summary, trouble_with_effect
from usher.consumer.torture.scenarios import AFTER, BEFORE, DISTURBED, MESSAGES, SCENARIOS, RunStep, WakeStep, places

_SUMS = (0, 1, 11, 111)


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        (121, "10 too much: your handler added message 2 twice"),
        (113, "2 too much: your handler added message 1 three times"),
        (221, "110 too much: your handler added messages 2 and 3 twice"),
        (222, "111 too much: your handler added every message twice"),
        (101, "10 too little: message 2 is missing"),
        (11, "it is as after message 2: a later effect is missing or was overwritten"),
        (0, "it is as after message 0: no effect is there"),
        (104.5, "6.5 too little"),
        ("x", 'it should be 111 and is "x"'),
    ],
)
def test_numbers_tell_which_message_was_doubled_or_lost(seen: Any, told: str) -> None:
    assert explain(_SUMS, seen) == told


def test_an_effect_that_shows_nothing_or_differs_by_nature_cannot_be_judged() -> None:
    assert trouble_with_effect(0, _SUMS, _SUMS) == ""
    assert "does not show what the handler does" in trouble_with_effect(111, _SUMS, _SUMS)
    assert "leave out what differs by nature" in trouble_with_effect(0, _SUMS, (0, 1, 11, 112))


def test_the_verdict_names_what_went_wrong() -> None:
    good, bad = (ScenarioResult(name, name, "", "", 2) for name in ("good", "bad"))
    assert summary([good]).startswith("SAFE: after each of 2 stories")
    bad.failures.append(CaseFailure("", 1, 2, "1 too much"))
    assert summary([good, bad]) == "NOT SAFE: effects went wrong in 1 of 2 kinds of stories (bad)"
    assert not bad.document()["safe"]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_every_story_runs_every_message_to_its_end_and_no_fence_comes_back_but_a_zombies(scenario: Any) -> None:
    for place in places(scenario, 7, 3):
        steps = scenario.steps(place)
        runs = [step for step in steps if isinstance(step, RunStep)]
        highest = max(run.fence for run in runs)
        for number in range(1, MESSAGES + 1):
            last = [run for run in runs if run.number == number][-1]
            assert not last.does, "somebody finishes it"
        finished = {run.number for run in runs if run.fence == highest and not run.does}
        assert DISTURBED in finished or scenario.name == "sent_again_later"
        frozen = {run.actor for run in runs if run.does == "freeze"}
        assert {step.actor for step in steps if isinstance(step, WakeStep)} == frozen
        assert all(runs[at].fence >= runs[at - 1].fence or scenario.name == "late_ack" for at in range(1, len(runs)))


def test_places_are_spread_and_the_end_is_always_one() -> None:
    within = next(scenario for scenario in SCENARIOS if scenario.at_every_line)
    assert places(within, 4, 30) == [0, 1, 2, 3, AFTER]
    assert places(within, 100, 4) == [0, 25, 50, 75, AFTER]
    assert places(within, 0, 4) == [AFTER]
    assert {tuple(places(scenario, 9, 9)) for scenario in SCENARIOS if not scenario.at_every_line} == {
        (BEFORE,),
        (AFTER,),
    }


def test_a_handler_is_stopped_before_the_line_that_was_asked_for() -> None:
    reached = []

    def handler() -> None:
        reached.append("one")
        reached.append("two")
        reached.append("three")

    places_told: list[str] = []
    for at in (0, 1, 2, 3):
        reached.clear()
        steps = LineStops(__file__, at, lambda where: places_told.append(f"{where} after {len(reached)}"))
        steps.call(handler)
        assert steps.count == 3
    wanted = [f'reached.append("{word}") after {count}' for count, word in enumerate(("one", "two", "three"))]
    assert [told.partition(": ")[2] for told in places_told] == wanted


def test_lines_of_libraries_of_python_and_of_usher_do_not_count(tmp_path: Path) -> None:
    import json

    import sqlalchemy

    import usher.consumer.sinks.sql

    for module in (json, sqlalchemy, usher.consumer.sinks.sql):
        assert not is_users(str(module.__file__))
    assert not is_users("<string>")
    assert is_users(str(tmp_path / "shop.py"))


def test_without_sqlalchemy_the_sink_names_the_extra_and_nothing_else_misses_it() -> None:
    def run(program: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
        )

    hidden = "import sys; sys.modules['sqlalchemy'] = None\n"
    assert "pip install -e '.[sql]' in Usher's folder" in run(hidden + "import usher.consumer.sinks.sql").stderr
    modules = ("program", "sinks.redis_guard", "sinks.http", "torture.cli")
    others = f"import usher.master.assembly.program, {', '.join(f'usher.consumer.{name}' for name in modules)}\n"
    assert run(others + "import sys; sys.exit('sqlalchemy' in sys.modules)").returncode == 0
    assert run(hidden + others).returncode == 0
