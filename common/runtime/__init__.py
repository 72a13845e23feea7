"""Run one process: settings, services, signals, locks, health."""

from __future__ import annotations
