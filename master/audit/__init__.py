"""The audit."""

from __future__ import annotations
