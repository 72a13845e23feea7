"""Name, lease, journal and crash report of one consumer process."""

from __future__ import annotations
