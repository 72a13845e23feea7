"""Read models for the page, the commands and the metrics."""

from __future__ import annotations
