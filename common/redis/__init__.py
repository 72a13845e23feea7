"""Talk to Redis: one connection, its errors, its scripts, its server."""

from __future__ import annotations
