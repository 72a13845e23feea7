"""Loads the atomic steps of ``common/lua`` and runs them. One Lua file per step; the contract is its header.

``--- @include name`` pulls in ``lua/includes/name.lua``. What a server can do is asked, not guessed from its version:
the ``#!lua`` line, by which a script says how it behaves when memory is full, is put in front only where the server
reads it.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from usher.common.base.errors import NotNow, RedisTrouble
from usher.common.redis.client import Arg, CommandRefused, Link, Meanwhile, ScriptMissing

_INCLUDE = re.compile(r"^--- @include (\w+)\n", re.MULTILINE)
#: The first that fits. What writes nothing is also done while Redis refuses writes for another reason: replicas are
#: missing, the disk is full.
_MEMORY = {
    "-- Memory: works when full, as nothing is written": "#!lua flags=no-writes\n",
    "-- Memory: works when full": "#!lua flags=allow-oom\n",
    "-- Memory: refused when full": "#!lua\n",
}


@functools.cache
def source(name: str) -> str:
    """The text of step ``name`` with its includes."""
    return _INCLUDE.sub(
        lambda found: _files()[found[1]].read_text(encoding="utf-8"), _files()[name].read_text(encoding="utf-8")
    )


@functools.cache
def _files() -> dict[str, Path]:
    """Find every script by its name: the room it is in says who may run it, and a name is used once."""
    return {file.stem: file for file in Path(str(resources.files("usher.common"))).glob("lua/*/*.lua")}


def ids_argument(each: Iterable[Sequence[bytes]]) -> bytes:
    """The stream ids of several tickets as one argument, for cjson: one that is long costs Redis, and us, less than
    many that are short."""
    joined = b'","'.join(itertools.chain.from_iterable(each))
    return b'["%b"]' % joined if joined else b"[]"


def sizes_argument(each: Iterable[Sequence[bytes]]) -> str:
    """How many of them are of each ticket."""
    return str([len(ids) for ids in each])


def with_memory_flag(text: str) -> str:
    """The text with the ``#!lua`` line that its header asks for."""
    for line, shebang in _MEMORY.items():
        if line in text:
            return shebang + text
    return text


class ScriptRunner:
    """Runs steps over one Link; used by the thread that owns the link."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._reads_flags: bool | None = None
        self._prepared: dict[str, tuple[str, str]] = {}

    def run(
        self, name: str, keys: Sequence[str | bytes], args: Sequence[Arg], meanwhile: Meanwhile | None = None
    ) -> Any:
        """Run step ``name`` once; ``meanwhile``, and what it raises: see Link.call.

        Sending the text after NOSCRIPT is no repetition: Redis did not run anything.
        """
        text, digest = self.prepared(name)
        try:
            return self._link.call("EVALSHA", digest, len(keys), *keys, *args, meanwhile=meanwhile)
        except ScriptMissing:
            return self._link.call("EVAL", text, len(keys), *keys, *args)

    def run_each(self, name: str, keys: Sequence[str | bytes], each: Sequence[Sequence[Arg]]) -> list[Any]:
        """Run step ``name``, which changes nothing, once for each of these arguments, at once."""
        answers = self.try_each(name, keys, each)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def try_each(self, name: str, keys: Sequence[str | bytes], each: Sequence[Sequence[Arg]]) -> list[Any]:
        """Run step ``name`` once for each of these arguments, in two round trips. Of one that did not happen, or of
        which nobody knows, the answer is the exception that ``run`` raises."""
        return self.try_on_each(name, [(keys, args) for args in each])

    def try_on_each(self, name: str, each: Sequence[tuple[Sequence[str | bytes], Sequence[Arg]]]) -> list[Any]:
        """The same, each with its own keys."""
        if not each:
            return []
        try:
            first = self.run(name, *each[0])  # from then on Redis knows it
        except CommandRefused as refused:  # of this one: the others may be fine
            first = refused
        except RedisTrouble as trouble:
            not_sent = NotNow("CONNECT", f"not sent, because of the one before: {trouble}")
            return [trouble, *[not_sent] * (len(each) - 1)]
        digest = self.prepared(name)[1]
        try:
            return [
                first,
                *self._link.pipeline([("EVALSHA", digest, len(keys), *keys, *args) for keys, args in each[1:]]),
            ]
        except RedisTrouble as trouble:  # the first one has happened, and the caller must hear of it
            return [first, *[trouble] * (len(each) - 1)]

    def prepared(self, name: str) -> tuple[str, str]:
        """Return the text of step ``name`` as this server understands it, and the digest by which Redis knows it."""
        prepared = self._prepared.get(name)
        if prepared is None:
            text = with_memory_flag(source(name)) if self._server_reads_flags() else source(name)
            prepared = self._prepared[name] = (text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
        return prepared

    def _server_reads_flags(self) -> bool:
        """Whether ``#!lua`` is understood (Redis >= 7); 6.2 answers that it is not Lua."""
        if self._reads_flags is None:
            try:
                self._link.call("EVAL", "#!lua flags=no-writes\nreturn 1", 0)
                self._reads_flags = True
            except CommandRefused:
                self._reads_flags = False
        return self._reads_flags
