"""Metrics, traces, and notifications of dead letters."""

from __future__ import annotations
