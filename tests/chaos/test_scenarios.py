"""The scenarios K0..K17 on real processes. ``pytest tests/chaos --seeds 20 --seconds 30 -k K3`` runs one of them
long."""

from __future__ import annotations

import pytest

from tests.chaos.plans import PLANS
from tests.chaos.plans.handlers import while_it_runs
from tests.chaos.plans.plan import Plan
from tests.chaos.rig.clock import compiler
from tests.chaos.runner import HEADER, run_seeds

pytestmark = [pytest.mark.chaos, pytest.mark.process]

#: What a plain run shows elsewhere: calm (test_demo.py), Redis killed (test_supervisord.py), hot and stuck tickets
#: (test_operations.py), poison (test_aborts.py, test_dead_letters.py), SCRIPT FLUSH (test_script_cache.py), many streams
#: (test_many_streams.py).
_NIGHTLY = {"K0", "K7a", "K11", "K12", "K14", "K17"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A short run leaves out the scenarios that others cover in part."""
    option = metafunc.config.getoption
    is_long = option("seeds", 1) > 1 or option("seconds", 0.0) > 0
    plans = [plan for plan in PLANS if plan.brief or is_long]
    if option("while_it_runs", False):
        plans = [while_it_runs(plan) for plan in plans if not plan.load.talks]
    params = [
        pytest.param(plan, id=plan.name, marks=() if is_long or plan.name not in _NIGHTLY else pytest.mark.slow)
        for plan in plans
    ]
    metafunc.parametrize("plan", params)


def test_scenario(plan: Plan, request: pytest.FixtureRequest, chaos_report: list[str]) -> None:
    if plan.shape.has_clock and not compiler():
        pytest.skip("no C compiler, which makes a clock that can be set")
    option = request.config.getoption
    first, seeds = option("first_seed", 1), option("seeds", 1)
    outcome = run_seeds(plan, range(first, first + seeds), option("seconds", 0.0), option("keep", ""))
    if HEADER not in chaos_report:
        chaos_report.append(HEADER)
    chaos_report.append(outcome.line())
    if outcome.failures and plan.known:
        pytest.xfail(plan.known)
    assert not outcome.failures, "\n\n".join(outcome.failures)
