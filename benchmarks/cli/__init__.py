"""The commands of `python -m benchmarks`."""

from __future__ import annotations
