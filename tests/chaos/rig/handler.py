"""The handler that runs in the consumers. It writes down its start before anything else, and its end after everything
else.

How it behaves is in the message: ``work_ms`` to work, ``fail`` to raise (``before:2``: before the effect, in the first
two attempts; ``after:1``: after the effect; ``always``), ``broken_until_ns`` to raise until then, ``hang_ms`` to be
stuck, ``freeze_ms`` to be stuck and to keep the interpreter, ``abort`` to end the process in the first so many
attempts, ``die_again_ms`` to end the process so late in the second start, ``lose_ack`` to have the acknowledgement of
that attempt lost, ``log_lines`` to log so many. Standard library only: the same handler serves Usher
and what it is compared with.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.chaos.rig.records import HistoryWriter, now_ns
from tests.chaos.rig.sink import SinkClient

#: Environment of the consumers; the rig sets them.
HISTORY_VARIABLE = "CHAOS_HISTORY"
SINK_VARIABLE = "CHAOS_SINK"
NAME_VARIABLE = "CHAOS_NAME"
#: A thread that sleeps for 20 ms and wakes so much later was not scheduled.
_STALL_NS = 100_000_000
_TICK_S = 0.02
#: Within this after the end of a process all goes on.
_END_NS = 2_000_000_000


log = logging.getLogger("chaos")


class Poisoned(Exception):
    """The message asked for it."""


class _World:
    """What a process needs; made at the first message, since a handler's module does nothing when it is imported."""

    _lock = threading.Lock()
    _made: _World | None = None

    def __init__(self) -> None:
        self.history = HistoryWriter(Path(os.environ[HISTORY_VARIABLE]))
        self.sink = SinkClient(os.environ[SINK_VARIABLE])
        self.who = f"{os.environ[NAME_VARIABLE]}/{os.getpid()}"
        self.serials = itertools.count(1)
        self.owner = self.sink.ask("hello", who=self.who)  # the consumer, when this is a child of it
        self._ticker = threading.Thread(target=self._tick, name="chaos-tick", daemon=True)
        self._ticker.start()

    @classmethod
    def get(cls) -> _World:
        with cls._lock:
            if cls._made is None:
                cls._made = cls()
            return cls._made

    def _tick(self) -> None:
        before = now_ns()
        while True:
            time.sleep(_TICK_S)
            now = now_ns()
            if now - before > _STALL_NS:
                self.history.write("stall", who=self.who, t0=before, t1=now)
            before = now


def steps(message: Any, kind: str) -> Iterator[float]:
    """Record an execution by a handler of this kind. Yields the seconds for which it waits."""
    world = _World.get()
    fields = message.fields
    # System A knows one stream only; of several, the history has the source's own ids, which no step of Usher has made.
    uid, tok = message.uid, message.fence
    ticket = getattr(message, "scoped_ticket_id", message.ticket_id)
    mid = getattr(message, "source_id", message.id)
    x = f"{world.who}-{next(world.serials)}"
    world.sink.ask("open", ticket=ticket, tok=tok)  # a refusal is found out at the commit
    dies = "die_again_ms" in fields and world.sink.ask("begin", uid=uid, who=world.who) == "2"
    kind = "frozen" if "freeze_ms" in fields else "dies" if dies else kind
    facts = {"uid": uid, "ticket": ticket, "tok": tok, "who": world.who}
    world.history.write(
        "start", x=x, **facts, owner=world.owner, mid=mid, attempt=message.attempt, kind=kind, t=now_ns()
    )
    if message.attempt <= int(fields.get("abort", 0)):
        os.kill(os.getpid(), signal.SIGKILL)  # as a segmentation fault would, without a core file
    if dies:
        # Written before: another fault may end the process meanwhile, and the ticket waits for that long all the same.
        ends = now_ns() + int(fields["die_again_ms"]) * 1_000_000
        end = {"t0": now_ns(), "t1": ends, "since": ends, "bound_ns": _END_NS}
        world.history.write("fault", kind="died_again", who=world.who, recover="", **end)
        yield int(fields["die_again_ms"]) / 1000
        os.kill(os.getpid(), signal.SIGKILL)
    ok = False
    try:
        if "freeze_ms" in fields:
            ctypes.PyDLL(None).usleep(int(fields["freeze_ms"]) * 1000)  # as C code that does not let go of the lock
        for _ in range(int(fields.get("log_lines", 0))):
            log.warning("a line of a handler %s", "." * 500)
        yield int(fields.get("hang_ms", 0)) / 1000
        when, _, times = fields.get("fail", "").partition(":")
        if now_ns() < int(fields.get("broken_until_ns", 0)):
            raise Poisoned("not repaired yet")
        if when == "always" or (when == "before" and message.attempt <= int(times)):
            raise Poisoned(f"{when} {times}")
        yield float(fields.get("work_ms", 1)) / 1000
        answer = world.sink.ask("commit", **facts, amount=int(fields.get("amount", 0)))
        if answer == "fenced":
            world.history.write("fenced", x=x, **facts, t=now_ns())
            # and is acknowledged: an acknowledgement of somebody who is fenced must be refused, or the message is lost
            return
        if when == "after" and answer == "ok" and message.attempt <= int(times):
            raise Poisoned(f"{when} {times}")
        if message.attempt == int(fields.get("lose_ack", 0)):
            world.sink.ask("lose_ack", who=world.who)
        ok = True
    finally:
        world.history.write("finish", x=x, ok=ok, t=now_ns())


def skip(message: Any) -> None:
    """Note that a batch handler leaves a message alone, since an earlier one of its ticket has failed."""
    world = _World.get()
    world.history.write("skip", uid=message.uid, who=world.who)


def handle(message: Any) -> None:
    """Handle a message on a thread."""
    for seconds in steps(message, "thread"):
        time.sleep(seconds)


async def handle_async(message: Any) -> None:
    """Handle a message on the event loop of a consumer with ``async def`` handlers."""
    for seconds in steps(message, "async"):
        await asyncio.sleep(seconds)
