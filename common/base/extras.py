"""Tell how to install an extra of pyproject.toml; the only place that words it."""

from __future__ import annotations


def how_to_install(extra: str) -> str:
    """Return the command to type. Usher is on no package index: an extra comes from the folder that Usher was installed
    from.

    >>> how_to_install("sql")
    "pip install -e '.[sql]' in Usher's folder"
    """
    return f"pip install -e '.[{extra}]' in Usher's folder"
