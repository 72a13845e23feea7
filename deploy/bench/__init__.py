"""Measure throughput and latency on the user's own Redis: `usher bench`."""

from __future__ import annotations
