"""The hot path: from the inbox to the acknowledgement."""

from __future__ import annotations
