"""Write files that only their owner may read."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from usher.common.base.errors import StartRefused


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, whole or not at all. Raises StartRefused when it cannot be written."""
    draft = path.with_name(path.name + ".new")
    try:
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()
        with os.fdopen(
            os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8", errors="surrogateescape"
        ) as file:
            file.write(text)
        draft.replace(path)
    except OSError as problem:
        raise StartRefused(f"{path} cannot be written: {problem.strerror or problem}") from problem
