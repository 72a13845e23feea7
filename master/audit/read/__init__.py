"""Read Redis into columns for Spark."""

from __future__ import annotations
