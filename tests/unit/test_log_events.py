"""docs/log-events.md lists every event of the log, with its level; and nothing else."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_ROW = re.compile(r"^\| `([a-z_*]+)` \| ([a-z, ]+) \| [^|]+ \| [^|]+ \|$", re.MULTILINE)


def names(node: ast.expr) -> list[str]:
    """Every name that the first argument of ``event`` may be; what is put into one is ``*``."""
    match node:
        case ast.Constant(value=str(name)):
            return [name]
        case ast.IfExp():
            return [*names(node.body), *names(node.orelse)]
        case ast.JoinedStr():
            return ["".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)]
    raise AssertionError(f"line {node.lineno}: an event's name must be found in the log's documentation: write it out")


def levels(within: ast.AST) -> set[str]:
    """The levels that are named there, as in ``level=WARNING``."""
    return {
        node.id.lower()
        for node in ast.walk(within)
        if isinstance(node, ast.Name) and node.id in logging.getLevelNamesMapping()
    }


def levels_of(call: ast.Call, tree: ast.Module) -> set[str]:
    """Those of the call itself; where it is given a variable, what is assigned to that, else all that its class names."""
    level = next((keyword.value for keyword in call.keywords if keyword.arg == "level"), None)
    if level is None:
        return {"info"}
    if levels(level):
        return levels(level)
    holder = next(
        node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and any(one is call for one in ast.walk(node))
    )
    assigned = [
        node.value
        for node in ast.walk(holder)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == ast.unparse(level)
    ]
    return set().union(*map(levels, assigned)) or levels(holder)


def logged() -> Iterator[tuple[str, set[str]]]:
    for package in ("common", "consumer", "deploy", "master"):
        for path in (ROOT / package).rglob("*.py"):
            tree = ast.parse(path.read_text("utf-8"))
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "event":
                    yield from ((name, levels_of(node, tree)) for name in names(node.args[0]))


def test_every_event_is_documented_with_its_levels_and_no_other() -> None:
    in_code: dict[str, set[str]] = {}
    for name, its_levels in logged():
        in_code.setdefault(name, set()).update(its_levels)
    rows = _ROW.findall((ROOT / "docs" / "log-events.md").read_text("utf-8"))
    documented = {name: set(text.split(", ")) for name, text in rows}
    assert len(rows) == len(documented), "an event stands there twice"
    assert documented == in_code
    assert len(in_code) > 100, "else nothing was found"
