"""The line that `usher up` prints to be tried."""

from __future__ import annotations

from pathlib import Path

import pytest

from usher.deploy.local.plan import LocalSettings, Plan
from usher.deploy.local.up import _example


@pytest.mark.parametrize(
    ("url", "settings", "line"),
    [
        ("redis://:pw@h:1/0", {}, "redis-cli -u redis://:***@h:1/0 XADD ticket_stream '*' ticket_id 42 text hello"),
        ("rediss://h:1/0?ssl_ca_certs=/a.pem&ssl_certfile=/b.pem", {}, "usher send --ticket 42 text=hello"),
        (
            "redis+sentinel://h:1/shop",
            {"ticket_stream": "a b"},
            "usher send --ticket-stream 'a b' --ticket 42 text=hello",
        ),
        ("unix:///tmp/s", {"ticket_field": "t"}, "usher send --ticket-field t --ticket 42 text=hello"),
    ],
)
def test_it_is_one_that_a_shell_and_its_program_can_read(url: str, settings: dict[str, str], line: str) -> None:
    """redis-cli knows no options of a URL, nor Sentinel; pasted, all behind an `&` was a command of its own."""
    assert _example(Plan(LocalSettings(redis_url=url, **settings), Path("/s"), url, None, {})) == line  # type: ignore[arg-type]
