"""Numbers with their nouns, for people."""

from __future__ import annotations


def many(count: int, noun: str, nouns: str = "") -> str:
    """A number with the noun that goes with it.

    >>> many(1, "dead letter"), many(2000, "dead letter"), many(0, "entry", "entries")
    ('1 dead letter', '2,000 dead letters', '0 entries')
    """
    return f"{count:,} {noun if count == 1 else nouns or f'{noun}s'}"
