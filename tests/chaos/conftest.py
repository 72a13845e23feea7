"""Options, marks and the printed tables of the chaos tests.

``pytest tests/chaos`` runs every scenario briefly; ``pytest tests/chaos --seeds 20 --seconds 30`` runs long. A failed
run keeps its history: the message says where, and ``python -m tests.chaos.checker FILE`` judges it again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

_HERE = Path(__file__).parent
_CHAOS = "chaos"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("chaos")
    group.addoption(
        "--seeds", type=int, default=1, help="runs of each chaos scenario, each with another seed (default 1)"
    )
    group.addoption("--first-seed", type=int, default=1, help="the first seed (default 1)")
    group.addoption(
        "--seconds",
        type=float,
        default=0.0,
        help="seconds of faults per run (at least what the scenario needs, the default)",
    )
    group.addoption("--while-it-runs", action="store_true", help="users talk to what runs meanwhile (rig/talk.py)")
    group.addoption("--mutants", action="store_true", help="also run chaos scenarios with each of the bugs put back")
    group.addoption(
        "--keep", default="", help="folder that keeps the histories of failed runs (default: a new temporary folder)"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A run with many seeds takes its time."""
    limit_s = 100 + config.getoption("seeds", 1) * (60 + config.getoption("seconds", 0.0))
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.timeout(limit_s))


class Report(list[str]):
    """Lines that are printed at the end of the whole run, wherever the test ran: they travel with its report."""

    def __init__(self, item: pytest.Item) -> None:
        super().__init__()
        self._item = item

    def append(self, line: str) -> None:
        super().append(line)
        self._item.user_properties.append((_CHAOS, line))


@pytest.fixture
def chaos_report(request: pytest.FixtureRequest) -> list[str]:
    """What a test wants printed at the end."""
    return Report(request.node)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [
        report
        for outcome in ("passed", "failed", "xfailed", "xpassed")
        for report in terminalreporter.stats.get(outcome, ())
    ]
    lines = dict.fromkeys(str(line) for report in reports for name, line in report.user_properties if name == _CHAOS)
    if lines:
        terminalreporter.section("chaos")
        for line in sorted(
            lines, key=lambda line: not line.lstrip().startswith("scenario")
        ):  # the head of the table comes first
            terminalreporter.write_line(line)
