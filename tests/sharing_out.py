"""How pytest-xdist shares the tests out: a file at a time, but all of the audit to one worker."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

#: Its tests share a SparkSession. A second one costs its start again, and every query runs slowly until its Java is
#: warm.
_TOGETHER = "tests/audit/"


class SharingOut(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return _TOGETHER if nodeid.startswith(_TOGETHER) else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SharingOut | None:
    """For ``--dist loadfile``, which pyproject.toml chooses; any other choice is the caller's."""
    return SharingOut(config, log) if config.getvalue("dist") == "loadfile" else None
