"""Watch files that a running program reads again when they change: certificates, authorities, tokens."""

from __future__ import annotations

import math
from pathlib import Path

from usher.common.base.clock import now_s

#: Seconds until a failed read is repeated although nothing has changed: the fault may have been ours, with no file
#: descriptor left.
_AGAIN_S = 60.0


class FileWatch:
    """A watch on files that tells when they differ from what was read. For one thread at a time."""

    def __init__(self, *files: Path) -> None:
        """Note the state of the files, which the caller is about to read."""
        self._files = files
        self._seen = self._look()
        self._again_s = math.inf

    def are_new(self) -> bool:
        """Return True if the files are to be read now; they count as read then, unless ``failed`` is called."""
        seen = self._look()
        if seen == self._seen and now_s() < self._again_s:
            return False
        self._seen, self._again_s = seen, math.inf
        return True

    def failed(self) -> None:
        """Note that the files could not be used: try again when they change, or after a while."""
        self._again_s = now_s() + _AGAIN_S

    def _look(self) -> tuple[tuple[int, ...] | None, ...]:
        return tuple(map(_state_of, self._files))


def _state_of(file: Path) -> tuple[int, ...] | None:
    """Return values that change when the file does; the inode's time also changes with its owner or mode, which may
    make it readable at last."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
