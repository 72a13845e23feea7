"""Watch the Python files of a project, for ``usher up --reload``."""

from __future__ import annotations

import os
from pathlib import Path

#: Most files that are looked at, each second.
_MOST_FILES = 5_000


class CodeWatch:
    """A watch on the ``.py`` files in a folder and those below it; virtual environments and hidden folders are left
    out."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen = self._look()

    def changed(self) -> list[str]:
        """Return the files that came, went or changed since the last call."""
        before, self._seen = self._seen, self._look()
        return sorted({path for path, _ in {*before.items()} ^ {*self._seen.items()}})

    def _look(self) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        for folder, folders, files in os.walk(self._folder):
            folders[:] = [name for name in folders if not name.startswith((".", "__")) and name != "node_modules"]
            if "pyvenv.cfg" in files:
                folders.clear()
                continue
            for name in files:
                if name.endswith(".py") and len(found) < _MOST_FILES:
                    path = Path(folder, name)
                    try:
                        facts = path.stat()
                    except OSError:
                        continue  # an editor's file that went meanwhile
                    found[os.path.relpath(path, self._folder)] = facts.st_mtime_ns, facts.st_size
        return found
