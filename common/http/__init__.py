"""HTTP rules for both programs: authentication, limits, problem documents, OpenAPI."""

from __future__ import annotations
