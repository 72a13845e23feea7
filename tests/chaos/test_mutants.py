"""The tests tested: bugs are put back into the system, one at a time, and each must be noticed.

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
from usher import Link

_ROOT = Path(__file__).parents[2]
_ON_PATH = Path(__file__).parent / "mutants" / "on_path"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "story" in metafunc.fixturenames:
        stories = dict.fromkeys(story for bug in BUGS for story in bug.stories)
        metafunc.parametrize("story", stories, ids=[story.rpartition(":")[2] for story in stories])
    elif "bug" in metafunc.fixturenames:
        pairs = [(bug, plan) for bug in BUGS for plan in bug.plans if metafunc.config.getoption("mutants", False)]
        metafunc.parametrize(("bug", "name"), pairs, ids=[f"{bug.mutant.name}-{plan}" for bug, plan in pairs])


def _story(named: str) -> Story:
    module, _, name = named.partition(":")
    return story_of(getattr(importlib.import_module(module), name))


def test_the_story_holds_as_the_system_is(story: str, redis_url: str) -> None:
    with Stage(redis_url) as stage:
        _story(story)(stage)


def _is_noticed(bug: Bug, story: str, url: str) -> str:
    """What was noticed; "" if nothing was."""
    link = Link(url, "test:flush")
    link.call("FLUSHALL")
    link.close()
    with pytest.MonkeyPatch.context() as patch, Stage(url) as stage:
        bug.mutant.apply(patch.setattr)
        try:
            _story(story)(stage)
        except (AssertionError, pytest.fail.Exception) as red:
            return str(red).strip().splitlines()[0]
    return ""


def test_the_bugs_are_noticed(redis_url: str, chaos_report: list[str]) -> None:
    """All of them, by each of their stories: a mutant that changes nothing any more is found here."""
    seen = {(bug.mutant.name, story): _is_noticed(bug, story, redis_url) for bug in BUGS for story in bug.stories}
    silent = [f"{name}: {story}" for (name, story), told in seen.items() if not told]
    noticed = len(BUGS) - len({name for name, _ in (one.split(": ", 1) for one in silent)})
    chaos_report.append(f"mutants: {noticed}/{len(BUGS)} noticed by each of their stories")
    for (name, _), told in seen.items():
        chaos_report.append(f"  {name:56} {told or 'NOT NOTICED'}")
    assert not silent


@pytest.mark.chaos
@pytest.mark.process
@pytest.mark.timeout(300)
def test_a_chaos_scenario_runs_with_the_bug(
    bug: Bug, name: str, tmp_path_short: Path, monkeypatch: pytest.MonkeyPatch, chaos_report: list[str]
) -> None:
    """Whether it turns red is told, not asserted: faults come by chance, and what a scenario misses a story has noticed
    for certain."""
    plan = next(plan for plan in PLANS if plan.name == name)
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
    chaos_report.append(f"mutant {bug.mutant.name:56} {plan.name:5} {told}")
    assert any("runs the mutant" in log.read_text("utf-8", "replace") for log in tmp_path_short.glob("*.log")), (
        "the mutant was not on"
    )
