"""A test of a rule: its story holds as the system is, and fails without the rule."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from tests.chaos.mutants.edits import Mutant
from tests.integration.actors import Stage

log = logging.getLogger(__name__)

Story = Callable[[Stage], None]

_STORIES: dict[Callable[..., None], Story] = {}


def rule(*mutants: Mutant) -> Callable[[Story], Callable[..., None]]:
    """The decorated story runs once as it is, and once per mutant, where one of its assertions must fail. It runs in an
    empty Redis."""

    def made(story: Story) -> Callable[..., None]:
        @pytest.mark.parametrize(
            "without", [None, *mutants], ids=lambda mutant: "as it is" if mutant is None else f"without: {mutant.name}"
        )
        def test(any_redis_url: str, without: Mutant | None, monkeypatch: pytest.MonkeyPatch) -> None:
            with Stage(any_redis_url) as stage:
                if without is None:
                    story(stage)
                    return
                without.apply(monkeypatch.setattr)
                with pytest.raises(
                    (AssertionError, pytest.fail.Exception)
                ) as red:  # the latter: an expected error did not come
                    story(stage)
                log.info("without %r: %s", without.name, red.value)

        # Not functools.wraps: pytest would look through it at the story's parameters.
        test.__name__, test.__qualname__, test.__doc__, test.__module__ = (
            story.__name__,
            story.__qualname__,
            story.__doc__,
            story.__module__,
        )
        _STORIES[test] = story
        return test

    return made


def story_of(function: Callable[..., None]) -> Story:
    """The story of a test of a rule; a bare story is its own."""
    return _STORIES.get(function, function)
