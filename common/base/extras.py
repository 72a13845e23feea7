"""Version of the package, how to install an extra, and ``Late`` for what most never use."""

from __future__ import annotations

import importlib
from typing import Any


class Late:
    """A library that is imported when something of it is first used; each takes up to 2 MiB."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        value = self.__dict__[name] = getattr(importlib.import_module(self._name), name)
        return value


def version() -> str:
    import importlib.metadata  # slow, and wanted by few programs

    try:
        return importlib.metadata.version("usher-streams")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def how_to_install(extra: str) -> str:
    """Return the command to type. Usher is on no package index: an extra comes from the folder that Usher was installed
    from."""
    return f"pip install -e '.[{extra}]' in Usher's folder"
