"""Make foreign text safe to show: a message, a name or an error may hold any character; JSON of others, and for
terminals; words for people. Pure."""

from __future__ import annotations

import json
from typing import Any

import orjson

#: Characters of an error's text that are kept.
_LONGEST_ERROR = 4000
#: The shortest whole numbers that do not fit into 64 bits have 19 digits.
_ZEROS, _LONG = bytes.maketrans(b"123456789", b"000000000"), b"0" * 19
#: Words for people in place of those that programs compare.
_LABELS = {"bad": "Critical", "warn": "Warning", "ok": "OK", "unknown": "Unknown", "clean": "OK"}


def escape_control(text: str, kept: str = "") -> str:
    """Spell out all characters that act on a terminal or on the direction of text, except those in ``kept``.

    >>> escape_control("a\\u202eb\\0\\n"), escape_control("a\\n\\x1b", kept="\\n")
    ('a\\\\u202eb\\\\x00\\\\x0a', 'a\\n\\\\x1b')
    """
    is_plain = text.isprintable()
    return text if is_plain else "".join(one if one.isprintable() or one in kept else _spelt(one) for one in text)


def time_of_day(at_ms: int) -> str:
    """Format milliseconds since the epoch as a time of day.

    >>> time_of_day(1790000000000)
    '14:13:20 UTC'
    """
    minutes, seconds = divmod(at_ms // 1000 % 86_400, 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{seconds:02d} UTC"


def span(ms: float | None) -> str:
    """Format a length of time for people, in at most two units; a dash for an unknown one.

    >>> span(0.25), span(40), span(2500), span(9000), span(75_000), span(7_200_000), span(2 * 86_400_000), span(None)
    ('0.2 ms', '40 ms', '2.5 s', '9 s', '1 min 15 s', '2 h', '2 d', '-')
    """
    if ms is None:
        return "-"
    seconds = max(0.0, ms) / 1000
    if 0 < seconds < 1:
        return f"{ms:.{ms < 10:d}f}".removesuffix(".0") + " ms"
    if seconds < 10:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    whole = int(seconds)
    for size, unit, smaller, name in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit} {rest} {name}" if rest else f"{whole // size} {unit}"
    return f"{whole} s"


def json_safe(text: str) -> str:
    """Spell out the bytes of ``text`` that are not UTF-8 (surrogates): JSON cannot hold them."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def format_error(raised: BaseException) -> str:
    """Return type and text of an error, cut to 4,000 characters. A handler's own exception may even fail to give a
    text."""
    try:
        text = str(raised)
    except BaseException as problem:
        text = f"(its text is unavailable: {type(problem).__name__})"
    # A text made of a message's fields may hold surrogates, which neither Redis nor a log can take.
    return f"{type(raised).__name__}: {text}"[:_LONGEST_ERROR].encode("utf-8", "backslashreplace").decode()


def _spelt(one: str) -> str:
    code = ord(one)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def pluralize(count: int, noun: str, nouns: str = "") -> str:
    """Return a number with its noun in the right form.

    >>> pluralize(1, "dead letter"), pluralize(2000, "dead letter"), pluralize(0, "entry", "entries")
    ('1 dead letter', '2,000 dead letters', '0 entries')
    """
    return f"{count:,} {noun if count == 1 else nouns or f'{noun}s'}"


def label(word: str) -> str:
    """Return the word that is shown for a severity or a state."""
    return _LABELS.get(word, word.replace("_", " "))


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
    return text if text.isprintable() else "".join(one if one.isprintable() else json.dumps(one)[1:-1] for one in text)


def info_lines(reply: bytes) -> dict[str, str]:
    """Return the ``name:value`` lines of Redis' INFO and CLUSTER INFO."""
    return dict(line.split(":", 1) for line in reply.decode(errors="replace").splitlines() if ":" in line)
