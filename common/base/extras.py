"""How what is left out of a plain installation is brought in: the extras of pyproject.toml. The one place that words
it."""

from __future__ import annotations


def how_to_install(extra: str) -> str:
    """What to type. Usher is on no package index: an extra comes from the folder that Usher was installed from.

    >>> how_to_install("sql")
    "pip install -e '.[sql]' in Usher's folder"
    """
    return f"pip install -e '.[{extra}]' in Usher's folder"
