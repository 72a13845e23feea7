"""The tests tested: 15 bugs are put back into the system, one at a time, and each must be noticed.

In every run by the cheapest story that a bug spoils; with ``--mutants`` also by the chaos scenarios, on real processes.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.mutants.catalogue import BUGS, Bug
from tests.chaos.mutants.rules import Story, story_of
from tests.chaos.plans import PLANS
from tests.chaos.runner import run
from tests.integration.actors import Stage
from usher.common.redis.client import Link

_LEAST = 12
_ROOT = Path(__file__).parents[2]
_ON_PATH = Path(__file__).parent / "mutants" / "on_path"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "bug" in metafunc.fixturenames:
        is_story = "redis_url" in metafunc.fixturenames
        bugs = [bug for bug in BUGS if is_story or (bug.plan and metafunc.config.getoption("mutants", False))]
        metafunc.parametrize("bug", bugs, ids=[bug.mutant.name for bug in bugs])


def _story(bug: Bug) -> Story:
    module, _, name = bug.story.partition(":")
    return story_of(getattr(importlib.import_module(module), name))


def test_the_story_holds_as_the_system_is(bug: Bug, redis_url: str) -> None:
    with Stage(redis_url) as stage:
        _story(bug)(stage)


def _is_noticed(bug: Bug, url: str) -> str:
    """What was noticed; "" if nothing was."""
    link = Link(url, "test:flush")
    link.call("FLUSHALL")
    link.close()
    with pytest.MonkeyPatch.context() as patch, Stage(url) as stage:
        bug.mutant.apply(patch.setattr)
        try:
            _story(bug)(stage)
        except (AssertionError, pytest.fail.Exception) as red:
            return str(red).strip().splitlines()[0]
    return ""


def test_the_bugs_are_noticed(redis_url: str, chaos_report: list[str]) -> None:
    seen = {bug.mutant.name: _is_noticed(bug, redis_url) for bug in BUGS}
    score = sum(map(bool, seen.values()))
    chaos_report.append(f"mutants: {score}/{len(BUGS)} noticed by a story")
    for name, told in seen.items():
        chaos_report.append(f"  {name:48} {told or 'NOT NOTICED'}")
    assert len(BUGS) == 15
    assert score >= _LEAST, seen


@pytest.mark.chaos
@pytest.mark.process
@pytest.mark.timeout(300)
def test_a_chaos_scenario_runs_with_the_bug(
    bug: Bug, tmp_path_short: Path, monkeypatch: pytest.MonkeyPatch, chaos_report: list[str]
) -> None:
    """Whether it turns red is told, not asserted: faults come by chance, and what a scenario misses a story has noticed
    for certain."""
    plan = next(plan for plan in PLANS if plan.name == bug.plan)
    environ = {"PYTHONPATH": os.pathsep.join((str(_ON_PATH), str(_ROOT))), "USHERS_MUTANT": bug.mutant.name}
    if bug.is_of_the_rig:
        bug.mutant.apply(monkeypatch.setattr)
    changed = replace(plan, varies=False, shape=replace(plan.shape, environ={**plan.shape.environ, **environ}))
    try:
        verdict = run(changed, 1, plan.seconds, tmp_path_short)
        told = (
            f"{len(verdict.violations)} violations: {', '.join(sorted(verdict.rules))}"
            if not verdict.ok
            else "NOT NOTICED"
        )
    except (RuntimeError, OSError) as problem:
        told = f"the run did not end: {problem}"
    chaos_report.append(f"mutant {bug.mutant.name:48} {plan.name:5} {told}")
    assert any("runs the mutant" in log.read_text("utf-8", "replace") for log in tmp_path_short.glob("*.log")), (
        "the mutant was not on"
    )
