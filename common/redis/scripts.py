"""The texts of the atomic steps of ``common/lua``: a Lua file per step, with the contract in its header.

What it names of ``lua/includes``, functions and values, comes behind that. ``--- @numbers count 3 4, large 5`` checks
these arguments before anything else happens (``_MOST``); those whose place is not fixed a script checks itself
(given.lua). The server is asked what it can do, its version is no guide: the ``#!lua`` line, by which a script says how
it behaves when memory is full, is prepended only if the server reads it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from importlib import resources

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
