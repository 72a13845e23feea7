"""Read the .sql files of this folder: named queries and versioned blocks. Pure text: the files show exactly what is
run."""

from __future__ import annotations

import functools
import re
from importlib import resources

DIALECTS = ("sqlite", "postgresql", "mysql")

_NAME = re.compile(r"^-- name: (\w+)(?: \[([\w, ]+)\])?$")
_VERSION = re.compile(r"^-- version: (\d+)$", re.MULTILINE)


def queries(dialect: str) -> dict[str, str]:
    """Return name -> query of queries.sql, for one dialect."""
    return named("queries.sql", dialect)


@functools.cache
def named(file: str, dialect: str) -> dict[str, str]:
    """Return name -> query of a file of named queries, for one dialect."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in _read(file).splitlines():
        heading = _NAME.match(line)
        if heading:
            lines = []
            if heading[2] is None or dialect in heading[2].split(", "):
                found[heading[1]] = lines
        elif not line.startswith("--"):
            lines.append(line)
    return {name: "\n".join(lines).strip().rstrip(";") for name, lines in found.items()}


def schema(dialect: str) -> str:
    """Return all that makes the tables in an empty database, for a migration tool of the application's own."""
    version = queries(dialect)["set_version"].replace(":version", str(newest(dialect)))
    return f"{_blocks(dialect).rstrip()}\n\n{version};\n"


@functools.cache
def versions(dialect: str) -> dict[int, str]:
    """Return version -> the statements that lead to it, in order."""
    _, *parts = _VERSION.split(_blocks(dialect))
    return {int(number): block.strip() for number, block in zip(parts[::2], parts[1::2], strict=True)}


def newest(dialect: str) -> int:
    """Return the version that this Usher needs."""
    return max(versions(dialect))


def _blocks(dialect: str) -> str:
    return _read(f"schema_{dialect}.sql")


def _read(name: str) -> str:
    return (resources.files("usher.common") / "outbox" / name).read_text(encoding="utf-8")
