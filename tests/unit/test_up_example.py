"""The line that `usher up` prints to be tried."""

from __future__ import annotations

from pathlib import Path

import pytest

from usher.deploy.local.up import LocalSettings, Plan, _example


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({}, "usher send --ticket 42 text=hello"),
        ({"ticket_stream": "a b"}, "usher send --ticket-stream 'a b' --ticket 42 text=hello"),
        (
            {"ticket_stream": "t:*", "ticket_field": "t"},
            "usher send --ticket-stream t:1 --ticket-field t --ticket 42 text=hello",
        ),
    ],
)
def test_it_is_one_that_a_shell_and_its_program_can_read(settings: dict[str, str], line: str) -> None:
    assert _example(Plan(LocalSettings(**settings), Path("/s"), "", None, {})) == line  # type: ignore[arg-type]
