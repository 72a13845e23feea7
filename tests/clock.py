"""A clock that stands still until a test moves it."""

from __future__ import annotations

from types import ModuleType

import pytest


class Clock:
    s = 100.0

    def __call__(self) -> float:
        return self.s


def clock_of(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> Clock:
    """What these modules have for ``now_s`` from now on."""
    clock = Clock()
    for module in modules:
        monkeypatch.setattr(module, "now_s", clock)
    return clock
