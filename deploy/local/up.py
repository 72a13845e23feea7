"""``usher up``: run Redis, masters and consumers on this machine under supervisord, in the foreground."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any

import click

from usher.common.base.errors import StartRefused
from usher.common.base.log import redacted
from usher.common.runtime.settings import options
from usher.common.runtime.signals import StopAsked, StopRequest
from usher.deploy.local.plan import (
    EXAMPLE_HANDLER,
    LocalSettings,
    Plan,
    Supervision,
    SupervisionLost,
    can_prove,
    claimed,
    local_settings,
    plan,
    start,
    watch,
)

#: Colours of programs, in the order in which they appear; red is left for supervisord's own news.
_COLOURS = tuple(
    f"{light}{name}" for light in ("", "bright_") for name in ("cyan", "green", "yellow", "blue", "magenta")
)
#: Words of those lines of supervisord's own log that a person wants to see while it runs well.
_NEWS = (" exited: ", "gave up: ", "killing ", "spawnerr", "FATAL")
_WIDTH = 12
#: Bytes read per file and turn; the rest waits for the next turn, so that one noisy program does not hide the others.
_TURN_BYTES = 256 * 1024


class Relay:
    """The programs' logs; of one that is rotated, its rest too."""

    def __init__(self, folder: Path, coloured: bool) -> None:
        self._folder = folder
        self._coloured = coloured
        self._read = {path.stem: ((facts := path.stat()).st_ino, facts.st_size) for path in folder.glob("*.log")}

    def lines(self) -> list[str]:
        return [
            self._dressed(path.stem, line)
            for path in sorted(self._folder.glob("*.log"))
            for line in self._news(path)
            if path.stem != "supervisord" or any(word in line for word in _NEWS)
        ]

    def _news(self, path: Path) -> list[str]:
        news: list[str] = []
        for file in (path.with_name(f"{path.name}.1"), path):
            with contextlib.suppress(OSError), file.open("rb") as opened:  # rotated now: the next turn finds it
                known, offset = self._read.get(path.stem, (0, 0))
                inode = os.fstat(opened.fileno()).st_ino
                if inode != known and file != path:
                    continue
                offset = opened.seek(offset if inode == known else 0)
                grown = opened.read(_TURN_BYTES)
                whole = grown[: grown.rfind(b"\n") + 1 or (len(grown) == _TURN_BYTES and _TURN_BYTES)]
                self._read[path.stem] = inode, offset + len(whole)
                news += [line.decode(errors="replace") for line in whole.removesuffix(b"\n").split(b"\n") if whole]
        return news

    def _dressed(self, name: str, line: str) -> str:
        # Logs may hold text from the network: none of its control characters reaches the terminal.
        plain = "".join(
            letter if letter.isprintable() or letter == "\t" else "\N{REPLACEMENT CHARACTER}" for letter in line
        )
        label = f"{name:<{_WIDTH}} | "
        if not self._coloured:
            return label + plain
        colour = "red" if name == "supervisord" else _COLOURS[sorted(self._read).index(name) % len(_COLOURS)]
        return click.style(label, fg=colour) + plain


#: Most files that are looked at, each second.
_MOST_FILES = 5_000


def _sources(folder: Path) -> set[tuple[str, int]]:
    """Return the ``.py`` files in a folder and those below it, with their times; virtual environments and hidden
    folders are left out."""
    found: set[tuple[str, int]] = set()
    for at, folders, files in os.walk(folder):
        left_out = [*folders] if "pyvenv.cfg" in files else [name for name in folders if name.startswith((".", "__"))]
        folders[:] = [name for name in folders if name not in left_out and name != "node_modules"]
        for path in (Path(at, name) for name in files if name.endswith(".py") and len(found) < _MOST_FILES):
            with contextlib.suppress(OSError):  # an editor's file that went meanwhile
                found.add((os.path.relpath(path, folder), path.stat().st_mtime_ns))
    return found


_RELAY_EVERY_S = 0.2
_WATCH_EVERY_S = 1.0


@click.command(
    help=(
        "Run everything on this machine: an embedded Redis (unless USHER_REDIS_URL is set), masters and consumers."
        " Ctrl-C drains and stops everything (exit code 130), SIGTERM too (0); asked again, they kill what still runs."
        " Masters and consumers take their settings from the environment: USHER_MAX_ATTEMPTS=3 usher up."
    )
)
@click.option("--reload", is_flag=True, help="Restart consumers when a .py file here, or below, has changed.")
@click.option(
    "--proof/--no-proof",
    default=True,
    help="Prove history every five minutes (usher audit prove), where the extra audit is installed [default: proof].",
)
@options(LocalSettings)
def up(flags: dict[str, Any], reload: bool, proof: bool) -> None:
    settings = local_settings(os.environ, flags)
    if settings.tls_cert is not None:
        raise StartRefused(
            "USHER_TLS_CERT: `usher up` speaks plain HTTP on loopback; unset it, or run `usher master` and `usher"
            " consumer` yourself"
        )
    with StopRequest() as stop, claimed(settings.state_folder.absolute()) as lock:
        click.echo("usher: checking settings, ports and handler", err=True)
        try:
            made = plan(settings, os.environ, stop.check)
        except (StartRefused, StopAsked):
            if stop.asked:  # the checks ended early because of it
                sys.exit(_asked_code(stop))
            raise
        sys.exit(_run(made, lock, stop, reload, proof and can_prove()))


def _run(made: Plan, lock: int, stop: StopRequest, reload: bool, proves: bool) -> int:
    """Run everything until asked to stop (``_asked_code``) or until a program is gone for good (1)."""
    running = Supervision(made.state_folder, made.environ, made.settings.stop_seconds, (lock,))
    running.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
    shown = _Shown(Relay(running.logs, coloured=sys.stdout.isatty() and not made.environ.get("NO_COLOR")))
    code = 0
    try:
        stop.check()
        running.start()
        start(made, running, stop.check, lambda what: click.echo(f"usher: {what}", err=True))
        if proves:
            running.start_group("proof")
        shown.go_on(_summary(made))
        _watch_until_asked(made, running, shown, stop, reload)
    except StopAsked:
        pass
    except SupervisionLost as lost:
        click.echo(f"usher: {lost}", err=True)
        code = 1
    finally:
        _stop(running, shown, stop)
    return code if code and not stop.insists else _asked_code(stop)


def _asked_code(stop: StopRequest) -> int:
    """Return the exit code of a requested stop. Ctrl-C: 130 (cli.py), whenever it comes; Python ends with it too before
    it is noticed here. SIGTERM and a closed terminal, the usual end under a supervisor: 0, unless it was asked again
    and all was killed."""
    return stop.exit_code if stop.insists or stop.signal == signal.SIGINT else 0


def _watch_until_asked(made: Plan, running: Supervision, shown: _Shown, stop: StopRequest, reload: bool) -> None:
    here = Path.cwd()
    watched_s, seen = time.monotonic(), _sources(here) if reload else set()
    while not stop.wait(_RELAY_EVERY_S):
        shown.go_on()
        if time.monotonic() - watched_s >= _WATCH_EVERY_S:
            watch(running, made.redis_port is not None)
            before, seen = seen, _sources(here) if reload else seen
            if changed := sorted({path for path, _ in before ^ seen}):
                shown.go_on(f"usher: {', '.join(changed[:3])} changed: consumers drain, and start anew")
                running.drain_group("consumer")
            watched_s = time.monotonic()


def _stop(running: Supervision, shown: _Shown, stop: StopRequest) -> None:
    """Drain and end everything while the logs go on, where they still can be seen; asked once more, end it at once."""

    def hurry() -> bool:
        with contextlib.suppress(OSError):
            shown.go_on()
        return stop.insists

    with contextlib.suppress(OSError):
        click.echo("usher: stopping; running handlers may finish (Ctrl-C again to kill)", err=True)
    running.stop(hurry)
    hurry()
    with contextlib.suppress(OSError):
        click.echo("usher: everything has stopped", err=True)


class _Shown:
    """The output of the logs. Who does not read it holds nothing up, not even a stop: the rest waits in the files."""

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self._rest = memoryview(b"")
        self._room = select.poll()
        self._room.register(sys.stdout, select.POLLOUT)

    def go_on(self, more: str = "") -> None:
        """Show what the programs have logged, and ``more``, as far as there is room. Raises OSError when nobody can
        read it any more; a full disk under it stops nothing."""
        if more or not self._rest:
            lines = [*self.relay.lines(), *([more] if more else [])]
            text = "".join(line + "\n" for line in lines).encode(sys.stdout.encoding, "backslashreplace")
            self._rest = memoryview(bytes(self._rest) + text)
        while self._rest and self._room.poll(1000 * _RELAY_EVERY_S):
            try:
                self._rest = self._rest[os.write(sys.stdout.fileno(), self._rest[: select.PIPE_BUF]) :]
            except OSError as problem:
                if problem.errno != errno.ENOSPC:
                    raise
                self._rest = self._rest[:0]


def _summary(made: Plan) -> str:
    settings = made.settings
    embedded = f"  (embedded; data in {made.state_folder / 'redis'})" if made.redis_port is not None else ""
    is_example = settings.handler == EXAMPLE_HANDLER
    built_in = "  (built in, logs each message; choose yours with --handler)" if is_example else ""
    rows = [
        ("Redis", redacted(made.redis_url) + embedded),
        ("page", f"{settings.urls[0]}/"),
        ("masters", "  ".join(settings.urls)),
        ("consumers", " ".join(f"consumer-{index + 1}" for index in range(settings.consumers))),
        ("handler", settings.handler + built_in),
        ("logs", str(made.state_folder / "logs")),
        ("try", _example(made)),
    ]
    lines = [f"  {name:<10} {text}" for name, text in rows]
    return "\n".join(["", "Usher is up.", *lines, "Ctrl-C drains and stops everything.", ""])


def _example(made: Plan) -> str:
    sources, stream = made.settings.sources, made.settings.work_stream
    if sources is not None:
        stream = next(iter((*sources.names, *sources.patterns))).replace("*", "1").replace("?", "1")
    given = (("stream", stream, "ticket_stream"), ("field", made.settings.ticket_field, "ticket_id"))
    flags = [f"--ticket-{name} {shlex.quote(value)}" for name, value, usual in given if value != usual]
    return " ".join(["usher send", *flags, "--ticket 42 text=hello"])
