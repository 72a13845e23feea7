"""The ``usher`` command: a group that imports a command's module only when that command is called.

So ``usher send`` never imports the master. Exit codes of every command: 0
fine, 1 it ran and found a problem, 2 it could not start, could not go on (any error that nobody expected) or was called
wrongly, 130 Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys

#: Signals that end this process while it imports, which takes a while: what process 1 of a container has no handler for
#: is lost, and Ctrl-C would be a traceback.
_EARLY: tuple[int, ...] = ()
if os.getpid() == 1:
    _EARLY = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
elif sys.argv[0].endswith(("/usher", "usher/__main__.py")):
    _OF_PYTHON = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    _EARLY = tuple(number for number, own in _OF_PYTHON.items() if signal.getsignal(number) is own)
for _number in _EARLY:
    signal.signal(_number, lambda number, _frame: os._exit(128 + number))

import contextlib
import errno
import gc
import importlib
import io
import itertools
import select
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from usher.common.base.errors import UsherError
from usher.common.base.extras import Late, version
from usher.common.base.text import escape_control

difflib: Any = Late("difflib")
_ROOT = Path(__file__).resolve().parent.parent
_COULD_NOT, _INTERRUPTED = 2, 130
#: The exit code tells what nobody reads: stderr may be closed, or its reader gone.
_PERHAPS_UNREAD = contextlib.suppress(OSError, ValueError)


#: The commands by what they are for, as ``usher --help`` lists them.
PARTS: dict[str, dict[str, tuple[str, str]]] = {
    "Run": {
        "run": ("deploy.local.run:run", "Run a handler: one process that handles messages, and may lead."),
        "up": ("deploy.local.up:up", "Run everything on this machine: Redis, two masters, consumers."),
        "demo": ("deploy.local.demo:demo", "Start everything, send messages, check every single one."),
        "master": ("master.__main__:main", "Run a master (supervisord does this for you in `usher up`)."),
        "consumer": ("consumer.__main__:main", "Run a consumer with your handler."),
        "streamer": ("master.streamer.cli:streamer", "Run the streamer of an outbox: committed rows become messages."),
    },
    "Send": {
        "send": ("common.cli.send:send", "Send messages: from a CSV file, made up, or one."),
        "delayed": ("master.cli.commands:delayed", "Look at messages sent for later; send, move or drop them."),
    },
    "Look": {
        "status": ("master.cli.commands:status", "Show consumers, tickets in processing, lag and rates."),
        "tickets": ("master.cli.commands:tickets", "Look at tickets in processing; explain, retry, give up."),
        "find": ("master.cli.commands:find", "Find unfinished and dead messages by a field: kind=paid."),
        "stuck": ("master.cli.commands:stuck", "Show tickets that are stuck or fail, and why, in groups."),
        "consumers": ("master.cli.commands:consumers", "Look at the registered consumers; drain and resume them."),
        "log": ("master.cli.commands:log", "Browse the stream by id or time."),
        "rules": ("master.cli.commands:rules", "Show the rules that hold now, and lift them."),
        "actions": ("master.cli.commands:actions", "Show what operators did, and why."),
    },
    "Act": {
        "dead": ("master.cli.commands:dead", "Look at dead letters, redrive them, or drop them."),
        "pause": ("master.cli.commands:pause", "Pause a ticket, a pattern, or everything."),
        "slow": ("master.cli.commands:slow", "Slow a ticket, a pattern, or everything down."),
        "limit": ("master.cli.commands:limit", "Bound what waits of a ticket; the rest are dead letters."),
        "resume": ("master.cli.commands:resume", "Let what was paused or slowed go on."),
        "trim": ("master.cli.commands:trim", "Cut what no reader of the stream needs; shows it first."),
    },
    "Check": {
        "doctor": ("common.cli.doctor:doctor", "Check Redis and what its set-up means for the promise."),
        "audit": ("master.audit.cli:audit", "Prove from pending lists and run log: the promise held."),
        "report": ("master.audit.cli:report", "Report waits, run times and costs by tenant, handler, ticket, day."),
        "rehearse": ("deploy.rehearsal.cli:rehearse", "Try your handler on existing messages; changes nothing."),
        "replay": ("deploy.rehearsal.cli:replay", "Run finished messages again, in order, or another handler on them."),
        "torture": ("consumer.torture.cli:torture", "Try your handler against repeats, kills and zombies."),
        "bench": ("deploy.bench.rig:bench", "Measure throughput and latency on this machine."),
    },
    "Deploy": {
        "init-deploy": ("deploy.local.init_deploy:init_deploy", "Write a folder for supervisord or systemd to run."),
        "acl": ("common.cli.doctor:acl", "Print Redis users with just the rights that Usher needs."),
        "token": ("common.cli.doctor:token", "Make a token for the HTTP API and the page."),
    },
}
COMMANDS: dict[str, tuple[str, str]] = {name: listed for part in PARTS.values() for name, listed in part.items()}
#: Commands that `usher up` and supervisord call; not listed in --help.
HIDDEN: dict[str, str] = {
    "embedded-redis": "common.redis.embedded:main",
    "supervisord": "deploy.local.up:supervisord",
    "handler-process": "consumer.isolation.child:main",
    "torture-stage": "consumer.torture.stage:main",
    "preflight": "deploy.local.up:preflight",
}


class _Failed(Exception):
    """Carries, as its cause, an error past click, which would end the program with a code of its own: 1 for a broken
    pipe, also one of a socket, and that of Ctrl-C for an end of file."""


class LazyGroup(click.Group):
    _shared: dict[str, click.Option] = {}

    def share(self) -> dict[str, click.Option]:
        """Return the options for all commands, which are made when they are needed: the modules take a while."""
        if not self._shared:
            settings = importlib.import_module("usher.common.runtime.settings")
            json = click.Option(["--json"], is_flag=True, help="Print JSON: one document, or one in each line.")
            made = [json, *settings.flags_of(settings.CommonSettings, settings.CommonSettings.model_fields)]
            self._shared = {option.opts[0]: option for option in made}
            self.params += made
        return self._shared

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args if args and args[0] in HIDDEN else _hoisted(args, self.share()))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_commands(ctx, formatter)
        click.Command.format_options(self, ctx, formatter)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (BrokenPipeError, EOFError) as problem:
            raise _Failed from problem
        except SystemExit as ended:
            if isinstance(ended.__context__, BrokenPipeError):  # rich ends the program with 1, and forgets its output
                return _COULD_NOT
            raise

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        target = COMMANDS[cmd_name][0] if cmd_name in COMMANDS else HIDDEN.get(cmd_name)
        return load_command(f"usher.{target}") if target else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as wrong:  # as click does for options
            if ":" in args[0] or any(Path(args[0].replace(".", "/") + end).exists() for end in (".py", "/__init__.py")):
                return "run", self.get_command(ctx, "run"), args
            close = difflib.get_close_matches(args[0], COMMANDS, 1)
            if not close or "Did you mean" in wrong.message:
                raise
            raise click.UsageError(f"{wrong.message} Did you mean '{close[0]}'?", ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        widest = max(map(len, COMMANDS))  # one column for all
        for part, commands in PARTS.items():
            with formatter.section(part):
                formatter.write_dl([(name.ljust(widest), summary) for name, (_, summary) in commands.items()])


def load_command(target: str) -> click.Command:
    module_name, _, attribute = target.partition(":")
    command = getattr(importlib.import_module(module_name), attribute)
    if not isinstance(command, click.Command):
        raise TypeError(f"{target} is not a click command")
    _finish(command)
    if _is_program:
        gc.freeze()  # it stays: to search it for garbage again and again takes a quarter of the start of a master
        gc.enable()
        for number in _EARLY:  # from now on there may be something to tell, or to clear away
            signal.signal(number, signal.default_int_handler)
    return command


#: This process runs one command, and ends with it.
_is_program = False


_SHARED = "Options for {}: `usher --help`; they may stand here, too."


def _finish(command: click.Command, *, given: bool = False) -> None:
    """Have a command say which of the shared options it reads, and refuse the others. ``given``: its group reads
    settings."""
    reads = given or getattr(command.callback, "reads_settings", False)
    takes_json = hasattr(command.callback, "takes_json") or any(one.name == "as_json" for one in command.params)
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            _finish(inner, given=reads)
        return
    named = ["JSON"] * takes_json + ["Redis, the streams, TLS and the log"] * reads
    if named:
        command.epilog = command.epilog or _SHARED.format(", ".join(named))
    called = command.invoke

    def refuse(ctx: click.Context) -> Any:
        for field in ctx.find_root().obj or ():
            if not (takes_json if field == "json" else reads):
                raise click.NoSuchOption(f"--{field.replace('_', '-')}", ctx=ctx)
        return called(ctx)

    command.invoke = refuse  # type: ignore[method-assign]


def _hoisted(words: Sequence[str], shared: Mapping[str, click.Option]) -> list[str]:
    """Return the words of a command line with the options of ``usher`` in front, wherever they stood."""
    front, rest, left = list[str](), list[str](), iter(words)
    for word in left:
        if word == "--":
            rest += [word, *left]
        elif (option := shared.get(word.partition("=")[0])) is not None:
            front += [word] if "=" in word or option.is_flag else [word, *itertools.islice(left, 1)]
        else:
            rest.append(word)
    return [*front, *rest]


def _show_version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(f"usher {version()} ({_ROOT})")
        ctx.exit()


_COMPLETION = """\b
The shell completes commands and flags after
  eval "$(_USHER_COMPLETE=bash_source usher)"      or zsh_source, fish_source
"""


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]}, epilog=_COMPLETION)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
@click.pass_context
def usher(ctx: click.Context, **given: Any) -> None:
    """Per-ticket ordered, concurrent work on Redis Streams.

    Settings come from the environment (USHER_*), or from the options below and those of each command. The options below
    may stand before a command or behind it. Try `usher demo` first.
    """
    ctx.obj = {field: value for field, value in given.items() if value not in (None, False)}


def run(argv: Sequence[str] | None = None, group: click.Command | None = None, name: str = "usher") -> int:
    """Run the command line and return its exit code; errors of Usher become one clear message on stderr."""
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and (out.errors == "strict" or out.encoding.lower() != "utf-8"):
        out.reconfigure(errors="backslashreplace")  # else a ticket id would be a traceback
    try:
        outcome = (group or usher).main(
            args=None if argv is None else list(argv), prog_name=name, standalone_mode=False
        )
    except click.ClickException as wrong:
        with _PERHAPS_UNREAD:
            wrong.show()
        return wrong.exit_code
    except (click.Abort, KeyboardInterrupt):
        with _PERHAPS_UNREAD:
            click.echo("usher: interrupted", err=True)
        return _INTERRUPTED
    except Exception as problem:  # 1 says that a command has found something: no error may end with it
        with _PERHAPS_UNREAD:
            _tell(problem.__cause__ if isinstance(problem, _Failed) else problem)
        return _COULD_NOT
    return outcome if isinstance(outcome, int) else 0


def _tell(problem: BaseException | None) -> None:
    """Say on stderr why a command ends: in a line if that says it all, else with where it stood."""
    if isinstance(problem, UsherError) or (isinstance(problem, ModuleNotFoundError) and problem.name == "sqlalchemy"):
        click.echo(escape_control(f"usher: {problem}", kept="\n"), err=True)  # an extra's message says how to get it
    elif isinstance(problem, OSError) and problem.errno == errno.ENOSPC and problem.filename is None:
        _forget_output()
        click.echo("usher: the disk on which it writes, or to which its output goes, is full", err=True)
    elif isinstance(problem, BrokenPipeError) and _is_unread():
        _forget_output()  # the reader of our output has gone (`usher tickets | head`)
    else:
        traceback.print_exception(problem)
        click.echo("usher: this error was not expected, so the command could not be done", err=True)


def _is_unread() -> bool:
    """Return True when nobody reads our output any more."""
    if sys.stdout is None or sys.stdout.closed:
        return False
    look = select.poll()
    look.register(sys.stdout, select.POLLOUT)
    return any(what & select.POLLERR for _, what in look.poll(0))


def _forget_output() -> None:
    """Keep the interpreter from flushing to the broken output at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    global _is_program
    _is_program = True
    gc.disable()  # while modules are imported
    sys.exit(run())


if __name__ == "__main__":
    main()
