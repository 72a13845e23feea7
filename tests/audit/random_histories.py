"""Random histories: short ones, each with tickets and consumers of its own, whose clocks may be wrong, or set while they
run. Most executions follow one another as they should."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from usher.master.policy.explain import FENCES_PER_MS

#: The moment before which all entries were added, by Redis' clock.
BEGAN_MS = 1_700_000_000_000
_MS = 1000
_ENTRIES = 8  # of a history


class Execution(NamedTuple):
    noted_ms: int
    consumer: str
    run: tuple[str, str, int, int, int, str]  # id, ticket, fence, start us, end us, outcome


@dataclass
class History:
    """``entries``: id -> ticket; ``set_clocks``: consumers whose clock was set while they ran; ``kept``: entries that
    are never acknowledged."""

    entries: dict[str, str] = field(default_factory=dict)
    executions: list[Execution] = field(default_factory=list)
    set_clocks: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)
    letters: set[str] = field(default_factory=set)
    repeats: list[tuple[int, str]] = field(default_factory=list)  # (ms, id) that a master declared


def histories(seeds: range, *, set_clocks: bool) -> History:
    """Return the histories of these seeds, beside one another."""
    whole = History()
    for seed in seeds:
        _Dice(seed, set_clocks).add_to(whole)
    whole.executions.sort(key=lambda one: one.noted_ms)
    return whole


class _Dice:
    def __init__(self, seed: int, set_clocks: bool) -> None:
        self._chance = random.Random(seed)
        self._seed, self._is_set = seed, set_clocks
        choice = self._chance.choice
        #: consumer -> (what its clock is ahead, from when on by another amount, in microseconds)
        self._clocks = {}
        for name in "abc":
            ahead = choice((0, 0, 0, 700, -900, 40_000, -300_000, 5_000_000, -5_000_000))
            later = choice((ahead, ahead, ahead + 2_000_000, ahead - 2_000_000, ahead + 300)) if set_clocks else ahead
            self._clocks[f"{name}{seed}:1"] = ahead, later

    def add_to(self, whole: History) -> None:
        """Add a history of its tickets."""
        ids = [f"{BEGAN_MS - 1_000_000 + 10 * self._seed + n}-{self._chance.randint(0, 1)}" for n in range(_ENTRIES)]
        names = [f"x{self._seed}", f"x{self._seed}", f"x{self._seed}", f"y{self._seed}", ""]
        entries = {one: self._chance.choice(names) for one in ids}
        whole.entries |= entries
        for ticket in sorted({*entries.values()}):
            whole.executions += self._executions(ticket, [one for one in ids if entries[one] == ticket])
        whole.kept |= {one for one in ids if self._chance.random() < 0.1}
        whole.letters |= {one for one in ids if self._chance.random() < 0.05}
        if self._chance.random() < 0.2:
            whole.repeats.append((BEGAN_MS + self._chance.randint(0, 20_000), self._chance.choice(ids)))
        whole.set_clocks |= {name for name, (ahead, later) in self._clocks.items() if ahead != later}

    def _executions(self, ticket: str, ids: list[str]) -> Iterator[Execution]:
        chance, choice = self._chance, self._chance.choice
        owner, fence, now_us = choice([*self._clocks]), 0, BEGAN_MS * _MS + chance.randint(0, 9_000_000)
        at = 0
        for _ in range(chance.randint(2, 14)):
            at = min(len(ids) - 1, max(0, at + choice((0, 1, 1, 1, 1, 1, -1))))
            if fence == 0 or chance.random() < 0.4:
                owner = choice([*self._clocks]) if chance.random() < 0.8 else owner
                given_ms = now_us // _MS - choice((0, 0, 0, 1, 2000))
                fence = max(fence + 1, given_ms * FENCES_PER_MS) if chance.random() < 0.9 else given_ms * FENCES_PER_MS
            who = owner if chance.random() < 0.97 else choice([*self._clocks])
            start_us = now_us + choice((100, 300, 1500, 700_000))
            end_us = start_us + choice((0, 200, 20_000, 1_500_000, 6_000_000))
            outcome = choice(("done", "done", "done", "done", "failed", "crashed", "gave_up"))
            noted_ms = (end_us + choice((100, 100, 400, 3_000, 900_000, 4_000_000))) // _MS
            called = ids[at : at + 2] if chance.random() < 0.1 else ids[at : at + 1]  # together, if there are two
            for n, one in enumerate(called):
                under = ticket if ticket == "" or chance.random() < 0.98 else f"z{self._seed}"
                times = self._by_clock(who, start_us), 0 if outcome == "crashed" else self._by_clock(who, end_us)
                yield Execution(noted_ms + n * choice((0, 0, 2000)), who, (one, under, fence, *times, outcome))
            now_us = end_us + choice((300, 800, 2_000, 50_000, 3_000_000, 300, 800, -20_000, -1_000_000, -7_000_000))
            # A fence is never ahead of Redis' clock, unless that was set back.
            now_us = max(now_us, BEGAN_MS * _MS, 0 if self._is_set else fence // FENCES_PER_MS * _MS)

    def _by_clock(self, who: str, us: int) -> int:
        before, later = self._clocks[who]
        return us + (before if us < (BEGAN_MS + 12_000) * _MS else later)
