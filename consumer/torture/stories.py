"""The scenarios, and the judgement of the effects that the harness saw. Pure: a scenario is a list of steps for actors
(child processes), which the harness performs; effects come in, words come out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise, product
from typing import Any

#: Number of messages of a ticket in a scenario.
MESSAGES = 3
#: The message in whose handler most faults happen.
DISTURBED = 2
#: Places where an actor is stopped: a number is "before the n-th line that runs", or one of these.
BEFORE, AFTER = "before", "after"
#: What a step does that wakes an actor, and runs nothing.
WAKE = "wake"
FaultPoint = int | str


@dataclass(frozen=True)
class RunStep:
    """The step in which ``actor`` runs message ``number`` (1 to 3) under ``fence`` (1, 2, ...).

    ``does``: the fault at ``place``: ``kill`` itself, ``freeze``, or ``fail`` with an error; empty: none; ``WAKE``: it
    only wakes up. ``is_copy``: it runs a second entry with the same uid. ``attempt``: as the handler sees it.
    ``merges``: the messages behind it wait, for a handler that absorbs them.
    """

    actor: str
    number: int
    fence: int
    does: str = ""
    place: FaultPoint = BEFORE
    is_copy: bool = False
    attempt: int = 1
    merges: bool = False


@dataclass(frozen=True)
class Scenario:
    """A fault: its name in JSON, a title, how it comes about in real life, the advice, and its steps, in which ``a2/1``
    is "actor a runs message 2 under fence 1". A fault, ``copy``, ``merge`` and ``again`` (the second attempt) may
    follow a colon; ``wake:a`` wakes an actor."""

    name: str
    title: str
    story: str
    advice: str
    script: str
    at_every_line: bool = False

    def steps(self, place: FaultPoint) -> list[RunStep]:
        made: list[RunStep] = []
        for word in self.script.split():
            what, *how = word.split(":")
            if what == WAKE:
                made.append(RunStep(how[0], 0, 0, WAKE))
                continue
            does = next((fault for fault in ("kill", "fail", "freeze") if fault in how), "")
            run = RunStep(what[0], int(what[1]), int(what[3:]), does, place if does else BEFORE, "copy" in how)
            made.append(replace(run, attempt=1 + ("again" in how), merges="merge" in how))
        return made


_UID = (
    "Store message.uid in the same transaction as the effect and skip a uid that is known; SqlSink does both:"
    " `@sink.exactly_once`."
)
_FENCE = (
    "Store message.fence with the effect and refuse a lower one in the same atomic statement; asking still_mine() is"
    " not enough, because the pause can come right after the answer. SqlSink and RedisGuard do it."
)
_ATOMIC = (
    "Put all that the handler stores into one transaction, together with the uid (SqlSink), so that either all of it is"
    " there or nothing."
)


UNDISTURBED = Scenario("undisturbed", "nothing goes wrong", "Three messages, each handled once.", "", "a1/1 a2/1 a3/1")
SCENARIOS = (
    Scenario(
        "sent_twice",
        "a producer sends a message twice",
        "Message 2 is in the stream twice, with the same uid: the producer did not hear that its first XADD had"
        " arrived.",
        _UID,
        "a1/1 a2/1 a2/1:copy a3/1",
    ),
    Scenario(
        "sent_again_later",
        "the second copy comes behind newer messages",
        "Message 1 comes once more, with the same uid, after messages 2 and 3: an outbox sent its last batch again.",
        _UID + " A 'last uid seen' is not enough.",
        "a1/1 a2/1 a3/1 b1/2:copy",
    ),
    Scenario(
        "repeated_tail",
        "several messages run again, in order",
        "Messages 1 to 3 were handled, and their process died before the batch of acknowledgements was sent: all three"
        " run again elsewhere.",
        _UID,
        "a1/1 a2/1 a3/1 b1/2 b2/2 b3/2",
    ),
    Scenario(
        "late_ack",
        "the acknowledgement comes too late",
        "A consumer handled message 2, but its lease ended before it could say so: the new owner runs it again, the old"
        " one goes on to message 3.",
        _UID + " " + _FENCE,
        "a1/1 a2/1 b2/2 a3/1 b3/2",
    ),
    Scenario(
        "zombie",
        "a zombie wakes up with an old fencing token",
        "A process freezes before it starts the handler for message 2; another owner takes the ticket over with"
        " messages 2 and 3; then it wakes up and runs message 2 under its old fencing token.",
        _FENCE,
        "a1/1 a2/1:freeze b2/2 b3/2 wake:a",
    ),
    Scenario(
        "two_zombies",
        "two zombies wake up, the younger first",
        "Two owners in a row freeze before message 1; a third one runs messages 1 to 3; then both wake up.",
        _FENCE,
        "a1/1:freeze b1/2:freeze c1/3 c2/3 c3/3 wake:b wake:a",
    ),
    Scenario(
        "killed_within",
        "kill -9 before every line, and before the acknowledgement",
        "The process is killed in the handler for message 2, or right behind it; the message runs again elsewhere.",
        _ATOMIC + " " + _UID,
        "a1/1 a2/1:kill b2/2:again b3/2",
        at_every_line=True,
    ),
    Scenario(
        "failed_within",
        "an error before every line, and a retry",
        "An error comes up in the middle of the handler for message 2 (a timeout, say), and the handler is called"
        " again.",
        _ATOMIC + " Let errors out of the handler: one that is swallowed counts as success.",
        "a1/1 a2/1:fail a2/1:again a3/1",
        at_every_line=True,
    ),
    Scenario(
        "zombie_within",
        "a zombie freezes before every line",
        "A process freezes in the middle of the handler for message 2; another owner takes the ticket over with"
        " messages 2 and 3; then it wakes up and finishes message 2.",
        _FENCE + " Check and effect must be one transaction.",
        "a1/1 a2/1:freeze b2/2 b3/2 wake:a",
        at_every_line=True,
    ),
)

_EACH = (
    "Treat each message of a run (`for one in (message, *message.absorb())`) as if it ran alone, under its own uid and"
    " fence, all in one transaction. What must differ, such as one answer for all, is left out of --effect."
)
#: For handlers that absorb. A run that failed or was killed comes again in parts: its message runs alone.
MERGED = (
    Scenario(
        "merged",
        "a run absorbs what waits",
        "Messages 2 and 3 wait as message 1 begins; the ticket should look as if each had run alone.",
        _EACH,
        "a1/1:merge a2/1:merge a3/1",
    ),
    Scenario(
        "merged_killed_within",
        "kill -9 before every line of a run that absorbs",
        "The process is killed in a run, or behind it: message 1 comes again alone, the others in a run behind it.",
        _EACH,
        "a1/1:merge:kill b1/2:again b2/2:merge b3/2",
        at_every_line=True,
    ),
    Scenario(
        "merged_failed_within",
        "an error before every line of a run that absorbs",
        "An error comes up in a run; all come back in order, and each runs alone.",
        _EACH + " Let errors out of the handler.",
        "a1/1:merge:fail a1/1:again a2/1 a3/1",
        at_every_line=True,
    ),
)


def places(scenario: Scenario, lines: int, most: int) -> list[FaultPoint]:
    """Return the places of the fault in this scenario, when an undisturbed run has ``lines`` lines: at most ``most`` of
    them, evenly spread, and the end."""
    if not scenario.at_every_line:
        return [BEFORE]
    count = min(lines, most)
    return [*(at * lines // count for at in range(count)), AFTER]


_LONGEST_SHOWN = 160
#: Words for how often a message was added.
_OFTEN = ("not at all", "once", "twice", "three times", "four times", "five times")


#: The effect of an undisturbed ticket before any message, and after the first, second and third.
Expected = tuple[Any, ...]


@dataclass(frozen=True)
class CaseFailure:
    """A run of a scenario after which the ticket was not as it should be. ``where``: the place of the fault; ``notes``:
    whatever else was seen."""

    where: str
    expected: Any
    seen: Any
    explanation: str
    notes: Sequence[str] = ()


@dataclass
class ScenarioResult:
    """The result of a scenario: how often it was run, and what went wrong."""

    name: str
    title: str
    story: str
    advice: str
    runs: int = 0
    failures: list[CaseFailure] = field(default_factory=list)

    @property
    def safe(self) -> bool:
        return not self.failures

    def document(self) -> dict[str, Any]:
        return asdict(self) | {"safe": self.safe}


def explain(expected: Expected, seen: Any) -> str:
    """Return the difference in words; with numbers and lists also the message that it comes from."""
    want = expected[-1]
    if all(
        isinstance(value, list) and len(value) == 1 for value in (want, seen)
    ):  # a table of one row, or of one value
        inside = tuple(value[0] if isinstance(value, list) and value else None for value in expected)
        return explain(inside, seen[0])
    for number, earlier in enumerate(expected[:-1]):
        if seen == earlier:
            return (
                f"it is as after message {number}:"
                f" {'a later effect is missing or was overwritten' if number else 'no effect is there'}"
            )
    if _is_number(want) and _is_number(seen):
        return _about_numbers(expected, seen)
    if isinstance(want, list) and isinstance(seen, list):
        return _about_lists(want, seen)
    return f"it should be {format_effect(want)} and is {format_effect(seen)}"


def _about_numbers(expected: Expected, seen: Any) -> str:
    """Return the difference, and how often each message was added where it comes of that: of several ways that with
    the fewest messages."""
    sums = [value if _is_number(value) else 0 for value in expected]  # before any message there may be no sum
    difference = seen - expected[-1]
    told = f"{format_effect(abs(difference))} too {'much' if difference > 0 else 'little'}"
    steps = [later - earlier for earlier, later in pairwise(sums)]
    ways = [
        {number: often for number, often in enumerate(each, start=1) if often != 1}
        for each in product(range(len(_OFTEN)), repeat=len(steps))
        if sum((often - 1) * step for often, step in zip(each, steps, strict=True)) == difference
    ]
    ways = [way for way in ways if len(way) < len(steps) or len({*way.values()}) == 1]  # else it is a guess
    if not ways:
        return told
    way = min(ways, key=lambda way: (len(way), sum(way.values())))
    return f"{told}: your handler added {', '.join(f'message {number} {_OFTEN[way[number]]}' for number in way)}"


def _about_lists(want: list[Any], seen: list[Any]) -> str:
    wanted, found = (Counter(json.dumps(item, sort_keys=True) for item in items) for items in (want, seen))
    more, less = found - wanted, wanted - found
    parts = [
        f"{', '.join(item[:_LONGEST_SHOWN] for item in list(items)[:3])} {how}"
        for items, how in ((more, "too often"), (less, "missing"))
        if items
    ]
    return "; ".join(parts) or "the same items in another order"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def format_effect(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "..."


def trouble_with_effect(before: Any, first: Expected, second: Expected) -> str:
    """Return the reason why effects cannot be judged, else "": a handled ticket looks like one that was not, or two
    equal ones look different."""
    if first[-1] == before:
        return (
            f"a ticket looks the same before its messages and after them ({format_effect(before)}): --effect does not"
            " show what the handler does, or the handler does nothing with these messages (see --field)"
        )
    if first != second:
        return (
            "two tickets got the same three messages undisturbed, and --effect returned"
            f" {format_effect(first[-1])} for one and {format_effect(second[-1])} for the other: leave out what"
            " differs by nature (ids, times, the ticket's own name)"
        )
    return ""


def summary(findings: Sequence[ScenarioResult]) -> str:
    bad = [finding for finding in findings if not finding.safe]
    runs = sum(finding.runs for finding in findings)
    if not bad:
        return f"SAFE: after each of {runs} stories of {len(findings)} kinds every effect was there exactly once"
    return (
        f"NOT SAFE: effects went wrong in {len(bad)} of {len(findings)} kinds of stories"
        f" ({', '.join(finding.name for finding in bad)})"
    )


def explained(finding: ScenarioResult) -> Iterator[str]:
    failure = finding.failures[0]
    yield finding.story
    yield f"Expected {format_effect(failure.expected)}, seen {format_effect(failure.seen)}: {failure.explanation}."
    if failure.where:
        yield f"The place: {failure.where}"
    for note in failure.notes[:3]:
        yield f"({note})"
    if len(finding.failures) > 1:
        yield f"{len(finding.failures)} of {finding.runs} places are of this kind."
    yield f"-> {finding.advice}"
