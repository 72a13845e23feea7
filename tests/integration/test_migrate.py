"""docs/migrate.md: each handler takes what its text sends."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest

from tests.rules import ROOT
from usher.testing import Kit

_PAGE = (ROOT / "docs" / "migrate.md").read_text()


@pytest.mark.parametrize(
    ("of", "name", "ticket", "fields", "stored"),
    [
        ("Celery", "book", "42", {"account": 42, "amount": "12.50"}, (42, Decimal("12.50"))),
        ("RQ", "resize", "42", {"path": "42/cat.jpg"}, ("42/cat.jpg",)),
        ("BullMQ", "orders", "42", {"kind": "paid", "body": '{"order": 42, "amount": "12.50"}'}, (42, "12.50")),
    ],
)
def test_the_same_job_after_the_move(
    usher_kit: Callable[..., Kit],
    monkeypatch: pytest.MonkeyPatch,
    of: str,
    name: str,
    ticket: str,
    fields: dict[str, Any],
    stored: tuple[Any, ...],
) -> None:
    seen: list[tuple[Any, ...]] = []
    found = re.search(rf"^```python\n# after: {of}\n(.*?)^```$", _PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    assert of == "BullMQ" or f'producer.send("{ticket}", {fields}'.replace("'", '"') in _PAGE
    moved: Any = types.ModuleType("moved")
    moved.store = moved.make_thumbnails = lambda *given: seen.append(given)
    monkeypatch.setitem(sys.modules, "moved", moved)  # annotations are looked up there
    exec(compile(found[1], "migrate.md", "exec", dont_inherit=True), vars(moved))  # noqa: S102
    kit = usher_kit(getattr(moved, name))
    kit.producer.send(ticket, fields)
    kit.run()
    assert (seen, kit.given_up) == ([stored], [])
