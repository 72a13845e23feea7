"""HTTP for all programs: serving, authentication, problem documents, OpenAPI."""

from __future__ import annotations
