"""Stop a handler before a line of the user's own code. The lines of libraries, of Python and of Usher do not count."""

from __future__ import annotations

import functools
import linecache
import site
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any


class LineStops:
    """A counter of the lines that a call runs. It calls ``act(place in words)`` before the ``at``-th line (from 0);
    with ``at`` None it only counts."""

    def __init__(self, always: str, at: int | None, act: Callable[[str], None]) -> None:
        self._always = always  # the handler's own file
        self._at = at
        self._act = act
        self.count = 0

    def call(self, run: Callable[[], Any]) -> Any:
        """Return the result of ``run()``, traced on this thread."""
        sys.settrace(self._entered)
        try:
            return run()
        finally:
            sys.settrace(None)

    def _entered(self, frame: FrameType, event: str, arg: Any) -> Any:
        file = frame.f_code.co_filename
        return self._line if file == self._always or is_users(file) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            reached, self.count = self.count, self.count + 1
            if reached == self._at:
                self._act(describe_line(frame.f_code.co_filename, frame.f_lineno))
        return self._line


def describe_line(file: str, line: int) -> str:
    """Return a line in words, like ``orders.py:12: total += 1``."""
    return f"{Path(file).name}:{line}: {linecache.getline(file, line).strip()[:80]}"


@functools.cache
def is_users(file: str) -> bool:
    """Return whether a source file is the user's own."""
    if file.startswith("<"):
        return False
    path = Path(file).resolve()
    return not any(path.is_relative_to(folder) for folder in _others())


@functools.cache
def _others() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    libraries = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    # Each folder by itself: in a checkout they are links to folders beside the user's.
    own = [Path(__file__).resolve().parents[2] / name for name in ("common", "master", "consumer", "usher")]
    places: list[str | Path] = [*libraries, *site.getsitepackages(), site.getusersitepackages(), *own]
    return tuple(Path(place).resolve() for place in places)
