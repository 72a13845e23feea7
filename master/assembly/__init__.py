"""Put a master together: the composition root."""

from __future__ import annotations
