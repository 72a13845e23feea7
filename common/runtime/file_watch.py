"""Files that a running program reads again when they have changed: certificates, authorities, tokens."""

from __future__ import annotations

import math
from pathlib import Path

from usher.common.base.clock import now_s

#: Seconds until a try that failed is repeated though nothing has changed: it may have been us, without a file
#: descriptor left.
_AGAIN_S = 60.0


class FileWatch:
    """Whether some files are others than they were when they were read. For one thread at a time."""

    def __init__(self, *files: Path) -> None:
        """They are about to be read."""
        self._files = files
        self._seen = self._look()
        self._again_s = math.inf

    def are_new(self) -> bool:
        """Whether they are to be read now; they count as read then, unless ``failed`` says something else."""
        seen = self._look()
        if seen == self._seen and now_s() < self._again_s:
            return False
        self._seen, self._again_s = seen, math.inf
        return True

    def failed(self) -> None:
        """They could not be used: not before they change, or a while has passed."""
        self._again_s = now_s() + _AGAIN_S

    def _look(self) -> tuple[tuple[int, ...] | None, ...]:
        return tuple(map(_state_of, self._files))


def _state_of(file: Path) -> tuple[int, ...] | None:
    """What changes when the file does; the time of the inode also when it gets another owner or mode, so that we can
    read it at last."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
