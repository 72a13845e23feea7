"""The harness must be seen to fail: system A, taken literally, through the same scenarios, the same handler and the
same checker.

Only that it is judged is asserted, and that it breaks under faults; how often is printed. Its messages have no tokens,
so S4 is not asked.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.plans import PLANS
from tests.chaos.plans.plan import Plan
from tests.chaos.rig.cluster import Shape
from tests.chaos.rig.producer import Load
from tests.chaos.runner import run
from tests.chaos.system_a.cluster import ClusterA

pytestmark = [pytest.mark.chaos, pytest.mark.process]

_BY_NAME = {plan.name: plan for plan in PLANS}


def _for_system_a(name: str) -> Plan:
    """The plan for one master without proxies of HTTP, at a rate that it can keep up with, and without counters that it
    does not have."""
    plan = _BY_NAME[name]
    shape = Shape(masters=1, proxied=plan.shape.proxied & {"redis"})
    return replace(plan, shape=shape, load=Load(rate=40, work_ms=60), must=(), tokens=False, varies=False, drain_s=5.0)


def _broken(name: str, report: list[str]) -> dict[str, int]:
    plan = _for_system_a(name)
    folder = Path(tempfile.mkdtemp(prefix=f"chaos-A-{name}-"))
    try:
        verdict = run(plan, 1, plan.seconds, folder, ClusterA)
    finally:
        shutil.rmtree(folder)
    report.append(
        f"system A, {name} {plan.title}: {verdict.figures['messages']} messages, violations"
        f" {dict(sorted(verdict.rules.items()))}"
    )
    return dict(verdict.rules)


def test_system_a_works_as_long_as_nothing_goes_wrong(request: pytest.FixtureRequest, chaos_report: list[str]) -> None:
    if request.config.getoption("seeds", 1) == 1:
        pytest.skip("only in long runs (--seeds)")
    assert not _broken("K0", chaos_report)


@pytest.mark.parametrize("name", ["K3", pytest.param("K5", marks=pytest.mark.slow)])
def test_system_a_breaks_when_something_goes_wrong(name: str, chaos_report: list[str]) -> None:
    broken = _broken(name, chaos_report)
    assert set(broken) & {"S1", "S2", "S2b", "S3", "L1", "L2"}, broken
