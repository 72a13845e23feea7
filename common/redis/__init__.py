"""Connect to Redis: connections, errors, scripts, and the embedded server."""

from __future__ import annotations
