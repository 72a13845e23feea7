"""The process that runs a handler only, for a suspect or a rehearsal: it is called as a consumer calls it, and nothing
here knows of Redis.

The handler runs on a thread of its own, as in a consumer, and not on the main one: objects that belong to one thread (a
SQLite connection that was opened at import, a signal handler) fail here as they would there.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import math
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import click

from usher.common.base.clock import now_s, run_us
from usher.common.base.errors import GiveUp, HandlerUnusable
from usher.common.base.log import configure, in_hand
from usher.common.protocol.attempts import Attempts
from usher.common.runtime.fork_guard import ForkGuard, end_with_parent
from usher.common.runtime.service import Service, ServiceEnded
from usher.consumer.handlers.batches import judge
from usher.consumer.handlers.decorators import given
from usher.consumer.handlers.loader import Handler, check_ran, load_handler, with_spans
from usher.consumer.handlers.message import Message, OwnLease, message_type
from usher.consumer.isolation.process import (
    INTERRUPT,
    STATUS,
    TELL_WHERE,
    CallResult,
    Piece,
    ProcessSpec,
    pidfd,
)

#: Seconds between looks at the lease while a handler runs, and how many of them must find that it has ended.
_LOOK_S, _LOOKS = 0.05, 3


class HandlerCall:
    """The way to call a handler on this thread as a consumer does, a batch handler with a list of one."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Future[Any] | None = None
        self.interrupted = threading.Event()

    def __call__(self, message: Message) -> BaseException | None:
        """Return the error that the message fails with."""
        if self._handler.batch is None:
            return self.run(message)[1]
        [(_, raised)] = judge([[message]], *self.run([message]))
        return raised

    def run(self, given: Any) -> tuple[Any, BaseException | None]:
        """Call the handler with a message, or a list of them. Return what it returned, and what it raised."""
        handler = self._handler
        try:
            returned = handler.call(given)
            returned = self.wait(returned) if handler.is_async else returned
            if handler.batch is None and returned is not None:
                check_ran(returned)
                given.result(returned)
            return returned, None
        except BaseException as problem:  # sys.exit() too: in a consumer it does not end the thread either
            is_interrupted = isinstance(problem, asyncio.CancelledError) and self.interrupted.is_set()
            return None, GiveUp("interrupted") if is_interrupted else problem

    def wait(self, awaited: Any) -> Any:
        if self._event_loop is None:
            self._event_loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._event_loop)
        task = asyncio.ensure_future(awaited, loop=self._event_loop)
        self._event_loop.call_soon(self._cancel, task)  # behind its beginning
        return self._event_loop.run_until_complete(task)

    def cancel(self) -> None:
        """Interrupt the call, from another thread, where the next one begins only when this one is over."""
        self.interrupted.set()
        if self._event_loop is not None:
            self._event_loop.call_soon_threadsafe(self._cancel)

    def _cancel(self, begun: asyncio.Future[Any] | None = None) -> None:
        self._task = begun or self._task
        if self.interrupted.is_set() and self._task is not None:
            self._task.cancel()
            self._task = None  # once

    def close(self) -> None:
        if self._event_loop is not None:
            self._event_loop.close()
            asyncio.set_event_loop(None)


class Slot(Service):
    """The only slot: it takes a message, runs the handler, and answers."""

    name = "work-0"
    stalls_after_s = math.inf

    def __init__(
        self, asker: Connection, handler: Handler, make: type[Message], lease: OwnLease, limit_s: float
    ) -> None:
        super().__init__()
        self.pieces: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()  # None: no more will come
        self._asker, self._answering = asker, threading.Lock()
        self.call = HandlerCall(handler)
        make.cancelled_apart = self.call.interrupted
        make.on_progress = lambda some, told: self.answer(told)
        self._make = make
        self._limit_s = limit_s
        self._lease = lease
        self.is_busy = False

    def run_once(self) -> float:
        piece = self.pieces.get()
        if piece is None:
            raise ServiceEnded
        result = self._run(piece)
        self.is_busy = False
        self.answer(result)
        return 0.0

    def answer(self, what: object) -> None:
        with self._answering:  # a handler's threads may all have parts of its result
            self._asker.send(what)

    def on_end(self) -> None:
        self.call.close()

    def _run(self, piece: Piece) -> CallResult:
        known = Attempts(*piece.known)
        message = self._make(piece.ticket, piece.stream_id, piece.fence, list(piece.flat), self._lease, known)
        message.attempt += 1
        message.start_us = run_us()
        message.first_ms = message.start_us // 1000
        message.slot = 1  # in hand: log lines name it
        in_hand.set(message)
        self.answer(True)
        began_s = time.monotonic()
        message.deadline = began_s + self._limit_s if self._limit_s else None
        with ForkGuard():  # forked children must not answer, nor take the next order
            raised = self.call(message)
        seconds = time.monotonic() - began_s
        message.slot = 0
        told = getattr(message, "answer", None) if raised is None else None
        return CallResult.of(raised and _without_us(raised), round(seconds, 6), told)


def end_all() -> None:
    os.killpg(0, signal.SIGKILL)


def _without_us(raised: BaseException) -> BaseException:
    calls = raised.__traceback__
    while calls is not None and calls.tb_frame.f_code.co_filename == __file__:
        calls = calls.tb_next
    return raised if calls is None else raised.with_traceback(calls)


def _ignore(*_: object) -> None:
    """Take a signal that is not for this process. Not SIG_IGN, which programs would inherit that a handler starts."""


@click.command(name="handler-process")
@click.argument("orders", type=int)
def main(orders: int) -> None:
    """Be the template: fork a process for each order on this socket, and one that watches it, until the socket is
    closed. An order brings a pipe for what ``watch`` tells, and the descriptors of ``run``."""
    end_with_parent()
    for stop in (signal.SIGTERM, signal.SIGINT):  # systemd sends it to all of a service; who asked decides, and ends us
        signal.signal(stop, _ignore)
    control = socket.socket(fileno=orders)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that watch
    while True:
        order, descriptors, _, _ = socket.recv_fds(control, 1, 4)
        if not order:
            return
        with contextlib.suppress(OSError):  # too many processes: who asked sees its pipe closed
            if not os.fork():
                break
        for descriptor in descriptors:
            os.close(descriptor)
    control.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    status, asker, *asked = descriptors
    if pid := os.fork():
        for descriptor in asked:
            os.close(descriptor)
        watch(pid, status, asker)
    os.close(status)
    os.close(asker)
    end_with_parent()
    os.setpgid(0, 0)
    with contextlib.suppress(ConnectionError, EOFError):  # who asked was killed, which others tell
        run(*asked)


def watch(pid: int, status: int, asker: int) -> NoReturn:
    """Tell, through the pipe ``status``, the number of the process with the handler, and how it ends; end it, and all
    that it has started, as soon as ``asker`` (a pidfd) has ended. It may not do so itself: it keeps the interpreter."""
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)
        os.write(status, STATUS.pack(pid))
        news, handler = select.poll(), pidfd(pid)
        news.register(handler, select.POLLIN)
        news.register(asker, select.POLLIN)
        if handler not in dict(news.poll()):
            os.killpg(pid, signal.SIGKILL)
        os.write(status, STATUS.pack(os.waitpid(pid, 0)[1]))
    os._exit(0)


def run(asked_by: int, where: int) -> None:
    """Run messages until the socket is closed. ``asked_by``: descriptor of the socket that brings the spec, then
    messages and ends of the lease; ``where``: descriptor of the file for the stack of a process that dies."""
    with contextlib.suppress(OSError):  # where memory ends, this process is the one to end, and not the consumer
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    for descriptor in (asked_by, where):
        os.set_inheritable(descriptor, False)
    faulthandler.enable(where)
    faulthandler.register(TELL_WHERE, where)
    # Whatever the handler prints is seen, even if its process is killed.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    asker = Connection(asked_by)
    spec: ProcessSpec = asker.recv()
    level, style = spec.log
    configure(spec.program, level, style, spec.secrets)
    try:
        handler = with_spans(load_handler(spec.handler), spec.stream, spec.group)
    except HandlerUnusable as unusable:
        asker.send(str(unusable))
        return
    limit_s = given(handler.options.deadline_s, spec.handler_s)
    lease = OwnLease(math.inf if spec.is_rehearsal else 0.0, now_s())
    made = message_type(spec.stream, spec.is_gathered, spec.is_rehearsal)
    slot = Slot(asker, handler, made, lease, limit_s)
    asker.send(limit_s)
    slot.start()
    looks = 0
    with contextlib.suppress(ConnectionError, EOFError):
        while True:
            if not asker.poll(_LOOK_S if slot.is_busy else None):
                # Who asked ends this process when the lease has ended, unless it stands still; and another owner may
                # run the message by then.
                looks = looks + 1 if slot.is_busy and not lease.holds() else 0
                if looks > _LOOKS:
                    end_all()
                continue
            order, looks = asker.recv(), 0
            if isinstance(order, Piece):
                slot.call.interrupted.clear()
                slot.is_busy = True
                slot.pieces.put(order)
            elif order == INTERRUPT:
                slot.call.cancel()
            else:
                lease.ends_s = order
    # Who asked has gone, and we were not told: a handler that changes its user clears PR_SET_PDEATHSIG.
    if slot.is_busy:
        end_all()
    slot.pieces.put(None)
    while not slot.join(1.0):
        pass
