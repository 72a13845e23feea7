"""Words for people in place of those that programs compare: JSON, keys in Redis and styles of the page keep theirs."""

from __future__ import annotations

_LABELS = {
    "bad": "Critical",
    "warn": "Warning",
    "ok": "OK",
    "unknown": "Unknown",
    "clean": "OK",
}


def label(word: str) -> str:
    """Return the word that is shown for a severity or a state.

    >>> label("bad"), label("handed_over")
    ('Critical', 'handed over')
    """
    return _LABELS.get(word, word.replace("_", " "))
