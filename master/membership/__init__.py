"""Know which consumers there are, and whether they live."""

from __future__ import annotations
