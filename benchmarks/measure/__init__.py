"""Measure one thing each."""

from __future__ import annotations
