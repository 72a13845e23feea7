"""``usher torture``: the command that runs duplicates, kills, errors and zombies against the user's own handler, and
prints a verdict on its effects."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import click
import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from usher.common.base.durations import Number
from usher.common.base.errors import StartRefused
from usher.common.base.text import escape_control, json_line
from usher.common.redis.embedded import EmbeddedRedis
from usher.common.runtime.own_command import usher_command
from usher.common.runtime.stop_request import StopAsked, StopRequest
from usher.consumer.torture.child import HandlerSpec
from usher.consumer.torture.findings import CaseFailure, ScenarioResult, format_effect, summary
from usher.consumer.torture.harness import TortureLimits, default_fields

_LOOK_EVERY_S = 0.2
Told = Callable[[str, int, int], None]


def run_torture(
    play: HandlerSpec,
    fields: Sequence[Mapping[str, str]],
    limits: TortureLimits,
    environ: Mapping[str, str],
    progress: Told,
    check: Callable[[], None],
) -> list[ScenarioResult]:
    """Run all scenarios, and return the results. It calls ``check`` meanwhile, which may raise. Raises StartRefused
    when nothing can be said about the handler."""
    with tempfile.TemporaryDirectory(prefix="usher-torture-", dir="/tmp" if Path("/tmp").is_dir() else None) as name:
        folder = Path(name)
        with EmbeddedRedis(folder, port=None, durable=False) as server:
            request = {"redis_url": server.url, "play": asdict(play), "fields": list(fields), "limits": asdict(limits)}
            (folder / "request").write_bytes(orjson.dumps(request))
            return _staged(folder, dict(environ) | {"USHER_REDIS_URL": server.url}, progress, check)


def _staged(
    folder: Path, environ: Mapping[str, str], progress: Told, check: Callable[[], None]
) -> list[ScenarioResult]:
    reader, writer = os.pipe()
    with (
        (folder / "request").open("rb") as request,
        (folder / "log").open("wb") as log,
        os.fdopen(reader, "rb", buffering=0) as told,
    ):
        process = subprocess.Popen(
            usher_command("torture-stage", str(writer)),
            stdin=request,
            stdout=log,
            stderr=log,
            env=dict(environ),
            pass_fds=(writer,),
            start_new_session=True,
        )
        os.close(writer)
        try:
            for line in _lines(told, check):
                document: dict[str, Any] = orjson.loads(line)
                if "findings" in document:
                    return [_finding(each) for each in document["findings"]]
                if "cannot" in document:
                    raise StartRefused(f"nothing can be said about this handler: {document['cannot']}")
                progress(document["scenario"], document["told"], document["count"])
            raise StartRefused(
                "the torture process ended by itself; its last output:\n"
                f"{(folder / 'log').read_text(errors='replace')[-2000:]}"
            )
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)  # its child processes are in its group, frozen ones too
            except ProcessLookupError:
                pass
            process.wait()


def _lines(told: IO[bytes], check: Callable[[], None]) -> Iterator[bytes]:
    """Yield whole lines as they come; a Ctrl-C is noticed while there are none."""
    rest = b""
    while True:
        check()
        if not select.select([told], [], [], _LOOK_EVERY_S)[0]:
            continue
        chunk = told.read(65_536)
        if not chunk:
            return
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines


def _finding(document: dict[str, Any]) -> ScenarioResult:
    document.pop("safe")
    failures = [CaseFailure(**{**failure, "notes": tuple(failure["notes"])}) for failure in document.pop("failures")]
    return ScenarioResult(**document, failures=failures)


_HELP = """Run HANDLER (module:function) against everything that may happen to it, and say whether its effects are safe.

Three messages of one ticket are handled again and again by real processes that are killed, stopped and repeated, before
every line of your handler. Afterwards the ticket must look as if nothing had happened. Your handler really runs, so
point it to a database for tests.

--effect names a function that tells what a ticket looks like. It may be

\b
  def effect(ticket_id): return ...    anything comparable: a number, rows, a mapping
  def effect(): return {...}           a mapping of tickets, or one number: a total

and should leave out what differs by nature: ids, times, the ticket's own name. Messages have the fields n (1, 2, 3) and
amount (1, 10, 100), so that a sum tells which message is in it twice.

Try it in a checkout: usher torture examples/sinks.py has four handlers to try.

Exit code 0: safe. 1: not safe. 2: nothing can be said, and why.
"""


@click.command(help=_HELP)
@click.argument("handler")
@click.option("--effect", required=True, metavar="MODULE:FUNCTION", help="Tells what a ticket looks like (see above).")
@click.option("--setup", default="", metavar="MODULE:FUNCTION", help="Called once before all: creates tables, say.")
@click.option(
    "--field",
    "fields",
    multiple=True,
    metavar="NAME=VALUE",
    help="A field of the messages; {n} and {amount} in it are filled in.",
)
@click.option(
    "--stops",
    type=click.IntRange(1, 1000),
    default=30,
    show_default=True,
    help="Most lines of the handler before which a fault is tried.",
)
@click.option(
    "--handler-seconds",
    type=Number(min=1),
    default=30.0,
    show_default=True,
    help="Longest that one call may take.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def torture(
    handler: str, effect: str, setup: str, fields: tuple[str, ...], stops: int, handler_seconds: float, as_json: bool
) -> None:
    for spec, option in ((handler, "HANDLER"), (effect, "--effect"), *([(setup, "--setup")] if setup else [])):
        check_given(spec, option)
    messages = default_fields(_pairs(fields))
    began_s = time.monotonic()
    with StopRequest() as stop, _display() as display:
        try:
            limits = TortureLimits(stops, handler_seconds)
            findings = run_torture(
                HandlerSpec(handler, effect, setup), messages, limits, os.environ, display.progress, stop.check
            )
        except StopAsked:
            sys.exit(stop.exit_code)
    seconds = time.monotonic() - began_s
    is_safe = all(finding.safe for finding in findings)
    if as_json:
        document = {
            "handler": handler,
            "safe": is_safe,
            "seconds": round(seconds, 2),
            "scenarios": [finding.document() for finding in findings],
        }
        click.echo(json_line(document))
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


@dataclass
class _TortureProgress:
    """The progress on stderr: a bar on a terminal, else nothing (the run takes seconds)."""

    bars: Progress | None = None

    def progress(self, scenario: str, told: int, count: int) -> None:
        if self.bars is not None:
            if not self.bars.tasks:
                self.bars.add_task("", total=count)
            self.bars.update(self.bars.tasks[0].id, completed=told, description=scenario)


@contextlib.contextmanager
def _display() -> Iterator[_TortureProgress]:
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _TortureProgress()
        return
    columns: tuple[Any, ...] = (
        TextColumn("{task.description:>16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        yield _TortureProgress(bars)


def print_torture_verdict(screen: Console, findings: list[ScenarioResult], seconds: float) -> None:
    table = Table(
        "",
        "what happens",
        Column("told", justify="right"),
        Column("went wrong", justify="right"),
        box=None,
        padding=(0, 2, 0, 0),
    )
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


def explained(finding: ScenarioResult) -> Iterator[str]:
    """Yield a failed scenario in a few lines: what happened, the first example of its result, what to do."""
    failure = finding.failures[0]
    yield finding.story
    yield f"Expected {format_effect(failure.expected)}, seen {format_effect(failure.seen)}: {failure.explanation}."
    if failure.where:
        yield f"The place: {failure.where}"
    for note in failure.notes[:3]:
        yield f"({note})"
    if len(finding.failures) > 1:
        yield f"{len(finding.failures)} of {finding.runs} places are of this kind."
    yield f"-> {finding.advice}"


def check_given(spec: str, option: str) -> None:
    """Raise StartRefused unless ``spec`` looks like module:function."""
    module, colon, name = spec.partition(":")
    if not (module and colon and name):
        raise StartRefused(f"{option} must look like module:function (it is {spec!r})")
