"""``usher demo``: start everything on this machine for a moment, send a workload through it, and judge every
message."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from usher.common.base.durations import Number, option
from usher.common.base.errors import GroupMissing, StartRefused, UsherError
from usher.common.base.text import escape_control, json_line
from usher.common.cli.progress import progress
from usher.common.cli.send import CsvSource, incidents, paced
from usher.common.protocol.keys import Keys
from usher.common.redis.client import CommandRefused, Link
from usher.common.redis.replies import TicketStream
from usher.common.runtime.settings import takes_json
from usher.common.runtime.signals import StopAsked, StopRequest
from usher.common.sending.producer import Outgoing, Producer
from usher.deploy.demo.handlers import (
    FOLDER_VARIABLE,
    SUFFIX,
    WORK_VARIABLE,
    count_ended,
    executions,
    judge,
)
from usher.deploy.local.up import trial
from usher.master.cli.shared import console, table

_HANDLER = "usher.deploy.demo.handlers:record"
_MASTERS = 2


@click.command()
@option(
    "--csv csv_path",
    "Send the rows of a CSV file (.gz too, - for standard input) instead of a made-up workload.",
    metavar="FILE",
)
@option("--key", "Column of the CSV that names the ticket.", metavar="COLUMN")
@option("--messages", "How many messages. [default: 20000, or the whole CSV]", click.IntRange(min=1))
@option("--tickets", "Different tickets of the made-up workload (Zipf).", click.IntRange(min=1), 2000)
@option("--consumers", "Number of consumers.", click.IntRange(1, 32), 3)
@option("--seed", "The same seed gives the same workload.", int, 1)
@option("--work-ms", "Milliseconds that the handler works on a message.", Number(min=0), 1.0)
@option(
    "--kill",
    "Half-way, kill -9 one consumer's process; repeats are then allowed, losses and disorder are not.",
    is_flag=True,
)
@option("--keep", "Keep the temporary folder with logs and records.", is_flag=True)
@takes_json
def demo(csv_path: str | None, key: str | None, messages: int | None, tickets: int, seed: int, **asked: Any) -> None:
    """Start Redis, masters and consumers in a temporary folder, send a workload, and check what happened to every
    message. Settings from the environment are not used, and no running Usher or Redis is touched."""
    if (csv_path is None) != (key is None):
        raise click.UsageError("--csv and --key belong together: --key names the column that holds the ticket")
    with _temporary_folder(asked["keep"]) as folder:
        count = messages or 20_000
        if csv_path is not None:
            csv_path, count = _readable(folder, csv_path, key or "", messages)
        with (
            contextlib.nullcontext(incidents(count, tickets, seed))
            if csv_path is None
            else CsvSource(csv_path, key or "") as rows,
            StopRequest() as stop,
        ):
            try:
                flow = Flow(folder, count, asked["consumers"], asked["work_ms"], asked["kill"], stop)
                verdict = flow.run(itertools.islice(rows, count))
            except (StopAsked, UsherError, CommandRefused) as problem:
                if stop.asked:  # any other problem is a consequence of the stop
                    click.echo("usher: demo stopped", err=True)
                    sys.exit(stop.exit_code)
                if isinstance(problem, StartRefused):
                    raise
                click.echo(f"usher: the demo failed: {problem}", err=True)
                sys.exit(2)  # 1 is a verdict
    if asked["as_json"]:
        click.echo(json_line(verdict))
    else:
        _print_demo_verdict(verdict, flow.killed)
    sys.exit(0 if verdict["clean"] else 1)


@contextlib.contextmanager
def _temporary_folder(keep: bool) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="usher-demo-"))
    try:
        yield folder
    finally:
        if keep:
            click.echo(f"usher: logs and records are in {folder}", err=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _readable(folder: Path, csv_path: str, key: str, most: int | None) -> tuple[str, int]:
    """Return the path of the CSV, and the number of its rows; it is read through once, so a bad row is found before
    anything starts. Raises StartRefused."""
    if csv_path == "-":
        csv_path = str(folder / "input.csv")
        with Path(csv_path).open("wb") as copy:
            shutil.copyfileobj(sys.stdin.buffer, copy)
    with CsvSource(csv_path, key) as rows:
        count = sum(1 for _ in itertools.islice(rows, most))
    if not count:
        raise StartRefused(f"--csv: {csv_path} has no rows")
    return csv_path, count


#: Seconds without a handled message after which the run ends.
PATIENCE_S = 60.0
_POLL_S = 0.1


class Flow:
    """A demo run in ``folder``. ``kills``: half-way, kill -9 the process of one consumer."""

    def __init__(
        self, folder: Path, count: int, consumers: int, work_ms: float, kills: bool, stop: StopRequest
    ) -> None:
        self._records = folder / "records"
        self._records.mkdir()
        environ = {FOLDER_VARIABLE: str(self._records), WORK_VARIABLE: str(work_ms)}
        asked = {"consumers": consumers, "masters": _MASTERS, "handler": _HANDLER}
        self._trial, self._count, self._stop = trial(folder, stop, _say, environ, **asked), count, stop
        self._kill_at = count // 2 if kills else math.inf
        self._sent: list[tuple[str, str]] = []
        self._killed_ns: dict[int, int] = {}
        self.killed = ""
        self._ended = 0
        self._looked_s = 0.0

    def run(self, messages: Iterable[Outgoing]) -> dict[str, Any]:
        with progress() as self._show, self._trial as (running, link):
            settings = running.settings
            _say(f"watch it at {settings.urls[0]}/ while it lasts")
            _say(f"sending {self._count:,} messages")
            keys = Keys(settings.work_stream, settings.group)
            return self._verdict(link, keys, Producer(link, keys.stream, settings.ticket_field, patience_s=0), messages)

    def _verdict(self, link: Link, keys: Keys, producer: Producer, messages: Iterable[Outgoing]) -> dict[str, Any]:
        began_ns = time.monotonic_ns()
        for batch in paced(messages):
            sent = producer.send_many(batch)
            self._sent += [(one.id, str(message.ticket_id)) for one, message in zip(sent, batch, strict=True)]
            self._look()
        unacknowledged = self._wait(TicketStream(link, keys))
        found = executions(self._records)
        last_ns = max((run.end_ns for run in found if run.end_ns is not None), default=began_ns)
        return judge(
            self._sent,
            found,
            seconds=(last_ns - began_ns) / 1e9,
            dead=_dead_letters(link, keys, len(self._sent) + 1),
            killed_ns=self._killed_ns,
            unacknowledged=unacknowledged,
        )

    def _look(self) -> None:
        self._stop.check()
        if time.monotonic() - self._looked_s < _POLL_S:
            return
        self._looked_s, self._ended = time.monotonic(), count_ended(self._records)
        self._show(f"{len(self._sent):,} sent", self._ended, self._count)
        if self._ended >= self._kill_at:
            self._kill_one()

    def _wait(self, group: TicketStream) -> int:
        """Wait until all is acknowledged, or nothing was handled for a while. Return the number of entries that are
        still pending in the group; all of them if there is no group to ask."""
        moved_s, seen = time.monotonic(), -1
        while True:
            self._look()
            if self._ended != seen:
                moved_s, seen = time.monotonic(), self._ended
            try:
                facts = group.group_facts()
            except GroupMissing:
                return len(self._sent)
            is_read = facts[b"last-delivered-id"].decode() == self._sent[-1][0]
            if (is_read and not facts[b"pending"]) or time.monotonic() - moved_s > PATIENCE_S:
                return int(facts[b"pending"])
            time.sleep(_POLL_S)

    def _kill_one(self) -> None:
        self._kill_at = math.inf
        last = max(self._records.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        self.killed, _, pid = last.name.removesuffix(SUFFIX).rpartition(".")
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
            self._killed_ns[int(pid)] = time.monotonic_ns()


def _dead_letters(link: Link, keys: Keys, most: int) -> dict[str, str]:
    dead = {}
    for letter_id, fields in link.call("XRANGE", keys.dead, "-", "+", "COUNT", most):
        named = dict(zip(fields[::2], fields[1::2], strict=False))
        told = (named.get(b"usher-" + name, b"").decode(errors="replace") for name in (b"reason", b"error", b"owner"))
        dead[named.get(b"usher-id", letter_id).decode()] = " ".join(filter(None, told))
    return dead


def _say(what: str) -> None:
    click.echo(f"usher: {what}", err=True)


def _print_demo_verdict(verdict: dict[str, Any], killed: str) -> None:
    screen, is_clean = console(), verdict["clean"]
    names = ("sent", "handled", "tickets", "lost", "duplicates", "order_violations", "overlaps", "dead_letters")
    counts = [(name.replace("_", " "), f"{verdict[name]:,}") for name in names]
    shares = [
        (share["name"] + " (killed once)" * (share["name"] == killed), f"{share['handled']:,}", f"{share['tickets']:,}")
        for share in verdict["consumers"]
    ]
    screen.print(table("usher demo", ("", "number"), counts, ("number",)))
    screen.print(table("", ("consumer", "handled", "tickets"), shares, ("handled", "tickets")))
    for example in verdict["examples"]:
        click.echo(f"  {escape_control(example)}")
    if verdict["unacknowledged"] or verdict["unexpected"]:
        told = "  {unacknowledged:,} never acknowledged, {unexpected:,} never sent but handled"
        click.echo(told.format_map(verdict))
    repeats = (
        f"; {verdict['duplicates']:,} executions were repeats after the kill, in order" if is_clean and killed else ""
    )
    said = (
        "clean: nothing lost, every ticket in order, one at a time"
        if is_clean
        else "NOT CLEAN (run it again with --keep to look at logs and records)"
    )
    speed = "{handled:,} messages in {seconds:.1f} s ({messages_per_second:,.0f}/s)".format_map(verdict)
    colour = "green" if is_clean else "red"
    screen.print(f"[bold {colour}]Verdict: {said}[/]{repeats}. {speed}", soft_wrap=True)
