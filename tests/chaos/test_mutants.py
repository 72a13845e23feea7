"""The tests tested: 15 bugs are put back into the system, one at a time, and each must be noticed. RELIABILITY 5.5."""

from __future__ import annotations

import importlib

import pytest

from common.redis_client import Link
from tests.chaos.mutants.catalogue import BUGS, Bug
from tests.chaos.mutants.rules import Story, story_of
from tests.integration.actors import Stage

#: Fewer than this must not be noticed by nobody.
_LEAST = 12


def _story(bug: Bug) -> Story:
    module, _, name = bug.story.partition(":")
    return story_of(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.mutant.name)
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
    chaos_report.append(f"mutants: {score}/{len(BUGS)} noticed")
    chaos_report += [f"  {name:48} {told or 'NOT NOTICED'}" for name, told in seen.items()]
    assert len(BUGS) == 15
    assert score >= _LEAST, seen
