"""The stories of ``tests/scenarios`` are played to the letter. They are there to be read: what happens, and what the
leader does about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.story import FOLDER, Story, played

STORIES = sorted(FOLDER.glob("*.txt"))


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.stem)
def test_the_leader_does_what_the_story_tells(story: Path) -> None:
    text = story.read_text(encoding="utf-8")
    assert played(text) == text, "if that is right: python -m tests.story"


def test_every_story_says_what_it_is_about() -> None:
    assert len(STORIES) >= 9
    for story in STORIES:
        assert story.read_text(encoding="utf-8").startswith("# "), story.name


def test_another_ending_would_be_noticed() -> None:
    text = (FOLDER / "owner_dies.txt").read_text(encoding="utf-8")
    other = text.replace("[1-0 2-0 3-0] to c2", "[3-0 1-0 2-0] to c2")
    assert other != text
    assert played(other) != other


def test_a_sentence_that_nobody_understands_is_an_error() -> None:
    with pytest.raises(ValueError, match="nobody understands 'everybody sleeps'"):
        Story().hear("everybody sleeps")
