"""Show what the programs log, line by line, with the program's name in front.

The programs log into files (supervisord rotates them); the relay follows the files, so a slow or closed terminal holds
no program up.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import click

#: Colours of programs, in the order in which they appear; red is left for supervisord's own news.
_COLOURS = (
    "cyan",
    "green",
    "yellow",
    "blue",
    "magenta",
    "bright_cyan",
    "bright_green",
    "bright_yellow",
    "bright_blue",
    "bright_magenta",
)
_WIDTH = 12
#: Bytes read per file and turn; the rest waits for the next turn, so that one noisy program does not hide the others.
_TURN_BYTES = 256 * 1024


@dataclass
class _OpenLog:
    """An open log: the file itself, not its name, so that a rotation loses nothing."""

    descriptor: int
    inode: int
    rest: bytes = b""


class Relay:
    """Follows every ``*.log`` of a folder from where it ends now."""

    def __init__(self, folder: Path, coloured: bool) -> None:
        self._folder = folder
        self._coloured = coloured
        self._followed: dict[str, _OpenLog] = {}
        for path in folder.glob("*.log"):
            followed = self._open(path)
            if followed is not None:
                os.lseek(followed.descriptor, 0, os.SEEK_END)

    def lines(self) -> list[str]:
        """Return the lines logged since the last call, ready to print."""
        shown = []
        for path in sorted(self._folder.glob("*.log")):
            name = path.name.removesuffix(".log")
            for line in self._news(path, name):
                if name != "supervisord" or self._is_news(line):
                    shown.append(self._dressed(name, line))
        return shown

    def close(self) -> None:
        for followed in self._followed.values():
            os.close(followed.descriptor)
        self._followed.clear()

    def _open(self, path: Path) -> _OpenLog | None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None  # rotated away at this moment; the next turn finds the new one
        followed = _OpenLog(descriptor, os.fstat(descriptor).st_ino)
        self._followed[path.name.removesuffix(".log")] = followed
        return followed

    def _news(self, path: Path, name: str) -> list[str]:
        followed = self._followed.get(name) or self._open(path)
        if followed is None:
            return []
        grown = os.read(followed.descriptor, _TURN_BYTES)
        if not grown and self._was_rotated(path, followed):
            os.close(followed.descriptor)
            del self._followed[name]
            return self._news(path, name)
        *whole, followed.rest = (followed.rest + grown).split(b"\n")
        return [line.decode(errors="replace") for line in whole]

    @staticmethod
    def _was_rotated(path: Path, followed: _OpenLog) -> bool:
        try:
            return path.stat().st_ino != followed.inode
        except OSError:
            return False

    @staticmethod
    def _is_news(line: str) -> bool:
        """Select from supervisord's own log the lines that a person wants to see while it runs well."""
        return any(word in line for word in (" exited: ", "gave up: ", "killing ", "spawnerr", "FATAL"))

    def _dressed(self, name: str, line: str) -> str:
        # Logs may hold text from the network: none of its control characters reaches the terminal.
        plain = "".join(
            letter if letter.isprintable() or letter == "\t" else "\N{REPLACEMENT CHARACTER}" for letter in line
        )
        label = f"{name:<{_WIDTH}} | "
        if not self._coloured:
            return label + plain
        colour = "red" if name == "supervisord" else _COLOURS[sorted(self._followed).index(name) % len(_COLOURS)]
        return click.style(label, fg=colour) + plain
