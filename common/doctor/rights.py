"""Ask Redis, by ACL DRYRUN, whether the user of this connection may run what the programs of common/redis/acl.py run.
Nothing runs. Redis before 7.0 cannot be asked."""

from __future__ import annotations

import re
from collections.abc import Iterator

from usher.common.doctor.facts import Rights
from usher.common.protocol.keys import Keys
from usher.common.protocol.sources import SourceSelection
from usher.common.redis.acl import AclProgram, programs
from usher.common.redis.client import Arg, Link

#: Redis tries only a call of the right length: so many words follow the key. Of all other commands there may be more.
_WORDS = {
    **dict.fromkeys(("get", "pttl", "hgetall", "hlen", "zcard", "type", "xlen", "del", "exists", "mget"), 0),
    **dict.fromkeys(("xinfo|stream", "xinfo|groups", "memory|usage"), 0),
    **dict.fromkeys(("hget", "hexists", "zscore", "xinfo|consumers"), 1),
    **dict.fromkeys(("hsetnx", "xgroup|create", "xgroup|setid", "xgroup|delconsumer"), 2),
}
_OTHERS = 4


def find_rights(link: Link, keys: Keys, sources: SourceSelection | None = None) -> Rights:
    """Return what is missing for each program. Raises RedisTrouble when Redis cannot be reached."""
    [who] = link.pipeline([("ACL", "WHOAMI")])
    if not isinstance(who, bytes):
        return Rights(None, None, str(who))
    user = who.decode(errors="replace")
    named = (*sources.names, *sources.patterns) if sources is not None else ()
    kinds = [program for program in programs(keys.stream, keys.group, named) if program.connects]
    calls = [(program.name, name, call) for program in kinds for name, call in _calls(program)]
    told, *answers = link.pipeline(
        [("ACL", "DRYRUN", user, *call) for call in (("TIME",), *(call[2] for call in calls))]
    )
    if isinstance(told, Exception):
        return Rights(user, None, str(told))
    missing: dict[str, dict[str, None]] = {program.name: {} for program in kinds}
    for (program_name, command, _), answer in zip(calls, answers, strict=True):
        if isinstance(answer, bytes) and answer != b"OK":  # an error: the server does not know it
            missing[program_name][command] = None
    return Rights(user, {name: tuple(sorted(commands)) for name, commands in missing.items()})


def _calls(program: AclProgram) -> Iterator[tuple[str, tuple[Arg, ...]]]:
    """Yield each command of a program on a key of its grant, and one command on each of the grant's other keys."""
    for name in program.sends:
        yield _shown(name), tuple(name.upper().split("|"))
    for commands, patterns in program.grants:
        for at, pattern in enumerate(patterns):
            key = re.sub(r"\\(.)|[*?]", lambda found: found[1] or "1", pattern)
            for name in commands if at == 0 else commands[:1]:
                yield _shown(name), _call(name, key)


def _call(name: str, key: str) -> tuple[Arg, ...]:
    words = tuple(name.upper().split("|"))
    if name in ("eval", "evalsha"):
        return (*words, "0" * 40, 1, key)
    if name in ("xread", "xreadgroup"):
        return (*words, *(("GROUP", "g", "c") if name == "xreadgroup" else ()), "STREAMS", key, "0")
    return (*words, key, *("0",) * _WORDS.get(name, _OTHERS))


def _shown(name: str) -> str:
    return name.upper().replace("|", " ")
