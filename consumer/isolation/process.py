"""A process that runs the handler only, as the process that asks it sees it.

It is started for the first message, and again for the next one after it was ended: a handler that hangs is killed, with
all that it has started, and a handler may end its process itself. The process runs ``consumer/isolation/child.py``, and
is forked by a template that has loaded all of ours and nothing of the user's: a new interpreter takes half a second.
What both tell each other is pickled: they run the same user's code.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import io
import math
import os
import pickle
import re
import select
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from usher.common.base.errors import LONGEST_WAIT_S, GiveUp, Invalid, RetryLater, StartRefused, readable
from usher.common.base.text import format_error
from usher.common.runtime.fork_guard import oom_kills
from usher.common.runtime.own_command import usher_command
from usher.consumer.handlers.error_trace import traced, type_name


class How(enum.StrEnum):
    """The way in which a call ended. HUNG: it was ended; DIED: it ended its process."""

    DONE = "done"
    RAISED = "raised"
    LATER = "retry_later"
    GAVE_UP = "gave_up"
    INVALID = "invalid"
    HUNG = "hung"
    DIED = "died"
    NOT_RUN = "not_run"


#: The order that interrupts the run; one that is a number says when the lease ends, on the clock ``now_s``.
INTERRUPT = "interrupt"
#: The frame that calls the handler; the frames below it are ours.
_OURS = re.compile(r'^ +File ".*[/\\]consumer[/\\]isolation[/\\]child\.py".*$', re.MULTILINE)


@dataclass(frozen=True)
class ProcessSpec:
    """The facts that the process needs. ``handler``: as module:function; ``stream``: its ticket stream; ``handler_s``:
    USHER_HANDLER_SECONDS, 0 is no limit; ``log``: level and format of the handler's logging; ``secrets``: texts that no
    log may show; ``program``: its name in the log. ``is_rehearsal``: it has no lease; else the asker
    will say until when the messages are ours. ``group``: the consumer group, for spans."""

    handler: str
    stream: str
    is_gathered: bool
    handler_s: float = 0.0
    log: tuple[str, str] = ("info", "human")
    secrets: tuple[str, ...] = ()
    program: str = "rehearsal"
    is_rehearsal: bool = True
    group: str = ""


@dataclass(frozen=True)
class Piece:
    """A message, as a consumer knows it. ``known``: starts, failures, crashes and losses before; ``flat``: names and
    values by turns."""

    ticket: bytes
    stream_id: bytes
    fence: int
    known: tuple[int, int, int, int]
    flat: Sequence[bytes]


@dataclass(frozen=True)
class CallResult:
    """The result of a handler's call.

    ``error``: type and text of the exception, else another remark; ``after_s``: seconds that a RetryLater asks for;
    ``seconds``: duration of the call; ``is_in_doubt``: it died, and need not be the reason; ``answer``: what its caller
    is told.
    """

    how: How
    error: str = ""
    error_type: str = ""
    traceback: str = ""
    after_s: float = 0.0
    seconds: float = 0.0
    is_in_doubt: bool = False
    answer: tuple[bytes, bytes] | None = None

    @classmethod
    def of(cls, raised: BaseException | None, seconds: float = 0.0, answer: Any = None) -> CallResult:
        """Return the result of a call that raised this; None: it returned."""
        if raised is None:
            return cls(How.DONE, seconds=seconds, answer=answer)
        problem = readable(raised)
        after_s = min(max(0.0, problem.after_s), LONGEST_WAIT_S) if isinstance(problem, RetryLater) else 0.0
        kinds = {RetryLater: How.LATER, Invalid: How.INVALID, GiveUp: How.GAVE_UP, BaseException: How.RAISED}
        how = next(how for kind, how in kinds.items() if isinstance(problem, kind))
        return cls(how, format_error(problem), type_name(problem), traced(problem), after_s, seconds)

    @property
    def is_taken(self) -> bool:
        return self.how == How.DONE

    def told(self) -> str:
        """Describe the result in a few words.

        >>> CallResult(How.RAISED, "KeyError: 'x'").told(), CallResult(How.LATER, after_s=30).told()
        ("raises KeyError: 'x'", 'RetryLater 30 s')
        >>> CallResult(How.DIED, "by SIGABRT").told()
        'ended its process by SIGABRT'
        """
        if self.how == How.LATER:
            return f"RetryLater {self.after_s:g} s"
        if self.how == How.DONE:
            return "done"
        begins = {How.RAISED: "raises ", How.HUNG: "hung: ", How.DIED: "ended its process ", How.NOT_RUN: "not run: "}
        return begins.get(self.how, "") + self.error


class _Answers(pickle.Unpickler):
    """Reader of answers. A handler may have given up rights that we have, so nothing else is made of what it writes."""

    def find_class(self, module: str, name: str) -> Any:
        known = {one.__name__: one for one in (CallResult, How) if module == one.__module__}
        if name not in known:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return known[name]


def calls_of_handler(dump: str) -> str:
    """Return, from a dump of all threads (faulthandler), the calls of the one that runs the handler, innermost first;
    the whole dump where that thread cannot be told.

    >>> calls_of_handler('Thread 1:\\n  File "a.py"\\n  File "/x/consumer/isolation/child.py", line 1\\n\\nThread 2:')
    'Thread 1:\\n  File "a.py"'
    """
    for thread in dump.split("\n\n"):
        found = _OURS.search(thread)
        if found is not None and not found[0].endswith(" in run"):
            return thread[: found.start()].rstrip()
    return dump


#: Receives the handler's prints: standard output is the report's.
_STDERR = 2
#: The limit in seconds of a rehearsal where none is set: a person waits for the answer.
_USUAL_LIMIT_S = 60.0
#: Seconds for the import of the handler's module, for the report of a hang before the end, and for a regular end.
_IMPORT_S, _LAST_WORDS_S, _END_S = 120.0, 0.3, 2.0
#: Seconds in which it must have taken a message.
_SEND_S = 60.0
_LOOK_EVERY_S = 0.1
#: Extra seconds: the answer of a handler that ended in time is on its way.
_GRACE_S = 0.2
#: A look that comes later than this was kept from coming: this process stood still, and may be the whole machine.
_LATE_S = 1.0
#: On this signal the process writes down the calls of all its threads.
TELL_WHERE = signal.SIGRTMAX
_LONGEST_TRACE = 8000
#: What the template tells of a process that it has forked: its number, then its status for ``waitpid``.
STATUS = struct.Struct("=i")


def pidfd(pid: int) -> int:
    """``os.pidfd_open``, which Pythons lack that were built on an old Linux (uv's). Raises OSError before Linux 5.3."""
    if (number := ctypes.CDLL(None, use_errno=True).syscall(434, pid, 0)) < 0:  # its number on all kinds of machines
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(number)


class Forked:
    """A process that the template has forked, and that ends when this one does; as ``subprocess.Popen`` for what is not
    our own child. ``status``: our end of the pipe that brings its number, and how it ended."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.returncode: int | None = None
        if not self._is_readable(_SEND_S) or not (told := os.read(status, STATUS.size)):
            os.close(status)
            raise OSError("the template did not start it")
        [self.pid] = STATUS.unpack(told)

    def wait(self, within_s: float = 0.0) -> int | None:
        """Return the exit code, or minus the signal; None when it has not ended in time."""
        if self.returncode is None and self._is_readable(within_s):
            told = os.read(self.status, STATUS.size)
            # Who watches it was killed, and took it along.
            self.returncode = os.waitstatus_to_exitcode(*STATUS.unpack(told)) if told else -signal.SIGKILL
        return self.returncode

    def _is_readable(self, within_s: float) -> bool:
        pipe = select.poll()  # select() takes no number above 1023
        pipe.register(self.status, select.POLLIN)
        return bool(pipe.poll(1000 * within_s))


class Template:
    """The process that forks handler processes; started for the first of them, and again when it has gone. Any thread
    may ask. ``stdout``: our descriptor for what handlers print; None is our own."""

    def __init__(self, stdout: int | None = None) -> None:
        self._stdout = stdout
        self._lock = threading.RLock()
        self._socket: socket.socket | None = None

    def fork(self, asked_by: int, where: int) -> Forked:
        """Return a new process that runs ``child.run`` with these descriptors. Raises OSError."""
        ours = pidfd(os.getpid())
        status, theirs = os.pipe()
        given = theirs, ours, asked_by, where
        try:
            with self._lock:
                try:
                    socket.send_fds(self._socket or self._start(), [b"1"], given)
                except OSError:  # it has gone
                    socket.send_fds(self._start(), [b"1"], given)
        except OSError:
            os.close(status)
            raise
        finally:
            os.close(ours)
            os.close(theirs)
        try:
            return Forked(status)
        except OSError:  # the next one has another template: this one may stand still
            self.end()
            raise

    def begin(self) -> None:
        """Start it ahead of need, unless there is one: also for processes that are forked from this one."""
        with self._lock, contextlib.suppress(OSError):
            if self._socket is None:
                self._start()

    def _start(self) -> socket.socket:
        self.end()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(_SEND_S)
        with theirs:
            self._process = subprocess.Popen(
                usher_command("handler-process", str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=self._stdout,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # a Ctrl-C is ours to pass on
            )
        self._socket = ours
        return ours

    def end(self) -> None:
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None
                self._process.kill()  # nothing, where the arbiter has started it: our successor goes on with it
                self._process.wait()


class HandlerProcess(contextlib.AbstractContextManager["HandlerProcess"]):
    """Runs a handler on one message after another. ``check`` is called again and again while it waits, and may raise;
    ``with`` ends the process. ``template``: None for one of its own, whose handlers print to standard error."""

    def __init__(
        self,
        spec: ProcessSpec,
        check: Callable[[], None],
        template: Template | None = None,
    ) -> None:
        self._spec = spec
        self._check = check
        self._template = template or Template(_STDERR)
        self._is_own_template = template is None
        #: True until the process has got its first message.
        self.is_fresh = True
        self._process: Forked | None = None
        # A dying process writes here what it was doing.
        self._where = tempfile.TemporaryFile()  # noqa: SIM115 - closed at our own end
        self._limit_s = 0.0
        self._is_late = False
        self.on_part: Callable[[tuple[bytes, bytes]], None] = lambda told: None
        #: Other observations, as sentences, and what takes one.
        self.notes: list[str] = []
        self.note: Callable[[str], object] = self.notes.append

    def run(self, piece: Piece) -> CallResult:
        """Run the handler on this message and return how the call ended. Raises StartRefused when the handler cannot be
        loaded."""
        process = self.begin()
        if self._asked(piece, _SEND_S) is None:
            told = f"did not take the message within {_SEND_S:g} s"
            if (code := process.wait(_END_S)) is not None:
                told = f"ended {_ending(code)} before it took the message"
            self._kill()
            return CallResult(How.NOT_RUN, f"the handler's process {told}")
        began_s, kills = time.monotonic(), oom_kills()
        limit_s = self._limit_s or (_USUAL_LIMIT_S if self._spec.is_rehearsal else math.inf)
        self.is_fresh = False
        self._is_late = is_in_doubt = False
        while isinstance(answer := self._hear(began_s + limit_s + _GRACE_S - time.monotonic()), tuple):
            self.on_part(answer)
        if isinstance(answer, CallResult):
            return answer
        seconds = time.monotonic() - began_s
        if not self._is_late:
            how, code = How.DIED, process.wait(_END_S)
            told = _ending(code) if code is not None else "by closing what connects us with it"
            is_in_doubt = code in (None, -signal.SIGKILL) and oom_kills() != kills
            told += ", when the kernel ended processes for want of memory" if is_in_doubt else ""
        else:
            how, told = How.HUNG, f"it did not end within {limit_s:g} s"
            told += "" if self._limit_s else ", and no limit is set (--handler-seconds)"
            with contextlib.suppress(OSError):  # it has just ended, or has changed its user
                os.kill(process.pid, TELL_WHERE)
            process.wait(_LAST_WORDS_S)
        self._kill()
        return CallResult(how, told, traceback=self._last_words(), seconds=seconds, is_in_doubt=is_in_doubt)

    def __exit__(self, kind: object, *_: object) -> None:
        self.end(gently=kind is None)

    def end(self, gently: bool) -> None:
        """End the process for good; ``gently``: it may write what it still has to write (a log, a buffer)."""
        process = self._process
        if process is not None and gently:
            self._note_end(process)
            self._pipe.close()  # it reads the end
            process.wait(_END_S)
        self._kill()
        self._where.close()
        if self._is_own_template:
            self._template.end()

    def tell(self, order: float | str) -> bool:
        """Send something that has no answer. Return False when the process is too busy to take it."""
        room = select.poll()
        if self._process is not None:
            room.register(self._pipe, select.POLLOUT)
        if not room.poll(0):
            return False
        with contextlib.suppress(OSError):  # it has gone
            self._pipe.send(order)
        return True

    def begin(self) -> Forked:
        if self._process is not None and self._note_end(self._process):
            self._kill()
        if self._process is None:
            self._process = self._start()
        return self._process

    def _note_end(self, process: Forked) -> bool:
        code = process.wait()
        if code is not None:
            self.note(
                f"the handler's process ended {_ending(code)} when a call was over: something that the handler began"
                " goes on behind it"
            )
        return code is not None

    def _start(self) -> Forked:
        ours, theirs = socket.socketpair()
        self._where.seek(0)
        self._where.truncate()
        try:
            process = self._template.fork(theirs.fileno(), self._where.fileno())
        except OSError as problem:
            ours.close()
            raise StartRefused(f"no process for the handler: {problem}") from problem
        finally:
            theirs.close()
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # it may stand still in the middle of a message
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(_SEND_S), 0))
        self._process, self._pipe, self.is_fresh = process, Connection(ours.detach()), True
        answer = self._asked(self._spec, _IMPORT_S)
        if answer is None:
            code = process.wait(_END_S)
            ended = _ending(code) if code is not None else f"did not end within {_IMPORT_S:g} s"
            self._kill()
            raise StartRefused(
                f"{self._spec.handler}: its import ended the process {ended}\n{self._last_words()}".strip()
            )
        if isinstance(answer, str):
            self._kill()
            raise StartRefused(answer)
        self._limit_s = answer
        return process

    def _asked(self, order: object, within_s: float) -> Any:
        """Send an order, and return its answer; None where the process has gone, or does not read or answer it."""
        try:
            self._pipe.send(order)
        except OSError:
            return None
        while isinstance(answer := self._hear(within_s), tuple):
            pass  # a part of the last result, of a thread that a handler left behind
        return answer

    def _hear(self, within_s: float) -> Any:
        looked_s = time.monotonic()
        until_s = looked_s + within_s
        while True:
            self._check()
            now = time.monotonic()
            if now - looked_s > _LATE_S:  # given back: the process may have stood still with us
                until_s += now - looked_s
            looked_s = now
            left_s = until_s - now
            # Before the look: the output of its last moment counts.
            is_over = self._process is None or self._process.wait() is not None
            if self._pipe.poll(0 if is_over else min(max(left_s, 0.0), _LOOK_EVERY_S)):
                try:
                    return _Answers(io.BytesIO(self._pipe.recv_bytes())).load()
                except (EOFError, OSError, pickle.UnpicklingError):  # it has gone, or says what none of ours says
                    return None
            if is_over or left_s <= 0:  # over: a child of the process still holds the socket
                self._is_late = not is_over
                return None

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        self._pipe.close()  # it reads the end, and ends itself if we may not: its handler has changed the user
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(_END_S)
        os.close(process.status)

    def _last_words(self) -> str:
        self._where.seek(0)
        return calls_of_handler(self._where.read().decode(errors="replace").strip())[:_LONGEST_TRACE]


def _ending(code: int) -> str:
    """Describe how a process ended.

    >>> _ending(-6), _ending(3)
    ('by SIGABRT', 'with exit code 3')
    """
    if code >= 0:
        return f"with exit code {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"
