"""Times as people write them mean one moment, or are refused."""

from __future__ import annotations

import time
from collections.abc import Iterator

import click
import pytest

from usher.common.base.durations import Moment, moment_ms, moment_text
from usher.master.cli.commands import place

_BERLIN = "Europe/Berlin"


@pytest.fixture
def zone(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield request.param
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("zone", "text", "told"),
    [
        (_BERLIN, "2026-03-29T02:30", "there is no such time"),
        (":" + _BERLIN, "2026-03-29T02:30", "there is no such time"),
        ("CET-1CEST,M3.5.0,M10.5.0/3", "2026-03-29T02:30", "there is no such time"),
        ("Europe/Nowhere", "2026-11-21T10:00", "TZ names a zone that is not known"),
        ("UTC", "2026-11-21T10:00+23:00", "no zone with this offset"),
        ("UTC", "2026-11-21T10:00 Europe/Berlin", "is no time: write"),
        ("UTC", "9999-12-31T23:59:59-23:59", "is no time: write"),
    ],
    indirect=["zone"],
)
def test_what_is_no_time_is_refused_at_every_door(zone: str, text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        moment_ms(text)
    for door in (lambda: Moment().convert(text, None, None), lambda: place(text, 0)):
        with pytest.raises(click.BadParameter, match=told):
            door()


@pytest.mark.parametrize("zone", [_BERLIN, "CET-1CEST,M3.5.0,M10.5.0/3"], indirect=True)
def test_a_time_that_comes_twice_is_the_first_one_and_the_answer_says_which(zone: str) -> None:
    assert moment_text(moment_ms("2026-10-25T02:30"), "seconds") == "2026-10-25T02:30:00+02:00"
    assert moment_ms("2026-10-25T02:30") == moment_ms("2026-10-25T02:30+02:00")
    assert moment_ms("2026-10-25T02:30:00.123457") == moment_ms("2026-10-25T00:30:00.123457Z")


@pytest.mark.parametrize("zone", ["Europe/Nowhere"], indirect=True)
def test_an_offset_needs_no_zone(zone: str) -> None:
    assert moment_ms("2026-11-21T10:00+00:00") == 1_795_255_200_000


def test_seconds_are_no_id() -> None:
    assert place("1790000000000", 0) == "1790000000000"
    with pytest.raises(click.BadParameter, match="seconds"):
        place("1790000000", 0)
