"""Yardsticks and simulated load, one process each."""

from __future__ import annotations
