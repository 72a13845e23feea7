"""Examples; none of this is installed."""

from __future__ import annotations
