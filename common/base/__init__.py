"""The ground: errors, clock, log, text. Depends on nothing of ours."""

from __future__ import annotations
