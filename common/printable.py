"""What others wrote, so that it can only be read: a message, a name or an error may hold anything. Pure."""

from __future__ import annotations


def printable(text: str, kept: str = "") -> str:
    """``text`` with all characters spelt out, but for those in ``kept``, that act on a terminal or on the direction of text.

    >>> printable("a\\u202eb\\0\\n"), printable("a\\n\\x1b", kept="\\n")
    ('a\\\\u202eb\\\\x00\\\\x0a', 'a\\n\\\\x1b')
    """
    return text if text.isprintable() else "".join(one if one.isprintable() or one in kept else _spelt(one) for one in text)


def _spelt(one: str) -> str:
    code = ord(one)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
