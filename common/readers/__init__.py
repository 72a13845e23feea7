"""Plain consumer groups without tickets: ReliableStream and MessageReadingLoop (public library)."""

from __future__ import annotations
