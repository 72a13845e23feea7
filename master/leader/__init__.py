"""Lead: lease, epoch, and the scripts that carry it. Everything that leads stands on this room."""

from __future__ import annotations
