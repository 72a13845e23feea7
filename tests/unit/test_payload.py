"""common/outbox/rows.py: what would be encoded is looked at, and nothing else."""

from __future__ import annotations

import dataclasses
import decimal
import math
from typing import Any

import orjson
import pytest

from usher.common.outbox.rows import as_json


@dataclasses.dataclass
class _Row:
    note: Any
    _mean: float = math.nan


@dataclasses.dataclass
class _Slotted:
    __slots__ = ("_mean", "note")
    note: Any
    _mean: float


@pytest.mark.parametrize("row", [_Row(None), _Slotted(None, math.nan), {"rows": [_Row(None)]}])
def test_what_is_not_encoded_is_not_refused(row: object) -> None:
    assert as_json("data", row) == orjson.dumps(row)


def test_what_a_dataclass_was_given_beside_its_fields_is_encoded_too() -> None:
    for row in (_Row(math.inf), _Slotted(math.inf, 0.0)):
        with pytest.raises(ValueError, match="data has a NaN or an infinity"):
            as_json("data", row)
    more: Any = _Row(1.0)
    more.total = math.nan
    assert orjson.dumps(more) == b'{"note":1.0,"total":null}'
    with pytest.raises(ValueError, match="data has a NaN or an infinity"):
        as_json("data", more)


class _Model:
    """Of a library that orjson does not know, as pydantic's are."""


@pytest.mark.parametrize("value", [_Model(), {"rows": [_Model()]}, decimal.Decimal("1.5"), {1, 2}, b"x"])
def test_what_cannot_be_encoded_is_refused_with_a_way_out(value: object) -> None:
    with pytest.raises(TypeError, match=r"^data: Type is not JSON serializable: .*: give str\(value\) .*model_dump"):
        as_json("data", value)
    with pytest.raises(TypeError, match="^Dict key must be str$"):
        as_json("data", {1: 2})
