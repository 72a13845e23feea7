from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


def _modules_with_examples() -> list[str]:
    files = [
        file
        for package in ("common", "master", "consumer", "deploy")
        for file in sorted((_ROOT / package).rglob("*.py"))
    ]
    return [
        ".".join(("usher", *file.relative_to(_ROOT).with_suffix("").parts))
        for file in files
        if ">>> " in file.read_text(encoding="utf-8")
    ]


@pytest.mark.parametrize("name", _modules_with_examples())
def test_the_examples_in_docstrings_are_true(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
