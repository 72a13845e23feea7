"""Tell the version of the installed package, and how to install an extra of pyproject.toml; both in this place only."""

from __future__ import annotations


def version() -> str:
    import importlib.metadata  # slow, and wanted by few programs

    try:
        return importlib.metadata.version("usher-streams")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def how_to_install(extra: str) -> str:
    """Return the command to type. Usher is on no package index: an extra comes from the folder that Usher was installed
    from.

    >>> how_to_install("sql")
    "pip install -e '.[sql]' in Usher's folder"
    """
    return f"pip install -e '.[{extra}]' in Usher's folder"
