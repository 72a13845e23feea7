"""The judgement of the effects that the harness saw. Pure: effects in, words out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations, pairwise
from typing import Any

_LONGEST_SHOWN = 160
#: Words for how often a message was added, by the number of times too many.
_TIMES = {1: "twice", 2: "three times", 3: "four times", 4: "five times"}


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
    sums = [value if _is_number(value) else 0 for value in expected]  # before any message there may be no sum
    steps = [later - earlier for earlier, later in pairwise(sums)]
    difference = seen - expected[-1]
    told = f"{format_effect(abs(difference))} too {'much' if difference > 0 else 'little'}"
    for number, step in enumerate(steps, start=1):
        if step and difference > 0 and difference % step == 0 and difference // step in _TIMES:
            return f"{told}: your handler added message {number} {_TIMES[difference // step]}"
        if step and difference == -step:
            return f"{told}: message {number} is missing"
    if len(set(steps)) == len(steps):
        for (first, one), (second, other) in combinations(enumerate(steps, start=1), 2):
            if difference == one + other:
                return f"{told}: your handler added messages {first} and {second} twice"
        if steps and difference == sum(steps):
            return f"{told}: your handler added every message twice"
    return told


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
