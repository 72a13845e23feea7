"""``usher torture``: the command that runs duplicates, kills, errors and zombies against the user's own handler, and
prints a verdict on its effects."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Column, Table

from usher.common.base.durations import Number, option
from usher.common.base.errors import StartRefused
from usher.common.base.text import escape_control, json_line
from usher.common.cli.progress import progress
from usher.common.redis.embedded import EmbeddedRedis
from usher.common.runtime.own_command import usher_command
from usher.common.runtime.settings import takes_json
from usher.common.runtime.signals import StopRequest
from usher.consumer.torture.stage import TortureRequest
from usher.consumer.torture.stories import ScenarioResult, explained, summary

_LOOK_EVERY_S = 0.2


def run_torture(
    request: TortureRequest,
    environ: Mapping[str, str],
    told: Callable[[str, int, int], object],
    check: Callable[[], None],
) -> list[ScenarioResult]:
    """Run all scenarios, and return the results; ``told`` gets the scenario, the runs done, and the runs in all.
    ``check`` is called meanwhile, and may raise. Raises StartRefused when nothing can be said about the handler."""
    ours, theirs = Pipe()
    with (
        tempfile.TemporaryDirectory(prefix="usher-torture-", dir="/tmp" if Path("/tmp").is_dir() else None) as name,
        EmbeddedRedis(folder := Path(name), port=None, durable=False) as server,
        (folder / "log").open("w+b") as log,
        ours,
    ):
        process = subprocess.Popen(
            usher_command("torture-stage", str(theirs.fileno())),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**environ, "USHER_REDIS_URL": server.url},
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
        theirs.close()
        try:
            with contextlib.suppress(EOFError, ConnectionError):
                ours.send(request)
                while True:
                    check()
                    if not ours.poll(_LOOK_EVERY_S):
                        continue
                    match ours.recv():
                        case list(results):
                            return results
                        case str(why):
                            raise StartRefused(f"nothing can be said about this handler: {why}")
                        case scenario, done, count:
                            told(scenario, done, count)
            last_words = (folder / "log").read_text(errors="replace")[-2000:]
            raise StartRefused(f"the torture process ended by itself; its last output:\n{last_words}")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its child processes are in its group, frozen ones too
            process.wait()


_HELP = """Run HANDLER (module:function) against everything that may happen to it, and say whether its effects are safe.

Three messages of one ticket are handled again and again by real processes that are killed, stopped and repeated, before
every line of your handler. Afterwards the ticket must look as if nothing had happened; for a handler that absorbs, also
as if each message had run alone. Your handler really runs, so point it to a database for tests.

--effect names a function that tells what a ticket looks like:

\b
  def effect(ticket_id): return ...    anything comparable: a number, rows, a mapping

It should leave out what differs by nature: ids, times, the ticket's own name. Messages have the fields n (1, 2, 3) and
amount (1, 10, 100), so that a sum tells which message is in it twice.

Try it in a checkout: usher torture examples/sinks.py has four handlers to try.

Exit code 0: safe. 1: not safe. 2: nothing can be said, and why.
"""


@click.command(help=_HELP)
@click.argument("handler")
@option("--effect", "Tells what a ticket looks like (see above).", required=True, metavar="MODULE:FUNCTION")
@option("--setup", "Called once before all: creates tables, say.", default="", metavar="MODULE:FUNCTION")
@option(
    "--field fields",
    "A field of the messages; {n} and {amount} in it are filled in.",
    multiple=True,
    metavar="NAME=VALUE",
)
@option("--stops", "Most lines of the handler before which a fault is tried.", click.IntRange(1, 1000), 30)
@option("--handler-seconds", "Longest that one call may take.", Number(min=1), 30.0)
@takes_json
def torture(handler: str, effect: str, setup: str, fields: tuple[str, ...], as_json: bool, **asked: Any) -> None:
    for spec, flag in ((handler, "HANDLER"), (effect, "--effect"), (setup, "--setup")):
        module, colon, name = spec.partition(":")
        if not (module and colon and name) and (spec or flag != "--setup"):
            raise StartRefused(f"{flag} must look like module:function (it is {spec!r})")
    request = TortureRequest(handler, effect, setup, _pairs(fields), **asked)
    began_s = time.monotonic()
    with StopRequest() as stop, progress() as show:
        findings = run_torture(request, os.environ, show, stop.check)
    seconds = time.monotonic() - began_s
    is_safe = all(finding.safe for finding in findings)
    if as_json:
        document = {"handler": handler, "safe": is_safe, "seconds": round(seconds, 2)}
        click.echo(json_line(document | {"scenarios": [finding.document() for finding in findings]}))
    else:
        print_torture_verdict(Console(highlight=False), findings, seconds)
    sys.exit(0 if is_safe else 1)


def _pairs(fields: tuple[str, ...]) -> dict[str, str]:
    made = {}
    for field in fields:
        name, equals, value = field.partition("=")
        if not equals or not name:
            raise click.UsageError(f"--field {field!r} must look like name=value")
        if name in ("ticket_id", "uid"):
            raise click.UsageError(f"--field {name}: usher torture sets this field itself")
        made[name] = value
    return made


def print_torture_verdict(screen: Console, findings: list[ScenarioResult], seconds: float) -> None:
    counts = (Column(name, justify="right") for name in ("told", "went wrong"))
    table = Table("", "what happens", *counts, box=None, padding=(0, 2, 0, 0))
    for finding in findings:
        mark = "[green]safe[/]" if finding.safe else "[bold red]UNSAFE[/]"
        table.add_row(mark, finding.title, str(finding.runs), str(len(finding.failures) or ""))
    screen.print(table)
    for finding in findings:
        if not finding.safe:
            screen.print(f"\n[bold red]{finding.title}[/]")
            for text in explained(finding):
                screen.print(f"  {escape_control(text)}", markup=False, soft_wrap=True)
    is_safe = all(finding.safe for finding in findings)
    screen.print(f"\n[bold {'green' if is_safe else 'red'}]{summary(findings)}[/] ({seconds:.1f} s)", soft_wrap=True)
