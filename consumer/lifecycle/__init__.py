"""The life of one consumer process: its name, lease, journal and crash report."""

from __future__ import annotations
