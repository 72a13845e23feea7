"""The child process of the harness: forked, it plays one incarnation of a consumer and runs the user's handler.

The harness talks to it through a pipe. An order is ``run`` (a message), ``effect`` (read a
ticket's effect), ``setup`` or ``look`` (check the names, and what the handler's module opens at its import). The answer
says how the order ended; before the child kills or freezes itself, it says so, and where.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import linecache
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

from usher.common.base.clock import now_s
from usher.common.protocol.attempts import Attempts
from usher.common.runtime.fork_guard import end_with_parent
from usher.consumer.handlers.error_trace import is_users
from usher.consumer.handlers.loader import Handler, load_handler
from usher.consumer.handlers.message import Message, OwnLease
from usher.consumer.isolation.child import HandlerCall
from usher.consumer.isolation.process import CallResult
from usher.consumer.torture.scenarios import AFTER


class LineStops:
    """A counter of the lines that a call runs. It calls ``act(place in words)`` before the ``at``-th line (from 0);
    with ``at`` None it only counts."""

    def __init__(self, always: str, at: int | None, act: Callable[[str], None]) -> None:
        self._always = always  # the handler's own file
        self._at = at
        self._act = act
        self.count = 0

    def call(self, run: Callable[[], Any]) -> Any:
        sys.settrace(self._entered)
        try:
            return run()
        finally:
            sys.settrace(None)

    def _entered(self, frame: FrameType, event: str, arg: Any) -> Any:
        file = frame.f_code.co_filename
        return self._line if file == self._always or is_users(file) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            reached, self.count = self.count, self.count + 1
            if reached == self._at:
                file, line = frame.f_code.co_filename, frame.f_lineno
                self._act(f"{Path(file).name}:{line}: {linecache.getline(file, line).strip()[:80]}")
        return self._line


#: The range in which JSON integers travel as themselves.
_LARGEST = 2**63 - 1


def to_json_value(value: Any) -> Any:
    """Return ``value`` as numbers, texts, lists and mappings. Rows become lists, sets sorted lists; anything else
    becomes its ``repr``.

    >>> to_json_value({"rows": [(1, "a")], "seen": {2, 1}})
    {'rows': [[1, 'a']], 'seen': [1, 2]}
    """
    if value is None or isinstance(value, (bool, float, str)):
        return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
    if isinstance(value, int):
        return value if abs(value) <= _LARGEST else str(value)
    if isinstance(value, Mapping):
        return {to_json_value(str(name)): to_json_value(inner) for name, inner in value.items()}
    if isinstance(value, Set):
        return sorted((to_json_value(inner) for inner in value), key=repr)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [to_json_value(inner) for inner in value]
    return repr(value)


_LEASE_S = 3600.0


class TortureError(Exception):
    """An error that `usher torture` raises in the handler, like a timeout of a library."""


@dataclass(frozen=True)
class TortureRequest:
    """What to test: a handler, the function that reads its effect, and one to call once before, each as
    ``module:function``. ``fields``: of the messages, one mapping for each; ``stops``: most places of a fault per
    scenario; ``handler_s``: longest that one call may take."""

    handler: str
    effect: str
    setup: str
    fields: Sequence[Mapping[str, str]]
    stops: int
    handler_s: float


def load_function(spec: str, option: str) -> Callable[..., Any]:
    module, _, name = spec.partition(":")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as problem:
        raise ValueError(f"{option} {spec}: {problem}") from problem
    return function


class TortureChild:
    def __init__(self, request: TortureRequest) -> None:
        ours, theirs = Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            _live(theirs, request)
        theirs.close()
        self.pipe = ours
        self.is_frozen = False
        self.is_over = False

    def hear(self, within_s: float) -> dict[str, Any] | None:
        """Return the next answer, or None when there is none in time. The answer of a child that is gone is
        ``died``."""
        if not self.pipe.poll(within_s):
            return None
        try:
            answer: dict[str, Any] = self.pipe.recv()
        except (EOFError, OSError):
            self._reap()
            return {"ended": "died", "error": "its process ended by itself"}
        if answer["ended"] == "frozen":  # it says so just before it stops: the signal to go on must not come first
            os.waitpid(self.pid, os.WUNTRACED)
            self.is_frozen = True
        elif answer["ended"] == "killed":
            self._reap()
        return answer

    def wake(self) -> None:
        self.is_frozen = False
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        if not self.is_over:
            os.kill(self.pid, signal.SIGKILL)
            self._reap()
        self.pipe.close()

    def _reap(self) -> None:
        if not self.is_over:
            os.waitpid(self.pid, 0)
            self.is_over = True


# ---- in the child process --------------------------------------------------------------------------------------------


def _live(stage: Connection, request: TortureRequest) -> None:
    try:
        end_with_parent()  # frozen, it would outlive the harness
        with contextlib.suppress(EOFError):  # the harness has gone
            _ChildLoop(stage, request).run()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


class _ChildLoop:
    """The loop of the child process: it obeys orders, one ``_do_`` method each."""

    def __init__(self, stage: Connection, request: TortureRequest) -> None:
        self._stage = stage
        self._request = request

    def run(self) -> None:
        while True:
            order = self._stage.recv()
            try:
                answer = getattr(self, f"_do_{order['do']}")(order)
            except BaseException as problem:
                answer = _raised(problem)
            self._stage.send(answer)

    @functools.cached_property
    def _handler(self) -> Handler:
        return load_handler(self._request.handler)

    @functools.cached_property
    def _call(self) -> HandlerCall:
        return HandlerCall(self._handler)

    def _do_look(self, order: dict[str, Any]) -> dict[str, Any]:
        before = _descriptors()
        load_handler(self._request.handler)
        effect = load_function(self._request.effect, "--effect")
        if self._request.setup:
            load_function(self._request.setup, "--setup")
        parameters = len(inspect.signature(effect).parameters)
        return {"ended": "well", "opened": _descriptors() != before, "parameters": parameters}

    def _do_setup(self, order: dict[str, Any]) -> dict[str, Any]:
        if self._request.setup:
            self._called(load_function(self._request.setup, "--setup"))
        return {"ended": "well"}

    def _do_effect(self, order: dict[str, Any]) -> dict[str, Any]:
        effect = load_function(self._request.effect, "--effect")
        value = self._called(effect, *([order["ticket"]] if order["parameters"] else []))
        if not order["parameters"] and isinstance(value, Mapping):
            return {"ended": "well", "value": to_json_value(value.get(order["ticket"])), "is_total": False}
        return {"ended": "well", "value": to_json_value(value), "is_total": not order["parameters"]}

    def _do_run(self, order: dict[str, Any]) -> dict[str, Any]:
        call = self._call
        lease, before, absorbed = OwnLease(_LEASE_S, now_s()), order["attempt"] - 1, list[int]()

        class Given(Message):
            __slots__ = ()

            def absorb(self, limit: int | None = None) -> list[Message]:
                taken = waiting[:limit]
                del waiting[: len(taken)]
                absorbed.extend(number for number, _ in taken)
                return [one for _, one in taken]

            async def more(self, timeout_s: float) -> Message | None:
                return next(iter(self.absorb(1)), None)

        def entry(entry_id: str, flat: Sequence[str], before: int = 0) -> Message:
            parts = [part.encode("utf-8", "surrogateescape") for part in flat]
            of_ticket = order["ticket"].encode(), entry_id.encode(), order["fence"], parts
            message = Given(*of_ticket, lease, Attempts(before, before))
            message.attempt += 1
            return message

        message = entry(order["id"], order["flat"], before)
        waiting = [(number, entry(*one)) for number, *one in order["behind"]]
        does, place = order["does"], order["place"]

        def act(where: str) -> None:
            if does == "fail":
                raise TortureError(f"an error before {where}")
            self._stage.send({"ended": "killed" if does == "kill" else "frozen", "where": where})
            os.kill(os.getpid(), signal.SIGKILL if does == "kill" else signal.SIGSTOP)
            lease.end()  # a process that was stopped has slept for longer than its lease

        source = inspect.unwrap(self._handler.call)
        steps = LineStops(
            getattr(getattr(source, "__code__", None), "co_filename", ""),
            place if isinstance(place, int) else None,
            act,
        )
        if does and place == "before":
            act("the handler")
        if (problem := steps.call(lambda: call(message))) is not None:
            raise problem
        # This run may have had fewer lines than the undisturbed one.
        if does and (place == AFTER or (isinstance(place, int) and steps.count <= place)):
            act("the acknowledgement")
        return {"ended": "well", "lines": steps.count, "absorbed": absorbed}

    def _called(self, function: Callable[..., Any], *arguments: Any) -> Any:
        result = function(*arguments)
        return self._call.wait(result) if inspect.isawaitable(result) else result


def _raised(raised: BaseException) -> dict[str, Any]:
    told = CallResult.of(raised)
    answer = {"ended": told.how, "error": told.error[:500], "after_s": told.after_s, "details": told.traceback[-4000:]}
    return answer | {"is_ours": isinstance(raised, TortureError)}


def _descriptors() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor from which this list was read
            found.add(f"{name} {Path('/proc/self/fd', name).readlink()}")
    return found
