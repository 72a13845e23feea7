"""The third program: moves committed outbox rows into the stream."""

from __future__ import annotations
