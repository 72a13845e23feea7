"""Take back what code of others did to the state that all threads of a process share.

Only what our own threads cannot live with; all else (time zone, locale, working directory, umask, default timeout of
sockets, garbage collection, seeds) is theirs to set, and nothing of ours depends on it.
"""

from __future__ import annotations

import os
import sys

#: A thread may have to wait for the interpreter so long, for each other thread that computes.
_LONGEST_SWITCH_S = 0.1


class ProcessState:
    """The state of this process before code of others ran. ``take_back`` is called now and then."""

    def __init__(self) -> None:
        self._depth = sys.getrecursionlimit()
        self._switch_s = sys.getswitchinterval()
        self._stderr = _stderr()

    def take_back(self) -> list[str]:
        """Set things right, and return what was done, in words; what was told before is not told again."""
        done = []
        if (depth := sys.getrecursionlimit()) < self._depth:
            sys.setrecursionlimit(self._depth)
            done.append(f"the recursion limit was {depth}; it is {self._depth} again")
        if (switch_s := sys.getswitchinterval()) > max(_LONGEST_SWITCH_S, self._switch_s):
            sys.setswitchinterval(self._switch_s)
            done.append(f"the switch interval was {switch_s:g} s; it is {self._switch_s:g} s again")
        if (stderr := _stderr()) != self._stderr:
            self._stderr = stderr
            done.append("stderr was closed or is another file; the log goes on to the one that it was")
        return done


def _stderr() -> tuple[int, int]:
    try:
        file = os.fstat(2)
    except OSError:
        return 0, 0
    return file.st_dev, file.st_ino
