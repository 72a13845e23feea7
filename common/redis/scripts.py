"""Load and run the atomic steps of ``common/lua``: a Lua file per step, with the contract in its header.

What it names of ``lua/includes``, functions and values, comes behind that. ``--- @numbers count 3 4, large 5`` checks
these arguments before anything else happens (``_MOST``); those whose place is not fixed a script checks itself
(given.lua). The server is asked what it can do, its version is no guide: the ``#!lua`` line, by which a script says how
it behaves when memory is full, is prepended only if the server reads it.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from typing import Any

from usher.common.base.clock import now_s
from usher.common.base.errors import NotNow, RedisTrouble
from usher.common.redis.client import Arg, CommandRefused, Link, ScriptMissing

#: What is shared: a function, or values, and the names; and a name, or a comment, in which none counts.
_SHARED = re.compile(r"^local (?:function )?(\w+(?:, \w+)*).*?(?=^local |\Z)", re.MULTILINE | re.DOTALL)
_NAME, _COMMENT, _HEADER = re.compile(r"[A-Za-z_]\w*"), re.compile(r" *--.*"), re.compile(r"(?:--.*\n)*")
_NUMBERS = re.compile(r"^--- @numbers ?(.*)\n", re.MULTILINE)
#: Most that an argument may be (lua/includes/given.lua): a count, or a time, a number of bytes.
_MOST = {"count": 10**6, "large": 10**15}
#: Header line -> ``#!lua`` line; the first match counts. Scripts that write nothing also run while Redis refuses writes
#: for another reason: replicas are missing, the disk is full.
_MEMORY = {
    "-- Memory: works when full, as nothing is written": "#!lua flags=no-writes\n",
    "-- Memory: works when full": "#!lua flags=allow-oom\n",
    "-- Memory: refused when full": "#!lua\n",
}
_LOADS_AGAIN = (
    "and this user may not send it: a master of this version loads it within moments, or at once `usher acl --load`,"
    " both as the user of masters"
)
#: Seconds after which Redis is asked again whether it knows the steps of others: a lease lasts longer than that.
_LOAD_EVERY_S = 4.0


def source(name: str) -> str:
    text = _NUMBERS.sub(_checks, _texts()[0][name])
    return _HEADER.sub(lambda header: header[0] + "".join(dict.fromkeys(_needed(text))), text, count=1)


def _needed(text: str) -> Iterator[str]:
    """Yield what a text names of what is shared, each behind what that needs itself."""
    for name in dict.fromkeys(_NAME.findall(_COMMENT.sub("", text))):
        if (part := _texts()[1].get(name, text)) != text:
            yield from (*_needed(part), part)


def _checks(found: re.Match[str]) -> str:
    kinds = [part.split() for part in found[1].split(", ")]
    return "".join(f"whole(ARGV[{at}], {_MOST[kind]})\n" for kind, *places in kinds for at in places)


@functools.cache
def _texts() -> tuple[dict[str, str], dict[str, str]]:
    """Map every script's name to its text, and what is shared to its own; its folder says which program may run it;
    names are unique. All are read at once: a handler may use up the process' descriptors, and a deploy replace the
    files, before a failure is charged. In a zip there are no paths: Spark's clusters get Usher as one
    (``--py-files``)."""
    folders = {one.name: one for one in (resources.files("usher.common") / "lua").iterdir() if one.is_dir()}
    files = [(name, file) for name, folder in folders.items() for file in folder.iterdir()]
    texts = [(name, file.name, file.read_text(encoding="utf-8")) for name, file in files if file.name.endswith(".lua")]
    shared = [found for of, _, text in texts if of == "includes" for found in _SHARED.finditer(_COMMENT.sub("", text))]
    named = {name: found[0] for found in shared for name in found[1].split(", ")}
    return {name.removesuffix(".lua"): text for of, name, text in texts if of != "includes"}, named


def with_memory_flag(text: str) -> str:
    for line, shebang in _MEMORY.items():
        if line in text:
            return shebang + text
    return text


def _reads_no_flags(refused: object) -> bool:
    """Return True if the server (6.2) takes a ``#!lua`` line for Lua that it cannot compile; it ran nothing."""
    return isinstance(refused, CommandRefused) and "compiling script" in str(refused)


class ScriptRunner:
    """A runner of steps over one Link; used by the thread that owns the link."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._reads_flags = True  # until the server refuses them
        self._digests: dict[str, str] = {}
        # The connection over which steps were loaded for others, and when Redis is asked whether it still knows them.
        self._loaded_over: int | None = None
        self._next_load_s = 0.0

    def load_for_others(self, names: Iterable[str]) -> list[str]:
        """Load steps for users that may run loaded ones only, as far as Redis does not know them. It is asked now and
        then: somebody may have flushed them, or an earlier load was refused. Return why Redis refused to. Raises
        RedisTrouble."""
        if now_s() < self._next_load_s and self._loaded_over == self.link.connections:
            return []
        names = [*names]
        known = self._known([self.digest(name) for name in names])
        missing = [name for name, is_known in zip(names, known, strict=True) if not is_known]
        answers = self.link.pipeline([("SCRIPT", "LOAD", self._text(name)) for name in missing]) if missing else []
        self._loaded_over, self._next_load_s = self.link.connections, now_s() + _LOAD_EVERY_S
        # Redis 6.2 knows no user that is kept from sending scripts alone.
        return [str(one) for one in answers if isinstance(one, Exception) and not _reads_no_flags(one)]

    def _known(self, digests: list[str]) -> Sequence[Any]:
        try:
            found: Sequence[Any] = self.link.call("SCRIPT", "EXISTS", *digests)
        except CommandRefused:
            return [0] * len(digests)
        return found

    def run(self, name: str, keys: Sequence[str | bytes], args: Sequence[Arg]) -> Any:
        """Run step ``name`` once; for the errors see Link.call.

        Sending the text after NOSCRIPT is no repetition: Redis did not run anything.
        """
        arguments = (len(keys), *keys, *args)
        try:
            return self.link.call("EVALSHA", self.digest(name), *arguments)
        except ScriptMissing as missing:
            return self._run_text(name, arguments, missing)

    def run_each(self, name: str, keys: Sequence[str | bytes], each: Sequence[Sequence[Arg]]) -> list[Any]:
        answers = self.try_each(name, [(keys, args) for args in each])
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def try_each(self, name: str, each: Sequence[tuple[Sequence[str | bytes], Sequence[Arg]]]) -> list[Any]:
        """Run step ``name`` with each of these keys and arguments, in two round trips. The answer of a run that did not
        happen, or whose outcome is unknown, is the exception that ``run`` raises."""
        if not each:
            return []
        try:
            first = self.run(name, *each[0])  # from now on Redis knows the script
        except CommandRefused as refused:  # only this run: the others may be fine
            first = refused
        except RedisTrouble as trouble:
            not_sent = NotNow("CONNECT", f"not sent, because an earlier command failed: {trouble}")
            return [trouble, *[not_sent] * (len(each) - 1)]
        digest = self.digest(name)
        commands = [("EVALSHA", digest, len(keys), *keys, *args) for keys, args in each[1:]]
        try:
            return [first, *self.link.pipeline(commands)]
        except RedisTrouble as trouble:  # the first run has happened, and the caller must hear of it
            return [first, *[trouble] * (len(each) - 1)]

    def digest(self, name: str) -> str:
        """Return the digest by which Redis knows step ``name``. The text is made again when Redis asks for it."""
        if (digest := self._digests.get(name)) is None:
            digest = hashlib.sha1(self._text(name).encode(), usedforsecurity=False).hexdigest()
            self._digests[name] = digest
        return digest

    def _text(self, name: str) -> str:
        """Return step ``name`` as this server understands it, as far as that is known."""
        return with_memory_flag(source(name)) if self._reads_flags else source(name)

    def _run_text(self, name: str, arguments: Sequence[Arg], missing: ScriptMissing) -> Any:
        self._loaded_over = None
        try:
            return self.link.call("EVAL", self._text(name), *arguments)
        except CommandRefused as refused:
            if "NOPERM" in str(refused) and "'eval'" in str(refused):  # EVAL itself, not a command of the script
                raise ScriptMissing(missing.kind, f"Redis does not know step {name}, {_LOADS_AGAIN}") from refused
            if not self._reads_flags or not _reads_no_flags(refused):
                raise
        self._reads_flags = False
        self._digests.clear()
        return self.link.call("EVAL", self._text(name), *arguments)
