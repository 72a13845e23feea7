"""Explain what a ticket waits for. Pure."""

from __future__ import annotations
