"""Connect to SQL databases, and tell which of their errors pass by themselves."""

from __future__ import annotations
