"""Do what operators and timers ask for. Needs no leader, but for the delayed sender."""

from __future__ import annotations
