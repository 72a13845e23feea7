"""The harness: it runs every scenario with child processes and looks at the ticket afterwards. It is one process
without threads, because it forks."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click

from usher.common.base.clock import wall_ms
from usher.common.runtime.fork_guard import end_with_parent
from usher.consumer.handlers.loader import load_handler
from usher.consumer.isolation.process import How
from usher.consumer.torture.child import TortureChild, TortureRequest
from usher.consumer.torture.findings import CaseFailure, Expected, ScenarioResult, explain, trouble_with_effect
from usher.consumer.torture.scenarios import (
    DISTURBED,
    MERGED,
    MESSAGES,
    SCENARIOS,
    UNDISTURBED,
    FaultPoint,
    RunStep,
    Scenario,
    Step,
    places,
)

#: Most starts of a handler that raises, for one message; then the message would become a dead letter.
_ATTEMPTS = 5
_RETRIES_LATER = 50
_OVER = ("well", "killed", "frozen", "died", "stuck", How.GAVE_UP, How.INVALID)
_LONGEST_PAUSE_S = 0.5


class HandlerUntestable(Exception):
    """The error when nothing can be said about this handler; the text says why."""


@dataclass
class Case:
    """A run of one scenario at one place: its ticket, its child processes (``actors``), and what was noted."""

    ticket: str
    actors: dict[str, TortureChild] = field(default_factory=dict)
    entries: dict[tuple[int, bool], tuple[str, list[str]]] = field(default_factory=dict)
    fence: int = 0
    where: str = ""
    notes: list[str] = field(default_factory=list)
    merged: set[int] = field(default_factory=set)  # messages that a run of another one has ended


class Harness:
    """The runner of the scenarios for one handler."""

    def __init__(self, request: TortureRequest) -> None:
        self._request = request
        self._run = secrets.token_hex(3)
        self._tickets, self._entries = 0, itertools.count(1)
        self._fences = wall_ms() * 1024  # as the leader's: higher than those of any run before
        self._parameters = 0
        self._hold_s = 0.5

    def tell_all(self, progress: Callable[[str, int, int], None]) -> list[ScenarioResult]:
        """Run every scenario at every place, and return the results. It calls ``progress(scenario, runs done, runs in
        all)``. Raises HandlerUntestable."""
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
        with contextlib.closing(TortureChild(self._request)) as actor:
            answer = self._ask(actor, {"do": "look"})
            self._parameters = answer["parameters"]
        if not answer["opened"]:
            load_handler(self._request.handler)
        with contextlib.closing(TortureChild(self._request)) as actor:
            self._ask(actor, {"do": "setup"})

    def _ask(self, actor: TortureChild, order: Mapping[str, Any]) -> dict[str, Any]:
        actor.pipe.send(order)
        answer = actor.hear(self._request.handler_s)
        if answer is None:
            raise HandlerUntestable(f"{order['do']}: it did not end within {self._request.handler_s:g} s")
        if answer["ended"] != "well":
            is_known = order["do"] == "look"  # an error in a name needs only one line
            raise HandlerUntestable(f"{order['do']}: {answer['error'] if is_known else _details(answer)}")
        return answer

    # ---- the expected effect -----------------------------------------------------------------------------------------

    def _undisturbed(self) -> tuple[Expected, int]:
        began_s = time.monotonic()
        first, lines = self._control()
        self._hold_s = max(0.3, (time.monotonic() - began_s) / 2)
        second, _ = self._control()
        trouble = trouble_with_effect(first[0], first, second)
        if trouble:
            raise HandlerUntestable(trouble)
        return first, lines

    def _control(self) -> tuple[Expected, int]:
        with self._story() as story:
            before = self._effect(story.ticket)
            after, lines = [self._seen(before, before)], 0
            for step in UNDISTURBED.steps(0):
                assert isinstance(step, RunStep)
                answer = self._perform(story, step)
                if answer["ended"] != "well":
                    told = f"the handler fails although nothing goes wrong; message {step.number}: {_details(answer)}"
                    raise HandlerUntestable(told)
                if step.number == DISTURBED:
                    lines = answer["lines"]
                after.append(self._seen(self._effect(story.ticket), before))
        return tuple(after), lines

    def _effect(self, ticket: str) -> tuple[Any, bool]:
        with contextlib.closing(TortureChild(self._request)) as actor:
            answer = self._ask(actor, {"do": "effect", "ticket": ticket, "parameters": self._parameters})
        return answer["value"], answer["is_total"]

    def _seen(self, now: tuple[Any, bool], before: tuple[Any, bool]) -> Any:
        value, is_total = now
        if not is_total:
            return value
        if not isinstance(value, (int, float)) or not isinstance(before[0], (int, float)):
            raise HandlerUntestable(
                "--effect takes no argument, so it must return a number (a total) or a mapping of tickets; it returned"
                f" {value!r}. Or let it take the ticket id"
            )
        return value - before[0]

    def _lines_of_merged(self) -> int:
        """Return the lines of a run for which the other messages wait; 0 if it absorbs none of them."""
        with self._story() as story:
            answer = self._perform(story, RunStep("a", 1, 1, merges=True))
            return int(answer["lines"]) if story.merged else 0

    # ---- cases -------------------------------------------------------------------------------------------------------

    def _tell(self, scenario: Scenario, place: FaultPoint, expected: Expected) -> CaseFailure | None:
        with self._story() as story:
            before = (0, True) if self._parameters else self._effect(story.ticket)  # only a total needs it
            for step in scenario.steps(place):
                self._step(story, step)
            self._wake_all(story)
        seen = self._seen(self._effect(story.ticket), before)
        if seen == expected[-1]:
            return None
        return CaseFailure(story.where, expected[-1], seen, explain(expected, seen), story.notes)

    def _step(self, story: Case, step: Step) -> None:
        if not isinstance(step, RunStep):
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
            answer = actor.hear(self._request.handler_s)
        if answer is None:
            actor.close()
            return {"ended": "stuck", "error": f"it did not end within {self._request.handler_s:g} s"}
        return answer

    def _wake_all(self, story: Case) -> None:
        for name in story.actors:
            self._wake(story, name)

    def _wake(self, story: Case, name: str) -> None:
        actor = story.actors[name]
        if not actor.is_frozen:
            return  # it was never stopped, or was woken earlier
        actor.wake()
        answer = actor.hear(self._request.handler_s)
        if answer is not None and answer["ended"] != "well":
            story.notes.append(f"the zombie ended with {answer['error']}")

    @contextlib.contextmanager
    def _story(self) -> Iterator[Case]:
        self._tickets += 1
        story = Case(f"torture-{self._run}-{self._tickets}")
        try:
            yield story
        finally:
            for actor in story.actors.values():
                actor.close()

    def _entry(self, story: Case, step: RunStep) -> tuple[str, list[str]]:
        key = (step.number, step.is_copy)
        if key not in story.entries:
            head = {"ticket_id": story.ticket, "uid": f"{story.ticket}-m{step.number}"}
            fields = head | dict(self._request.fields[step.number - 1])
            entry_id = f"{self._fences // 1024}-{next(self._entries)}"
            story.entries[key] = (entry_id, [part for pair in fields.items() for part in pair])
        return story.entries[key]


def _details(answer: Mapping[str, Any]) -> str:
    return str(answer.get("details") or answer["error"])


def default_fields(given: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the fields of the three messages: ``n``, ``amount`` (any sum of which shows its parts), and those that the
    user gives, with ``{n}`` and ``{amount}`` filled in."""
    made = []
    for number in range(1, MESSAGES + 1):
        base = {"n": str(number), "amount": str(10 ** (number - 1))}
        filled = {
            name: value.replace("{n}", base["n"]).replace("{amount}", base["amount"]) for name, value in given.items()
        }
        made.append(base | filled)
    return made


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
        except HandlerUntestable as why:
            told.send(str(why))
