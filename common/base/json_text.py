"""Parse the JSON of others. Pure."""

from __future__ import annotations

import json
from typing import Any

import orjson

#: The shortest whole numbers that do not fit into 64 bits have 19 digits.
_ZEROS, _LONG = bytes.maketrans(b"123456789", b"000000000"), b"0" * 19


def parse_json(text: bytes | str) -> Any:
    """Parse a JSON document; whole numbers of more than 64 bits, of which orjson silently makes floats, stay whole.
    Raises ValueError when it is not JSON (NaN and Infinity are not), or a number is larger than a float may be.

    >>> parse_json(b'{"id": 18446744073709551617}'), parse_json("1.5")
    ({'id': 18446744073709551617}, 1.5)
    """
    value = orjson.loads(text)
    digits = text if isinstance(text, bytes) else text.encode()
    if _LONG not in digits.translate(_ZEROS):
        return value
    try:
        return json.loads(text)  # several times slower, and less strict: but orjson has found nothing wrong
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
