"""The hot path: wake, peek, plan, hand over."""

from __future__ import annotations
