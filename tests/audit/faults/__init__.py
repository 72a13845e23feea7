"""Faults: each a small history that is well but for one thing, and what the audit must find in it, and nothing else."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple

from tests.audit.seeding import Seeder
from usher.common.redis.client import Link


class Fault(NamedTuple):
    """``expected``: check -> ids (or owners, or tickets) of its examples."""

    name: str
    seed: Callable[[Seeder, Link], None]
    expected: dict[str, set[str]]


FAULTS: list[Fault] = []


def fault(**expected: str) -> Callable[[Callable[[Seeder, Link], None]], None]:
    """Let the function below seed a fault; of each check the examples, separated by spaces. Without a check it is none,
    but looks like one.

    Ticket a has 1-1, 3-1, 5-1, ticket b the others; 6-1 is in processing, what becomes of 5-1 is said by each fault.
    """

    def added(seed: Callable[[Seeder, Link], None]) -> None:
        FAULTS.append(Fault(seed.__name__, seed, {check: set(ids.split(" ")) for check, ids in expected.items()}))

    return added


#: The last message of ticket a, as it should be done.
DONE = ("5-1", "a", 5, 500, 550)

for _module in ("runs", "links", "state", "foreign"):
    importlib.import_module(f"{__name__}.{_module}")


def plant(seeder: Seeder, link: Link, seed: Callable[[Seeder, Link], None]) -> None:
    """Seed a history with one fault."""
    seeder.add(*((f"{n}-1", "ab"[n % 2 == 0]) for n in range(1, 7)))
    seeder.read()
    seeder.live("c1:1")
    seeder.own("c1:1", "6-1")
    seeder.index("b", "c1:1 5 6-1")
    seeder.over(*(f"{n}-1" for n in range(1, 6)))
    runs = ((f"{n}-1", "ab"[n % 2 == 0], 5, 100 * n, 100 * n + 50) for n in range(1, 5))
    seeder.ran("c1:1", *runs, record="100-1")
    seed(seeder, link)
