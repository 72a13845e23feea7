"""The judgement of the effects that the harness saw. Pure: effects in, words out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

_LONGEST_SHOWN = 160
#: Words for how often a message was added, by the number of times too many.
_TIMES = {1: "twice", 2: "three times", 3: "four times", 4: "five times"}


@dataclass(frozen=True)
class Expected:
    """The effect of an undisturbed ticket before any message, and after the first, second and third."""

    after: tuple[Any, ...]

    @property
    def whole(self) -> Any:
        return self.after[-1]


@dataclass(frozen=True)
class CaseFailure:
    """A run of a scenario after which the ticket was not as it should be. ``where``: the place of the fault; ``notes``:
    whatever else was seen."""

    where: str
    expected: Any
    seen: Any
    explanation: str
    notes: tuple[str, ...] = ()


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
    if all(_is_single(value) for value in (expected.whole, seen)):  # a table of one row, or of one value
        return explain(Expected(tuple(map(_inside, expected.after))), _inside(seen))
    want = expected.whole
    for number, earlier in enumerate(expected.after[:-1]):
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
    sums = [value if _is_number(value) else 0 for value in expected.after]  # before any message there may be no sum
    steps = [later - earlier for earlier, later in pairwise(sums)]
    difference = seen - expected.whole
    told = f"{format_effect(abs(difference))} too {'much' if difference > 0 else 'little'}"
    for number, step in enumerate(steps, start=1):
        if step and difference > 0 and difference % step == 0 and difference // step in _TIMES:
            return f"{told}: your handler added message {number} {_TIMES[difference // step]}"
        if step and difference == -step:
            return f"{told}: message {number} is missing"
    if len(set(steps)) == len(steps):
        for first in range(len(steps)):
            for second in range(first + 1, len(steps)):
                if difference == steps[first] + steps[second]:
                    return f"{told}: your handler added messages {first + 1} and {second + 1} twice"
        if steps and difference == sum(steps):
            return f"{told}: your handler added every message twice"
    return told


def _about_lists(want: list[Any], seen: list[Any]) -> str:
    wanted, found = Counter(map(_key, want)), Counter(map(_key, seen))
    more, less = found - wanted, wanted - found
    parts = [f"{', '.join(_some(more))} too often"] if more else []
    parts += [f"{', '.join(_some(less))} missing"] if less else []
    return "; ".join(parts) or "the same items in another order"


def _some(items: Counter[str]) -> list[str]:
    return [item[:_LONGEST_SHOWN] for item in list(items)[:3]]


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _is_single(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 1


def _inside(value: Any) -> Any:
    """Return the first element of a list; None for an empty one, and for any other value."""
    return value[0] if isinstance(value, list) and value else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def format_effect(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "..."


def trouble_with_effect(before: Any, first: Expected, second: Expected) -> str:
    """Return the reason why effects cannot be judged, else "": a handled ticket looks like one that was not, or two
    equal ones look different."""
    if first.whole == before:
        return (
            f"a ticket looks the same before its messages and after them ({format_effect(before)}): --effect does not"
            " show what the handler does, or the handler does nothing with these messages (see --field)"
        )
    if first.after != second.after:
        return (
            "two tickets got the same three messages undisturbed, and --effect returned"
            f" {format_effect(first.whole)} for one and {format_effect(second.whole)} for the other: leave out what"
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
