"""The system under test, its peers' programs and servers, and what handlers note."""

from __future__ import annotations
