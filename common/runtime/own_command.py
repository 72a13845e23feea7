"""Start another program of Usher by its path, so that it is this very Usher, whatever is installed and whichever folder
is current."""

from __future__ import annotations

import sys
from pathlib import Path

import usher


def usher_command(*words: str) -> list[str]:
    return [sys.executable, str(Path(usher.__file__).resolve().with_name("__main__.py")), *words]
