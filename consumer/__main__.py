"""``usher consumer`` / ``python -m usher.consumer``: run one consumer."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import click

from usher.common.base.errors import HandlerUnusable
from usher.common.base.log import configure
from usher.common.base.text import format_error
from usher.common.http.serve import START_S, WorkerEnds, check_address, leave, serve, server_tls
from usher.common.redis.locate import check_at_start, resolve_redis_url
from usher.common.runtime.fork_guard import end_with_parent
from usher.common.runtime.settings import load, options
from usher.consumer.handlers.loader import load_handler
from usher.consumer.isolation.process import Template
from usher.consumer.lifecycle.master_client import MasterClient
from usher.consumer.program import ConsumerProgram, name_what_ran
from usher.consumer.settings import ConsumerSettings

#: The child's answer when the handler can be used.
_FINE = "fine"
_STEP_S = 0.02


@click.command(help="Run a consumer: it registers at a master and runs HANDLER on the messages handed over to it.")
@options(ConsumerSettings)
def main(flags: dict[str, Any]) -> None:
    settings = load(ConsumerSettings, os.environ, flags)
    configure(settings.consumer_name, settings.log_level, settings.log_format, settings.secrets)
    check_handler(settings.handler)
    check_address(settings.bind, "USHER_BIND")
    redis_url = resolve_redis_url(settings)
    check_at_start(redis_url, {"USHER_LEASE_SECONDS": settings.lease_seconds})
    template = Template()
    ends = WorkerEnds(partial(name_what_ran, settings), template.begin)
    masters = MasterClient(settings.master_urls.split(","), settings.api_token, settings.tls_ca)
    of_process = leave, partial(leave, for_good=True), ends, template, masters
    program = partial(ConsumerProgram, settings, redis_url, *of_process)
    tls = server_tls(settings.tls_cert, settings.tls_key)
    for late in ("psutil", "prometheus_client", "urllib3", "usher.consumer.web"):
        importlib.import_module(late)  # before the handler's module, which may change where modules are found
    serve(program, settings.bind, settings.consumer_name, settings.drain_seconds + 5, tls=tls, ends=ends)


def check_handler(
    spec: str, check: Callable[[], None] = lambda: None, environ: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Import the handler once in a child process, so that a failing import is reported before anything starts.

    A child, because importing may start threads or open connections, which must not exist before the worker is
    forked. ``check`` is called all the time, and may raise, which ends it. ``environ``: what the programs will have in
    their environment. Raises HandlerUnusable.
    """
    said = mmap.mmap(-1, 60_000)  # which the child shares
    child = os.fork()
    if child == 0:
        problem = _FINE
        os.setsid()
        end_with_parent()  # whose group it has left
        os.environ.update(environ)
        with contextlib.suppress(RuntimeError, ValueError, OSError):  # there is no stderr
            faulthandler.enable()  # says where it stands, if it takes too long
        try:
            load_handler(spec)
        except HandlerUnusable as unusable:
            problem = str(unusable)
        except BaseException as ended:
            problem = f"USHER_HANDLER={spec} ended the process while it was imported: {format_error(ended)}"
        said.write(problem.encode("utf-8", "backslashreplace")[: len(said)])
        os._exit(0)
    try:
        code = _code_of(child, START_S, check)
    finally:  # also what the module has started
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(child, os.WNOHANG) == (0, 0):  # it may not have had its own group yet
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    problem = said[:].rstrip(b"\0").decode(errors="replace")
    if code == -signal.SIGABRT and not problem:
        raise HandlerUnusable(
            f"USHER_HANDLER={spec}: its module was not imported within {START_S:.0f} s, or aborted; the lines above say"
            " where it stood (load what is slow when the first message comes)"
        )
    if not problem:  # the child could not answer: os._exit(), a segmentation fault in a library
        how = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
        shown = "" if code >= 0 else f" (to see where: `python -X faulthandler -c 'import {spec.partition(':')[0]}'`)"
        raise HandlerUnusable(f"USHER_HANDLER={spec}: its module ends the process {how} when it is imported{shown}")
    if problem != _FINE:
        raise HandlerUnusable(problem)


def _code_of(child: int, most_s: float, check: Callable[[], None]) -> int:
    """Return the child's exit code; end it after ``most_s``."""
    ends_s, signals = time.monotonic() + most_s, iter((signal.SIGABRT, signal.SIGKILL))
    while True:
        check()
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > ends_s and (number := next(signals, None)) is not None:
            os.kill(child, number)
            ends_s += 1.0
        time.sleep(_STEP_S)


if __name__ == "__main__":
    from usher.cli import run

    sys.exit(run(group=main))
