"""A process that runs the handler only, as the process that asks it sees it.

It is started for the first message, and again for the next one after it was ended: a handler that hangs is killed, with
all that it has started, and a handler may end its process itself. The process runs ``consumer/isolation/child.py``, and
is forked by a template that has loaded all of ours and nothing of the user's: a new interpreter takes half a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from usher.common.base.errors import StartRefused
from usher.common.runtime.memory import oom_kills
from usher.common.runtime.own_command import usher_command

DONE, RAISED, LATER, GAVE_UP, INVALID = "done", "raised", "retry_later", "gave_up", "invalid"
HUNG, DIED, NOT_RUN = "hung", "died", "not_run"

#: The key of an order that only says when the lease ends, on the clock ``now_s``, or that the run is interrupted; of
#: the answer that the handler is called next; and of one with a part of the result.
LEASE, INTERRUPT, STARTS, PART = "lease_ends_s", "interrupt", "starts", "part"
#: The frame that calls the handler; the frames below it are ours.
_OURS = re.compile(r'^ +File ".*[/\\]consumer[/\\]isolation[/\\]child\.py".*$', re.MULTILINE)


@dataclass(frozen=True)
class ProcessSpec:
    """The facts that the process needs. ``handler``: as module:function; ``stream``: its ticket stream; ``handler_s``:
    USHER_HANDLER_SECONDS, 0 is no limit; ``log``: level and format of the handler's logging; ``secrets``: texts that no
    log may show; ``program``: its name in the log. ``has_lease``: the asker will say until when the messages are ours
    (``LEASE``). ``group``: the consumer group, for spans."""

    handler: str
    stream: str
    is_gathered: bool
    handler_s: float = 0.0
    log: tuple[str, str] = ("info", "human")
    secrets: tuple[str, ...] = ()
    program: str = "rehearsal"
    is_rehearsal: bool = True
    has_lease: bool = False
    group: str = ""


@dataclass(frozen=True)
class Piece:
    """A message, as a consumer knows it. ``known``: starts, failures, crashes and losses before; ``flat``: names and
    values by turns.

    >>> one = Piece(b"42", b"5-1", 9, (1, 1, 0, 0), (b"a", b"\\xff"))
    >>> Piece.of(orjson.loads(to_wire(one))) == one
    True
    """

    ticket: bytes
    stream_id: bytes
    fence: int
    known: tuple[int, int, int, int]
    flat: Sequence[bytes]

    @classmethod
    def of(cls, told: dict[str, Any]) -> Piece:
        ticket, stream_id, *flat = from_wire([told["ticket"], told["stream_id"], *told["flat"]])
        starts, failures, crashes, losses = told["known"]
        return cls(ticket, stream_id, told["fence"], (starts, failures, crashes, losses), tuple(flat))


@dataclass(frozen=True)
class CallResult:
    """The result of a handler's call.

    ``how``: done, raised, retry_later, gave_up, invalid, hung (it was ended), died (it ended its process), not_run.
    ``error``: type and text of the exception, else another remark; ``after_s``: seconds that a RetryLater asks for;
    ``seconds``: duration of the call; ``is_in_doubt``: it died, and need not be the reason; ``answer``: what its caller
    is told, as ``from_wire`` reads it.
    """

    how: str
    error: str = ""
    error_type: str = ""
    traceback: str = ""
    after_s: float = 0.0
    seconds: float = 0.0
    is_in_doubt: bool = False
    answer: Sequence[Any] | None = None

    @property
    def is_taken(self) -> bool:
        return self.how == DONE

    def told(self) -> str:
        """Describe the result in a few words.

        >>> CallResult(RAISED, "KeyError: 'x'").told(), CallResult(LATER, after_s=30).told()
        ("raises KeyError: 'x'", 'RetryLater 30 s')
        >>> CallResult(DIED, "by SIGABRT").told()
        'ended its process by SIGABRT'
        """
        if self.how == LATER:
            return f"RetryLater {self.after_s:g} s"
        if self.how == DONE:
            return "done"
        words = {RAISED: "raises ", HUNG: "hung: ", DIED: "ended its process ", NOT_RUN: "not run: "}
        return words.get(self.how, "") + self.error


def to_wire(told: object) -> bytes:
    """Return a line of JSON; bytes are text there, a letter for each (Latin-1)."""
    return orjson.dumps(told, default=lambda data: data.decode("latin-1")) + b"\n"


def from_wire(told: Sequence[str] | None) -> Any:
    return told and tuple(part.encode("latin-1") for part in told)


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
#: The limit in seconds where none is set: a person waits for the answer.
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
    ``with`` ends the process. ``usual_limit_s``: the limit where none is set; ``template``: None for one of its own,
    whose handlers print to standard error."""

    def __init__(
        self,
        spec: ProcessSpec,
        check: Callable[[], None],
        usual_limit_s: float = _USUAL_LIMIT_S,
        template: Template | None = None,
    ) -> None:
        self._spec = spec
        self._check = check
        self._usual_limit_s = usual_limit_s
        self._template = template or Template(_STDERR)
        self._is_own_template = template is None
        #: True until the process has got its first message.
        self.is_fresh = True
        self._process: Forked | None = None
        # A dying process writes here what it was doing.
        self._where = tempfile.TemporaryFile()  # noqa: SIM115 - closed at our own end
        self._limit_s = 0.0
        self._rest = b""
        self._is_late = False
        self.on_part: Callable[[tuple[bytes, bytes]], None] = lambda told: None
        #: Other observations, as sentences.
        self.notes: list[str] = []

    def run(self, piece: Piece) -> CallResult:
        """Run the handler on this message and return how the call ended. Raises StartRefused when the handler cannot be
        loaded."""
        process = self.begin()
        if not self._takes(piece):
            told = f"did not take the message within {_SEND_S:g} s"
            if (code := process.wait(_END_S)) is not None:
                told = f"ended {_ending(code)} before it took the message"
            self._kill()
            return CallResult(NOT_RUN, f"the handler's process {told}")
        began_s, kills = time.monotonic(), oom_kills()
        limit_s = self._limit_s or self._usual_limit_s
        self.is_fresh = False
        self._is_late = is_in_doubt = False
        try:
            while (answer := self._hear(began_s + limit_s + _GRACE_S - time.monotonic())) and PART in answer:
                self.on_part(from_wire(answer[PART]))
        except OSError:  # it has gone
            answer = None
        if answer is not None:
            return CallResult(**answer)
        seconds = time.monotonic() - began_s
        if not self._is_late:
            how, code = DIED, process.wait(_END_S)
            told = _ending(code) if code is not None else "by closing what connects us with it"
            is_in_doubt = code in (None, -signal.SIGKILL) and oom_kills() != kills
            told += ", when the kernel ended processes for want of memory" if is_in_doubt else ""
        else:
            how, told = HUNG, f"it did not end within {limit_s:g} s"
            told += "" if self._limit_s else ", and no limit is set (--handler-seconds)"
            with contextlib.suppress(OSError):  # it has just ended, or has changed its user
                os.kill(process.pid, TELL_WHERE)
            process.wait(_LAST_WORDS_S)
        self._kill()
        return CallResult(how, told, traceback=self._last_words(), seconds=seconds, is_in_doubt=is_in_doubt)

    def _takes(self, piece: Piece) -> bool:
        try:
            self._socket.sendall(to_wire(piece))
            return self._hear(_SEND_S) is not None
        except OSError:  # it has gone, or does not read
            return False

    def __exit__(self, kind: object, *_: object) -> None:
        self.end(gently=kind is None)

    def end(self, gently: bool) -> None:
        """End the process for good; ``gently``: it may write what it still has to write (a log, a buffer)."""
        process = self._process
        if process is not None and gently:
            self._note_end(process)
            self._socket.close()  # it reads the end
            process.wait(_END_S)
        self._kill()
        self._where.close()
        if self._is_own_template:
            self._template.end()

    def tell(self, order: Mapping[str, Any]) -> bool:
        """Send something that has no answer. Return False when the process is too busy to take it."""
        if self._process is None:
            return False
        try:
            self._socket.send(to_wire(order), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:  # it has gone
            pass
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
            self.notes.append(
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
        ours.settimeout(_SEND_S)
        self._process, self._socket, self._rest, self.is_fresh = process, ours, b"", True
        try:
            ours.sendall(to_wire(self._spec))
            answer = self._hear(_IMPORT_S)
        except OSError:
            answer = None
        if answer is None:
            code = process.wait(_END_S)
            ended = _ending(code) if code is not None else f"did not end within {_IMPORT_S:g} s"
            self._kill()
            raise StartRefused(
                f"{self._spec.handler}: its import ended the process {ended}\n{self._last_words()}".strip()
            )
        if "cannot" in answer:
            self._kill()
            raise StartRefused(answer["cannot"])
        self._limit_s = answer["limit_s"]
        return process

    def _hear(self, within_s: float) -> dict[str, Any] | None:
        looked_s = time.monotonic()
        until_s = looked_s + within_s
        sockets = select.poll()  # select() takes no number above 1023
        sockets.register(self._socket, select.POLLIN)
        while b"\n" not in self._rest:
            self._check()
            now = time.monotonic()
            if now - looked_s > _LATE_S:  # given back: the process may have stood still with us
                until_s += now - looked_s
            looked_s = now
            left_s = until_s - now
            # Before the look: the output of its last moment counts.
            is_over = self._process is None or self._process.wait() is not None
            if sockets.poll(0 if is_over else 1000 * min(max(left_s, 0.0), _LOOK_EVERY_S)):
                chunk = self._socket.recv(65_536)
                if not chunk:
                    return None
                self._rest += chunk
            elif is_over or left_s <= 0:  # over: a child of the process still holds the socket
                self._is_late = not is_over
                return None
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = orjson.loads(line)
        return answer

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        self._socket.close()  # it reads the end, and ends itself if we may not: its handler has changed the user
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
