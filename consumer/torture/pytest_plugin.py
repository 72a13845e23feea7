"""The pytest fixture ``usher_torture`` for users' own tests::

    def test_effects_are_safe(usher_torture):
        usher_torture("shop.orders:handle", effect="shop.orders:balance")

pytest finds it by itself where Usher is installed (``-p no:usher_torture`` turns it off). Nothing of Usher is imported
before it is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def usher_torture() -> Callable[..., None]:
    """Return ``usher_torture(handler, effect=..., setup="", fields={}, stops=30, handler_seconds=30)``, which fails the
    test, with the explanation, when the handler's effects are not safe. The arguments are those of ``usher torture
    --help``; the environment is the test's."""
    return _torture


def _torture(handler: str, **asked: Any) -> None:
    from usher.common.base.errors import StartRefused
    from usher.consumer.torture.cli import run_torture
    from usher.consumer.torture.stage import TortureRequest
    from usher.consumer.torture.stories import explained, summary

    __tracebackhide__ = True
    request = TortureRequest(handler, **asked)
    try:
        findings = run_torture(request, os.environ, lambda scenario, told, count: None, lambda: None)
    except StartRefused as refused:
        pytest.fail(f"usher torture: {refused}", pytrace=False)
    if not all(finding.safe for finding in findings):
        parts = [f"{finding.title}\n  " + "\n  ".join(explained(finding)) for finding in findings if not finding.safe]
        pytest.fail(f"usher torture {handler}: {summary(findings)}\n\n" + "\n\n".join(parts), pytrace=False)
