"""Make foreign text safe to show: a message, a name or an error may hold any character. Pure."""

from __future__ import annotations

#: Characters of an error's text that are kept.
_LONGEST_ERROR = 4000


def escape_control(text: str, kept: str = "") -> str:
    """Spell out all characters that act on a terminal or on the direction of text, except those in ``kept``.

    >>> escape_control("a\\u202eb\\0\\n"), escape_control("a\\n\\x1b", kept="\\n")
    ('a\\\\u202eb\\\\x00\\\\x0a', 'a\\n\\\\x1b')
    """
    return (
        text
        if text.isprintable()
        else "".join(one if one.isprintable() or one in kept else _spelt(one) for one in text)
    )


def time_of_day(at_ms: int) -> str:
    """Format milliseconds since the epoch as a time of day.

    >>> time_of_day(1790000000000)
    '14:13:20 UTC'
    """
    minutes, seconds = divmod(at_ms // 1000 % 86_400, 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{seconds:02d} UTC"


def json_safe(text: str) -> str:
    """Spell out the bytes of ``text`` that are not UTF-8 (surrogates): JSON cannot hold them.

    >>> json_safe("a\\udcff")
    'a\\\\xff'
    """
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
