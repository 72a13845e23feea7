"""The processes of the harness: one without threads, because it forks, runs every scenario and looks at the ticket
afterwards; its children play incarnations of a consumer each, and run the user's handler.

The harness talks to a child through a pipe. An order is ``run`` (a message), ``call`` (of ``--setup`` or
``--effect``) or ``look`` (check the names, and what the handler's module opens at its import). The answer says how the
order ended; before the child kills or freezes itself, it says so, and where.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import os
import pkgutil
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import click

from usher.common.base.clock import now_s, wall_ms
from usher.common.base.errors import StartRefused
from usher.common.protocol.attempts import Attempts
from usher.common.runtime.fork_guard import end_with_parent
from usher.consumer.handlers.error_trace import is_users
from usher.consumer.handlers.loader import Handler, load_handler
from usher.consumer.handlers.message import Message, OwnLease
from usher.consumer.isolation.child import HandlerCall
from usher.consumer.isolation.process import CallResult, How
from usher.consumer.torture.stories import (
    AFTER,
    DISTURBED,
    MERGED,
    MESSAGES,
    SCENARIOS,
    UNDISTURBED,
    WAKE,
    CaseFailure,
    Expected,
    FaultPoint,
    RunStep,
    Scenario,
    ScenarioResult,
    explain,
    places,
    trouble_with_effect,
)


def counted(run: Callable[[], Any], own_file: str, at: int | None, act: Callable[[str], None]) -> tuple[Any, int]:
    """Return the result of a call, and the number of lines that it ran in users' files, the handler's ``own_file``
    included. Call ``act(place in words)`` before the ``at``-th of them (from 0)."""
    count = 0

    def entered(frame: FrameType, event: str, arg: Any) -> Any:
        file = frame.f_code.co_filename
        return line if file == own_file or is_users(file) else None

    def line(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        if event == "line":
            reached, count = count, count + 1
            if reached == at:
                file, number = frame.f_code.co_filename, frame.f_lineno
                act(f"{Path(file).name}:{number}: {linecache.getline(file, number).strip()[:80]}")
        return line

    sys.settrace(entered)
    try:
        return run(), count
    finally:
        sys.settrace(None)


def to_json_value(value: Any) -> Any:
    """Return ``value`` as numbers, texts, lists and mappings. Rows become lists, sets sorted lists; anything else
    becomes its ``repr``.

    >>> to_json_value({"rows": [(1, "a")], "seen": {2, 1}})
    {'rows': [[1, 'a']], 'seen': [1, 2]}
    """
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if value is None or isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < 2**63):  # of JSON
        return value
    if isinstance(value, Mapping):
        return {to_json_value(str(name)): to_json_value(inner) for name, inner in value.items()}
    if isinstance(value, Set):
        return sorted(map(to_json_value, value), key=repr)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [*map(to_json_value, value)]
    return repr(value)


_LEASE_S = 3600.0


class TortureError(Exception):
    """An error that `usher torture` raises in the handler, like a timeout of a library."""


@dataclass(frozen=True)
class TortureRequest:
    """Request for a test: a handler, the function that reads its effect, and one to call once before, each as
    ``module:function``. ``fields``: of the messages, beside ``n`` and ``amount``; ``stops``: most places of a fault per
    scenario; ``handler_seconds``: longest that one call may take."""

    handler: str
    effect: str
    setup: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)
    stops: int = 30
    handler_seconds: float = 30.0


def load_function(spec: str, option: str) -> Callable[..., Any]:
    try:
        function: Callable[..., Any] = pkgutil.resolve_name(spec)
    except (ImportError, AttributeError, ValueError) as problem:
        raise ValueError(f"{option} {spec}: {problem}") from problem
    return function


class TortureChild:
    def __init__(self, request: TortureRequest) -> None:
        self.pipe, theirs = Pipe()
        self._process = get_context("fork").Process(target=_live, args=(theirs, self.pipe, request))
        self._process.start()
        theirs.close()
        self.is_frozen = False

    def hear(self, within_s: float) -> dict[str, Any] | None:
        """Return the next answer, or None when there is none in time. The answer of a child that is gone is
        ``died``."""
        if not self.pipe.poll(within_s):
            return None
        try:
            answer: dict[str, Any] = self.pipe.recv()
        except (EOFError, OSError):
            return {"ended": "died", "error": "its process ended by itself"}
        if answer["ended"] == "frozen":  # it says so just before it stops: the signal to go on must not come first
            os.waitpid(self._pid, os.WUNTRACED)
            self.is_frozen = True
        elif answer["ended"] == "killed":
            self._process.join()
        return answer

    def wake(self) -> None:
        self.is_frozen = False
        os.kill(self._pid, signal.SIGCONT)

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self.pipe.close()

    @property
    def _pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid


# ---- in the child process --------------------------------------------------------------------------------------------


def _live(stage: Connection, of_harness: Connection, request: TortureRequest) -> None:
    end_with_parent()  # frozen, it would outlive the harness
    of_harness.close()
    with contextlib.suppress(EOFError):  # the harness has gone
        _ChildLoop(stage, request).run()


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
        load_function(self._request.effect, "--effect")
        if self._request.setup:
            load_function(self._request.setup, "--setup")
        return {"ended": "well", "opened": _descriptors() != before}

    def _do_call(self, order: dict[str, Any]) -> dict[str, Any]:
        """Call the function of ``--setup`` or ``--effect``."""
        result = load_function(getattr(self._request, order["of"]), f"--{order['of']}")(*order["given"])
        value = self._call.wait(result) if inspect.isawaitable(result) else result
        return {"ended": "well", "value": to_json_value(value)}

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

        own = getattr(getattr(inspect.unwrap(self._handler.call), "__code__", None), "co_filename", "")
        if does and place == "before":
            act("the handler")
        problem, lines = counted(lambda: call(message), own, place if isinstance(place, int) else None, act)
        if problem is not None:
            raise problem
        # This run may have had fewer lines than the undisturbed one.
        if does and (place == AFTER or (isinstance(place, int) and lines <= place)):
            act("the acknowledgement")
        return {"ended": "well", "lines": lines, "absorbed": absorbed}


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


# ---- in the harness --------------------------------------------------------------------------------------------------

#: Most starts of a handler that raises, for one message; then the message would become a dead letter.
_ATTEMPTS = 5
_RETRIES_LATER = 50
_OVER = ("well", "killed", "frozen", "died", "stuck", How.GAVE_UP, How.INVALID)
_LONGEST_PAUSE_S = 0.5


@dataclass
class Case:
    """A run of one scenario at one place: its ticket, its child processes (``actors``), and what was noted."""

    number: int
    ticket: str
    actors: dict[str, TortureChild] = field(default_factory=dict)
    fence: int = 0
    where: str = ""
    notes: list[str] = field(default_factory=list)
    merged: set[int] = field(default_factory=set)  # messages that a run of another one has ended


class Harness:
    """The runner of the scenarios for one handler."""

    def __init__(self, request: TortureRequest) -> None:
        self._request = request
        self._run = secrets.token_hex(3)
        self._tickets = 0
        self._fences = wall_ms() * 1024  # as the leader's: higher than those of any run before
        self._hold_s = 0.5

    def tell_all(self, progress: Callable[[str, int, int], None]) -> list[ScenarioResult]:
        """Run every scenario at every place, and return the results. It calls ``progress(scenario, runs done, runs in
        all)``. Raises StartRefused."""
        self._look()
        expected, lines = self._undisturbed()
        merged = self._lines_of_merged()
        told_of = [(each, lines) for each in SCENARIOS] + [(each, merged) for each in MERGED if merged]
        plan = [(each, place) for each, many in told_of for place in places(each, many, self._request.stops)]
        findings = {each.name: ScenarioResult(each.name, each.title, each.story, each.advice) for each, _ in told_of}
        for told, (scenario, place) in enumerate(plan):
            progress(scenario.name, told, len(plan))
            failure = self._tell(scenario, place, expected)
            findings[scenario.name].runs += 1
            findings[scenario.name].failures += [failure] if failure else []
        return [*findings.values()]

    def _look(self) -> None:
        """Check that all names are there, and import the handler once for all child processes, unless its import opens
        files or connections; then call the setup."""
        if not self._ask("look")["opened"]:
            load_handler(self._request.handler)
        if self._request.setup:
            self._ask("call", "setup")

    def _ask(self, do: str, of: str = "", *given: str) -> dict[str, Any]:
        """Return the answer of a child of its own to an order."""
        with contextlib.closing(TortureChild(self._request)) as actor:
            actor.pipe.send({"do": do, "of": of, "given": given})
            answer = actor.hear(self._request.handler_seconds)
        if answer is None:
            raise StartRefused(f"{of or do}: it did not end within {self._request.handler_seconds:g} s")
        if answer["ended"] != "well":  # an error in a name needs only one line
            raise StartRefused(f"{of or do}: {_details(answer) if of else answer['error']}")
        return answer

    # ---- the expected effect -----------------------------------------------------------------------------------------

    def _undisturbed(self) -> tuple[Expected, int]:
        began_s = time.monotonic()
        first, lines = self._control()
        self._hold_s = max(0.3, (time.monotonic() - began_s) / 2)
        second, _ = self._control()
        trouble = trouble_with_effect(first[0], first, second)
        if trouble:
            raise StartRefused(trouble)
        return first, lines

    def _control(self) -> tuple[Expected, int]:
        with self._story() as story:
            after, lines = [self._effect(story.ticket)], 0
            for step in UNDISTURBED.steps(0):
                answer = self._perform(story, step)
                if answer["ended"] != "well":
                    told = f"the handler fails although nothing goes wrong; message {step.number}: {_details(answer)}"
                    raise StartRefused(told)
                if step.number == DISTURBED:
                    lines = answer["lines"]
                after.append(self._effect(story.ticket))
        return tuple(after), lines

    def _effect(self, ticket: str) -> Any:
        return self._ask("call", "effect", ticket)["value"]

    def _lines_of_merged(self) -> int:
        """Return the lines of a run for which the other messages wait; 0 if it absorbs none of them."""
        with self._story() as story:
            answer = self._perform(story, RunStep("a", 1, 1, merges=True))
            return int(answer["lines"]) if story.merged else 0

    # ---- cases -------------------------------------------------------------------------------------------------------

    def _tell(self, scenario: Scenario, place: FaultPoint, expected: Expected) -> CaseFailure | None:
        with self._story() as story:
            for step in scenario.steps(place):
                self._step(story, step)
            self._wake_all(story)
        seen = self._effect(story.ticket)
        if seen == expected[-1]:
            return None
        return CaseFailure(story.where, expected[-1], seen, explain(expected, seen), story.notes)

    def _step(self, story: Case, step: RunStep) -> None:
        if step.does == WAKE:
            self._wake(story, step.actor)
            return
        if step.number in story.merged:
            return
        answer = self._perform(story, step)
        if "where" in answer:
            story.where = f"before {answer['where']}"
        elif answer.get("is_ours"):
            story.where = answer["error"].partition("an error ")[2]
        elif answer["ended"] != "well":
            story.notes.append(f"message {step.number}, actor {step.actor}: {answer['error']}")

    def _perform(self, story: Case, step: RunStep) -> dict[str, Any]:
        actor = story.actors.get(step.actor)
        if actor is None:
            actor = story.actors[step.actor] = TortureChild(self._request)
        is_stale, story.fence = step.fence < story.fence, max(step.fence, story.fence)
        entry_id, flat = self._entry(story, step)
        order = {"do": "run", "ticket": story.ticket, "id": entry_id, "flat": flat, "fence": self._fences + step.fence}
        order |= {"does": step.does, "place": step.place}
        behind = range(step.number + 1, MESSAGES + 1) if step.merges else ()
        order["behind"] = [(n, *self._entry(story, replace(step, number=n))) for n in behind]
        attempt, later = step.attempt, 0
        while True:
            actor.pipe.send(order | {"attempt": attempt})
            answer = self._heard(story, actor)
            order["behind"] = []  # what failed runs alone the next time
            story.merged.update(answer.get("absorbed", ()))
            ended = answer["ended"]
            if is_stale or answer.get("is_ours") or ended in _OVER:
                return answer
            later += ended == How.LATER
            if later > _RETRIES_LATER or attempt - later >= step.attempt + _ATTEMPTS - 1:
                return answer | {"error": f"given up after {attempt} attempts: {answer['error']}"}
            attempt += 1
            time.sleep(min(answer["after_s"], _LONGEST_PAUSE_S))

    def _heard(self, story: Case, actor: TortureChild) -> dict[str, Any]:
        """Return the answer of ``actor``. If it waits for a lock that a frozen one holds, wake that one earlier."""
        answer = actor.hear(self._hold_s)
        if answer is None and any(other.is_frozen for other in story.actors.values()):
            self._wake_all(story)
        if answer is None:
            answer = actor.hear(self._request.handler_seconds)
        if answer is None:
            actor.close()
            return {"ended": "stuck", "error": f"it did not end within {self._request.handler_seconds:g} s"}
        return answer

    def _wake_all(self, story: Case) -> None:
        for name in story.actors:
            self._wake(story, name)

    def _wake(self, story: Case, name: str) -> None:
        actor = story.actors[name]
        if not actor.is_frozen:
            return  # it was never stopped, or was woken earlier
        actor.wake()
        answer = actor.hear(self._request.handler_seconds)
        if answer is not None and answer["ended"] != "well":
            story.notes.append(f"the zombie ended with {answer['error']}")

    @contextlib.contextmanager
    def _story(self) -> Iterator[Case]:
        self._tickets += 1
        story = Case(self._tickets, f"torture-{self._run}-{self._tickets}")
        try:
            yield story
        finally:
            for actor in story.actors.values():
                actor.close()

    def _entry(self, story: Case, step: RunStep) -> tuple[str, list[str]]:
        """Return a message's id and fields: ``amount`` is such that any sum shows its parts."""
        own = {"n": str(step.number), "amount": str(10 ** (step.number - 1))}
        fields = {"ticket_id": story.ticket, "uid": f"{story.ticket}-m{step.number}", **own}
        for name, value in self._request.fields.items():
            fields[name] = value.replace("{n}", own["n"]).replace("{amount}", own["amount"])
        place = 2 * MESSAGES * story.number + MESSAGES * step.is_copy + step.number
        return f"{self._fences // 1024}-{place}", [part for pair in fields.items() for part in pair]


def _details(answer: Mapping[str, Any]) -> str:
    return str(answer.get("details") or answer["error"])


@click.command(name="torture-stage")
@click.argument("told_to", type=int)
def main(told_to: int) -> None:
    """Run all scenarios for the request that comes over the pipe ``told_to``, and answer there: standard output belongs
    to the handler and its prints."""
    end_with_parent()
    sys.path.append(str(Path.cwd()))  # the folder of the handler's project
    os.set_inheritable(told_to, False)
    with Connection(told_to) as told:
        try:
            told.send(Harness(told.recv()).tell_all(lambda *progress: told.send(progress)))
        except StartRefused as why:
            told.send(str(why))
