"""The effect on a ticket after a story, as plain values that can travel between processes and be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

#: The range in which JSON integers travel as themselves.
_LARGEST = 2**63 - 1


def to_json_value(value: Any) -> Any:
    """Return ``value`` as numbers, texts, lists and mappings. Rows become lists, sets sorted lists; anything else
    becomes its ``repr``.

    >>> to_json_value({"rows": [(1, "a")], "seen": {2, 1}})
    {'rows': [[1, 'a']], 'seen': [1, 2]}
    """
    if value is None or isinstance(value, (bool, float, str)):
        return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
    if isinstance(value, int):
        return value if abs(value) <= _LARGEST else str(value)
    if isinstance(value, Mapping):
        return {to_json_value(str(name)): to_json_value(inner) for name, inner in value.items()}
    if isinstance(value, Set):
        return sorted((to_json_value(inner) for inner in value), key=repr)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [to_json_value(inner) for inner in value]
    return repr(value)
