"""The master's HTTP interface. ``python docs/reference.py http`` tells all routes, from their ``@tells``; ``GET
/api/openapi.json`` does it for programs.
"""

from __future__ import annotations
