"""`usher` commands in this process, as people call them: a program for each would take a second."""

from __future__ import annotations

from pathlib import Path

import pytest

from usher.cli import run


def usher(*words: str) -> int:
    """The exit code; what is said is in ``capsys``."""
    try:
        return run(list(words))
    except SystemExit as ended:
        return int(ended.code or 0)


@pytest.fixture
def audit_environ(tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of ``usher audit`` for the test's Redis."""
    given = {
        "USHER_REDIS_URL": redis_url,
        "USHER_AUDIT_DIR": str(tmp_path / "audit"),
        "USHER_AUDIT_ENGINE": "local",  # Spark is asked for where it is meant: it takes seconds to start
    }
    monkeypatch.setattr("usher.master.audit.findings.SETTLE_S", 0.1)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    return given
