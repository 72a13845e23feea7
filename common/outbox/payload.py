"""Encode values of applications as JSON, whole or not at all. Pure."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable
from typing import Any

import orjson

_WAYS_OUT = (
    "give str(value) for what has a text of its own, model.model_dump(mode='json') for a pydantic model, a dict or a"
    " list for the rest"
)
_NO_NUMBERS = frozenset({str, int, bool, type(None)})


def as_json(name: str, value: Any) -> bytes:
    """Return ``value`` as orjson encodes it. Raises TypeError, with a way out, for what it cannot encode, and
    ValueError, which names the place below ``name``, for NaN and Infinity: JSON has neither, and orjson would write
    null in silence.

    >>> as_json("data", {"total": 1.5, "note": None})
    b'{"total":1.5,"note":null}'
    """
    try:
        encoded = orjson.dumps(value)
    except TypeError as refused:
        if "serializable" not in str(refused):
            raise
        raise TypeError(f"{name}: {refused}: {_WAYS_OUT}") from refused
    # Looking at each value costs more than encoding all, and naming each place ten times as much.
    if b"null" in encoded and _may_be_not_finite((value,)) and (found := _not_finite(name, value)):
        place, number = found
        raise ValueError(f"{place} is {number}, which JSON cannot say: give None, or a text")
    return encoded


def _may_be_not_finite(values: Iterable[Any]) -> bool:
    """Return False when none of these values, nor of their parts, is NaN or infinite."""
    for value in values:
        kind = type(value)
        if kind in _NO_NUMBERS:
            continue
        if kind is float:
            if not math.isfinite(value):
                return True
        elif kind is dict or kind is list or kind is tuple:
            if _may_be_not_finite(value.values() if kind is dict else value):
                return True
        else:
            return True  # a dataclass, an enum, a type of its own
    return False


def _not_finite(place: str, value: Any) -> tuple[str, float] | None:
    """Return the first number that is not finite, and its place. As deep as orjson goes (254)."""
    if isinstance(value, float):
        return None if math.isfinite(value) else (place, value)
    parts: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict):
        parts = ((f"{place}[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple)):
        parts = ((f"{place}[{number}]", part) for number, part in enumerate(value))
    elif isinstance(value, enum.Enum):
        parts = [(place, value.value)]
    elif dataclasses.is_dataclass(value):
        found = getattr(value, "__dict__", None) or {
            field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)
        }
        # orjson leaves out names that begin with an underscore.
        parts = ((f"{place}.{name}", part) for name, part in found.items() if not name.startswith("_"))
    return next(filter(None, (_not_finite(where, part) for where, part in parts)), None)
