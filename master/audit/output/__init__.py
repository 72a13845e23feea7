"""Write the audit's report, page, screen and history."""

from __future__ import annotations
