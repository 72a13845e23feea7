"""Parse the JSON of others, and print JSON for terminals. Pure."""

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


def json_line(document: object) -> str:
    """Return ``document`` as JSON in one line, in which no character acts on a terminal or on the direction of text.

    >>> json_line(["\\x9b1m\\u202e\\x7f", "\\u00fc\\U000e0001"])
    '["\\\\u009b1m\\\\u202e\\\\u007f","ü\\\\udb40\\\\udc01"]'
    """
    text = orjson.dumps(document).decode()
    return text if text.isprintable() else "".join(one if one.isprintable() else _code_units(one) for one in text)


def _code_units(one: str) -> str:
    units = one.encode("utf-16-be").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
