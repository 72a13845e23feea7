"""Check settings and handler before anything starts, in a process of its own.

A handler's module may do anything at its import, so `usher up` does not import it. It runs ``usher preflight`` in the
very environment that the programs will get: they would find the same problems.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import click

from usher.common.base.errors import HandlerUnusable, SettingsError, StartRefused
from usher.common.runtime.own_command import usher_command
from usher.common.runtime.settings import load

#: Stand-ins for settings that are only known at each program's start, or checked below.
_ANY = {"handler": "any:handler"}
#: Seconds between two looks whether the check has ended, or must end.
_STEP_S = 0.05


def problems_of_programs(environ: Mapping[str, str]) -> list[str]:
    from usher.consumer.settings import ConsumerSettings
    from usher.master.settings import MasterSettings, StreamerSettings

    problems: list[str] = []
    for cls in (MasterSettings, StreamerSettings, ConsumerSettings):
        try:
            load(cls, environ, _ANY if "consumer_name" in cls.model_fields else None)
        except SettingsError as wrong:
            problems += wrong.problems
    return [*dict.fromkeys(problems)]


def check_programs(
    environ: Mapping[str, str], folder: Path | None = None, check: Callable[[], None] = lambda: None
) -> None:
    """Raise StartRefused with what ``usher preflight`` says unless master, consumer and handler can be used in this
    environment, and in this folder (None: the current one). ``check`` is called all the time and may raise, which ends
    the check."""
    with tempfile.TemporaryFile() as said:  # no pipe: what the module has started may hold it open
        process = subprocess.Popen(
            usher_command("preflight"),
            env=dict(environ),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                check()
                time.sleep(_STEP_S)
        finally:  # also what the handler's module has started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        said.seek(0)
        told = said.read().decode(errors="replace").strip().removeprefix("usher: ")
    if code:
        by_signal = f"by {signal.Signals(-code).name}, while USHER_HANDLER was imported" if code < 0 else ""
        raise StartRefused(told or f"the check of settings and handler ended {by_signal or f'with exit code {code}'}")


@click.command()
def preflight() -> None:
    problems = problems_of_programs(os.environ)
    if problems:
        raise SettingsError(problems)
    handler = os.environ.get("USHER_HANDLER", "")
    if not handler:
        return
    try:
        importlib.import_module("usher.consumer.handlers.loader").load_handler(handler)
    except SystemExit as ended:
        raise HandlerUnusable(
            f"USHER_HANDLER={handler}: its module ends the program (exit code {ended.code}) when it is imported"
        ) from ended
    sys.stdout.flush()
    os._exit(0)  # a thread that the module has started would be waited for
