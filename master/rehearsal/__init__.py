"""`usher rehearse`: try a handler on messages that are there; nothing comes of it."""

from __future__ import annotations
