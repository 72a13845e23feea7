"""Values and parent side of a rehearsal: a handler tried in a process of its own."""

from __future__ import annotations
