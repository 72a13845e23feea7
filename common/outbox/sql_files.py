"""Read the .sql files of this folder: named queries, and the tables, a template. Pure text, also where SQLAlchemy is
not installed."""

from __future__ import annotations

import functools
import re
from importlib import resources

import jinja2

from usher.common.outbox.rows import ROW_BYTES

DIALECTS = ("sqlite", "postgresql", "mysql")

_NAME = re.compile(r"^-- name: (\w+)(?: \[([\w, ]+)\])?$")


@functools.cache
def queries(dialect: str) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in _read("queries.sql").splitlines():
        heading = _NAME.match(line)
        if heading:
            lines = []
            if heading[2] is None or dialect in heading[2].split(", "):
                found[heading[1]] = lines
        elif not line.startswith("--"):
            lines.append(line)
    return {name: "\n".join(lines).strip().rstrip(";") for name, lines in found.items()}


def schema(dialect: str) -> str:
    template = jinja2.Template(_read("schema.sql"), trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    return template.render(dialect=dialect, row_bytes=ROW_BYTES)


def _read(name: str) -> str:
    return (resources.files("usher.common") / "outbox" / name).read_text(encoding="utf-8")
