"""Versions of Redis and Valkey: the floor, and known holes. Pure.

Not a scanner: these are the holes in what Usher itself uses (scripts, XAUTOCLAIM, blocked readers). The operators of
Redis follow its releases.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from usher.common.doctor.facts import DoctorSeverity

Number = tuple[int, int, int]


class Version(NamedTuple):
    """A version; ``product`` is redis or valkey."""

    product: str
    number: Number

    def __str__(self) -> str:
        return f"{self.product.capitalize()} {'.'.join(map(str, self.number))}"


@dataclass(frozen=True)
class Hole:
    """A known hole: the version in which it came, and the first version without it per branch, lowest first. Valkey:
    none means not affected."""

    name: str
    what: str
    since: Number
    redis: tuple[Number, ...]
    valkey: tuple[Number, ...] = ()

    def fixed_in(self, product: str) -> list[str]:
        return [".".join(map(str, number)) for number in (self.valkey if product == "valkey" else self.redis)]

    def is_in(self, version: Version) -> bool:
        fixes = self.valkey if version.product == "valkey" else self.redis
        if not fixes or version.number < self.since:
            return False
        for fix in fixes:
            if fix[:2] == version.number[:2]:
                return version.number < fix
        return version.number < fixes[-1]


_HOLES = (
    Hole(
        "CVE-2025-49844",
        "any user that may run scripts can run any code as redis-server; all versions with Lua have it",
        (0, 0, 0),
        ((6, 2, 20), (7, 2, 11), (7, 4, 6), (8, 0, 4), (8, 2, 2)),
        ((7, 2, 11), (8, 0, 6), (8, 1, 4)),
    ),
    Hole(
        "CVE-2026-23479",
        "where clients are evicted (maxmemory-clients), any user that may log in can make redis-server use freed"
        " memory through a blocked read",
        (7, 2, 0),
        ((7, 4, 9), (8, 2, 6), (8, 4, 3), (8, 6, 3)),
    ),
    Hole(
        "CVE-2022-24834",
        "a script can overflow the heap through cjson or cmsgpack",
        (0, 0, 0),
        ((6, 2, 13), (7, 0, 12)),
    ),
)


def version_of(info: Mapping[str, str]) -> Version | None:
    """Return the version in INFO. A Valkey also reports the Redis that it is compatible with; its own version
    counts."""
    for product in ("valkey", "redis"):
        told = info.get(f"{product}_version")
        if told is not None:
            parts = [int(part) if part.isdecimal() else 0 for part in told.split("-")[0].split(".")[:3]]
            major, minor, patch = (*parts, 0, 0, 0)[:3]
            return Version(product, (major, minor, patch))
    return None


def floor_problem(version: Version) -> tuple[DoctorSeverity, str]:
    """Return the severity of running this version, and the reason, as judged by the lowest version that Usher works
    with."""
    if version.product != "redis":
        return DoctorSeverity.OK, ""
    if version.number < (6, 2, 0):
        return DoctorSeverity.BAD, "it has no XAUTOCLAIM: Usher cannot work"
    if version.number < (6, 2, 14):
        return (
            DoctorSeverity.WARN,
            "releases before 6.2.14 have bugs in consumer groups and scripts, and Usher is not tried with them",
        )
    if (7, 0, 0) <= version.number < (7, 0, 5):
        return (
            DoctorSeverity.BAD,
            "XAUTOCLAIM, which the sweep uses, can overflow the heap (CVE-2022-31144, CVE-2022-35951)",
        )
    return DoctorSeverity.OK, "new enough"


def known_holes(version: Version) -> Iterator[Hole]:
    """Yield the known holes that this version has, judged by its number."""
    return (hole for hole in _HOLES if hole.is_in(version))
