"""How a rule is taken out of the real code: a piece of text is replaced by another, in a Lua step or in a Python
function.

An edit that finds no text to replace raises LookupError: the code has changed, and the mutant must follow. That is no
AssertionError, so no test takes it for a caught bug.
"""

from __future__ import annotations
import __future__

import importlib
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from usher.common.redis import scripts

#: ``setattr``, or ``monkeypatch.setattr`` of a test.
Set = Callable[[Any, str, Any], None]


class Edit(Protocol):
    """One change."""

    def apply(self, set_: Set) -> None: ...


@dataclass(frozen=True)
class LuaEdit:
    """``old`` becomes ``new`` in step ``name``; in all steps that have it, when ``name`` is empty (for what is in an
    include)."""

    name: str
    old: str
    new: str

    def apply(self, set_: Set) -> None:
        original = scripts.source
        if self.name:
            _found_once(self.old, original(self.name), f"{self.name}.lua")

        def edited(name: str) -> str:
            text = original(name)
            return text.replace(self.old, self.new) if self.name in ("", name) else text

        set_(scripts, "source", edited)


@dataclass(frozen=True)
class LuaText:
    """Another text takes the place of step ``name``."""

    name: str
    text: str

    def apply(self, set_: Set) -> None:
        original = scripts.source
        original(self.name)
        set_(scripts, "source", lambda name: self.text if name == self.name else original(name))


@dataclass(frozen=True)
class CodeEdit:
    """``old`` becomes ``new`` in the source of a function, named ``module:function`` or ``module:Class.method``."""

    target: str
    old: str
    new: str

    def apply(self, set_: Set) -> None:
        owner, name = _owner(self.target)
        function = inspect.unwrap(inspect.getattr_static(owner, name))
        text = textwrap.dedent(inspect.getsource(function))
        _found_once(self.old, text, self.target)
        code = compile(
            text.replace(self.old, self.new), f"<mutant of {self.target}>", "exec", __future__.annotations.compiler_flag
        )
        made: dict[str, Any] = {}
        exec(code, function.__globals__, made)  # noqa: S102 - our own source, with one piece replaced
        set_(owner, name, made[name])


@dataclass(frozen=True)
class Replace:
    """Another function, or another value, takes the place of ``module:name`` or ``module:Class.name``."""

    target: str
    by: Any

    def apply(self, set_: Set) -> None:
        owner, name = _owner(self.target)
        if not hasattr(owner, name):
            raise LookupError(f"there is no {self.target} any more: the mutant must follow the code")
        set_(owner, name, self.by)


@dataclass(frozen=True)
class Mutant:
    """The system without a rule. ``name`` says what is missing, in a few words."""

    name: str
    edits: tuple[Edit, ...]

    def apply(self, set_: Set) -> None:
        for edit in self.edits:
            edit.apply(set_)


def mutant(name: str, *edits: Edit) -> Mutant:
    return Mutant(name, edits)


def _owner(target: str) -> tuple[Any, str]:
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(module)
    *classes, name = path.split(".")
    for part in classes:
        owner = getattr(owner, part)
    return owner, name


def _found_once(old: str, text: str, where: str) -> None:
    if text.count(old) != 1:
        raise LookupError(f"{where} has {text.count(old)} times {old!r}: the mutant must follow the code")
