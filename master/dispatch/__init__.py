"""The hot path: wake, plan, hand over and read on."""

from __future__ import annotations
