"""Start another program of Usher by its path, so that it is this very Usher, whatever is installed and whichever folder
is current."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click

import usher

#: So many times ``is_early`` is asked between two runs.
_LOOKS = 20


def usher_command(*words: str) -> list[str]:
    return [sys.executable, str(Path(usher.__file__).resolve().with_name("__main__.py")), *words]


def run_every(every_s: float, is_early: Callable[[], bool] = bool) -> None:
    """Run this process' command every ``every_s``, and sooner when ``is_early`` says so: in a process of its own, which
    leaves no memory behind. The first time is after a minute: the programs beside it may be starting. Ends with a
    signal."""
    words = [word for word in sys.argv[1:] if not word.startswith("--every=")]
    if "--every" in words:
        at = words.index("--every")
        del words[at : at + 2]
    until_s = time.monotonic() + min(every_s, 60.0)
    while True:
        while (left_s := until_s - time.monotonic()) > 0 and not is_early():
            time.sleep(min(left_s, every_s / _LOOKS))
        began_s = time.monotonic()
        code = subprocess.run(usher_command(*words), check=False).returncode
        told = f"usher: {words[0]} ended with exit code {code}; the next one in {every_s / 60:g} minutes"
        click.echo(told, err=True)
        until_s = max(began_s + every_s, time.monotonic() + 1.0)
