"""The scenarios, a module for each kind of fault."""

from __future__ import annotations

from tests.chaos.plans import everything, handlers, links, messages, operators, programs, servers, sources, suspects
from tests.chaos.plans.plan import Plan

PLANS: tuple[Plan, ...] = (
    *programs.PLANS,
    *links.PLANS,
    *servers.PLANS,
    *messages.PLANS,
    *suspects.PLANS,
    *handlers.PLANS,
    *operators.PLANS,
    *sources.PLANS,
    *everything.PLANS,
)
