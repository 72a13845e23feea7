"""Variants that only show more of what a plain run shows: ``pytest -m slow``."""

from __future__ import annotations

from typing import Any

import pytest


def more(*values: Any) -> list[Any]:
    """Return them as parameters of slow tests."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]
